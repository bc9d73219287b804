"""QDQ graph → graph of operators that `torch.onnx` translates.

They are spelled so that ONNX Runtime finds its int8 kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import fx

from nc.backends.passes import Pass, run_passes
from nc.backends.program import Program, fold
from nc.backends.program import program as built
from nc.backends.rewrites.low_bit import replace_low_bit, zero_codes
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    call_operator,
    constant_of,
    drop_unused,
    inline,
    take_over,
)
from nc.graph.views import Linear
from nc.numerics.packed_weight import PackedWeight
from nc.ops import dequantize_per_channel, dequantize_per_group, dequantize_per_tensor, quantize_per_tensor

_aten = torch.ops.aten
#: Operators that have an equivalent in ONNX.
KNOWN = (quantize_per_tensor, dequantize_per_tensor, dequantize_per_channel, dequantize_per_group)
_WEIGHTS = (dequantize_per_tensor, dequantize_per_channel, dequantize_per_group)


def program(part: fx.GraphModule, example: Sequence[torch.Tensor]) -> Program:
    """Return the program for a QDQ graph, which stays as it is, and flat inputs of it."""
    return built(part, example, lambda module: run_passes(module, _PASSES))


def _spell_linears(module: fx.GraphModule) -> None:
    """Rewrite linears with codes as weights: a product with the transposed weight, and the bias.

    ONNX Runtime has an int8 kernel for MatMul but uses none for Gemm, and it fuses MatMul and a following Add
    to Gemm if it knows all sizes except the batch. A subtraction of the negative bias gives the same numbers
    and is not fused.
    """
    graph = module.graph
    for node in [n for n in graph.nodes if n.target is _aten.linear.default]:
        view = Linear.of(node)
        if view.weight.target not in _WEIGHTS:
            continue
        weight = _transposed(module, view.weight)
        with graph.inserting_before(node):
            result = call_function(graph, _aten.matmul.default, (view.input, weight))
        take_over(result, node)
        if view.bias is not None:
            result = _plus_bias(module, node, result, view)
            take_over(result, node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        if not view.weight.users:
            graph.erase_node(view.weight)


def _plus_bias(module: fx.GraphModule, node: fx.Node, product: fx.Node, view: Linear) -> fx.Node:
    """Return the product and the bias of a linear."""
    bias = view.bias
    assert bias is not None
    if _becomes_gemm(view.input) and bias.op == "get_attr":
        bias = add_constant(
            module, node, f"{bias.target}_negative", -constant_of(module, bias), str(bias.meta.get("fqn", ""))
        )
        operator = _aten.sub.Tensor
    else:
        operator = _aten.add.Tensor
    with module.graph.inserting_before(node):
        return call_function(module.graph, operator, (product, bias))


def _becomes_gemm(x: fx.Node) -> bool:
    """Return whether ONNX Runtime fuses a MatMul that reads `x` and the following Add into a Gemm.

    It does if `x` is a matrix or all its sizes are fixed.
    """
    shape = x.meta["val"].shape
    return len(shape) == 2 or all(isinstance(size, int) for size in shape)


def _transposed(module: fx.GraphModule, weight: fx.Node) -> fx.Node:
    """Return the dequantize node of the same weight with its last axis first.

    Codes and scales are constants.
    """

    def turned(node: object) -> object:
        if not isinstance(node, fx.Node):
            return node
        value = constant_of(module, node)
        return (
            add_constant(module, weight, f"{node.target}_t", value.t(), str(node.meta.get("fqn", "")))
            if value.dim() == 2
            else node
        )

    codes, *rest = weight.args
    arguments: list[object] = [turned(codes), *map(turned, rest)]
    if weight.target is not dequantize_per_tensor:
        axis = arguments[3]
        assert isinstance(axis, int)
        arguments[3] = 1 - axis % 2
    with module.graph.inserting_before(weight):
        return call_operator(module.graph, weight.target, *arguments)  # type: ignore[arg-type] # arguments of a node, as they were


def _in_groups(module: fx.GraphModule, node: fx.Node, weight: PackedWeight) -> fx.Node:
    """Return a low-bit weight as codes with scales and zero points for each group."""
    size = weight.shape[1] // weight.params.scale.shape[1]
    parts = {"codes": weight.unpacked(), "scales": weight.params.scale, "zeros": zero_codes(weight)}
    bits = 4 if weight.form.bits <= 4 else 8
    codes, scales, zeros = (
        add_constant(module, node, f"{node.name}_{name}_{bits}bit", value, f"{node.name}.{name}")
        for name, value in parts.items()
    )
    with module.graph.inserting_before(node):
        return call_operator(module.graph, dequantize_per_group, codes, scales, zeros, 1, size, torch.uint8)


_PASSES = (
    Pass("low_bit_weights", functools.partial(replace_low_bit, spell=_in_groups)),
    Pass("linears", _spell_linears),
    Pass("constants", functools.partial(fold, keep=KNOWN)),
    Pass("inlined_operators", functools.partial(inline, keep=KNOWN)),
    Pass("unused_constants", drop_unused),
)
