"""MSE: the range whose codes give the least squared error (Choukroun et al., arXiv 1902.06822).

The error is that over the histogram, and the range is found by search.

Candidates are `amax * (1 - i / 100)` for i = 0..79. Affine codes have two ends: one is searched while the
other stays, twice over.
"""

from __future__ import annotations

import torch

from nc.formats import TensorFormat
from nc.numerics import formats
from nc.numerics.affine import choose_qparams
from nc.observers.base import RangeAlgorithm, State
from nc.observers.histogram import HISTOGRAM, occupied

_SHRINK = 1.0 - torch.arange(80, dtype=torch.float64) / 100


def squared_errors(
    values: torch.Tensor, counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spec: TensorFormat
) -> torch.Tensor:
    """Sum of squared quantization errors for each candidate range.

    Args:
        values: float64, shape [bins].
        counts: float64, shape [bins].
        low: shape [candidates].
        high: shape [candidates].
        spec: the codes.

    Returns:
        float64, shape [candidates].
    """
    if spec.dtype.kind == "float":
        steps = formats.choose_scale(low, high, spec.dtype).double()[:, None]
        nearest = formats.nearest_codes(values / steps, spec.dtype)
        return (
            torch.tensor(spec.dtype.values, dtype=torch.float64)[nearest.int()] * steps - values
        ).square() @ counts
    scale, zero_point = choose_qparams(
        low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=spec.symmetric
    )
    scale, zero_point = scale.double()[:, None], zero_point[:, None]
    codes = (torch.round(values / scale) + zero_point).clamp(spec.quant_min, spec.quant_max)
    return ((codes - zero_point) * scale - values).square() @ counts


def find_range(state: State, spec: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best candidate."""
    values, counts = occupied(state)
    low, high = state["low"].double().clamp(max=0.0), state["high"].double().clamp(min=0.0)
    if spec.symmetric:
        limit = torch.maximum(-low, high) * _SHRINK
        best = squared_errors(values, counts, -limit, limit, spec).argmin()
        return torch.maximum(low, -limit[best]).float(), torch.minimum(high, limit[best]).float()
    ends = [low, high]
    for _ in range(2):
        for side, whole in enumerate((low, high)):
            candidates = [end.expand(len(_SHRINK)) for end in ends]
            candidates[side] = whole * _SHRINK
            best = squared_errors(values, counts, candidates[0], candidates[1], spec).argmin()
            ends[side] = candidates[side][best]
    return ends[0].float(), ends[1].float()


MSE = RangeAlgorithm("mse", HISTOGRAM, find_range)
