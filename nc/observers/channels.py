"""Per-channel extremes: the smallest and largest value of each index of one dimension.

They are for SmoothQuant and for simulated formats.
"""

from __future__ import annotations

import dataclasses

import torch

from nc.observers.base import State, Statistic
from nc.observers.minmax import EXTREMES


def update(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
    """Widen each channel's range; the state takes its shape, [channels], from the first batch."""
    rows = x.reshape(-1, x.shape[-1])
    return {
        "low": torch.minimum(state["low"], rows.amin(0)),
        "high": torch.maximum(state["high"], rows.amax(0)),
    }


CHANNEL_EXTREMES = dataclasses.replace(EXTREMES, name="channel_extremes", update=update)


def extremes_along(axis: int) -> Statistic:
    """Return the same statistic of another dimension: each state tensor has its size."""

    def update_along(state: State, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> State:
        return update(state, x.movedim(axis, -1), low, high)

    return dataclasses.replace(CHANNEL_EXTREMES, name=f"extremes_of_axis_{axis}", update=update_along)
