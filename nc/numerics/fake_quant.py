"""Any number format at any tensor: codes, and the fp32 values that they stand for.

Every granularity is a block size, as in `nc.numerics.affine`. Scales are rounded to their type first; codes
are then chosen for the rounded scale. Divisions are fp32; what is between two values of a format is decided
exactly, in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from nc.formats import DType, TensorFormat, granularity
from nc.formats import dtype as named
from nc.numerics import affine, formats, mx
from nc.numerics.stored_scales import round_scale

_E4M3_LARGEST = 448.0


def choose(
    low: torch.Tensor, high: torch.Tensor, form: TensorFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point of each block.

    Args:
        low: smallest values, any shape; finite.
        high: largest values, same shape.
        form: of a `tensor_scale`, scales are relative to the largest of them, which is stored as 448 times an
            fp32 scale.

    Returns:
        Scale, fp32, and zero point, int32, of the shape of `low`; the zero point is None where it is 0
        everywhere. An all-zero block has scale 1 before it is rounded. A scale that is too small for its type
        is the least one of the type.
    """
    amax, dtype = torch.maximum(-low.double(), high.double()).clamp(min=0.0), form.dtype
    if dtype.kind == "float":
        scale, middle = formats.choose_scale(low, high, dtype), 0
    else:
        limits = {"quant_min": dtype.quant_min, "quant_max": dtype.quant_max}
        scale, _ = affine.choose_qparams(low, high, **limits, symmetric=form.symmetric)
        middle = (dtype.quant_min + dtype.quant_max + 1) // 2
    if form.scale_dtype == "e8m0":
        scale = shared_scale(amax, dtype)
    else:
        scale = _rounded(scale, form.scale_dtype, form.tensor_scale)
    if dtype.kind == "integer" and not form.symmetric:
        zeros = dtype.quant_min - torch.round(low.double().clamp(max=0.0) / scale.double())
        zeros = torch.where(amax < affine.TINY_AMAX, 0.0, zeros)
        return scale, zeros.clamp(dtype.quant_min, dtype.quant_max).int()
    return scale, torch.full(scale.shape, middle, dtype=torch.int32) if middle else None


def shared_scale(amax: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the E8M0 scale of each block, 2^(floor(log2 amax) - emax), fp32.

    See OCP Microscaling Formats (MX) Specification 1.0, section 6.3.

    Args:
        amax: largest magnitude of each block, any shape.
        dtype: dtype of the elements. With this scale, elements can exceed its largest value and are then
            clipped. An unsigned integer dtype gives the scale of the signed dtype with as many bits.
    """
    signed = named(f"int{dtype.bits}") if dtype.kind == "integer" else dtype
    return mx.scales(mx.shared_codes(amax, signed))


def codes_of(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: DType,
    round_method: str,
    seed: int = 0,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """Codes of `x`.

    Args:
        x: any float tensor without NaN.
        scale: one number per block, in the order of the blocks.
        zero_point: likewise; None: 0.
        dtype: the format.
        round_method: one of `nc.formats.tensor_format.ROUND_METHODS`.
        seed: of stochastic rounding.
        block_size: see `nc.numerics.affine.quantize`.

    Returns:
        Codes of the shape of `x` and the dtype `dtype.storage`.
    """
    values, scales, zeros = affine.in_blocks(
        x.float(), scale, 0 if zero_point is None else zero_point, block_size
    )
    exact = (values / scales).double()
    if dtype.kind == "integer":
        codes = (_whole(exact, round_method, seed) + zeros).clamp_(dtype.quant_min, dtype.quant_max)
        return codes.to(dtype.storage).reshape(x.shape)
    if round_method == "half_even":
        return formats.nearest_codes(exact, dtype).reshape(x.shape).view(dtype.storage)
    return _between(exact, dtype, round_method, seed).reshape(x.shape).view(dtype.storage)


def values_of(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: DType,
    block_size: Sequence[int] | None = None,
) -> torch.Tensor:
    """fp32 values of codes; arguments as in `codes_of`."""
    if dtype.kind == "float":
        return formats.dequantize(codes, scale, dtype, block_size)
    return affine.dequantize(codes, scale, 0 if zero_point is None else zero_point, block_size)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: str,
    round_method: str,
    seed: int,
) -> torch.Tensor:
    """fp32 values of the codes of `x` for given scales; NaN stays NaN.

    Args:
        x: any float tensor.
        scale: shape [], or of the rank of `x` with sizes that divide those of `x`.
        zero_point: likewise; None: 0.
        dtype: name of the format.
        round_method: as in `codes_of`.
        seed: likewise.
    """
    if not x.numel():
        return torch.empty_like(x, dtype=torch.float32)
    block = (
        tuple(size // count for size, count in zip(x.shape, scale.shape, strict=True))
        if scale.dim()
        else None
    )
    return _simulated(x, scale, zero_point, named(dtype), round_method, seed, block)


def fake_quantize_dynamic(
    x: torch.Tensor,
    dtype: str,
    blocks: str,
    symmetric: bool,
    round_method: str,
    scale_type: str,
    tensor_scale: bool,
    seed: int,
) -> torch.Tensor:
    """fp32 values of the codes of `x`, with the range of each of its blocks; NaN stays NaN.

    Args:
        x: any float tensor.
        dtype: name of the format.
        blocks: text of a granularity.
        symmetric: see `TensorFormat`.
        round_method: as in `codes_of`.
        scale_type: its `scale_dtype`.
        tensor_scale: likewise.
        seed: as in `codes_of`.

    Raises:
        ConfigError: the blocks do not cover `x`.
    """
    if not x.numel():
        return torch.empty_like(x, dtype=torch.float32)
    form = TensorFormat(
        dtype=named(dtype), symmetric=symmetric, scale_dtype=scale_type, tensor_scale=tensor_scale
    )
    block = granularity(blocks).block_size(x.shape)
    low, high = affine.block_range(torch.nan_to_num(x.float(), nan=0.0), block)
    scale, zero_point = choose(low, high, form)
    return _simulated(x, scale, zero_point, form.dtype, round_method, seed, block)


def _simulated(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: DType,
    round_method: str,
    seed: int,
    block: Sequence[int] | None,
) -> torch.Tensor:
    missing = torch.isnan(x)
    codes = codes_of(x.masked_fill(missing, 0.0), scale, zero_point, dtype, round_method, seed, block)
    return values_of(codes, scale, zero_point, dtype, block).masked_fill_(missing, math.nan)


def _rounded(scale: torch.Tensor, scale_type: str, tensor_scale: bool) -> torch.Tensor:
    """fp32 scales with values of their type."""
    if scale_type == "power_of_two":
        fraction, exponent = torch.frexp(scale)  # scale = fraction * 2^exponent with 0.5 <= fraction < 1
        return torch.ldexp(torch.ones_like(scale), torch.where(fraction == 0.5, exponent - 1, exponent))
    if tensor_scale:
        outer = scale.max() / _E4M3_LARGEST
        return round_scale(scale / outer, scale_type) * outer
    return round_scale(scale, scale_type)


def _whole(x: torch.Tensor, round_method: str, seed: int) -> torch.Tensor:
    """Whole numbers for float64 ones."""
    match round_method:
        case "half_even":
            return torch.round(x)
        case "half_away":
            return torch.sign(x) * torch.floor(x.abs() + 0.5)
        case "floor":
            return torch.floor(x)
        case _:
            return torch.floor(x + _random(x, seed))


def _between(x: torch.Tensor, dtype: DType, round_method: str, seed: int) -> torch.Tensor:
    """Return the code of one of the two values of a format that are next to each element, uint8."""
    values, codes = _table(dtype.name)
    x = x.clamp(float(values[0]), float(values[-1]))
    below = (torch.bucketize(x, values, right=True) - 1).clamp(0, len(values) - 2)
    low, high = values[below], values[below + 1]
    share = (x - low) / (high - low)  # 0 at the lower value, 1 at the upper one
    match round_method:
        case "floor":
            up = share >= 1.0
        case "half_away":
            up = torch.where(x < 0, share > 0.5, share >= 0.5)
        case _:
            up = share > _random(x, seed)
    return codes[below + up.long()]


def _random(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Uniform numbers from 0 up to 1, of the shape of `x`, float64."""
    return torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@functools.cache
def _table(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite values of a format in ascending order, float64, and their codes, uint8; one zero."""
    codes: dict[float, int] = {}
    for code, value in enumerate(named(name).values):
        if math.isfinite(value):
            codes.setdefault(value, code)
    order = sorted(codes)
    return torch.tensor(order, dtype=torch.float64), torch.tensor(
        [codes[v] for v in order], dtype=torch.uint8
    )
