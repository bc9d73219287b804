"""Offsets of blocks in one piece of memory, such that blocks needed at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Kernels read whole cache lines.
ALIGNMENT = 64


class Block(NamedTuple):
    """A piece of memory: its bytes, and the first and last call that need it."""

    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    """Return the size, rounded up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def solve(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return the offset of each block, and the bytes of all.

    The largest is placed first, each at the lowest place that is free while it lives.
    """
    offsets = [0] * len(blocks)
    placed: list[tuple[int, Block]] = []  # by offset
    for index in sorted(range(len(blocks)), key=lambda i: (-blocks[i].size, blocks[i].first)):
        block, offset = blocks[index], 0
        for other_offset, other in placed:
            if other.last < block.first or block.last < other.first:
                continue
            if offset + block.size <= other_offset:
                break
            offset = max(offset, aligned(other_offset + other.size))
        offsets[index] = offset
        placed.append((offset, block))
        placed.sort(key=lambda item: item[0])
    return offsets, max((aligned(offset + block.size) for offset, block in placed), default=0)
