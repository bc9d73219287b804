"""Codes of floating-point formats with at most 8 bits: `x^ = value(q) * s`, where a format is the table of its values.

There is no zero point. Scales are chosen so that the largest value of a block is the largest finite value of the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nc.numerics import affine
from nc.spec import DType


def choose_scale(low: torch.Tensor, high: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Scales that cover [low, high], fp32, of the shape of `low`. An all-zero range gives scale 1.

    Args:
        low: smallest values, any shape; finite.
        high: largest values, same shape; finite.
        dtype: a floating-point format.
    """
    amax = torch.maximum(-low.double(), high.double()).clamp(min=0.0)
    return torch.where(amax < affine.TINY_AMAX, torch.ones_like(amax), amax / dtype.largest).float()


def nearest_codes(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """The code of the value nearest to each element; of two that are equally near, the even code.

    The even code is the one with the even mantissa, as IEEE 754 rounds. What is beyond the largest finite value gets that value's code.

    Args:
        x: floats without NaN, any shape; compared in float64.
        dtype: a floating-point format.

    Returns:
        Codes of the shape of `x`, uint8; never those of -0, NaN or infinities.
    """
    codes, middles = _sorted_codes(dtype)
    values = x.double()
    below, above = torch.bucketize(values, middles), torch.bucketize(values, middles, right=True)  # they differ at ties only
    return torch.where(codes[below] % 2 == 0, codes[below], codes[above])


def quantize(x: torch.Tensor, scale: torch.Tensor | float, dtype: DType, block_size: Sequence[int] | None = None) -> torch.Tensor:
    """Codes of `x / scale`.

    Args:
        x: any float tensor without NaN; divided in fp32.
        scale: a number, or a tensor with one number per block, in the order of the blocks.
        dtype: a floating-point format.
        block_size: see `nc.numerics.affine.quantize`.

    Returns:
        Codes of the shape of `x` and the dtype `dtype.storage`.
    """
    values, scales, _ = affine.in_blocks(x.float(), scale, 0, block_size)
    return nearest_codes(values / scales, dtype).reshape(x.shape).view(dtype.storage)


def dequantize(codes: torch.Tensor, scale: torch.Tensor | float, dtype: DType, block_size: Sequence[int] | None = None) -> torch.Tensor:
    """Real fp32 values of codes; arguments as in `quantize`."""
    values = torch.tensor(dtype.values, dtype=torch.float32)[codes.view(torch.uint8).int()]
    return affine.dequantize(values, scale, 0, block_size)


def _sorted_codes(dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the finite values in ascending order, uint8, and the middles between neighbouring values, float64, one fewer."""
    codes: dict[float, int] = {}
    for code, value in enumerate(dtype.values):
        if math.isfinite(value):
            codes.setdefault(value, code)  # 0.0 == -0.0, and 0.0 comes first
    values = torch.tensor(sorted(codes), dtype=torch.float64)
    return torch.tensor([codes[value] for value in sorted(codes)], dtype=torch.uint8), (values[1:] + values[:-1]) / 2
