"""Low-bit linears as linears of rounded rows (`rows.c`), where that product is the faster one.

A linear with `act_dtype="int8"` and a symmetric weight with one scale for each output computes what a linear
with a dynamic range for each token does. In a graph it becomes one, so that linears of the same tensor share
its codes, and an activation and a sum go with the product. The kernels of `nc.backends.low_bit` compute the
others: they are the faster ones for few rows, and read 4 bits of a weight where this product reads 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from nc.backends.low_bit.graph import constant_weight
from nc.backends.native.plans import row_linears as row_format
from nc.backends.native.plans.ways import need, why_refused
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    call_operator,
    constant_value,
    fqn_of,
    note_value_of,
    take_over,
)
from nc.graph.tensor_meta import TENSORS, dim_of, hint_of
from nc.graph.views import LowBitLinear
from nc.kernels import tuning
from nc.kernels.c_code import abi
from nc.numerics.packed_weight import PackedWeight
from nc.ops import dequantize_per_channel, quant_linear, quantize_dequantize_dynamic

_aten = torch.ops.aten
#: Rows of the example from which this product is taken.
LEAST_ROWS = tuning.LOW_BIT_ROWS.value
#: Where a node has the number of rows that it reads in the example.
_ROWS = "rows_in_example"
#: Codes of so many bits are stored as half a byte by the kernels of few bits.
_HALF = 4


def replace_low_bit_rows(
    module: fx.GraphModule, example: Sequence[torch.Tensor], *, replace: bool = True
) -> None:
    """Replace low-bit linears by dynamic linears with int8 weights, where `rows.c` is the faster one.

    Args:
        module: flat graph.
        example: flat inputs; the number of their rows decides.
        replace: False: only the numbers of rows are noted, for `why_not_rows`.
    """
    nodes = [node for node in module.graph.nodes if node.target is quant_linear]
    sizes = _sizes(module, example) if nodes else {}
    for node in nodes:
        node.meta[_ROWS] = math.prod(_sizes_of(LowBitLinear.of(node).input, sizes)[:-1])
    taken = [node for node in nodes if LowBitLinear.of(node).act_dtype == "int8" and not why_not_rows(node)]
    ranges: dict[fx.Node, fx.Node] = {}
    weights: dict[tuple[object, ...], tuple[str, str]] = {}
    for node in taken if replace else ():
        x = LowBitLinear.of(node).input
        if x not in ranges:  # plans run no graph whose operators work in place: a value stays the same
            ranges[x] = _rounded(module, node, x)
        _replace(module, node, ranges[x], weights)


def why_not_rows(node: fx.Node) -> str:
    """Why `replace_low_bit_rows` leaves a linear to the kernels of few bits; "" where it does not.

    "" is returned for linears that do not ask for int8 activations too.
    """
    if node.target is not quant_linear or LowBitLinear.of(node).act_dtype != "int8":
        return ""
    return why_refused(_check, node)


def _check(node: fx.Node) -> None:
    """Raise `Refused` for a low-bit linear that the functions in C do not compute, or not faster."""
    view, module = LowBitLinear.of(node), node.graph.owning_module
    assert module is not None, "passes run on modules"
    missing = row_format.why_unavailable(row_format.CODES)
    need(not missing, missing)
    weight = constant_weight(module, schema_arguments(node))
    need(weight is not None, "its weight is not a constant")
    assert weight is not None, "it was asked"
    form, (_, inputs) = weight.form, weight.shape
    need(form.dtype.kind == "integer", f"its weight is {form.dtype}, no integer")
    need(form.bits > _HALF, f"it would read {form.dtype} codes as 8 bits, which gains no time")
    need(form.symmetric, "its weight has zero points")
    need(weight.scale.shape[1] == 1, f"its weight has groups of {form.group(inputs)} inputs")
    dtype = getattr(view.input.meta.get("val"), "dtype", None)
    need(dtype is torch.float32, f"its input is {dtype}, not fp32")
    most = abi.CONSTANTS.most_inputs
    need(inputs <= most, f"it has {inputs} inputs, and its C code takes 1 to {most}")
    bias = view.bias
    need(bias is None or constant_value(module, bias) is not None, "its bias is computed from the inputs")
    rows = node.meta.get(_ROWS, 0)
    need(rows >= LEAST_ROWS, f"the example has {rows} rows, and it pays from {LEAST_ROWS} on")
    too_large = row_format.why_not_weight(_codes(weight))
    need(not too_large, too_large)


def _codes(weight: PackedWeight) -> torch.Tensor:
    """Return the codes of a symmetric weight about 0, int8, [N, K]."""
    return (weight.unpacked().view(torch.uint8) - weight.form.middle).view(torch.int8)


def _sizes(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> dict[int | str, int]:
    """Return the sizes in the example, by their names in the graph."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {
        dim_of(size) if not isinstance(size, str) else str(size): given
        for node, tensor in zip(placeholders, example, strict=True)
        if isinstance(value := node.meta.get("val"), TENSORS)
        for size, given in zip(value.shape, tensor.shape, strict=True)
    }


def _sizes_of(node: fx.Node, sizes: dict[int | str, int]) -> list[int]:
    """Return the sizes of a value in the example; 0 where they are not known."""
    shape = getattr(node.meta.get("val"), "shape", (0, 0))
    names = [str(size) if isinstance(size, str) else dim_of(size) for size in shape]
    return [
        name if isinstance(name, int) else sizes.get(name, hint_of(size) or 0)
        for name, size in zip(names, shape, strict=True)
    ]


def _rounded(module: fx.GraphModule, node: fx.Node, x: fx.Node) -> fx.Node:
    """Return a tensor with the values of its codes, one symmetric range for each token."""
    with module.graph.inserting_before(node):
        ranges = call_operator(
            module.graph, quantize_dequantize_dynamic, x, True, -127, 127, True, torch.int8
        )
    note_value_of(ranges, x)
    return ranges


def _replace(
    module: fx.GraphModule,
    node: fx.Node,
    ranges: fx.Node,
    weights: dict[tuple[object, ...], tuple[str, str]],
) -> None:
    view, graph = LowBitLinear.of(node), module.graph
    key = tuple(part and part.target for part in view.parts.values())
    if key not in weights:  # layers that share a weight share its codes
        weight = constant_weight(module, schema_arguments(node))
        assert weight is not None, "it was asked"
        scale = weight.params.scale[:, 0].float()
        named = (("codes", _codes(weight)), ("scale", scale))
        made = [
            add_constant(module, node, f"{node.name}_{name}", value, f"{fqn_of(view.codes)}.{name}")
            for name, value in named
        ]
        codes_name, scale_name = (str(each.target) for each in made)
        weights[key] = codes_name, scale_name
    else:
        made = []
    with graph.inserting_before(node):
        codes, scales = made or [graph.get_attr(name) for name in weights[key]]
        values = call_operator(graph, dequantize_per_channel, codes, scales, None, 0, torch.int8)
        linear = call_function(graph, _aten.linear.default, (ranges, values, view.bias))
    take_over(linear, node)
    linear.meta.update(kind="linear", operator=node.meta.get("operator", node.name))
    node.replace_all_uses_with(linear)
    graph.erase_node(node)
