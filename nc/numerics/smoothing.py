"""SmoothQuant's scales, and rounding for its search, in float64.

The scales are those of Xiao et al., arXiv 2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nc.formats import TensorFormat
from nc.numerics.affine import choose_qparams, dequantize, quantize

#: Below these, channels are as good as dead; the same floors as in the authors' code.
_LEAST_WEIGHT = 1e-5
_LEAST_SCALE = 1e-5
COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "mean": lambda stacked: stacked.mean(0),
}


def scales_for(
    alpha: float, low: torch.Tensor, high: torch.Tensor, weights: Sequence[torch.Tensor], criterion: str
) -> torch.Tensor:
    """Return the smoothing scales, `s = max|X|^alpha / max|W|^(1 - alpha)` per channel.

    Args:
        alpha: 0 to 1.
        low: smallest value of each input channel, float64, shape [channels].
        high: largest value, likewise.
        weights: float64, each [outputs, channels].
        criterion: how the weights' magnitudes are combined: "max", "min" or "mean".

    Returns:
        float64, shape [channels]; 1 for channels that are always 0.
    """
    x = torch.maximum(-low, high).clamp(min=0.0)
    w = COMBINE[criterion](torch.stack([weight.abs().amax(0) for weight in weights])).clamp(min=_LEAST_WEIGHT)
    scales = (x**alpha / w ** (1 - alpha)).clamp(min=_LEAST_SCALE)
    return torch.where(x == 0.0, torch.ones_like(scales), scales)


def fake_quantize(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spec: TensorFormat) -> torch.Tensor:
    """Values of the codes of `x` for one range, float64."""
    scale, zero_point = choose_qparams(
        low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=spec.symmetric
    )
    codes = quantize(
        x, float(scale), int(zero_point), spec.quant_min, spec.quant_max, dtype=spec.dtype.storage
    )
    return dequantize(codes, float(scale), int(zero_point)).double()
