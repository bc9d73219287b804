"""The threads that torch's operators run on, for our C code.

Two thread pools would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from nc.process.warn import warn

_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_PAUSE = "omp_pause_resource_all"
#: `omp_pause_hard` of the OpenMP 5.0 standard, section 3.2.44: all that is not needed is given up.
_HARD = 2


def threads() -> int:
    """As many as torch uses."""
    leave_threads_of_parent()
    return torch.get_num_threads()


def keep_threads_in_forks() -> None:
    """Let processes that are forked from this one compute on several threads.

    Before each fork the forking thread ends its OpenMP threads (`omp_pause_resource_all`), and both processes
    start new ones when they need them. If the OpenMP library can't do so, forked processes use one thread.
    """
    _registered()


@functools.cache
def _registered() -> bool:
    pause = next((getattr(each, _PAUSE) for each in _libraries() if hasattr(each, _PAUSE)), None)
    if pause is None:
        return False
    refused: list[bool] = []

    def before() -> None:
        refused[:] = [pause(_HARD) != 0]

    def in_child() -> None:
        if not refused[-1]:
            _first_process.cache_clear()

    os.register_at_fork(before=before, after_in_child=in_child)
    return True


def leave_threads_of_parent() -> None:
    """Compute on one thread from now on in a forked process without its own threads.

    OpenMP would wait forever for threads that only the parent has.
    """
    keep_threads_in_forks()
    if torch.get_num_threads() > 1 and _first_process() != os.getpid():
        text = (
            f"This process was forked from one that computed on {torch.get_num_threads()} threads, which do "
            "not exist here. It computes "
            'on one thread: torch.set_num_threads(1). Start processes by "spawn" to use more.'
        )
        warn(text)
        torch.set_num_threads(1)


@functools.cache
def _first_process() -> int:
    """Return the process that asked first on several threads: it, or none, has started some."""
    return os.getpid()


def connect(library: ctypes.CDLL) -> None:
    """Let a library that includes openmp.h run on these threads.

    It runs on one thread where torch's are of another kind.
    """
    found = _addresses()
    library.nc_threads.argtypes = (ctypes.c_void_p,) * 3
    if found is not None:
        library.nc_threads(*found)


def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Return where functions of OpenMP are looked for, in this order."""
    # as the linker looks for torch: first what all libraries see, then what torch itself was linked to
    return ctypes.CDLL(None), ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _addresses() -> tuple[int | None, ...] | None:
    """Addresses of functions of the OpenMP library that torch's own operators call.

    None is returned where they use another kind of threads.
    """
    found = next(
        (library for library in _libraries() if all(hasattr(library, name) for name in _NAMES)), None
    )
    return (
        None
        if found is None
        else tuple(ctypes.cast(getattr(found, name), ctypes.c_void_p).value for name in _NAMES)
    )
