"""Linears that read the same codes → one linear, for example the projections of attention."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from nc.backends.native.fuse import constant, reads_codes, region_of, weight_of
from nc.graph.catalogue import MOVES, kind_of_node, op_name
from nc.graph.fx_utils import call_operator, constant_of
from nc.graph.placement import works_in_place
from nc.graph.views import Dequantize, Linear
from nc.ops import dequantize_per_channel, to_bf16

_aten = torch.ops.aten


def merge(module: fx.GraphModule) -> None:
    """Replace linears that a kernel would compute without anything behind them.

    Not where operators work in place, and not what is returned: a part of a larger tensor is not laid out as the caller expects.
    """
    if works_in_place(module):
        return
    groups: dict[tuple[Dequantize, bool], list[fx.Node]] = {}
    for node in module.graph.nodes:
        if kind_of_node(node) == "linear" and reads_codes(node):
            region = region_of(node)
            if region.codes is None and region.nodes == (node,) and _has_constant_bias(node) and not _is_returned(node):
                groups.setdefault((Dequantize.of(Linear.of(node).input), region.bf16), []).append(node)
    for (_, bf16), nodes in groups.items():
        if len(nodes) > 1:
            _merge(module, nodes, bf16)


def _merge(module: fx.GraphModule, nodes: list[fx.Node], bf16: bool) -> None:
    graph, first = module.graph, nodes[0]
    weights = [weight_of(module, Linear.of(node).weight) for node in nodes]
    codes, scales = map(torch.cat, zip(*weights, strict=True))
    with graph.inserting_before(first):
        weight = constant(module, f"{first.name}_merged", codes), constant(module, f"{first.name}_merged_scales", scales)
        bias = constant(
            module,
            f"{first.name}_merged_bias",
            torch.cat([_bias(module, node, len(s)) for node, (_, s) in zip(nodes, weights, strict=True)]),
        )
        dequantized = call_operator(graph, dequantize_per_channel, *weight, None, 0, torch.int8)
        value = graph.call_function(_aten.linear.default, (Linear.of(first).input, dequantized, bias))
        value.meta.update(kind="linear", operators=[node.meta["operator"] for node in nodes])
        if bf16:
            value = call_operator(graph, to_bf16, value)
        ends = list(itertools.accumulate((len(s) for _, s in weights), initial=0))
        parts = [graph.call_function(_aten.slice.Tensor, (value, -1, *limits)) for limits in itertools.pairwise(ends)]
    for node, part in zip(nodes, parts, strict=True):
        part.meta["val"] = node.meta.get("val")
        for old in list(node.users) if bf16 else [node]:
            old.replace_all_uses_with(part)
            graph.erase_node(old)
        if bf16:
            graph.erase_node(node)
        for user in part.users:
            if op_name(user) == "view":  # a part does not lie in one piece
                user.target = _aten.reshape.default


def _is_returned(node: fx.Node) -> bool:
    """Whether a result, or a view of it, is an output."""
    return any(user.op == "output" or (op_name(user) in MOVES and _is_returned(user)) for user in node.users)


def _has_constant_bias(node: fx.Node) -> bool:
    bias = Linear.of(node).bias
    return bias is None or bias.op == "get_attr"


def _bias(module: fx.GraphModule, node: fx.Node, size: int) -> torch.Tensor:
    bias = Linear.of(node).bias
    return torch.zeros(size) if bias is None else constant_of(module, bias)
