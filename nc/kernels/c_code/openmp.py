"""The threads that torch's operators run on, for C code of ours.

Two pools of threads would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from nc.process.warn import warn

_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def threads() -> int:
    """As many as torch uses."""
    leave_threads_of_parent()
    return torch.get_num_threads()


def leave_threads_of_parent() -> None:
    """In a forked process, compute on one thread from now on.

    OpenMP would wait for ever for threads that only the parent has.
    """
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


def _addresses() -> tuple[int | None, ...] | None:
    """Addresses of functions of the OpenMP library that torch's own operators call.

    None is returned where they use another kind of threads.
    """
    # as the linker looks for torch: first what all libraries see, then what torch itself was linked to
    libraries = (ctypes.CDLL(None), ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
    found = next((library for library in libraries if all(hasattr(library, name) for name in _NAMES)), None)
    return (
        None
        if found is None
        else tuple(ctypes.cast(getattr(found, name), ctypes.c_void_p).value for name in _NAMES)
    )
