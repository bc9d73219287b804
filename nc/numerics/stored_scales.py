"""Scales as they are stored: rounded to fp32, fp16, bf16, E8M0 or E4M3, or codes of an outer scale.

What is stored is never 0, NaN or infinite. A scale that is too small takes the least value of its format: in
fp16 2^-24, where weights of less than 2e-7 have a scale that would be 0. Subnormal numbers of fp16 and E4M3
are exact; those of fp32 and bf16 are not used, since some programs flush them to 0.
"""

from __future__ import annotations

import torch

from nc.formats.tensor_format import SCALE_DTYPES, DoubleQuant, TensorFormat
from nc.numerics.groups import GroupParams, Outer, spread

#: The least and the largest scale of a format.
LIMITS = {
    "fp32": (2.0**-126, torch.finfo(torch.float32).max),
    "bf16": (2.0**-126, torch.finfo(torch.bfloat16).max),
    "fp16": (2.0**-24, 65504.0),
    "e4m3": (2.0**-9, 448.0),
    "e8m0": (2.0**-126, 2.0**127),
}
_LEAST_OUTER = 2.0**-100  # its products with scales are not subnormal


def round_scale(scale: torch.Tensor, scale_dtype: str) -> torch.Tensor:
    """Return the values of a storage format that are nearest to scales, as fp32, within its limits.

    E8M0 takes the nearest power of two.

    Args:
        scale: fp32, any shape; negative ones stay so, but in E8M0, which has no sign.
        scale_dtype: a key of `SCALE_DTYPES`.
    """
    least, most = LIMITS[scale_dtype]
    held = scale.clamp(-most, most)
    if scale_dtype != "fp32":
        held = (held.abs() if scale_dtype == "e8m0" else held).to(SCALE_DTYPES[scale_dtype]).float()
    small = held.abs() < least
    return torch.where(small, torch.where(held < 0, -least, least), held) if bool(small.any()) else held


def stored(scale: torch.Tensor, form: TensorFormat, outer: torch.Tensor | None = None) -> torch.Tensor:
    """Return the nearest scales that a format can hold, fp32.

    Args:
        scale: fp32, any shape.
        form: the format.
        outer: of formats with two levels, the outer scales; a shape that goes with `scale`.
    """
    if outer is None:
        return round_scale(scale, form.scale_dtype)
    if form.double_quant is not None:
        return (scale / outer).round_().clamp_(1, 2**form.double_quant.bits - 1).mul_(outer)
    return round_scale(scale / outer, form.scale_dtype).mul_(outer)


def stored_minimum(
    minimum: torch.Tensor, form: TensorFormat, outer: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the nearest minima that a format can hold, fp32; arguments as for `stored`.

    With an outer minimum they are at most 0.
    """
    if outer is not None and form.double_quant is not None:
        return (minimum / outer).round_().clamp_(0, 2**form.double_quant.bits - 1).mul_(outer)
    most = LIMITS[form.scale_dtype][1]
    return minimum.clamp(-most, most).to(form.scale_storage).float()


def second_level(params: GroupParams, form: TensorFormat) -> GroupParams:
    """Params whose scales and minima the format can hold, for formats with one level or two.

    In two levels the largest scale of those that share an outer scale has the largest code, as in GGUF's
    k-quants (ggml-quants.c). Codes of weights have to be chosen after this.

    Args:
        params: of shape [N, G]; with double_quant scales are positive and minima at most 0. A scale of 0 is
            that of a group of zeros.
        form: the format.
    """
    outer = outer_of(params, form)
    if outer is None:
        minimum = None if params.minimum is None else stored_minimum(params.minimum, form)
        return GroupParams(stored(params.scale, form), params.zero, minimum)
    groups = params.scale.shape[1]
    minimum = params.minimum
    if minimum is not None and outer.minimum is not None:
        minimum = stored_minimum(minimum, form, spread(outer.minimum, groups))
    return GroupParams(stored(params.scale, form, spread(outer.scale, groups)), params.zero, minimum, outer)


def outer_of(params: GroupParams, form: TensorFormat) -> Outer | None:
    """Return the outer scales of a format with two levels, from scales in full precision; None for one level.

    See `second_level`.
    """
    if form.tensor_scale:
        return tensor_outer(params.scale.abs().max() / LIMITS["e4m3"][1])
    if form.double_quant is None:
        return None
    minimum = None if params.minimum is None else -_row_outer(-params.minimum, form.double_quant)
    return Outer(_row_outer(params.scale, form.double_quant), minimum)


def tensor_outer(scale: torch.Tensor) -> Outer:
    """Return the outer scale of a whole tensor, from the wanted number; 1 for a tensor of zeros.

    Args:
        scale: fp32, one element, at least 0.
    """
    return Outer(torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=_LEAST_OUTER)).reshape(1, 1))


def _row_outer(scale: torch.Tensor, double: DoubleQuant) -> torch.Tensor:
    rows, groups = scale.shape
    count = double.outer_count(groups)
    size = -(-groups // count)
    padded = torch.nn.functional.pad(scale, (0, size * count - groups)).reshape(rows, count, size)
    return round_scale((padded.amax(2) / (2**double.bits - 1)).clamp_(min=_LEAST_OUTER), double.outer_dtype)
