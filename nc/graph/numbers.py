"""Numbers that a tensor is multiplied by, or that are added to it."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx

from nc.graph.catalogue import computed_options, op_name
from nc.graph.fx_utils import constant_value
from nc.graph.tensor_meta import TENSORS, same_shape
from nc.graph.views import Binary

#: (factor, term), float64, of shape [] or as they are broadcast to the tensor.
Numbers = tuple[torch.Tensor, torch.Tensor]
#: Operators that can be that.
OPERATIONS = frozenset({"mul", "div", "add", "sub", "rsub"})
_ONE, _ZERO = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)


def is_varying(module: fx.GraphModule, node: object) -> TypeGuard[fx.Node]:
    """Return whether a value is a tensor that depends on inputs."""
    return (
        isinstance(node, fx.Node)
        and isinstance(node.meta.get("val"), TENSORS)
        and constant_value(module, node) is None
    )


def numbers_of(module: fx.GraphModule, node: fx.Node, source: fx.Node) -> Numbers | None:
    """Return s and t where a node computes `s * source + t` of the same shape in fp32; else None."""
    name = op_name(node)
    if name not in OPERATIONS or computed_options(node):
        return None
    operation, val, own = Binary.of(node), node.meta["val"], source.meta["val"]
    if not (val.dtype is own.dtype is torch.float32 and same_shape(val.shape, own.shape)):
        return None
    if operation.left is source and operation.right is source or operation.rounding_mode is not None:
        return None
    is_left = operation.left is source
    other = _constant(module, operation.right if is_left else operation.left)
    if other is None or (name == "div" and not is_left):
        return None
    if name in ("mul", "div"):
        return (1 / other if name == "div" else other), _ZERO
    # a + alpha * b, and for rsub b - alpha * a
    of_left, of_right = {
        "add": (1.0, float(operation.alpha)),
        "sub": (1.0, -float(operation.alpha)),
        "rsub": (-float(operation.alpha), 1.0),
    }[name]
    return (_ONE * of_left, other * of_right) if is_left else (_ONE * of_right, other * of_left)


def _constant(module: fx.GraphModule, value: object) -> torch.Tensor | None:
    """Return a number or a constant tensor in float64, without dimensions where it has one element."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64)
    found = constant_value(module, value)
    if found is None or found.is_complex() or found.dtype is torch.bool or not found.numel():
        return None
    found = found.detach().double()
    return found.reshape(()) if found.numel() == 1 else found
