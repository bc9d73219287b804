"""A weight in a few bits, as it is stored: packed codes, scales, zero points. What a kernel needs beside this, it makes itself."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from nc.numerics import bits
from nc.numerics.groups import GroupParams, decode
from nc.spec.weight_format import SCALE_DTYPES, WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """A weight of shape [N, K] in G groups per row.

    Attributes:
        form: the format.
        shape: (N, K).
        codes: uint8, [N, ceil(K * bits / 8)], see `nc.numerics.bits`.
        scale: [N, G], of the format's scale dtype; uint8 codes where scales are quantized themselves.
        zero: uint8, [N, ceil(G * bits / 8)]: packed codes of 0; None where they are not stored.
        minimum: [N, G], as `scale`; None where there are no minima.
        outer_scale: what `scale` is multiplied by: [1, 1], or [N, groups of scales]; else None.
        outer_minimum: likewise for `minimum`.
    """

    form: WeightFormat
    shape: tuple[int, int]
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    outer_scale: torch.Tensor | None = None
    outer_minimum: torch.Tensor | None = None

    @property
    def params(self) -> GroupParams:
        """Scales, zero points and minima in fp32."""
        return params(self.form, self.scale, self.zero, self.minimum, self.outer_scale, self.outer_minimum)

    def unpacked(self) -> torch.Tensor:
        """The codes, uint8, shape [N, K]."""
        return bits.unpack(self.codes, self.form.bits, self.shape[1])

    def dequantize(self) -> torch.Tensor:
        """The weight, fp32, shape [N, K]."""
        return decode(self.unpacked(), self.params, self.form)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is stored, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    @property
    def bytes(self) -> int:
        """What is stored, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


def params(
    form: WeightFormat,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
) -> GroupParams:
    """fp32 params of the tensors that are stored; see `PackedWeight`."""
    groups = scale.shape[1]
    return GroupParams(
        _with_outer(scale, outer_scale),
        None if zero is None else bits.unpack(zero, form.bits, groups).float(),
        None if minimum is None else _with_outer(minimum, outer_minimum),
    )


def _with_outer(scale: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    if outer is None:
        return scale.float()
    if outer.numel() == 1:
        return scale.float() * outer.float()
    repeats = -(-scale.shape[1] // outer.shape[1])
    return scale.float() * outer.float().repeat_interleave(repeats, 1)[:, : scale.shape[1]]


def pack(codes: torch.Tensor, found: GroupParams, form: WeightFormat) -> PackedWeight:
    """Store codes and fp32 params.

    Args:
        codes: uint8, shape [N, K].
        found: scales that fit their storage format exactly.
        form: without second-level scales.
    """
    storage = SCALE_DTYPES[form.scale_dtype]
    return PackedWeight(
        form=form,
        shape=(codes.shape[0], codes.shape[1]),
        codes=bits.pack(codes, form.bits),
        scale=found.scale.to(storage),
        zero=None if found.zero is None else bits.pack(found.zero.to(torch.uint8), form.bits),
        minimum=None if found.minimum is None else found.minimum.to(storage),
    )
