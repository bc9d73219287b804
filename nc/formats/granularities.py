"""Which elements of a tensor share one scale and one zero point.

They are blocks of one size that cover the tensor without overlap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Granularity:
    """Which elements of a tensor share one scale and one zero point.

    It is made by `per_channel`, `per_group` or `per_block`, a constant of this file, or made from its text by
    `granularity`.

    Attributes:
        name: "per_tensor", "per_channel", "per_token", "per_column", "per_group" or "per_block".
        axis: per channel, the axis of the channels (None: the operator's output channels); per group, the
            axis along which groups are.
        shape: per group, (size,); per block, the block's size in the last dimensions.
    """

    name: str
    axis: int | None = None
    shape: tuple[int, ...] = ()

    def block_size(self, shape: Sequence[int], channels: int | None = None) -> tuple[int, ...]:
        """Return the size of one block in each dimension of a tensor.

        Args:
            shape: of the tensor.
            channels: axis of the output channels, which `per_channel` without an axis means; None if there is
                none.

        Raises:
            ConfigError: the tensor has no such axis, or the blocks do not cover it; names sizes that do.
        """
        whole = tuple(shape)
        if self.name == "per_token":
            return (*(1,) * (len(whole) - 1), *whole[-1:])
        if self.name == "per_column":
            return (*(1,) * (len(whole) - 2), *whole[-2:-1], 1) if len(whole) > 1 else whole
        if self.name == "per_channel":
            axis = channels if self.axis is None else self.axis
            return whole if axis is None else _with(whole, axis, 1)
        if self.name == "per_group":
            return _checked(_with((1,) * len(whole), self.axis or 0, self.shape[0]), whole)
        if self.name == "per_block":
            return _checked((1,) * (len(whole) - len(self.shape)) + self.shape, whole)
        return whole

    def __str__(self) -> str:
        """Return the text that `granularity` reads, e.g. "per_channel" or "per_group 32"."""
        parts = [self.name, *(["x".join(map(str, self.shape))] if self.shape else [])]
        if self.axis is not None and (self.name, self.axis) != ("per_group", -1):
            parts.append(f"axis {self.axis}")
        return " ".join(parts)


def per_channel(axis: int | None = None) -> Granularity:
    """One scale per index of an axis; None: of the operator's output channels."""
    return Granularity("per_channel", axis)


def per_group(axis: int, size: int) -> Granularity:
    """Return one scale per `size` neighbours along an axis.

    -1 is the last axis (input channels of a linear's weight).
    """
    return Granularity("per_group", axis, (size,))


def per_block(shape: Sequence[int]) -> Granularity:
    """One scale per block of this size in the last dimensions."""
    return Granularity("per_block", None, tuple(shape))


def input_groups(size: int) -> Granularity:
    """Return one scale per `size` neighbouring input channels of a weight; -1: per output channel."""
    return PER_CHANNEL if size == -1 else per_group(-1, size)


PER_TENSOR = Granularity("per_tensor")
PER_CHANNEL = per_channel()
#: One scale per row of the last dimension.
PER_TOKEN = Granularity("per_token")
#: One scale per column of the last two dimensions: of the right side of a product what one result sums.
PER_COLUMN = Granularity("per_column")

_PLAIN = {str(g): g for g in (PER_TENSOR, PER_CHANNEL, PER_TOKEN, PER_COLUMN)}
_CHANNEL = re.compile(r"per_channel axis (-?\d+)")
_GROUP = re.compile(r"per_group ([1-9]\d*)(?: axis (-?\d+))?")
_BLOCK = re.compile(r"per_block ([1-9]\d*(?:x[1-9]\d*)*)")


def granularity(text: str) -> Granularity:
    """Return the inverse of `str`.

    Raises:
        ConfigError: it is not the text of one.
    """
    if text in _PLAIN:
        return _PLAIN[text]
    if match := _CHANNEL.fullmatch(text):
        return per_channel(int(match[1]))
    if match := _GROUP.fullmatch(text):
        return per_group(int(match[2] or -1), int(match[1]))
    if match := _BLOCK.fullmatch(text):
        return per_block([int(size) for size in match[1].split("x")])
    msg = (
        f'There is no granularity {text!r}; use {", ".join(map(repr, _PLAIN))}, "per_group SIZE" or '
        '"per_block ROWSxCOLUMNS".'
    )
    raise ConfigError(msg)


def _with(sizes: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    if not -len(sizes) <= axis < len(sizes):
        msg = f"A tensor with {len(sizes)} dimensions has no axis {axis}."
        raise ConfigError(msg)
    return tuple(size if d == axis % len(sizes) else s for d, s in enumerate(sizes))


def _checked(block: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(block) != len(shape):
        msg = f"Blocks with {len(block)} dimensions do not cover a tensor with {len(shape)}."
        raise ConfigError(msg)
    for axis, (part, size) in enumerate(zip(block, shape, strict=True)):
        if size % part:
            msg = (
                f"Blocks of {part} do not cover axis {axis} of {size} elements; the nearest sizes that do: "
                f"{_nearest(size, part)}."
            )
            raise ConfigError(msg)
    return block


def _nearest(size: int, part: int) -> str:
    """Return the largest divisor below and the smallest above, as text."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    found = [max(d for d in divisors if d <= part), *[d for d in divisors if d > part][:1]]
    return " and ".join(map(str, found))
