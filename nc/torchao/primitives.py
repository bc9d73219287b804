"""torchao's affine primitives: every integer granularity as a block size, with torchao's arithmetic.

The blocks are those of `nc.numerics.affine`, from which all integer granularities of this package are built.
Two things differ from it, so that results are those of torchao: here `x` is multiplied by `1 / scale` (there
divided, so codes near a tie can differ by one), and all is computed in the dtype of the input.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence

import torch

from nc.errors import ConfigError
from nc.formats.checks import is_whole
from nc.numerics import affine


class MappingType(enum.Enum):
    """How a range becomes a scale.

    * SYMMETRIC: largest magnitude / ((quant_max - quant_min) / 2); the largest positive value can be clipped.
    * SYMMETRIC_NO_CLIPPING_ERR: the larger of low / quant_min and high / quant_max; nothing is clipped.
    * ASYMMETRIC: (high - low) / (quant_max - quant_min), with a zero point.
    """

    SYMMETRIC = enum.auto()
    SYMMETRIC_NO_CLIPPING_ERR = enum.auto()
    ASYMMETRIC = enum.auto()


def choose_qparams_affine(
    input: torch.Tensor,  # torchao's name
    mapping_type: MappingType | str,
    block_size: Sequence[int],
    target_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = torch.int32,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of each block.

    Args:
        input: fp32, bf16 or fp16.
        mapping_type: a `MappingType`, torchao's, or its name.
        block_size: size of a block in each dimension of `input`, which it divides.
        target_dtype: an integer dtype of torch; it gives the range of codes where the next two are None.
        quant_min: lowest code.
        quant_max: highest code.
        eps: smallest scale; None: the smallest normal number of the input's dtype.
        scale_dtype: of the scale; None: that of the input.
        zero_point_dtype: of the zero point; None: int32.
        keepdim: keep dimensions that one block covers.

    Returns:
        Scale and zero point: of the shape of the grid of blocks, without the dimensions (longer than 1) that
            one block covers.

    Raises:
        ConfigError: an unknown mapping type or dtype, codes out of its range, or blocks that do not cover the
            input.
    """
    kind = mapping_type if isinstance(mapping_type, str) else getattr(mapping_type, "name", str(mapping_type))
    if kind not in MappingType.__members__:
        msg = f"There is no mapping_type {mapping_type!r}; use one of {', '.join(MappingType.__members__)}."
        raise ConfigError(msg)
    lowest, highest = _codes(target_dtype, quant_min, quant_max)
    _check(input, block_size)
    if not input.is_floating_point() or not input.numel():
        msg = (
            f"Expected a floating-point tensor with elements, but got {input.dtype} of shape "
            f"{tuple(input.shape)}."
        )
        raise ConfigError(msg)
    low, high = affine.block_range(input, block_size)
    low, high = low.clamp(max=0), high.clamp(min=0)
    least = torch.finfo(input.dtype).smallest_normal if eps is None else eps
    if kind == "ASYMMETRIC":
        scale = ((high - low) / float(highest - lowest)).clamp(min=least)
        zero_point = (lowest - torch.round(low / scale)).clamp(lowest, highest)
    else:
        if kind == "SYMMETRIC":
            scale = torch.maximum(-low, high) / (float(highest - lowest) / 2)
        else:
            scale = torch.maximum(low / float(lowest), high / float(highest))
        scale = scale.clamp(min=least)
        zero_point = torch.full_like(scale, int((highest + lowest + 1) / 2))
    kept = [
        n
        for n, part, size in zip(scale.shape, block_size, input.shape, strict=True)
        if keepdim or part != size or part == 1
    ]
    scale, zero_point = scale.reshape(kept), zero_point.reshape(kept)
    return scale.to(scale_dtype or input.dtype), zero_point.to(zero_point_dtype or torch.int32)


def quantize_affine(
    input: torch.Tensor,  # torchao's name
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    output_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
) -> torch.Tensor:
    """Codes: `clamp(round(input * (1 / scale)) + zero_point)`; arguments as in `choose_qparams_affine`.

    Of an `output_dtype` with fewer than 8 bits they are int8 or uint8: torch computes nothing with such
    dtypes.
    """
    lowest, highest = _codes(output_dtype, quant_min, quant_max)
    _check(input, block_size)
    values, scales, zeros = _in_blocks(input, block_size, scale, zero_point)
    codes = torch.round(values * (1.0 / scales))
    if zeros is not None:
        codes = codes + zeros
    return codes.clamp(lowest, highest).reshape(input.shape).to(_held(output_dtype))


def dequantize_affine(
    input: torch.Tensor,  # torchao's name
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    input_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of codes: `(input - zero_point) * scale`; arguments as in `choose_qparams_affine`.

    Raises:
        ConfigError: also if `input` has another dtype than `input_dtype`.
    """
    _codes(input_dtype, quant_min, quant_max)
    if input.dtype not in (input_dtype, _held(input_dtype)):
        msg = f"The codes have dtype {input.dtype}, but input_dtype is {input_dtype}."
        raise ConfigError(msg)
    _check(input, block_size)
    values, scales, zeros = _in_blocks(input.to(output_dtype), block_size, scale, zero_point)
    if zeros is not None:
        values = values - zeros.to(output_dtype)
    return (values * scales).reshape(input.shape).to(output_dtype)


def _in_blocks(
    x: torch.Tensor, block_size: Sequence[int], scale: torch.Tensor, zero_point: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each dimension of `x` as two, which block and where in it.

    Scale and zero point so that they broadcast.
    """
    counts = [size // part for size, part in zip(x.shape, block_size, strict=True)]
    split = [n for count, part in zip(counts, block_size, strict=True) for n in (count, part)]
    outer = [n for count in counts for n in (count, 1)]
    for name, part in (("scale", scale), ("zero_point", zero_point)):
        if part is not None and part.numel() != math.prod(counts):
            msg = (
                f"{name} has shape {tuple(part.shape)}, but the blocks are {counts}, {math.prod(counts)} in "
                "all."
            )
            raise ConfigError(msg)
    return x.reshape(split), scale.reshape(outer), None if zero_point is None else zero_point.reshape(outer)


def _check(x: torch.Tensor, block_size: Sequence[int]) -> None:
    sizes = tuple(block_size) if isinstance(block_size, Sequence) else (block_size,)
    fits = len(sizes) == x.dim() and all(
        is_whole(part, 1) and size % part == 0 for size, part in zip(x.shape, sizes, strict=False)
    )
    if not fits:
        msg = (
            f"block_size={sizes} does not cover a tensor of shape {tuple(x.shape)}: it needs a whole number "
            "for each dimension, which divides that dimension."
        )
        raise ConfigError(msg)


def _held(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that holds codes of an integer dtype."""
    match = re.fullmatch(r"torch\.(u?int)[1-7]", str(dtype))
    return dtype if match is None else getattr(torch, f"{match[1]}8")


def _codes(dtype: torch.dtype, quant_min: int | None, quant_max: int | None) -> tuple[int, int]:
    """Lowest and highest code."""
    match = re.fullmatch(r"torch\.(u?)int(\d+)", str(dtype))
    if match is None:
        msg = (
            f"{dtype} is not an integer dtype; use torch.int8, torch.uint8, torch.int32 or one of their kind."
        )
        raise ConfigError(msg)
    bits, unsigned = int(match[2]), bool(match[1])
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    lowest, highest = low if quant_min is None else quant_min, high if quant_max is None else quant_max
    if not low <= lowest < highest <= high:
        msg = f"Codes from {lowest} to {highest} do not fit {dtype}, which has {low} to {high}."
        raise ConfigError(msg)
    return lowest, highest
