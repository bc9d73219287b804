"""Codes of floating-point formats with at most 8 bits.

They follow `x^ = value(q) * s`, where a format is the table of its values.

There is no zero point. Scales are chosen so that the largest value of a block is the largest finite value of
the format.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from nc.formats import DType
from nc.numerics import affine


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
    """Return the code of the value nearest to each element; of two that are equally near, the even code.

    The even code is the one with the even mantissa, as IEEE 754 rounds. What is beyond the largest finite
    value gets that value's code.

    Args:
        x: floats without NaN, any shape; the comparison is exact.
        dtype: a floating-point format.

    Returns:
        Codes of the shape of `x`, uint8; never those of -0, NaN or infinities.
    """
    if (
        dtype.storage.is_floating_point and x.dtype == torch.float32
    ):  # torch has the format; its cast does not saturate
        codes = x.clamp(-dtype.largest, dtype.largest).to(dtype.storage).view(torch.uint8)
        return codes.masked_fill_(codes == 128, 0)
    numbers = x if x.dtype == torch.float64 else x.float()
    codes, starts = _sorted_codes(dtype, numbers.dtype)
    if len(codes) > 16:
        return codes[torch.bucketize(numbers, starts, out_int32=True, right=True)]
    steps = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for start in starts.tolist():
        steps += numbers >= start  # faster than a search
    return codes.index_select(0, steps.flatten().int()).reshape(x.shape)


def nearest_values(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the value nearest to each element, fp32; as `nearest_codes`."""
    if dtype.storage.is_floating_point:
        return x.clamp(-dtype.largest, dtype.largest).to(dtype.storage).float()
    return values(dtype).index_select(0, nearest_codes(x, dtype).flatten().int()).reshape(x.shape)


def values(dtype: DType) -> torch.Tensor:
    """Return the value of each code, fp32.

    Not cached: torch.compile would cache its own tensor, which nothing else can read.
    """
    return torch.tensor(dtype.values, dtype=torch.float32, device="cpu")


def quantize(
    x: torch.Tensor, scale: torch.Tensor | float, dtype: DType, block_size: Sequence[int] | None = None
) -> torch.Tensor:
    """Codes of `x / scale`.

    Args:
        x: any float tensor without NaN; divided in fp32.
        scale: a number, or a tensor with one number per block, in the order of the blocks.
        dtype: a floating-point format.
        block_size: see `nc.numerics.affine.quantize`.

    Returns:
        Codes of the shape of `x` and the dtype `dtype.storage`.
    """
    divided, scales, _ = affine.in_blocks(x.float(), scale, 0, block_size)
    return nearest_codes(divided / scales, dtype).reshape(x.shape).view(dtype.storage)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor | float, dtype: DType, block_size: Sequence[int] | None = None
) -> torch.Tensor:
    """Real fp32 values of codes; arguments as in `quantize`."""
    return affine.dequantize(values(dtype)[codes.view(torch.uint8).int()], scale, 0, block_size)


@functools.cache
def _sorted_codes(dtype: DType, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of the values that are chosen, in ascending order, uint8.

    Also return the first number of `kind` that belongs to each but the first.
    """
    codes: dict[float, int] = {}
    for code, value in enumerate(dtype.values):
        if abs(value) <= dtype.largest:
            codes.setdefault(value, code)  # 0.0 == -0.0, and 0.0 comes first
    order = sorted(codes)
    starts = []
    for below, above in itertools.pairwise(order):
        middle = (below + above) / 2
        start = torch.tensor(middle, dtype=kind, device="cpu")
        if float(start) < middle or (
            float(start) == middle and codes[above] % 2
        ):  # a tie belongs to the even code
            start = torch.nextafter(start, torch.tensor(math.inf, dtype=kind, device="cpu"))
        starts.append(start)
    return torch.tensor([codes[value] for value in order], dtype=torch.uint8, device="cpu"), torch.stack(
        starts
    )
