"""The threads that torch's operators run on, for C code of ours: two pools of threads would wait for each other."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def threads() -> int:
    """As many as torch uses; one in a forked process, where OpenMP would wait for threads that do not exist there."""
    return torch.get_num_threads() if _first_process() == os.getpid() else 1


@functools.cache
def _first_process() -> int:
    """The process that asked first: it, or none, has started threads."""
    return os.getpid()


def connect(library: ctypes.CDLL) -> None:
    """Let a library that includes openmp.h run on these threads; on one thread where torch's are of another kind."""
    found = _addresses()
    library.nc_threads.argtypes = (ctypes.c_void_p,) * 3
    if found is not None:
        library.nc_threads(*found)


def _addresses() -> tuple[int | None, ...] | None:
    """Addresses of functions of the OpenMP library that torch's own operators call; None where they use another kind of threads."""
    # as the linker looks for torch: first what all libraries see, then what torch itself was linked to
    libraries = (ctypes.CDLL(None), ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
    found = next((library for library in libraries if all(hasattr(library, name) for name in _NAMES)), None)
    return None if found is None else tuple(ctypes.cast(getattr(found, name), ctypes.c_void_p).value for name in _NAMES)
