"""Sizes of values by their names, where they are free."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nc.graph.tensor_meta import TENSORS, Size, dim_of, hint_of


def is_tensor(node: object) -> bool:
    """Whether a node gives a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), TENSORS)


def names_of(node: object) -> list[str]:
    """Return the sizes of a tensor as words, free ones by their names; [] for what is not a tensor."""
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return []
    return [name_of(size) for size in node.meta["val"].shape]


def name_of(size: int | torch.SymInt | Size) -> str:
    """Return a size as a word."""
    return str(size) if isinstance(size, (Size, int)) else str(dim_of(size))


def size_of(size: Any) -> int | Size:
    """Return a size as loaded graphs have it."""
    return size if isinstance(size, (int, Size)) else Size(str(dim_of(size)), hint_of(size))
