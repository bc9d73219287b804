"""Low-bit weights of shape [N, K] in groups along K: codes from weights, and weights from codes.

Scales here are fp32 tensors whose values fit their storage format exactly: they are rounded to it before
codes are chosen (`nc.numerics.stored_scales`), so what is stored is what the codes were chosen for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nc.formats.tensor_format import TensorFormat
from nc.numerics import formats

#: Weights that are worked on at once: several passes over so many stay in the cache.
CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Outer:
    """The second level of scales, which stored scales and minima are multiplied by.

    Shapes are [1, 1], or [N, outer groups], each of which holds the same number of neighbouring groups.

    Attributes:
        scale: fp32, positive.
        minimum: fp32, negative; None if the format has no minima.
    """

    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    def of_groups(self, start: int, count: int, groups: int) -> Outer:
        """Return the outer scales of `count` groups from `start` on, shape [1, 1] or [N, count].

        `groups` is the number of groups in a row.
        """

        def of(part: torch.Tensor) -> torch.Tensor:
            return part if part.numel() == 1 else spread(part, groups)[:, start : start + count]

        return Outer(of(self.scale), None if self.minimum is None else of(self.minimum))


def spread(outer: torch.Tensor, groups: int) -> torch.Tensor:
    """Outer scales [N, outer groups] for each of the groups of a row: [N, groups]; [1, 1] stays."""
    if outer.numel() == 1 or outer.shape[1] == groups:
        return outer
    return outer.repeat_interleave(-(-groups // outer.shape[1]), 1)[:, :groups]


@dataclass(frozen=True, slots=True)
class GroupParams:
    """What the groups of a weight have: tensors have shape [N, G].

    Attributes:
        scale: fp32; it may be negative.
        zero: the code of 0, fp32 with whole numbers; None where the format is symmetric or has minima.
        minimum: fp32, the value of code 0, in formats with `float_zero`.
        outer: of formats with two levels of scales. `scale` and `minimum` are multiplied by it already.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    outer: Outer | None = None

    def of_group(self, index: int) -> GroupParams:
        """Return the parameters of one group, shape [N, 1]."""
        part = slice(index, index + 1)
        zero, minimum = self.zero, self.minimum
        outer = None if self.outer is None else self.outer.of_groups(index, 1, self.scale.shape[1])
        return GroupParams(
            self.scale[:, part],
            None if zero is None else zero[:, part],
            None if minimum is None else minimum[:, part],
            outer,
        )

    def where(self, mask: torch.Tensor, other: GroupParams) -> GroupParams:
        """Return these where `mask`, [N, G], holds, else the other ones."""

        def of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
            return None if a is None or b is None else torch.where(mask, a, b)

        return GroupParams(
            torch.where(mask, self.scale, other.scale),
            of(self.zero, other.zero),
            of(self.minimum, other.minimum),
            self.outer,
        )


def join(parts: Sequence[GroupParams], dim: int = 1, outer: Outer | None = None) -> GroupParams:
    """Params side by side, or with dim=0 one below the other.

    Args:
        parts: at least one.
        dim: 1 or 0.
        outer: of all of them.
    """

    def of(found: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [part for part in found if part is not None]
        return torch.cat(there, dim) if there else None

    return GroupParams(
        torch.cat([p.scale for p in parts], dim),
        of([p.zero for p in parts]),
        of([p.minimum for p in parts]),
        outer,
    )


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows with about `CHUNK` elements."""
    step = max(1, CHUNK // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def encode(weight: torch.Tensor, params: GroupParams, form: TensorFormat) -> torch.Tensor:
    """Return the code nearest to each weight.

    Args:
        weight: fp32, shape [N, K].
        params: of G groups, where G divides K.
        form: the format.

    Returns:
        uint8, shape [N, K].
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows in chunks(*weight.shape):
        part, scale = (
            weight[rows].reshape(-1, params.scale.shape[1], weight.shape[1] // params.scale.shape[1]),
            params.scale[rows, :, None],
        )
        if form.dtype.kind == "float":
            found = formats.nearest_codes(part / scale, form.dtype)
        elif params.minimum is not None:
            found = (part - params.minimum[rows, :, None]).div_(scale).round_().clamp_(0, 2**form.bits - 1)
        else:
            zero = form.middle if params.zero is None else params.zero[rows, :, None]
            found = (part / scale).round_().add_(zero).clamp_(0, 2**form.bits - 1)
        codes[rows] = found.reshape(-1, weight.shape[1])
    return codes


def about_middle(
    codes: torch.Tensor, params: GroupParams, form: TensorFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and offset of each group, so that a weight is `scale * (code - middle) + offset`.

    There is no offset where all would be 0.

    A group of zeros alone is stored with a scale of 1: its terms, which are as large as the codes, would
    cancel each other but for fp32's rounding, which can be larger than all other weights. So a group with one
    code alone gets a scale of 0, and its weight as the offset.

    Args:
        codes: uint8, shape [N, K].
        params: of the groups.
        form: the format.

    Returns:
        Two tensors of shape [N, G].
    """
    scale, zero, minimum = params.scale, params.zero, params.minimum
    if minimum is None and zero is None:
        return scale, None
    groups = codes.view(*scale.shape, -1)
    first = groups[:, :, 0]
    alike = (groups == first[:, :, None]).all(2)
    if minimum is not None:
        offset, alone = minimum + form.middle * scale, first * scale + minimum
    else:
        assert zero is not None
        offset, alone = (form.middle - zero) * scale, (first - zero) * scale
    return scale.masked_fill(alike, 0), torch.where(alike, alone, offset)


def decode(codes: torch.Tensor, params: GroupParams, form: TensorFormat) -> torch.Tensor:
    """Return the fp32 weights of codes; arguments as for `encode`."""
    weight = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in chunks(*codes.shape):
        part, scale = (
            codes[rows].reshape(-1, params.scale.shape[1], codes.shape[1] // params.scale.shape[1]),
            params.scale[rows, :, None],
        )
        if form.dtype.kind == "float":
            found = (
                formats.values(form.dtype)
                .index_select(0, part.flatten().int())
                .reshape(part.shape)
                .mul_(scale)
            )
        elif params.minimum is not None:
            found = part.float().mul_(scale).add_(params.minimum[rows, :, None])
        else:
            found = (
                part.float()
                .sub_(float(form.middle) if params.zero is None else params.zero[rows, :, None])
                .mul_(scale)
            )
        weight[rows] = found.reshape(-1, codes.shape[1])
    return weight
