"""Min-max: the smallest and largest value ever seen. Independent of order and batch split, exactly mergeable."""

from __future__ import annotations

import torch

from nc.observers.base import State, Statistic


def update(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
    """Widen the range by the extremes of `x`."""
    return {"low": torch.minimum(state["low"], low), "high": torch.maximum(state["high"], high)}


def find_range(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """The range itself."""
    return state["low"], state["high"]


MINMAX = Statistic(
    name="minmax",
    state={"low": (torch.tensor(float("inf")), "min"), "high": (torch.tensor(float("-inf")), "max")},
    update=update,
    find_range=find_range,
)
