"""Weights of quantized operators become codes; recurrent layers and cells become operators that read them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from nc.formats import PER_TOKEN, TensorFormat
from nc.graph.catalogue import groups_of, kind_of_node, op_name, weight_axis
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    call_operator,
    constant_of,
    fqn_of,
    retarget,
    take_over,
)
from nc.graph.known_codes import KnownCodes
from nc.graph.plan import Decision, Plan
from nc.graph.recurrent import CELLS, is_recurrent, weights_of
from nc.graph.views import Recurrent, RecurrentCell, Weighted, set_argument
from nc.ops import (
    RECURRENT,
    dequantize_float,
    dequantize_per_channel,
    dequantize_per_group,
    dequantize_per_tensor,
)

_aten = torch.ops.aten


def quantize_weights(module: fx.GraphModule, plan: Plan, known: KnownCodes) -> None:
    """Put codes in the place of the weights of quantized operators."""
    specs = {d.operator: d.spec.weight for d in plan.quantized if d.spec.weight is not None}
    weights = _Weights(known)
    for node in [n for n in module.graph.nodes if n.meta.get("operator") in specs]:
        if is_recurrent(node):
            _make_dynamic(module, node, plan[node.meta["operator"]], weights)
        else:
            spec, source = specs[node.meta["operator"]], Weighted.of(node).weight
            weight = _quantized(module, node, source, spec, weight_axis(node), weights, groups_of(node))
            set_argument(node, "weight", weight)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one graph that have codes.

    Attributes:
        known: quantizes them.
        done: name, spec and axis → the nodes of codes and scale, or the scale as a number.
    """

    known: KnownCodes
    done: dict[tuple[str, TensorFormat, int | None], tuple[fx.Node, fx.Node | None, float]] = (
        dataclasses.field(default_factory=dict)
    )


def _quantized(
    module: fx.GraphModule,
    reader: fx.Node,
    weight: fx.Node,
    spec: TensorFormat,
    axis: int | None,
    weights: _Weights,
    groups: int = 1,
) -> fx.Node:
    """Return the dequantize node that `reader` is to read instead of a weight.

    Codes that it has are used again.
    """
    name = str(weight.target)
    key = (name, spec, axis)
    if key not in weights.done:
        codes, scale = weights.known.of(constant_of(module, weight), spec, axis, groups)
        first = next(iter(module.graph.nodes))
        fqn = weight.meta.get("fqn", name)
        codes_node = add_constant(module, first, f"{name}_{spec.dtype}", codes, fqn)
        # operators for integers take one scale as a number
        is_constant = scale.dim() > 0 or spec.dtype.kind == "float"
        scale_node = (
            add_constant(module, first, f"{name}_scale", scale, f"{fqn}.scale") if is_constant else None
        )
        weights.done[key] = (codes_node, scale_node, float(scale) if scale_node is None else 0.0)
    codes_node, scale_node, scalar = weights.done[key]
    with module.graph.inserting_before(reader):
        if scale_node is None:
            dequantized = call_operator(
                module.graph, dequantize_per_tensor, codes_node, scalar, 0, spec.dtype.storage
            )
        elif spec.dtype.kind == "float":
            dequantized = call_operator(
                module.graph, dequantize_float, codes_node, scale_node, str(spec.dtype)
            )
        elif spec.granularity.name == "per_group":
            groups_along = (spec.granularity.axis, spec.granularity.shape[0])
            dequantized = call_operator(
                module.graph,
                dequantize_per_group,
                codes_node,
                scale_node,
                None,
                *groups_along,
                spec.dtype.storage,
            )
        else:
            dequantized = call_operator(
                module.graph, dequantize_per_channel, codes_node, scale_node, None, axis, spec.dtype.storage
            )
    dequantized.meta["val"] = weight.meta["val"]
    return dequantized


def _make_dynamic(module: fx.GraphModule, node: fx.Node, decision: Decision, weights: _Weights) -> None:
    """Give a recurrent layer or cell int8 matrices; biases stay fp32, and what the decision says.

    A cell becomes a layer with one step.
    """
    spec = decision.spec
    codes, kind = spec.input(0), kind_of_node(node) or ""
    assert spec.weight is not None
    floats = set(decision.in_fp32)
    params = [
        w
        if w.meta["val"].dim() < 2 or fqn_of(w) in floats
        else _quantized(module, node, w, spec.weight, 0, weights)
        for w in weights_of(node)
    ]
    rows = codes.granularity == PER_TOKEN
    how: tuple[fx.node.Argument, ...] = (codes.quant_min, codes.quant_max, codes.dtype.storage, rows)
    if kind.startswith("rnn"):
        how = (*how, "relu" in op_name(node))
    how = (*how, bool(floats))
    if kind in CELLS:
        _step_as_layer(module, node, params, how)
        return
    layer = Recurrent.of(node)
    options = (layer.has_biases, layer.num_layers, layer.bidirectional, layer.batch_first)
    retarget(node, RECURRENT[kind])
    node.args = (layer.input, layer.hx, params, *options, *how)
    node.kwargs = {}


def _step_as_layer(
    module: fx.GraphModule, node: fx.Node, params: list[fx.Node], how: tuple[fx.node.Argument, ...]
) -> None:
    """Put a layer of one step in the place of a cell."""
    cell, kind = RecurrentCell.of(node), (kind_of_node(node) or "").removesuffix("_cell")

    def call(value: Any, target: Callable[..., Any], *arguments: fx.node.Argument) -> fx.Node:
        new = call_function(module.graph, target, arguments)
        new.meta["val"] = value
        return new

    states = [cell.hx] if isinstance(cell.hx, fx.Node) else cell.hx
    results = list(node.meta["val"]) if kind == "lstm" else [node.meta["val"]]
    last = [value.unsqueeze(0) for value in results]
    with module.graph.inserting_before(node):
        x, *hx = (
            call(n.meta["val"].unsqueeze(0), _aten.unsqueeze.default, n, 0) for n in (cell.input, *states)
        )
        arguments = (x, hx if kind == "lstm" else hx[0], params, cell.b_ih is not None, 1, False, False, *how)
        layer = call((last[0], *last), RECURRENT[kind], *arguments)
        value = layer.meta["val"]
        take_over(layer, node)
        layer.meta.update(val=value, kind=kind)
        rows = [call(value, operator.getitem, layer, i + 1) for i, value in enumerate(last)]
        rows = [call(value, _aten.squeeze.dim, row, 0) for value, row in zip(results, rows, strict=True)]
    replaced = {_index(user): user for user in node.users} if kind == "lstm" else {0: node}
    for index, old in replaced.items():
        old.replace_all_uses_with(rows[index])
        module.graph.erase_node(old)
        rows[index].name = old.name  # a tensor has the same name in both graphs
    if kind == "lstm":
        module.graph.erase_node(node)


def _index(node: fx.Node) -> int:
    """Which of several results a `getitem` node takes."""
    _, index = node.args
    assert isinstance(index, int), f"{node.name} takes no single result"
    return index
