"""Linears that read the same codes → one linear, for example the projections of attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import fx

from nc.backends.native.fuse import constant, reads_codes, weight_of
from nc.backends.native.regions import Region, behind, region_of
from nc.graph.catalogue import MOVES, kind_of_node, op_name
from nc.graph.fx_utils import call_function, call_operator, constant_of, give_values_of, retarget
from nc.graph.placement import works_in_place
from nc.graph.views import Dequantize, Linear
from nc.ops import dequantize_per_channel, quantize_per_tensor, to_bf16

_aten = torch.ops.aten
_Member = TypeVar("_Member")


def merge(module: fx.GraphModule) -> None:
    """Merge linears that read the same codes and are followed by at most a conversion to codes or bf16.

    Each keeps the scale and zero point of its codes: a product's scales and bias can hold those of each
    output channel. Linears are left as they are if operators work in place, or if their result is returned: a
    part of a larger tensor does not have the layout that the caller expects.
    """
    if works_in_place(module):
        return
    groups: dict[tuple[Dequantize, torch.dtype, tuple[int, int] | None], list[tuple[fx.Node, Region]]] = {}
    for node in module.graph.nodes:
        if kind_of_node(node) == "linear" and reads_codes(node):
            region = region_of(node)
            if region.nodes == (node,) and _has_constant_bias(node) and not is_returned(node):
                dtype = region.codes[2] if region.codes else torch.bfloat16 if region.bf16 else torch.float32
                groups.setdefault((Dequantize.of(Linear.of(node).input), dtype, region.limits), []).append(
                    (node, region)
                )
    for (_, dtype, limits), members in groups.items():
        if len(members) > 1:
            _merge(module, members, dtype, limits)


def _merge(
    module: fx.GraphModule,
    members: Sequence[tuple[fx.Node, Region]],
    dtype: torch.dtype,
    limits: tuple[int, int] | None,
) -> None:
    graph, first = module.graph, members[0][0]
    parts = [_in_units_of_codes(module, node, region) for node, region in members]
    codes, scales, biases = map(torch.cat, zip(*parts, strict=True))
    with graph.inserting_before(first):
        weight = (
            constant(module, f"{first.name}_merged", codes),
            constant(module, f"{first.name}_merged_scales", scales),
        )
        bias = constant(module, f"{first.name}_merged_bias", biases)
        dequantized = call_operator(graph, dequantize_per_channel, *weight, None, 0, torch.int8)
        value = call_function(graph, _aten.linear.default, (Linear.of(first).input, dequantized, bias))
        named = [node.meta["operator"] for node, _ in members if "operator" in node.meta]
        value.meta.update(kind="linear", operators=named)
        if dtype is torch.bfloat16:
            value = call_operator(graph, to_bf16, value)
        elif dtype is not torch.float32:
            low, high = limits or (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            value = call_operator(graph, quantize_per_tensor, value, 1.0, 0, low, high, dtype)
        slices = parts_of(graph, value, [len(scales) for _, scales, _ in parts])
    for (node, _), part in zip(members, slices, strict=True):
        replaced = [node] if dtype is torch.float32 else list(node.users)
        put_in_place(part, node, replaced)
        if dtype is not torch.float32:
            graph.erase_node(node)


def merged_groups(members: Sequence[_Member], result: Callable[[_Member], fx.Node]) -> list[list[_Member]]:
    """Return linears of the same rows in groups that become one product each.

    Those with which nothing goes, and whose result is not returned, are one; each of the others is alone.
    """
    lone = [one for one in members if len(behind(result(one))[0]) == 1 and not is_returned(result(one))]
    if len(lone) < 2:
        return [[one] for one in members]
    return [lone, *([one] for one in members if one not in lone)]


def parts_of(graph: fx.Graph, value: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    """Return the parts of a merged linear's result, of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        call_function(graph, _aten.slice.Tensor, (value, -1, *between))
        for between in itertools.pairwise(ends)
    ]


def put_in_place(part: fx.Node, node: fx.Node, replaced: Sequence[fx.Node]) -> None:
    """Give a part the value of a linear and the readers of the replaced nodes, and erase those."""
    part.meta["val"] = node.meta.get("val")
    give_values_of(part, *replaced)
    for old in replaced:
        old.replace_all_uses_with(part)
        part.graph.erase_node(old)
    for user in part.users:
        if op_name(user) == "view":  # a part is not contiguous
            retarget(user, _aten.reshape.default)


def _in_units_of_codes(
    module: fx.GraphModule, node: fx.Node, region: Region
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and bias of a linear whose result, rounded, is codes where its readers want codes."""
    codes, scales = weight_of(module, Linear.of(node).weight)
    bias = _bias(module, node, len(scales))
    if region.codes is None:
        return codes, scales, bias
    scale, zero_point, _ = region.codes
    return codes, (scales.double() / scale).float(), (bias.double() / scale + zero_point).float()


def is_returned(node: fx.Node) -> bool:
    """Return whether a result, or a view of it, is an output."""
    return any(user.op == "output" or (op_name(user) in MOVES and is_returned(user)) for user in node.users)


def _has_constant_bias(node: fx.Node) -> bool:
    bias = Linear.of(node).bias
    return bias is None or bias.op == "get_attr"


def _bias(module: fx.GraphModule, node: fx.Node, size: int) -> torch.Tensor:
    bias = Linear.of(node).bias
    return torch.zeros(size, dtype=torch.float32) if bias is None else constant_of(module, bias)
