"""Affine quantization.

It is `q = clamp(round(x / s) + z, a, b)`, `x^ = (q - z) * s` (Jacob et al., arXiv 1712.05877, eq. 1).

Rounding is half to even, the division a true fp32 division, and z is added after rounding: the family of ONNX
QuantizeLinear and of torch's fake quantization. `torch.quantize_per_tensor` adds z before it rounds; the two
differ by one code at exact ties when z is odd.

Every granularity is a block size: blocks of one size cover the tensor, and each has its own s and z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        zero_point = torch.where(
            amax < TINY_AMAX, torch.zeros_like(zero_point).clamp(quant_min, quant_max), zero_point
        )
    scale = torch.where(amax < TINY_AMAX, torch.ones_like(scale), scale)
    return scale.float(), zero_point.to(torch.int64)


def block_range(x: torch.Tensor, block_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each block.

    Args:
        x: any float tensor that is not empty.
        block_size: see `quantize`.

    Returns:
        `(low, high)` of the dtype of `x`, both of shape [x.shape[d] / block_size[d] for each dimension d].
    """
    rows, grid = block_rows(x, block_size)
    low, high = torch.aminmax(rows, dim=1)
    return low.reshape(grid), high.reshape(grid)


def block_rows(x: torch.Tensor, block_size: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the elements of each block as a row, and how many blocks each dimension of `x` has.

    The rows have shape [blocks, elements].
    """
    values = _split(x, block_size)
    grid, inner = values.shape[::2], list(range(1, values.dim(), 2))
    return values.permute(*range(0, values.dim(), 2), *inner).reshape(math.prod(grid), -1), tuple(grid)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int,
    quant_min: int,
    quant_max: int,
    *,
    dtype: torch.dtype,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """Codes of `x`.

    Args:
        x: any float tensor; computed in fp32.
        scale: a number, or a tensor with one number per block, in the order of the blocks. Codes are right
            for the scale given here: one that is stored in fewer bits is rounded before.
        zero_point: the code of 0, likewise.
        quant_min: lowest code.
        quant_max: highest code.
        dtype: of the codes.
        block_size: size of a block in each dimension of `x`, which it divides; see
            `nc.formats.Granularity.block_size`. None: one block.

    Returns:
        Codes of the shape of `x`.
    """
    values, scales, zero_points = in_blocks(x.float(), scale, zero_point, block_size)
    codes = (values / scales).round_().add_(zero_points).clamp_(quant_min, quant_max)
    return codes.to(dtype).reshape(x.shape)


def dequantize(
    q: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """Real fp32 values of codes `q`; arguments as in `quantize`."""
    values, scales, zero_points = in_blocks(q.to(torch.float32), scale, zero_point, block_size)
    # a code minus its zero point is exact in fp32
    return (values - zero_points).mul_(scales).reshape(q.shape)


_Number = torch.Tensor | float


def in_blocks(
    x: torch.Tensor, scale: _Number, zero_point: _Number, block_size: Sequence[int] | None
) -> tuple[torch.Tensor, _Number, _Number]:
    """`x`, scale and zero point shaped so that they broadcast; arguments as in `quantize`."""
    if block_size is None or all(part == size for part, size in zip(block_size, x.shape, strict=True)):
        return x, _one(scale), _one(zero_point)
    counts = [size // part for size, part in zip(x.shape, block_size, strict=True)]
    if all(part in (1, size) for part, size in zip(block_size, x.shape, strict=True)):
        return x, _shaped(scale, counts), _shaped(zero_point, counts)  # which keeps the memory format
    outer = [count for pair in zip(counts, [1] * len(counts), strict=True) for count in pair]
    return _split(x, block_size), _shaped(scale, outer), _shaped(zero_point, outer)


def _split(x: torch.Tensor, block_size: Sequence[int]) -> torch.Tensor:
    """Each dimension as two: which block, and where in it."""
    return x.reshape(
        [n for size, part in zip(x.shape, block_size, strict=True) for n in (size // part, part)]
    )


def _shaped(value: _Number, shape: Sequence[int]) -> _Number:
    return value.reshape(shape) if isinstance(value, torch.Tensor) and value.dim() else value


def _one(value: _Number) -> _Number:
    return value.reshape(()) if isinstance(value, torch.Tensor) else value
