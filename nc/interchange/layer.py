"""Low-bit linears as the formats of other tools have them.

They have integer codes, positive scales and integer zero points.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from nc.errors import ArtefactCorruptError, UnsupportedError
from nc.formats import dtype
from nc.formats.tensor_format import SCALE_DTYPES, low_bit
from nc.numerics import bits
from nc.numerics.groups import GroupParams
from nc.numerics.packed_weight import PackedWeight, pack

#: torch's dtypes of scales → their names.
_SCALE_NAMES = {SCALE_DTYPES[name]: name for name in ("fp32", "fp16", "bf16")}


#: Activations that are rounded, of which most formats say nothing.
INT8 = ("int8", "int8_block32")


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A linear, or the table of an embedding.

    Attributes:
        weight: shape [N, K].
        act_dtype: what activations are rounded to, see `nc.nn.QuantLinear`.
        embedding: it is a table.
    """

    weight: PackedWeight
    act_dtype: str = "fp32"
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """A weight of shape [N, K] in G groups per row: `(code - zero) * scale`.

    Attributes:
        bits: of a code.
        codes: uint8, shape [N, K].
        scale: fp32, shape [N, G].
        zero: uint8, shape [N, G]; None: 2^(bits - 1) everywhere.
    """

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    @property
    def group(self) -> int:
        """Number of elements of a group."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def zeros(self) -> torch.Tensor:
        """The zero points, also where all are 2^(bits - 1)."""
        return (
            torch.full(self.scale.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
            if self.zero is None
            else self.zero
        )


def codes_of(layer: StoredLayer, name: str, format_name: str, *, positive: bool = True) -> GroupCodes:
    """Return what a file of integer codes holds of a layer.

    Args:
        layer: a linear.
        name: of it, for messages.
        format_name: for messages.
        positive: write a group with a negative scale with the opposite one, which changes no weight: code' =
            2^b - 1 - code, zero' = 2^b - 1 - zero.

    Raises:
        UnsupportedError: the layer is an embedding, or its weight has no integer codes with one scale and one
            integer zero point per group.
    """
    weight, form = layer.weight, layer.weight.form
    if layer.embedding:
        refuse(
            name,
            format_name,
            "it holds linears only, and this is an embedding",
            "Quantize with embedding=None",
        )
    if form.dtype.kind != "integer":
        refuse(
            name,
            format_name,
            f"it holds integers, and the weight is {form.dtype}",
            'Quantize with w_dtype="int4"',
        )
    if form.float_zero:
        refuse(
            name,
            format_name,
            "its zero points are integers, and the weight has a minimum per group (a float zero point)",
            _INTEGER_ZERO,
        )
    if form.double_quant is not None or form.tensor_scale:
        refuse(
            name,
            format_name,
            "it has one level of scales, and the weight has two",
            "Quantize with double_quant=None",
        )
    params, codes = weight.params, weight.unpacked()
    scale, zero = params.scale, None if params.zero is None else params.zero.to(torch.uint8)
    negative = scale < 0
    if not positive:
        return GroupCodes(form.bits, codes, scale, zero)
    if bool(negative.any()):
        last = 2**form.bits - 1
        zero = torch.full(scale.shape, form.middle, dtype=torch.uint8) if zero is None else zero
        zero = torch.where(negative, last - zero, zero)
        turned = negative.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        codes = torch.where(turned, last - codes, codes)
    return GroupCodes(form.bits, codes, scale.abs(), zero)


_INTEGER_ZERO = "Quantize with integer zero points (w_sym=False without a float zero) or symmetrically"


def check_settings(settings: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise UnsupportedError for a setting that is not known, since it may change what is computed.

    Args:
        settings: of a file, by name; those without a value (None, False, 0, empty) say nothing.
        known: names of settings that the reader reads, and of those that change no result.
        where: they are, for the message.
    """
    for name, value in settings.items():
        if name not in known and value:
            msg = (
                f"{where} sets {name} = {str(value)[:200]}, which nc does not read and which may change what "
                "is computed. If it changes nothing, remove it from the file."
            )
            raise UnsupportedError(msg)


def refuse(name: str, format_name: str, reason: str, way_out: str) -> NoReturn:
    """Raise the UnsupportedError of a layer that a format cannot hold."""
    msg = (
        f"Layer {name!r}: {format_name} cannot hold this weight: {reason}. {way_out}, or choose another "
        "format."
    )
    raise UnsupportedError(msg)


def check_of_words(
    name: str, format_name: str, layer: StoredLayer, codes: GroupCodes, multiple: int, groups: Collection[int]
) -> None:
    """Check that a format whose words hold the codes of consecutive outputs or inputs can hold a layer.

    Args:
        name: of the layer.
        format_name: for the message.
        layer: the linear.
        codes: of its weight.
        multiple: what the outputs are a multiple of.
        groups: sizes of groups that its readers have.

    Raises:
        UnsupportedError: it can't.
    """
    outputs, inputs = codes.codes.shape
    leave = "Leave this layer out (exclude)"
    if inputs % 32:
        refuse(name, format_name, f"K = {inputs} input channels are not a multiple of 32", leave)
    if outputs % multiple:
        refuse(name, format_name, f"N = {outputs} outputs are not a multiple of {multiple}", leave)
    if codes.group not in groups and codes.scale.shape[1] != 1:
        way_out = f"Quantize with group_size one of {(-1, *groups)}"
        refuse(name, format_name, f"its readers have no groups of {codes.group}", way_out)
    if layer.act_dtype in INT8:
        reason = "it says nothing about activations, and this layer's are int8"
        refuse(name, format_name, reason, 'Use format="compressed-tensors"')


def stored_scale(
    scale: torch.Tensor, dtypes: tuple[torch.dtype, ...], name: str, format_name: str
) -> torch.Tensor:
    """Scales in the first of some dtypes that holds them exactly.

    Raises:
        UnsupportedError: none does.
    """
    for candidate in dtypes:
        stored = scale.to(candidate)
        if torch.equal(stored.float(), scale):
            return stored
    names = " or ".join(_SCALE_NAMES[d] for d in dtypes)
    refuse(
        name,
        format_name,
        f"it stores scales in {names}, which would change them",
        f'Quantize with scale_dtype="{_SCALE_NAMES[dtypes[0]]}"',
    )


def layer_of(codes: GroupCodes, scale_dtype: torch.dtype, where: str, act_dtype: str = "fp32") -> StoredLayer:
    """Return the layer of what a file holds. Zero points that all are 2^(bits - 1) make a symmetric weight.

    Raises:
        ArtefactCorruptError: a scale is not finite.
    """
    if not bool(torch.isfinite(codes.scale).all()):
        msg = f"{where}: a scale is not finite. Get the file again."
        raise ArtefactCorruptError(msg)
    symmetric = codes.zero is None or bool((codes.zero == 2 ** (codes.bits - 1)).all())
    form = low_bit(
        dtype=dtype(f"{'' if symmetric else 'u'}int{codes.bits}"),
        group_size=-1 if codes.scale.shape[1] == 1 else codes.group,
        symmetric=symmetric,
        scale_dtype=_SCALE_NAMES[scale_dtype],
    )
    zero = None if symmetric or codes.zero is None else codes.zero.float()
    return StoredLayer(
        pack(codes.codes.contiguous(), GroupParams(codes.scale.contiguous(), zero), form), act_dtype
    )


def words(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of `width` bits in int32, the first code in the lowest bits.

    Args:
        codes: uint8, shape [rows, count]; rows are padded with zeros to whole words.
        width: bits of a code.

    Returns:
        int32, shape [rows, ceil(count * width / 32)].
    """
    packed = bits.pack(codes.contiguous(), width)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def codes_in(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return the inverse of `words`: uint8, shape [rows, count]."""
    # a copy, because `contiguous` leaves any stride to a dimension of length 1, and `view` needs 1
    stored = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return bits.unpack(stored, width, count)[:, :count].contiguous()


def taken(
    tensors: dict[str, torch.Tensor],
    name: str,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
) -> torch.Tensor:
    """Take a tensor out of those of a file and check it.

    Args:
        tensors: by name; it is removed.
        name: of the tensor.
        dtypes: that it may have.
        shape: that it must have; None: any length.

    Raises:
        ArtefactCorruptError: it is not there, or it is another one.
    """
    if name not in tensors:
        msg = f"Tensor {name!r} is missing. The files are incomplete; get them again."
        raise ArtefactCorruptError(msg)
    found = tensors.pop(name)
    if (
        found.dtype not in dtypes
        or found.dim() != len(shape)
        or any(b not in (None, a) for a, b in zip(found.shape, shape, strict=True))
    ):
        expected = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        sizes = ", ".join("any" if length is None else str(length) for length in shape)
        msg = (
            f"Tensor {name!r} is {str(found.dtype).removeprefix('torch.')} {list(found.shape)}, but "
            f"{expected} [{sizes}] was expected."
        )
        raise ArtefactCorruptError(msg)
    return found


def groups_in(scale_groups: int, inputs: int, name: str, size: int = -1) -> None:
    """Check that groups of a size cover a row (-1: of any).

    Raises:
        ArtefactCorruptError: they do not.
    """
    if scale_groups < 1 or inputs < 1 or inputs % scale_groups or size not in (-1, inputs // scale_groups):
        msg = (
            f"Layer {name!r}: {scale_groups} groups do not fit {inputs} input channels. The files contradict "
            "themselves."
        )
        raise ArtefactCorruptError(msg)


def one_format(found: Mapping[str, GroupCodes], format_name: str) -> GroupCodes:
    """Return the bits and groups that all layers have, as those of any layer.

    Raises:
        UnsupportedError: they differ, or there is no layer.
    """
    if not found:
        msg = f"There is no low-bit linear that {format_name} could hold."
        raise UnsupportedError(msg)
    first_name, first = next(iter(found.items()))
    for name, codes in found.items():
        same_group = codes.group == first.group or codes.scale.shape[1] == first.scale.shape[1] == 1
        if codes.bits != first.bits or not same_group:
            reason = (
                f"all layers of a file have one bit width and group size; this one has {codes.bits} bits in "
                f"groups of {codes.group}, {first_name!r} has {first.bits} in groups of {first.group}"
            )
            refuse(name, format_name, reason, 'Quantize all alike, or use format="compressed-tensors"')
    return first


def size_of_groups(found: Mapping[str, GroupCodes]) -> int:
    """Return the group size of layers that are alike.

    It is -1 where each row is one group and rows have different lengths.
    """
    sizes = {codes.group for codes in found.values()}
    return sizes.pop() if len(sizes) == 1 else -1


def ordered_groups(g_idx: torch.Tensor, scale_groups: int, name: str) -> torch.Tensor:
    """Return the group of each block of input channels, shape [G].

    Args:
        g_idx: the group of each input channel, shape [K].
        scale_groups: G.
        name: of the layer.

    Raises:
        UnsupportedError: the channels of a group are not neighbours.
        ArtefactCorruptError: an index is out of range.
    """
    groups_in(scale_groups, g_idx.numel(), name)
    if bool((g_idx < 0).any()) or bool((g_idx >= scale_groups).any()):
        msg = f"Layer {name!r}: g_idx has an index outside 0 to {scale_groups - 1}. Get the files again."
        raise ArtefactCorruptError(msg)
    blocks = g_idx.reshape(scale_groups, -1)
    if bool((blocks != blocks[:, :1]).any()):
        msg = (
            f"Layer {name!r}: its groups are not made of neighbouring input channels (activation order, "
            "g_idx), which nc does not hold. Quantize again with desc_act=False, static groups or "
            "group-aware order."
        )
        raise UnsupportedError(msg)
    return blocks[:, 0].long()
