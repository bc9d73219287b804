"""The compiled functions in C, the threads that they divide their work among, and what this CPU has."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

from nc_run.abi import FUNCTIONS, header
from nc_run.errors import BackendUnavailableError
from nc_run.isas import ISAS

_FOLDER = Path(__file__).parent / "lib"
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
#: `omp_pause_hard` of the OpenMP 5.0 standard, section 3.2.44: all that is not needed is given up.
_HARD = 2


@functools.cache
def library(source: str) -> ctypes.CDLL:
    """Return the library of a C source, on the threads of libgomp where the system has it.

    Raises:
        BackendUnavailableError: it can't be loaded.
    """
    try:
        found = ctypes.CDLL(str(_FOLDER / f"{source}.so"))
    except OSError as error:
        msg = f"nc-run's library {source}.so can't be loaded: {error}. Install nc-run again."
        raise BackendUnavailableError(msg) from error
    found.nc_permit.argtypes = (ctypes.c_int64,)
    # its functions refuse all others, also where a damaged plan names them
    found.nc_permit(sum(1 << i for i, flags in enumerate(ISAS.values()) if _flags().issuperset(flags)))
    openmp = _openmp()
    if openmp is not None and hasattr(found, "nc_threads"):
        found.nc_threads.argtypes = (ctypes.c_void_p,) * 3
        found.nc_threads(*(ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value for name in _OPENMP))
    return found


@functools.cache
def c_code() -> str:
    """Return a hash of what functions take: names, fields and their numbers."""
    return hashlib.sha256(header().encode()).hexdigest()[:16]


@functools.cache
def address(function: str) -> int:
    """Return the address of a function of a plan; raises as `library`."""
    row = FUNCTIONS[function]
    return address_of(library(row.source), row.symbol)


def address_of(found: ctypes.CDLL, symbol: str) -> int:
    """Return the address of a symbol."""
    return ctypes.cast(getattr(found, symbol), ctypes.c_void_p).value or 0


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return libgomp; None where it is not installed: functions then run on one thread.

    Before a fork its threads end, as the new process would wait forever for threads that it does not have.
    """
    try:
        found = ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
    if not all(hasattr(found, name) for name in _OPENMP):
        return None
    if hasattr(found, "omp_pause_resource_all"):
        os.register_at_fork(before=lambda: found.omp_pause_resource_all(_HARD))
    return found


@functools.cache
def _flags() -> frozenset[str]:
    """Return all features of this CPU, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def why_not(function: str, isa: str) -> str:
    """Return why a function can't run here; "" where it can.

    Args:
        function: its name.
        isa: the instruction set that its fields name; "": none. Every function needs AVX2 at least.
    """
    lacks = [flag for flag in ISAS[isa or "avx2"] if flag not in _flags()]
    if lacks:
        return f"this CPU lacks {', '.join(lacks)}"
    if isa == "amx" and not library("rows").nc_rows_amx():
        return "the system does not let this process use AMX"
    return ""


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) or 1
