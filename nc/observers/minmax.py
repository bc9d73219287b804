"""Min-max: the smallest and largest value ever seen.

Independent of order and batch split, exactly mergeable.
"""

from __future__ import annotations

import torch

from nc.formats import TensorFormat
from nc.observers.base import RangeAlgorithm, State, Statistic, merge_each


def update(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
    """Widen the range by the extremes of `x`."""
    return {"low": torch.minimum(state["low"], low), "high": torch.maximum(state["high"], high)}


def find_range(state: State, spec: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range itself."""
    return state["low"], state["high"]


EXTREMES = Statistic(
    name="extremes",
    start={
        "low": torch.tensor(float("inf"), dtype=torch.float32),
        "high": torch.tensor(float("-inf"), dtype=torch.float32),
    },
    update=update,
    merge=merge_each(low=torch.minimum, high=torch.maximum),
)
MINMAX = RangeAlgorithm("minmax", EXTREMES, find_range)
