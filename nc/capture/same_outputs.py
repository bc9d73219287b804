"""Whether a captured graph gives the outputs of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc.graph.catalogue import first_input, is_float_tensor, op_name

#: Operators whose result is another one where two nearly equal values change places.
_PICKS = frozenset(
    {"topk", "sort", "argsort", "argmax", "argmin", "torchvision::nms", "multinomial", "searchsorted"}
)


class OtherOutputError(RuntimeError):
    """The graph gives something else.

    Attributes:
        picks: see `picks_of`.
    """

    def __init__(self, picks: Sequence[str]) -> None:
        super().__init__("the captured graph gives another output than the model")
        self.picks = picks


class LostEffectError(RuntimeError):
    """The graph leaves something else in an argument than the model does."""

    def __init__(self, *names: str) -> None:
        super().__init__(
            f"forward changes argument {' or '.join(map(repr, names))}, and the captured graph can't change "
            "it in the same way"
        )


def same_outputs(expected: Any, got: Any, picks: Sequence[str]) -> None:
    """Raise OtherOutputError where two outputs of the same structure differ by more than rounding.

    `picks` are for its message.
    """
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        if isinstance(a, torch.Tensor) and not (a.shape == b.shape and _is_close(a, b)):
            raise OtherOutputError(picks)


def picks_of(module: fx.GraphModule) -> list[str]:
    """Names of the operators that pick among floating-point values.

    Where two of them are nearly equal, rounding decides.
    """
    return sorted(
        {op_name(node) for node in module.graph.nodes if is_float_tensor(first_input(node))} & _PICKS
    )


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for rounding.

    It is relative to the largest value, because sums of large terms can end near 0.
    """
    if not a.is_floating_point():
        return torch.equal(a, b)
    largest = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
