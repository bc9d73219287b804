"""Calibration data that nothing is computed from, to judge by."""

from __future__ import annotations

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


class HeldOut:
    """The part of the calibration data that is held out: rows of batches, or whole batches.

    Attributes:
        samples: flat inputs.
        outputs: flat outputs of the fp32 model for each of them.
    """

    def __init__(self) -> None:
        self.samples = Samples(_ROWS, _BYTES)
        self.outputs: list[Sequence[Any]] = []
        self._calls = 0

    def split(self, batch: Batch, run: Run) -> tuple[Batch | None, Sequence[Any] | None]:
        """Return what of a batch is for calibration, and the outputs for all of it where they are known.

        Args:
            batch: flat inputs.
            run: computes the fp32 model's flat outputs.
        """
        self._calls += 1
        rows = _rows(batch)
        if not self.samples.has_room(batch):
            return batch, None
        if rows >= _SHARE:
            kept = rows - rows // _SHARE
            parts = _part(batch, 0, kept), _part(batch, kept, rows)
            whole = run(batch)
            tail = self._rows_alone(parts[1], whole, kept, rows, run)
            if tail is not None:
                self._keep(parts[1], tail)
                return parts[0], whole
        elif self._calls % _SHARE == 2:
            whole = run(batch)
            self._keep(batch, whole)
            return None, whole
        return batch, None

    def _rows_alone(
        self, part: Batch, whole: Sequence[Any], first: int, last: int, run: Run
    ) -> Sequence[Any] | None:
        """Return the outputs of some rows, if these are what the whole batch gives for them."""
        if not all(isinstance(t, torch.Tensor) and t.dim() and len(t) == last for t in whole):
            return None
        try:
            outputs = run(part)
        except Exception:  # any model: its sizes may be fixed, and then whole batches are held out
            return None
        same = all(o.shape == w[first:last].shape for o, w in zip(outputs, whole, strict=True))
        if not same or worst_sqnr_db([w[first:last] for w in whole], outputs) < _SAME_DB:
            return None
        return outputs

    def _keep(self, batch: Batch, outputs: Sequence[Any]) -> None:
        self.samples.keep(batch)
        self.outputs.append([o.clone() if isinstance(o, torch.Tensor) else o for o in outputs])


def _rows(batch: Batch) -> int:
    """Return the rows that all inputs have; 0 where they differ."""
    sizes = {len(t) if t.dim() else 0 for t in batch}
    return sizes.pop() if len(sizes) == 1 else 0


def _part(batch: Batch, first: int, last: int) -> Batch:
    return tuple(t[first:last] for t in batch)
