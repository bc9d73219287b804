"""Low-bit weights of shape [N, K] in groups along K: codes from weights, and weights from codes.

Scales here are fp32 tensors whose values fit their storage format exactly: they are rounded to it before codes are chosen, so what is
stored is what the codes were chosen for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nc.numerics import formats
from nc.spec.weight_format import SCALE_DTYPES, WeightFormat


@dataclass(frozen=True, slots=True)
class GroupParams:
    """What the groups of a weight have: all tensors have shape [N, G].

    Attributes:
        scale: fp32; it may be negative.
        zero: the code of 0, fp32 with whole numbers; None where the format is symmetric or has minima.
        minimum: fp32, the value of code 0, in formats with `float_zero`.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None

    def of_group(self, index: int) -> GroupParams:
        """Those of one group, shape [N, 1]."""
        part = slice(index, index + 1)
        zero, minimum = self.zero, self.minimum
        return GroupParams(self.scale[:, part], None if zero is None else zero[:, part], None if minimum is None else minimum[:, part])


def encode(weight: torch.Tensor, params: GroupParams, form: WeightFormat) -> torch.Tensor:
    """The code nearest to each weight.

    Args:
        weight: fp32, shape [N, K].
        params: of G groups, where G divides K.
        form: the format.

    Returns:
        uint8, shape [N, K].
    """
    rows = weight.reshape(*params.scale.shape, -1)
    scale = params.scale.unsqueeze(-1)
    if form.dtype.kind == "float":
        return formats.nearest_codes(rows / scale, form.dtype).reshape(weight.shape)
    if params.minimum is not None:
        codes = ((rows - params.minimum.unsqueeze(-1)) / scale).round_()
    else:
        codes = (rows / scale).round_().add_(form.middle if params.zero is None else params.zero.unsqueeze(-1))
    return codes.clamp_(0, 2**form.bits - 1).to(torch.uint8).reshape(weight.shape)


def decode(codes: torch.Tensor, params: GroupParams, form: WeightFormat) -> torch.Tensor:
    """The fp32 weights of codes; arguments as for `encode`."""
    rows = codes.reshape(*params.scale.shape, -1)
    scale = params.scale.unsqueeze(-1)
    if form.dtype.kind == "float":
        return (_table(form.dtype.name)[rows.int()] * scale).reshape(codes.shape)
    if params.minimum is not None:
        return (rows.float() * scale).add_(params.minimum.unsqueeze(-1)).reshape(codes.shape)
    zero = float(form.middle) if params.zero is None else params.zero.unsqueeze(-1)
    return rows.float().sub_(zero).mul_(scale).reshape(codes.shape)


def round_scale(scale: torch.Tensor, scale_dtype: str) -> torch.Tensor:
    """The values of a storage format that are nearest to scales, as fp32. E8M0 takes the nearest power of two.

    Args:
        scale: fp32, any shape.
        scale_dtype: a key of `SCALE_DTYPES`.
    """
    if scale_dtype == "fp32":
        return scale
    if scale_dtype == "e4m3":
        return scale.clamp(-448.0, 448.0).to(SCALE_DTYPES[scale_dtype]).float()  # torch's cast does not saturate
    return scale.to(SCALE_DTYPES[scale_dtype]).float()


@functools.cache
def _table(name: str) -> torch.Tensor:
    from nc.spec import dtype  # noqa: PLC0415

    return torch.tensor(dtype(name).values, dtype=torch.float32)
