"""Offsets of blocks in one piece of memory, such that blocks needed at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Iterable

from nc.backends.native.plans.execution_plan import Block

#: Kernels read whole cache lines.
ALIGNMENT = 64


def aligned(size: int) -> int:
    """Return the size, rounded up."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def solve(blocks: Iterable[Block]) -> tuple[dict[Block, int], int]:
    """Return the offset of each block, and the bytes of all.

    The largest is placed first, each at the lowest place that is free while it lives.
    """
    offsets: dict[Block, int] = {}
    placed: list[tuple[int, Block]] = []  # by offset
    for block in sorted(blocks, key=lambda b: (-b.size, b.first)):
        offset = 0
        for other_offset, other in placed:
            if other.last < block.first or block.last < other.first:
                continue
            if offset + block.size <= other_offset:
                break
            offset = max(offset, aligned(other_offset + other.size))
        offsets[block] = offset
        placed.append((offset, block))
        placed.sort(key=lambda item: item[0])
    return offsets, max((aligned(offset + block.size) for block, offset in offsets.items()), default=0)
