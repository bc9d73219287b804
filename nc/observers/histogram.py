"""The statistic for percentile, mse and kl: a dyadic histogram and the exact extremes, 32 KiB per tensor."""

from __future__ import annotations

import torch

from nc.numerics.histogram import BINS, MIN_EXPONENT, centres, coarsen, count, exponent_for
from nc.observers.base import State, Statistic


def update(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
    """Count the values of `x`."""
    exponent = exponent_for(max(abs(float(low)), abs(float(high))))
    new = {
        "low": low.float(),
        "high": high.float(),
        "exponent": torch.tensor(exponent, dtype=torch.int64),
        "counts": count(x, exponent),
    }
    return merge(state, new)


def merge(state: State, other: State) -> State:
    """Add the counts on the coarser grid of the two."""
    exponent = torch.maximum(state["exponent"], other["exponent"])
    mine, theirs = (coarsen(s["counts"], int(exponent - s["exponent"])) for s in (state, other))
    return {
        "low": torch.minimum(state["low"], other["low"]),
        "high": torch.maximum(state["high"], other["high"]),
        "exponent": exponent,
        "counts": mine + theirs,
    }


def occupied(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that stand for the bins that hold any, and their counts, both float64."""
    some = state["counts"] > 0
    values = centres(int(state["exponent"]), float(state["low"]), float(state["high"]))
    return values[some], state["counts"][some].double()


HISTOGRAM = Statistic(
    name="histogram",
    start={
        "low": torch.tensor(float("inf"), dtype=torch.float32),
        "high": torch.tensor(float("-inf"), dtype=torch.float32),
        "exponent": torch.tensor(MIN_EXPONENT, dtype=torch.int64),
        "counts": torch.zeros(BINS, dtype=torch.int64),
    },
    update=update,
    merge=merge,
)
