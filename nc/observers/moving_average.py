"""Moving average of each batch's extremes, `m <- m + c (m_batch - m)` with torch's c = 0.01.

It is started by the first batch, and depends on the order of the batches. Merging weighs two averages by
their number of batches, so a merge is not equal to one run over all data.
"""

from __future__ import annotations

import torch

from nc.formats import TensorFormat
from nc.observers.base import RangeAlgorithm, State, Statistic

CONSTANT = 0.01


def update(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
    """Move the averages by one batch."""
    weight = CONSTANT if state["batches"] else 1.0
    moved = {
        name: state[name] + weight * (value.double() - state[name])
        for name, value in (("low", low), ("high", high))
    }
    return {**moved, "batches": state["batches"] + 1}


def merge(state: State, other: State) -> State:
    """Averages weighted by batches."""
    total = state["batches"] + other["batches"]
    share = (other["batches"] / total.clamp(min=1)).double()
    return {
        **{name: state[name] + share * (other[name] - state[name]) for name in ("low", "high")},
        "batches": total,
    }


def find_range(state: State, spec: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the averages."""
    return state["low"].float(), state["high"].float()


AVERAGES = Statistic(
    name="moving_average",
    start={
        "low": torch.tensor(0.0, dtype=torch.float64),
        "high": torch.tensor(0.0, dtype=torch.float64),
        "batches": torch.tensor(0, dtype=torch.int64),
    },
    update=update,
    merge=merge,
    by_batch=True,
)
MOVING_AVERAGE = RangeAlgorithm("moving_average", AVERAGES, find_range)
