"""Linears in bf16 as functions in C (`rows.c`), between tensors in fp32 that hold numbers of bf16.

A tensor is rounded once, whatever the number of linears that read it. The product's last step adds the bias
and rounds the sum to bf16, as the graph does; an activation and a sum follow in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import fx

from nc.backends.native.fuse import constant
from nc.backends.native.merge import merged_groups, parts_of, put_in_place
from nc.backends.native.plans import row_linears
from nc.backends.native.plans.ways import PlannedOperator
from nc.backends.native.regions import Activation, behind, only_user
from nc.backends.native.torch_library import define, only_in_plans, prepack
from nc.graph.catalogue import input_node, kind_of_node
from nc.graph.fx_utils import (
    call_function,
    constant_of,
    constant_value,
    give_values_of,
    note_value_of,
    take_over,
)
from nc.graph.placement import works_in_place
from nc.graph.views import Linear
from nc.ops import from_bf16, to_bf16

_in_torch = only_in_plans("linear of rows in tile order")


@functools.cache
def bf16_rows() -> torch._ops.OpOverload:
    """Return what rounds rows to bf16; only `bf16_linear` can read the result, which has the shape of `x`."""
    return define(
        "bf16_rows(Tensor x) -> Tensor", _in_torch, lambda x: x.new_empty(x.shape, dtype=torch.bfloat16)
    )


@functools.cache
def bf16_linear() -> torch._ops.OpOverload:
    """Return the linear of rows in bf16: `activation(bf16(x W^T + bias)) + other`, in fp32.

    `weight` is packed as for oneDNN's linears.
    """
    return define(
        "bf16_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor? other, int outputs, str activation, "
        "float[] scalars, str algorithm) -> Tensor",
        _in_torch,
        lambda rows, _, __, ___, outputs, *____: rows.new_empty(
            (*rows.shape[:-1], outputs), dtype=torch.float32
        ),
    )


# ---- how it is found in a graph ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Rounded:
    """A linear whose inputs and result are rounded to bf16.

    Attributes:
        linear: the node.
        weight: the constant, in bf16.
        outputs: number of output channels.
        bias: one fp32 number for each output; None for none.
        result: the rounded result, in fp32 again.
    """

    linear: fx.Node
    weight: fx.Node
    outputs: int
    bias: torch.Tensor | None
    result: fx.Node


def replace_bf16_linears(module: fx.GraphModule) -> None:
    """Replace linears in bf16, where there are functions in C for plans.

    Those that read the same rows, and nothing else goes with, become one, of which each gets its part. Not
    where operators work in place: there a value depends on when it is read.
    """
    if row_linears.why_unavailable(row_linears.BF16) or works_in_place(module):
        return
    readers: dict[fx.Node, list[_Rounded]] = {}
    for node in module.graph.nodes:
        found = _rounded(module, node)
        if found is not None:
            readers.setdefault(_source(node), []).append(found)
    for members in readers.values():
        source = _source(members[0].linear)  # the one of the key may have become part of a linear
        with module.graph.inserting_before(members[0].linear):
            rounded = call_function(module.graph, bf16_rows(), (source,))
        note_value_of(rounded, source)
        for group in merged_groups(members, lambda each: each.result):
            _replace(module, group, rounded)
    for node in reversed(module.graph.nodes):
        if not node.users and (node.target in (to_bf16, from_bf16) or node.op == "get_attr"):
            module.graph.erase_node(node)


def _rounded(module: fx.GraphModule, node: fx.Node) -> _Rounded | None:
    """Return a linear whose inputs and result are rounded to bf16; None for all else."""
    low = only_user(node) if kind_of_node(node) == "linear" else None
    result = only_user(low) if low is not None and low.target is to_bf16 else None
    if result is None or result.target is not from_bf16:
        return None
    linear = Linear.of(node)
    sides = [linear.input, linear.weight, *([] if linear.bias is None else [linear.bias])]
    if not all(isinstance(side, fx.Node) and side.target is from_bf16 for side in sides):
        return None
    source, weight = (input_node(side) for side in sides[:2])
    bias = None if linear.bias is None else constant_value(module, linear.bias)
    if source.target is not to_bf16 or weight.op != "get_attr" or (bias is None) != (linear.bias is None):
        return None
    outputs, inputs = constant_of(module, weight).shape
    return _Rounded(node, weight, outputs, bias, result) if outputs and inputs else None


def _source(linear: fx.Node) -> fx.Node:
    """Return what such a linear rounds, in fp32."""
    return input_node(input_node(Linear.of(linear).input))


def _replace(module: fx.GraphModule, members: Sequence[_Rounded], rounded: fx.Node) -> None:
    """Replace linears of the same rows by one, and all that goes with a single one."""
    graph, first = module.graph, members[0]
    region, activation, other = behind(first.result) if len(members) == 1 else ([], Activation(), None)
    sizes = [each.outputs for each in members]
    biases = [
        torch.zeros(each.outputs, dtype=torch.float32, device="cpu")
        if each.bias is None
        else each.bias.detach().float().expand(each.outputs)
        for each in members
    ]
    with graph.inserting_before(region[-1] if region else first.linear):
        weight = first.weight
        if len(members) > 1:
            whole = torch.cat([constant_of(module, each.weight) for each in members])
            weight = constant(module, f"{first.linear.name}_bf16", whole)
        bias = constant(module, f"{first.linear.name}_bias", torch.cat(biases))
        packed = call_function(graph, prepack("linear"), (weight, None))
        how = (activation.name, list(activation.arguments), activation.algorithm)
        new = call_function(graph, bf16_linear(), (rounded, packed, bias, other, sum(sizes), *how))
        parts = parts_of(graph, new, sizes) if len(members) > 1 else []
    new.meta["bf16_operators"] = [
        each.linear.meta["operator"] for each in members if "operator" in each.linear.meta
    ]
    for each, part in zip(members, parts, strict=False):
        put_in_place(part, each.result, [each.result])
    if region:
        take_over(new, region[-1])
        give_values_of(new, region[-1])
        region[-1].replace_all_uses_with(new)
        for old in reversed(region):
            graph.erase_node(old)
    new.meta["operators"] = [
        node.meta["operator"]
        for node in (*(each.linear for each in members), *region)
        if "operator" in node.meta
    ]
    for each in members:
        (low,) = each.linear.users
        graph.erase_node(low)
        graph.erase_node(each.linear)


OPERATORS = (
    PlannedOperator((bf16_rows(),), {"C": functools.partial(row_linears.round_rows, row_linears.BF16)}),
    PlannedOperator((bf16_linear(),), {"C": functools.partial(row_linears.multiply, row_linears.BF16)}),
)
