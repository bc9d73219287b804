"""Memory in pages of 2 MB, where Linux gives them.

Reading what is larger than the caches is faster than from pages of 4 KB.

A CPU prefetches no further than to the end of a page, and looks up each page in a table. Measured on AMD Zen
4, one thread: 28 GB/s instead of 20. New pages can take long, 3 ms each on a virtual machine that gives free
ones back to its host: they are for what is read again and again.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch

#: Bytes of a large page on x86-64.
PAGE = 1 << 21
#: Bytes that small tensors share.
_PIECE = 16 << 20
#: Where tensors begin: a cache line.
_ALIGNMENT = 64


class LargePages:
    """Gives memory to one tensor after the other.

    A piece of 16 MB goes back to the system with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def empty(self, size: int) -> torch.Tensor:
        """Bytes, in large pages where the system has them: shape [size], uint8, aligned to a cache line."""
        if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if size > _PIECE // 2:
            return _part(*_new(size), size)
        with self._lock:
            piece = self._piece() if self._piece is not None else None
            if piece is None or self._used + size > len(piece):
                piece, self._used = _new(_PIECE)
                self._piece = weakref.ref(piece)
            result = _part(piece, self._used, size)
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return result

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values in such memory, contiguous."""
        size = tensor.numel() * tensor.element_size()
        return self.empty(size).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _new(size: int) -> tuple[mmap.mmap, int]:
    """Return a piece of memory of at least `size` bytes, and the offset of its first large page.

    Pages that are never accessed take no memory.
    """
    piece = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without large pages
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece, -_part(piece, 0, 1).data_ptr() % PAGE


def _part(piece: mmap.mmap, offset: int, size: int) -> torch.Tensor:
    """Return some bytes of a piece, which lives as long as they do."""
    return torch.frombuffer(piece, dtype=torch.uint8, count=size, offset=offset)
