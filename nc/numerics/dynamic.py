"""Quantization with ranges that are found in each call."""

from __future__ import annotations

import torch

from nc.numerics.affine import TINY_AMAX, choose_qparams

#: Largest code of a row of the right side of a product.
_LARGEST = 127


def quantize_dequantize_dynamic(
    x: torch.Tensor,
    per_token: bool,
    quant_min: int,
    quant_max: int,
    symmetric: bool,
    dim: int = -1,
    right: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 values of the codes of `x`; a new tensor.

    Args:
        x: fp32, any shape.
        per_token: one range for each row along `dim`; else one for the whole tensor.
        quant_min: lowest code.
        quant_max: highest code.
        symmetric: fix the zero point at the middle of the codes.
        dim: -1 for rows, -2 for columns.
        right: fp32, [..., columns of x, any]: the right factor of the product, if each of its rows has its
            own range. Codes are those of `x` times these ranges, as the product sums them: a large element of
            `x` that meets a small row does not widen the range of the others.
    """
    if not x.numel():
        return x.clone()
    if right is not None:
        scales = row_scales(right).mT
        return quantize_dequantize_dynamic(x * scales, per_token, quant_min, quant_max, symmetric, dim).div_(
            scales
        )
    low, high = (x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)) if per_token else torch.aminmax(x)
    scale, zero_point = choose_qparams(
        low, high, quant_min=quant_min, quant_max=quant_max, symmetric=symmetric
    )
    codes = (torch.round(x / scale) + zero_point).clamp_(quant_min, quant_max)
    return codes.sub_(zero_point).mul_(scale)


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 scales of the rows of a right side: fp32, [..., rows, 1] for [..., rows, any].

    Rows of nothing but 0 have that of the smallest other row, so that they widen no range.
    """
    amax = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    others = torch.where((amax >= TINY_AMAX) & amax.isfinite(), amax, torch.inf).amin(-2, keepdim=True)
    least = torch.where(others.isinf(), _LARGEST, others)
    return torch.where(amax < TINY_AMAX, least, amax) / _LARGEST
