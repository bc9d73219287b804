"""Patterns that IPEX 2.8's fuser computes wrongly, or never finishes on, and the rewrite that avoids each.

IPEX is archived: none of these will be fixed. Each lint has a name, which the report shows, and a test that runs the pattern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from nc.graph.catalogue import MOVES, is_float_tensor, kind_of_node, op_name
from nc.graph.qdq import dequantize_per_tensor, quantize_per_tensor

#: Relative change of scale that makes two quantize nodes of one tensor different to the fuser: a twenty-thousandth of a code at most.
_NUDGE = 1.0 + 2.0**-20


@dataclasses.dataclass(frozen=True, slots=True)
class Lint:
    """One rewrite.

    Attributes:
        name: shown in the report.
        why: what IPEX does without it.
        apply: rewrites a graph in place; returns the names of the operators it changed.
    """

    name: str
    why: str
    apply: Callable[[fx.GraphModule], list[str]]


def same_tensor_twice(module: fx.GraphModule) -> list[str]:
    """`matmul(y, y)`, `r + r`: the pass that splits shared dequantize nodes never ends. The second side gets codes of its own."""
    changed = []
    for node in list(module.graph.nodes):
        if kind_of_node(node) in ("matmul", "add"):
            left, right = _codes(node.args[0]), _codes(node.args[1])
            if left is not None and left is right:
                _own_codes(node, 1)
                changed.append(node.meta["operator"])
    return changed


def operand_is_source(module: fx.GraphModule) -> list[str]:
    """`conv(y) + y` with one int8 y: the fused kernel reads the wrong buffer. The added side gets codes of its own."""
    changed = []
    for node in list(module.graph.nodes):
        if kind_of_node(node) != "add":
            continue
        for index in (0, 1):
            other, side = node.args[1 - index], _codes(node.args[index])
            if side is not None and isinstance(other, fx.Node) and kind_of_node(other) and side is _codes(other.args[0]):
                _own_codes(node, index)
                changed.append(node.meta["operator"])
    return changed


def input_overwritten(module: fx.GraphModule) -> list[str]:
    """`linear(x) + x` with a fp32 graph input x: the sum is written into the caller's tensor. The graph works on a copy of x."""
    changed = []
    for node in [n for n in module.graph.nodes if n.op == "placeholder" and is_float_tensor(n)]:
        adds = [n for n in _readers(node) if op_name(n).rstrip("_") == "add"]
        if adds:
            with module.graph.inserting_after(_last_input(module)):
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            changed += [add.meta.get("operator", add.name) for add in adds]
    return changed


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a tensor or a view of it."""
    found = []
    for user in node.users:
        found += _readers(user) if op_name(user) in MOVES else [user]
    return found


def _last_input(module: fx.GraphModule) -> fx.Node:
    return next(n for n in reversed(module.graph.nodes) if n.op == "placeholder")


LINTS = (
    Lint("same_tensor_twice", "hangs", same_tensor_twice),
    Lint("operand_is_source", "returns garbage", operand_is_source),
    Lint("input_overwritten", "changes the caller's tensor", input_overwritten),
)


def apply_lints(module: fx.GraphModule) -> tuple[str, ...]:
    """Apply all, in order; returns "name: operator" for each rewrite."""
    found = [f"{lint.name}: {operator}" for lint in LINTS for operator in lint.apply(module)]
    module.graph.lint()
    module.recompile()
    return tuple(found)


def _codes(node: object) -> fx.Node | None:
    """The quantize node behind a dequantize, through moves that keep the buffer."""
    if not isinstance(node, fx.Node) or node.target is not dequantize_per_tensor:
        return None
    source = node.args[0]
    return source if source.target is quantize_per_tensor else None


def _own_codes(node: fx.Node, index: int) -> None:
    """Give one input of an operator a quantize/dequantize pair that no other shares, with a scale that differs enough to stay apart."""
    dequantize = node.args[index]
    x, scale, *rest = dequantize.args[0].args
    graph = node.graph
    with graph.inserting_before(node):
        codes = graph.call_function(quantize_per_tensor, (x, scale * _NUDGE, *rest))
        value = graph.call_function(dequantize_per_tensor, (codes, scale * _NUDGE, rest[0]))
    codes.meta["val"] = value.meta["val"] = dequantize.meta.get("val")
    node.update_arg(index, value)
