"""The bandwidth with which this machine reads memory.

It is the limit of layers whose weights do not fit into a cache.
"""

from __future__ import annotations

import functools
import time

import torch

#: Larger than the last-level cache of most CPUs, several times.
_BYTES = 256 << 20
_READS = 8


@functools.cache
def read_bandwidth(threads: int) -> float:
    """GB/s of the fastest of several sums over an array; measured once per process, in about a second.

    Args:
        threads: how many torch uses now; another number is measured again.
    """
    del threads
    data = torch.ones(_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(_READS):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return _BYTES / best / 1e9
