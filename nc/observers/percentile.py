"""Percentile: the range that leaves out the outermost values, e.g. 0.001 % by `percentile=99.999`.

Half of it is left out on each side. Symmetric codes cover that share of the magnitudes.
"""

from __future__ import annotations

import torch

from nc.formats import TensorFormat
from nc.numerics.histogram import SIDE, magnitudes, quantile
from nc.observers.base import RangeAlgorithm, State
from nc.observers.histogram import HISTOGRAM


def find_range(state: State, spec: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantiles of the histogram."""
    low, high, exponent = float(state["low"]), float(state["high"]), int(state["exponent"])
    assert spec.percentile is not None
    outside = (100.0 - spec.percentile) / 100.0
    if spec.symmetric:
        counts = torch.cat([torch.zeros(SIDE, dtype=torch.int64), magnitudes(state["counts"])])
        amax = max(-low, high)
        amin = 0.0 if low <= 0.0 <= high else min(abs(low), abs(high))
        limit = quantile(counts, exponent, amin, amax, 1.0 - outside)
        ends = [max(low, -limit), min(high, limit)]
    else:
        ends = [
            quantile(state["counts"], exponent, low, high, share)
            for share in (outside / 2, 1.0 - outside / 2)
        ]
    return torch.tensor(ends[0], dtype=torch.float32), torch.tensor(ends[1], dtype=torch.float32)


PERCENTILE = RangeAlgorithm("percentile", HISTOGRAM, find_range)
