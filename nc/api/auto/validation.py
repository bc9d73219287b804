"""Calibration data that nothing is computed from, to judge by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.numerics.metrics import worst_sqnr_db

Batch = tuple[torch.Tensor, ...]
Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]
#: What is kept, in rows of the first input and in bytes. The first batch that is held out is always kept.
_ROWS, _BYTES = 32, 64 * 2**20
#: Rows of one batch, and whole batches where rows cannot be held out: one batch may be unlike the others.
_ROWS_OF_BATCH, _BATCHES = 8, 4
#: One row, or one batch, in so many is held out; of batches the second, the sixth and so on.
_SHARE = 4
#: Outputs of a part of a batch are those of the whole if they agree to so many dB.
_SAME_DB = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """What becomes of a calibration batch.

    Attributes:
        seen: what calibration sees; None: nothing of it.
        held: what is held out; None: nothing of it.
        outputs: for the whole batch, where they are known.
    """

    seen: Batch | None
    held: Batch | None = None
    outputs: Sequence[Any] | None = None


class HeldOut:
    """The part of the calibration data that is held out: rows of batches, or whole batches.

    Of two batches and more something always is.

    Attributes:
        batches: flat inputs.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._calls = self._rows = 0

    @property
    def rows(self) -> int:
        """The number of rows that are held out."""
        return sum(len(batch[0]) if batch[0].dim() else 1 for batch in self.batches)

    def split(self, batch: Batch, run: Run) -> Split:
        """Return what of a batch is held out; nothing is kept yet.

        Args:
            batch: flat inputs.
            run: computes the fp32 model's flat outputs.
        """
        self._calls += 1
        if not batch or not all(t.numel() for t in batch):
            return Split(batch)
        rows = _rows(batch)
        whole: Sequence[Any] | None = None
        if rows > 1:
            self._rows += rows
            count = self._count(batch, rows)
            if count < 1:
                return Split(batch)
            whole = run(batch)
            first = rows - count
            held = _part(batch, first, rows)
            if _stand_alone(held, whole, run):
                return Split(_part(batch, 0, first), held, whole)
        if self._takes_whole(batch):
            whole = run(batch) if whole is None else whole
            if _numbers(whole):
                return Split(None, batch, whole)
        return Split(batch)

    def keep(self, split: Split) -> None:
        """Keep what is held out of a batch."""
        if split.held is not None:
            # row-major, as in a file: kernels round differently on another layout
            self.batches.append(
                tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in split.held)
            )

    def _count(self, batch: Batch, rows: int) -> int:
        """Return how many rows of a batch are held out, so that a quarter of all is."""
        wanted = min((self._rows + _SHARE // 2) // _SHARE, _ROWS) - self.rows
        free = (_BYTES - self._size()) * rows // _bytes(batch)
        return min(wanted, _ROWS_OF_BATCH, rows - 1, free if self.batches else max(free, 1))

    def _takes_whole(self, batch: Batch) -> bool:
        """Return whether the whole of a batch is held out, where rows of it cannot be."""
        if not self.batches:
            return self._calls > 1
        is_room = len(self.batches) < _BATCHES or self.rows < _ROWS
        return self._calls % _SHARE == 2 and is_room and self._size() + _bytes(batch) <= _BYTES

    def _size(self) -> int:
        return sum(map(_bytes, self.batches))


def _stand_alone(part: Batch, whole: Sequence[Any], run: Run) -> bool:
    """Return whether the last rows of a batch give alone what the whole batch gives for them.

    Outputs may have the batch in any dimension. It is not so where something is not a number: calibration
    says where that comes from.

    Args:
        part: these rows.
        whole: the outputs of the whole batch.
        run: computes outputs.
    """
    if not _numbers(whole):
        return False
    try:
        outputs = run(part)
    except Exception:  # any model: its sizes may be fixed, and then its batches stay whole
        return False
    expected = [_last(value, of) for value, of in zip(whole, outputs, strict=True)]
    known = [value for value in expected if value is not None]
    return len(known) == len(expected) and worst_sqnr_db(known, outputs) >= _SAME_DB


def _last(whole: Any, part: Any) -> torch.Tensor | None:
    """Return the last entries of an output, as many as `part` has along the one dimension where it has fewer.

    None is returned where that is not one dimension.
    """
    if not (isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor)):
        return None
    if whole.dim() != part.dim():
        return None
    sizes = zip(whole.shape, part.shape, strict=True)
    axes = [axis for axis, (size, less) in enumerate(sizes) if size != less]
    if len(axes) != 1 or whole.shape[axes[0]] < part.shape[axes[0]]:
        return None
    count = part.shape[axes[0]]
    return whole.narrow(axes[0], whole.shape[axes[0]] - count, count)


def _numbers(outputs: Sequence[Any]) -> bool:
    return not any(bool(t.isnan().any()) for t in outputs if isinstance(t, torch.Tensor))


def _rows(batch: Batch) -> int:
    """Return the rows that all inputs have; 0 where they differ."""
    sizes = {len(t) if t.dim() else 0 for t in batch}
    return sizes.pop() if len(sizes) == 1 else 0


def _part(batch: Batch, first: int, last: int) -> Batch:
    return tuple(t[first:last] for t in batch)


def _bytes(batch: Batch) -> int:
    return sum(t.numel() * t.element_size() for t in batch)
