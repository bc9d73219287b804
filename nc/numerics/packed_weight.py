"""A weight in a few bits, as it is stored: packed codes, scales, zero points.

What a kernel needs beside this, it makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from nc.errors import ConfigError
from nc.formats.tensor_format import SCALE_DTYPES, TensorFormat
from nc.numerics import bits
from nc.numerics.groups import GroupParams, Outer, decode, spread

#: Names of the stored tensors, in the order in which operators take them.
PARTS = ("codes", "scale", "zero", "minimum", "outer_scale", "outer_minimum")


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

    form: TensorFormat
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
        """Return the codes, uint8, shape [N, K]."""
        return bits.unpack(self.codes, self.form.bits, self.shape[1])

    def dequantize(self) -> torch.Tensor:
        """Return the weight, fp32, shape [N, K]."""
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
    form: TensorFormat,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
) -> GroupParams:
    """fp32 params of the tensors that are stored; see `PackedWeight`."""
    groups = scale.shape[1]
    outer = (
        None
        if outer_scale is None
        else Outer(outer_scale.float(), None if outer_minimum is None else outer_minimum.float())
    )
    return GroupParams(
        _multiplied(scale, outer_scale),
        None if zero is None else bits.unpack(zero, form.bits, groups).float(),
        None if minimum is None else _multiplied(minimum, outer_minimum),
        outer,
    )


def _multiplied(scale: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    return scale.float() if outer is None else scale.float() * spread(outer.float(), scale.shape[1])


def pack(codes: torch.Tensor, found: GroupParams, form: TensorFormat) -> PackedWeight:
    """Store codes and fp32 params. `PackedWeight.params` gives these params again, bit for bit.

    Args:
        codes: uint8, shape [N, K].
        found: scales that fit their storage format exactly (`nc.numerics.stored_scales.second_level` makes
            such), with `outer` where the format has two levels.
        form: the format.
    """
    outer, double = found.outer, form.double_quant
    assert (outer is not None) == form.two_levels
    storage = torch.uint8 if double is not None else form.scale_storage
    outer_storage = SCALE_DTYPES["fp32" if double is None else double.outer_dtype]

    def of(part: torch.Tensor | None, outside: torch.Tensor | None) -> torch.Tensor | None:
        if part is None or outside is None:
            return None if part is None else part.to(storage)
        inner = part / spread(outside, part.shape[1])
        return (inner if double is None else inner.round_()).to(storage)

    scale = of(found.scale, None if outer is None else outer.scale)
    assert scale is not None
    return PackedWeight(
        form=form,
        shape=(codes.shape[0], codes.shape[1]),
        codes=bits.pack(codes, form.bits),
        scale=scale,
        zero=None if found.zero is None else bits.pack(found.zero.to(torch.uint8), form.bits),
        minimum=of(found.minimum, None if outer is None else outer.minimum),
        outer_scale=None if outer is None else outer.scale.to(outer_storage),
        outer_minimum=None if outer is None or outer.minimum is None else outer.minimum.to(outer_storage),
    )


def parts_of(form: TensorFormat, shape: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a weight of shape [N, K] in a format, by name."""
    rows, columns = shape
    groups, double = columns // form.group(columns), form.double_quant
    inner = torch.uint8 if double is not None else form.scale_storage
    outer = SCALE_DTYPES["fp32" if double is None else double.outer_dtype]
    outer_shape = (1, 1) if double is None else (rows, double.outer_count(groups))
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "codes": (torch.uint8, (rows, bits.packed_size(columns, form.bits))),
        "scale": (inner, (rows, groups)),
    }
    if form.float_zero:
        expected["minimum"] = (inner, (rows, groups))
    elif not form.symmetric:
        expected["zero"] = (torch.uint8, (rows, bits.packed_size(groups, form.bits)))
    if form.two_levels:
        expected["outer_scale"] = (outer, outer_shape)
        if form.float_zero:
            expected["outer_minimum"] = (outer, outer_shape)
    return expected


def empty(form: TensorFormat, shape: tuple[int, int], device: torch.device) -> PackedWeight:
    """Return a weight of shape [N, K] whose tensors have no values yet."""
    parts = {
        name: torch.empty(size, dtype=dtype, device=device)
        for name, (dtype, size) in parts_of(form, shape).items()
    }
    return PackedWeight(form=form, shape=shape, **parts)


def check_parts(packed: PackedWeight) -> None:
    """Raise ConfigError unless shapes and dtypes are those of the format: kernels do not look at them."""
    form, (rows, columns) = packed.form, packed.shape
    expected = parts_of(form, packed.shape)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.tensors().items()}
    wrong = [
        f"{name}: {_described(found.get(name))} where {_described(expected.get(name))} is expected"
        for name in PARTS
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        msg = (
            f"The tensors are not those of a weight of {rows} x {columns} in {form}: {'; '.join(wrong)}. "
            "Give those stored for it."
        )
        raise ConfigError(msg)


def _described(part: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "none" if part is None else f"{part[0]} of shape {part[1]}"
