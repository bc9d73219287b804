"""Linears whose activations have ranges that are found in each call, as functions in C (`rows.c`).

A tensor is rounded once, whatever the number of linears that read it. The product's last step applies both
scales, the zero points, the bias, an activation and a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx

from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.native.fuse import constant, weight_of
from nc.backends.native.merge import merged_groups, parts_of, put_in_place
from nc.backends.native.plans import row_linears
from nc.backends.native.plans.ways import PlannedOperator, need, why_refused
from nc.backends.native.regions import Activation, behind
from nc.backends.native.torch_library import define, only_in_plans, prepack
from nc.graph.catalogue import kind_of_node, works_in_place
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    constant_of,
    constant_value,
    fqn_of,
    note_value_of,
    take_over,
)
from nc.graph.views import Dequantize, DynamicQDQ, Linear
from nc.kernels.c_code import abi
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_dequantize_dynamic

#: In reports, of the linears that have another kernel.
NAME = "c:row_product"


_in_torch = only_in_plans("linear of rounded rows")


@functools.cache
def rounded_rows() -> torch._ops.OpOverload:
    """Return what rounds rows; only `row_linear` can read the result, which has the shape of `x`."""
    return define(
        "rounded_rows(Tensor x, bool symmetric, bool per_row) -> Tensor",
        _in_torch,
        lambda x, *_: x.new_empty(x.shape, dtype=torch.uint8),
    )


@functools.cache
def row_linear() -> torch._ops.OpOverload:
    """Return the linear of rounded rows: `activation(x W^T + bias) + other`, in fp32.

    `weight` is packed as for oneDNN's linears; `scale` is of the weight, one or one for each output.
    """
    return define(
        "row_linear(Tensor rows, Tensor weight, Tensor scale, Tensor? bias, Tensor? other, int outputs, "
        "str activation, float[] scalars, str algorithm) -> Tensor",
        _in_torch,
        lambda rows, _, scale, __, ___, outputs, *____: scale.new_empty((*rows.shape[:-1], outputs)),
    )


# ---- how it is found in a graph ----


def replace_row_linears(module: fx.GraphModule) -> None:
    """Replace dynamic linears, where there are functions in C.

    Linears that read the same rows and have nothing fused become one, and each gets its part of the result.
    A following activation and sum are fused, unless operators work in place: there a value depends on when it
    is read.
    """
    alone = any(works_in_place(node) for node in module.graph.nodes)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if _is_dynamic(node) and not why_not_row_linear(node):
            readers.setdefault(Linear.of(node).input, []).append(node)
    for ranges, nodes in readers.items():
        codes = _rounded(module, ranges)
        for group in [[node] for node in nodes] if alone else merged_groups(nodes, lambda node: node):
            if len(group) > 1:
                _replace_by_one(module, group, codes)
            else:
                _replace(module, group[0], codes, alone=alone)
    for node in reversed(module.graph.nodes):
        ours = (quantize_dequantize_dynamic, dequantize_per_channel, dequantize_per_tensor)
        if not node.users and (node.target in ours or node.op == "get_attr"):
            module.graph.erase_node(node)


def why_not_row_linear(node: fx.Node) -> str:
    """Why `replace_row_linears` leaves a dynamic linear to FBGEMM; "" where it does not, or for others."""
    return why_refused(_check, node) if _is_dynamic(node) else ""


def _is_dynamic(node: fx.Node) -> bool:
    """Return whether a node is a linear whose input has ranges that are found in each call."""
    if kind_of_node(node) != "linear":
        return False
    ranges = Linear.of(node).input
    return isinstance(ranges, fx.Node) and ranges.target is quantize_dequantize_dynamic


def _check(node: fx.Node) -> None:
    """Raise `Refused` for a dynamic linear that the functions in C do not compute."""
    linear, module = Linear.of(node), node.graph.owning_module
    missing = row_linears.why_unavailable(row_linears.CODES)
    assert module is not None, "passes run on modules"
    ranges = DynamicQDQ.of(linear.input)
    need(not missing, missing)
    dtype = getattr(ranges.input.meta.get("val"), "dtype", None)
    need(dtype is torch.float32, f"its input is {dtype}, not fp32")
    need(
        linear.weight.target in (dequantize_per_channel, dequantize_per_tensor), "its weight is not quantized"
    )
    weight = Dequantize.of(linear.weight)
    need(weight.codes.op == "get_attr", "its weight is not a constant")
    need(weight.axis in (None, 0), "its weight has a scale for each input")
    codes, most = constant_of(module, weight.codes), abi.CONSTANTS.most_inputs
    inputs = codes.shape[-1]
    need(0 < inputs <= most, f"it has {inputs} inputs, and its C code takes 1 to {most}")
    too_large = row_linears.why_not_weight(codes)
    need(not too_large, too_large)
    bias = linear.bias
    need(bias is None or constant_value(module, bias) is not None, "its bias is computed from the inputs")


def _rounded(module: fx.GraphModule, ranges: fx.Node) -> fx.Node:
    """Return what rounds the input of dynamic linears."""
    view = DynamicQDQ.of(ranges)
    with module.graph.inserting_before(ranges):
        codes = call_function(module.graph, rounded_rows(), (view.input, view.symmetric, view.per_token))
    note_value_of(codes, view.input)
    return codes


def _replace(module: fx.GraphModule, node: fx.Node, codes: fx.Node, *, alone: bool) -> None:
    linear = Linear.of(node)
    weight = Dequantize.of(linear.weight)
    if isinstance(weight.scale, fx.Node):
        scale = weight.scale
    else:
        first = next(iter(module.graph.nodes))
        name = f"{weight.codes.target}_scale"
        scale = add_constant(
            module,
            first,
            name,
            torch.tensor([weight.scale], dtype=torch.float32, device="cpu"),
            f"{fqn_of(weight.codes)}.scale",
        )
    region, activation, other = behind(node, alone=alone)
    with module.graph.inserting_before(region[-1]):
        packed = call_function(module.graph, prepack("linear"), (weight.codes, None))
        how = (activation.name, list(activation.arguments), activation.algorithm)
        outputs = constant_of(module, weight.codes).shape[0]
        arguments = (codes, packed, scale, linear.bias, other, outputs, *how)
        new = call_function(module.graph, row_linear(), arguments)
    take_over(new, region[-1])
    new.meta["operators"] = [n.meta["operator"] for n in region if "operator" in n.meta]
    new.meta[DYNAMIC_KERNEL] = True
    region[-1].replace_all_uses_with(new)
    for old in reversed(region):
        module.graph.erase_node(old)


def _replace_by_one(module: fx.GraphModule, nodes: Sequence[fx.Node], codes: fx.Node) -> None:
    """Replace linears of the same rows by the parts of one."""
    graph, first = module.graph, nodes[0]
    parts = [weight_of(module, Linear.of(node).weight) for node in nodes]
    weights, scales = map(torch.cat, zip(*parts, strict=True))
    sizes = [len(of_outputs) for _, of_outputs in parts]
    biases = [_bias_of(module, node, size) for node, size in zip(nodes, sizes, strict=True)]
    with graph.inserting_before(first):
        weight, scale, bias = (
            constant(module, f"{first.name}_merged{name}", value)
            for name, value in (("", weights), ("_scales", scales), ("_bias", torch.cat(biases)))
        )
        packed = call_function(graph, prepack("linear"), (weight, None))
        none = Activation()
        how = (none.name, list(none.arguments), none.algorithm)
        merged = call_function(graph, row_linear(), (codes, packed, scale, bias, None, sum(sizes), *how))
        slices = parts_of(graph, merged, sizes)
    merged.meta["operators"] = [node.meta["operator"] for node in nodes if "operator" in node.meta]
    merged.meta[DYNAMIC_KERNEL] = True
    for node, part in zip(nodes, slices, strict=True):
        put_in_place(part, node, [node])


def _bias_of(module: fx.GraphModule, node: fx.Node, outputs: int) -> torch.Tensor:
    bias = Linear.of(node).bias
    value = None if bias is None else constant_value(module, bias)
    return (
        torch.zeros(outputs, dtype=torch.float32, device="cpu")
        if value is None
        else value.detach().float().expand(outputs)
    )


OPERATORS = (
    PlannedOperator((rounded_rows(),), {"C": functools.partial(row_linears.round_rows, row_linears.CODES)}),
    PlannedOperator((row_linear(),), {"C": functools.partial(row_linears.multiply, row_linears.CODES)}),
)
