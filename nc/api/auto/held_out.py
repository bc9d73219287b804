"""Calibration data that nothing is computed from, to judge by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.calibration.statistics import Samples
from nc.numerics.metrics import worst_sqnr_db

Batch = tuple[torch.Tensor, ...]
Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]
#: What is kept, in rows of the first input and in bytes.
_ROWS, _BYTES = 32, 64 * 2**20
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

    Attributes:
        samples: flat inputs.
    """

    def __init__(self) -> None:
        self.samples = Samples(_ROWS, _BYTES)
        self._calls = 0

    def split(self, batch: Batch, run: Run) -> Split:
        """Return what of a batch is held out; nothing is kept yet.

        Args:
            batch: flat inputs.
            run: computes the fp32 model's flat outputs.
        """
        self._calls += 1
        rows = _rows(batch)
        if not self.samples.has_room(batch):
            return Split(batch)
        if rows >= _SHARE:
            whole = run(batch)
            first = rows - rows // _SHARE
            held = _part(batch, first, rows)
            if _stand_alone(held, whole, first, rows, run):
                return Split(_part(batch, 0, first), held, whole)
        elif self._calls % _SHARE == 2:
            whole = run(batch)
            if _numbers(whole):
                return Split(None, batch, whole)
        return Split(batch)

    def keep(self, split: Split) -> None:
        """Keep what is held out of a batch."""
        if split.held is not None:
            self.samples.keep(split.held)


def _stand_alone(part: Batch, whole: Sequence[Any], first: int, last: int, run: Run) -> bool:
    """Whether some rows of a batch give alone what the whole batch gives for them.

    Not where something is no number: calibration says where that comes from.
    """
    if not _numbers(whole) or not all(_rows_of(value) == last for value in whole):
        return False
    try:
        outputs = run(part)
    except Exception:  # any model: its sizes may be fixed, and then its batches stay whole
        return False
    expected = [t[first:last] for t in whole]
    alike = all(o.shape == e.shape for o, e in zip(outputs, expected, strict=True))
    return alike and worst_sqnr_db(expected, outputs) >= _SAME_DB


def _rows_of(value: object) -> int:
    return len(value) if isinstance(value, torch.Tensor) and value.dim() else 0


def _numbers(outputs: Sequence[Any]) -> bool:
    return not any(bool(t.isnan().any()) for t in outputs if isinstance(t, torch.Tensor))


def _rows(batch: Batch) -> int:
    """Return the rows that all inputs have; 0 where they differ."""
    sizes = set(map(_rows_of, batch))
    return sizes.pop() if len(sizes) == 1 else 0


def _part(batch: Batch, first: int, last: int) -> Batch:
    return tuple(t[first:last] for t in batch)
