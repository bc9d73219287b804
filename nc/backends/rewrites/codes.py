"""Rewrites of a QDQ graph.

They give unsigned codes, and quantize nodes as early as possible without changing results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import (
    JOINS,
    MOVES,
    first_input,
    is_float_tensor,
    joined_inputs,
    op_name,
    schema_arguments,
)
from nc.graph.fx_utils import call_operator, give_values_of
from nc.graph.placement import works_in_place
from nc.graph.views import Quantize, options
from nc.ops import quantize_per_tensor, to_bf16

#: int8 codes and their zero points, as uint8.
_SHIFT = 128
_PADS = ("pad", "constant_pad_nd")
_NARROW = (quantize_per_tensor, to_bf16)


def unsigned(module: fx.GraphModule) -> None:
    """Activations with int8 codes get the same codes plus 128: convolution kernels take uint8 only."""
    for node in module.graph.nodes:
        if node.target is quantize_per_tensor and Quantize.of(node).dtype is torch.int8:
            old = Quantize.of(node)
            zero_point = old.numbers[1] + _SHIFT
            node.args = (
                old.input,
                old.scale,
                zero_point,
                old.quant_min + _SHIFT,
                old.quant_max + _SHIFT,
                torch.uint8,
            )
            for user in list(node.users):
                user.args = (node, old.scale, zero_point, torch.uint8)


def hoist(module: fx.GraphModule, *, coded_pads: bool = True) -> None:
    """Quantize, or round to bf16, before operators that only move or join values.

    All readers of these values must quantize or round them in the same way. Graphs with in-place operators
    are not changed: there a value depends on when it is read.

    Args:
        module: graph, changed in place.
        coded_pads: also before a pad with zeros whose code is not 0.
    """
    if works_in_place(module):
        return
    for node in reversed(list(module.graph.nodes)):
        narrowed = _narrowed_by_all(node) if _keeps_values(node) and is_float_tensor(node) else None
        sources = _float_sources(node) if narrowed is not None else []
        if narrowed is None or not sources:
            continue
        operator, *qparams = narrowed
        zero_point = qparams[1] if qparams else 0
        if op_name(node) in _PADS and zero_point and not coded_pads:
            continue
        _move_in_front(module, node, sources, operator, qparams)


def _narrowed_by_all(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the conversion, and its numbers, through which all that reads a node reads it."""
    found = {(user.target, *options(user)) if user.target in _NARROW else None for user in node.users}
    return next(iter(found)) if len(found) == 1 else None


def _float_sources(node: fx.Node) -> list[fx.Node]:
    """Return what a node moves or joins; [] unless all are floating-point tensors."""
    inputs = joined_inputs(node) if op_name(node) in JOINS else [first_input(node)]
    sources = [source for source in inputs if isinstance(source, fx.Node) and is_float_tensor(source)]
    return sources if len(sources) == len(inputs) else []


def _move_in_front(
    module: fx.GraphModule,
    node: fx.Node,
    sources: Sequence[fx.Node],
    operator: torch._ops.OpOverload,
    qparams: Sequence[Any],
) -> None:
    """Convert what a node reads in place of what it gives."""
    for source in dict.fromkeys(sources):
        with module.graph.inserting_before(node):
            codes = call_operator(module.graph, operator, source, *qparams)
        codes.meta["val"] = source.meta.get("val")
        node.replace_input_with(source, codes)
    if op_name(node) in _PADS:
        zero = float(Quantize.of(codes).numbers[1]) if qparams else 0.0
        node.args, node.kwargs = (
            tuple({**schema_arguments(node), "value": zero}.values()),
            {},
        )  # the code of 0
    give_values_of(node, *node.users)
    for user in list(node.users):
        user.replace_all_uses_with(node)
        module.graph.erase_node(user)


def _keeps_values(node: fx.Node) -> bool:
    """Return whether a node moves or joins values, or puts zeros around them."""
    name = op_name(node)
    if name in _PADS:
        arguments = schema_arguments(node)
        return arguments.get("mode", "constant") == "constant" and not arguments["value"]
    return name in MOVES | JOINS and name != "getitem"
