"""Quantization with ranges that are found in each call."""

from __future__ import annotations

import torch

from nc.numerics.affine import choose_qparams


def quantize_dequantize_dynamic(
    x: torch.Tensor, per_token: bool, quant_min: int, quant_max: int, symmetric: bool
) -> torch.Tensor:
    """fp32 values of the codes of `x`; a new tensor.

    Args:
        x: fp32, any shape.
        per_token: one range for each row of the last dimension; else one for the whole tensor.
        quant_min: lowest code.
        quant_max: highest code.
        symmetric: fix the zero point at the middle of the codes.
    """
    if not x.numel():
        return x.clone()
    low, high = (x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)) if per_token else torch.aminmax(x)
    scale, zero_point = choose_qparams(
        low, high, quant_min=quant_min, quant_max=quant_max, symmetric=symmetric
    )
    codes = (torch.round(x / scale) + zero_point).clamp_(quant_min, quant_max)
    return codes.sub_(zero_point).mul_(scale)
