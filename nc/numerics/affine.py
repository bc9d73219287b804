"""Affine quantization: `q = clamp(round(x / s) + z, a, b)`, `x^ = (q - z) * s` (Jacob et al., arXiv 1712.05877, eq. 1).

Rounding is half to even, the division a true fp32 division, and z is added after rounding: the family of ONNX QuantizeLinear and of
torch's fake quantization. `torch.quantize_per_tensor` adds z before it rounds; the two differ by one code at exact ties when z is odd.
"""

from __future__ import annotations

import torch

#: Ranges below this are taken as all zero: 1/scale would overflow fp32 long before they mattered.
TINY_AMAX = 2.0**-100


def choose_qparams(
    low: torch.Tensor, high: torch.Tensor, *, quant_min: int, quant_max: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point that cover [low, high] and represent 0 exactly.

    Args:
        low: smallest values, any shape; finite.
        high: largest values, same shape; finite.
        quant_min: lowest code.
        quant_max: highest code.
        symmetric: fix the zero point at the middle of the codes (0 for signed, 128 for [0, 255]).

    Returns:
        `(scale, zero_point)`, fp32 and int64, of the shape of `low`. An all-zero range gives scale 1.
    """
    low = low.double().clamp(max=0.0)
    high = high.double().clamp(min=0.0)
    amax = torch.maximum(-low, high)
    if symmetric:
        middle = (quant_min + quant_max + 1) // 2
        # the side with fewer codes decides, so that neither end clips
        scale = amax / min(quant_max - middle, middle - quant_min)
        zero_point = torch.full_like(amax, middle)
    else:
        scale = (high - low) / (quant_max - quant_min)
        scale = torch.where(amax < TINY_AMAX, torch.ones_like(scale), scale)
        zero_point = (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
        zero_point = torch.where(amax < TINY_AMAX, torch.zeros_like(zero_point).clamp(quant_min, quant_max), zero_point)
    scale = torch.where(amax < TINY_AMAX, torch.ones_like(scale), scale)
    return scale.float(), zero_point.to(torch.int64)


def quantize(
    x: torch.Tensor, scale: torch.Tensor | float, zero_point: int, quant_min: int, quant_max: int, axis: int | None = None
) -> torch.Tensor:
    """Codes of `x`.

    Args:
        x: any float tensor; computed in fp32.
        scale: a number, or a tensor of shape [x.shape[axis]].
        zero_point: the code of 0.
        quant_min: lowest code.
        quant_max: highest code.
        axis: channel axis of a per-channel scale.

    Returns:
        uint8 codes when `quant_min >= 0`, else int8; the shape of `x`.
    """
    codes = (x.float() / _along(scale, axis, x.dim())).round_().add_(zero_point)
    return codes.clamp_(quant_min, quant_max).to(torch.uint8 if quant_min >= 0 else torch.int8)


def dequantize(q: torch.Tensor, scale: torch.Tensor | float, zero_point: int, axis: int | None = None) -> torch.Tensor:
    """Real fp32 values of codes `q`; arguments as in `quantize`."""
    # a code minus its zero point is exact in fp32
    return q.to(torch.float32).sub_(zero_point).mul_(_along(scale, axis, q.dim()))


def _along(scale: torch.Tensor | float, axis: int | None, rank: int) -> torch.Tensor | float:
    """`scale` shaped so that it broadcasts along `axis` of a tensor of that rank."""
    if axis is None or not isinstance(scale, torch.Tensor) or scale.dim() == 0:
        return scale
    return scale.reshape([-1 if d == axis else 1 for d in range(rank)])
