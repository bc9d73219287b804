"""What the nodes of a QDQ graph that change precision call; they run on any CPU, so a QDQ graph is its own reference."""

from __future__ import annotations

import torch

from nc.numerics import affine
from nc.spec import per_channel, per_group


def quantize_per_tensor(x: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> torch.Tensor:
    """Codes of `x`: uint8 when `quant_min >= 0`, else int8."""
    return affine.quantize(x, scale, zero_point, quant_min, quant_max, dtype=torch.uint8 if quant_min >= 0 else torch.int8)


def dequantize_per_tensor(q: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """fp32 values of codes."""
    return affine.dequantize(q, scale, zero_point)


def dequantize_per_channel(q: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    """fp32 values of int8 weight codes with zero point 0 and one scale per index of `axis`."""
    return affine.dequantize(q, scale, 0, per_channel(axis).block_size(q.shape))


def dequantize_per_group(q: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, axis: int, group_size: int) -> torch.Tensor:
    """fp32 values of codes with one scale per `group_size` neighbours along `axis`; no zero point is 0.

    Args:
        q: codes, any shape.
        scale: fp32, the shape of `q` with the number of groups along `axis`.
        zero_point: integers of the same shape.
        axis: the axis that groups lie along.
        group_size: elements of a group.
    """
    return affine.dequantize(q, scale, 0 if zero_point is None else zero_point, per_group(axis, group_size).block_size(q.shape))


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """bf16 values nearest to fp32 ones."""
    return x.to(torch.bfloat16)


def from_bf16(x: torch.Tensor) -> torch.Tensor:
    """The same values in fp32."""
    return x.to(torch.float32)


def quantize_dequantize_dynamic(x: torch.Tensor, per_token: bool, quant_min: int, quant_max: int, symmetric: bool) -> torch.Tensor:
    """fp32 values of the codes of `x`, whose range is found here: over each row of the last dimension, or over all of it."""
    if not x.numel():
        return x
    low, high = (x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)) if per_token else torch.aminmax(x)
    scale, zero_point = affine.choose_qparams(low, high, quant_min=quant_min, quant_max=quant_max, symmetric=symmetric)
    codes = (torch.round(x / scale) + zero_point).clamp_(quant_min, quant_max)
    return codes.sub_(zero_point).mul_(scale)
