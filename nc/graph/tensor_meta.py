"""Shapes and dtypes that the nodes of a loaded graph had when it was traced.

After capture that is torch's fake tensors, with symbols as free sizes. They need a second of imports, so a
loaded graph has these instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch


class Size(str):
    """A free size: its name, and the size that it had when the model was traced.

    The size is None where it depends on data.
    """

    __slots__ = ("hint",)
    hint: int | None

    def __new__(cls, name: str, hint: int | None) -> Size:
        """Return a size of that name."""
        size = super().__new__(cls, name)
        size.hint = hint
        return size

    def __getnewargs__(self) -> tuple[str, int | None]:  # type: ignore[override] # a string is made from one argument
        """Return what copies are made from."""
        return str(self), self.hint


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A tensor without memory or operations."""

    dtype: torch.dtype
    shape: tuple[int | Size, ...]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)


#: What stands for one tensor in a node's `meta["val"]`.
TENSORS = (torch.Tensor, Traced)


def dim_of(size: int | torch.SymInt) -> int | str:
    """Return a size that the model fixed, or the name of a free one.

    Export keeps the fixed sizes apart from the shape.
    """
    if isinstance(size, int):
        return size
    expression = size.node.shape_env.replace(size.node.expr)
    return int(expression) if expression.is_number else str(expression)


def same_shape(a: Sequence[int | torch.SymInt | Size], b: Sequence[int | torch.SymInt | Size]) -> bool:
    """Compare two shapes, free sizes by their names: `==` on torch's symbols would fix what is free."""
    return len(a) == len(b) and all(_name_of(x) == _name_of(y) for x, y in zip(a, b, strict=True))


def _name_of(size: int | torch.SymInt | Size) -> int | str:
    return str(size) if isinstance(size, Size) else dim_of(size)


def name_of(size: int | torch.SymInt | Size) -> str:
    """Return a size as a word: of a free one its name."""
    return str(_name_of(size))


def names_of(val: object) -> list[str]:
    """Return the sizes of a tensor as words; [] for what is not a tensor."""
    return [name_of(size) for size in val.shape] if isinstance(val, TENSORS) else []


def without_env(size: int | torch.SymInt | Size) -> int | Size:
    """Return a size as loaded graphs have it."""
    return size if isinstance(size, (int, Size)) else Size(name_of(size), hint_of(size))


def hint_of(size: int | torch.SymInt | Size) -> int | None:
    """Return the size when the model was traced; None where it depends on data."""
    if isinstance(size, int):
        return size
    if isinstance(size, Size):
        return size.hint
    return int(size.node.hint) if size.node.has_hint() else None


def strided(val: torch.Tensor | Traced, dim: int, stride: int) -> torch.Tensor | Traced:
    """Return what is known of every `stride`-th slice along a dimension."""
    if isinstance(val, torch.Tensor):
        return val[(slice(None),) * dim + (slice(None, None, stride),)]
    size = val.shape[dim]
    known = hint_of(size)
    hint = None if known is None else math.ceil(known / stride)
    left: int | Size = (
        math.ceil(size / stride) if isinstance(size, int) else Size(f"ceil({size}/{stride})", hint)
    )
    return Traced(val.dtype, (*val.shape[:dim], left, *val.shape[dim + 1 :]))
