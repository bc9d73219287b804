"""Operators with packed low-bit weights → plain ones.

Their weights are computed from codes, or else are in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from nc.errors import UnsupportedError
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import add_constant, call_function, call_operator, constant_of, take_over
from nc.numerics.low_bit import stored_weight
from nc.numerics.packed_weight import PARTS, PackedWeight
from nc.ops import quant_embedding, quant_linear, quantize_dequantize_dynamic

_aten = torch.ops.aten


#: (graph, a linear, its weight, whose format is uniform) → fp32 values of the weight, [N, K], in a form that
#: keeps its codes.
Spell = Callable[[fx.GraphModule, fx.Node, PackedWeight], fx.Node]


def replace_low_bit(module: fx.GraphModule, spell: Spell) -> None:
    """Linears and embeddings with constant low-bit weights become plain ones.

    Weights that are computed stay as they are.

    Args:
        module: changed in place.
        spell: how weights of linears are written.
    """
    for node in [n for n in module.graph.nodes if n.target in (quant_linear, quant_embedding)]:
        arguments = schema_arguments(node)
        weight = _constant_weight(module, arguments)
        if weight is None:
            continue
        new = (
            _linear(module, node, arguments, weight, spell)
            if node.target is quant_linear
            else _embedding(module, node, arguments, weight)
        )
        take_over(new, node)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def _linear(
    module: fx.GraphModule, node: fx.Node, arguments: dict[str, Any], weight: PackedWeight, spell: Spell
) -> fx.Node:
    graph, x = module.graph, arguments["x"]
    kind = x.meta["val"].dtype
    values = (
        spell(module, node, weight)
        if _is_uniform(weight)
        else constant(module, node, "weight", weight.dequantize())
    )
    with graph.inserting_before(node):
        if arguments["act_dtype"] == "bf16":
            x, values = (to_dtype(graph, to_dtype(graph, side, torch.bfloat16), kind) for side in (x, values))
        elif arguments["act_dtype"] == "int8":
            sizes = x.meta["val"]  # later passes read them
            x = call_operator(graph, quantize_dequantize_dynamic, x, True, -127, 127, True, torch.int8)
            x.meta["val"] = sizes
        elif arguments["act_dtype"] != "fp32":
            what = f"OpenVINO and ONNX have no linear with act_dtype={arguments['act_dtype']!r}"
            msg = f'{what}: use act_dtype="int8" (per token), or backend="native".'
            raise UnsupportedError(msg)
        if kind != torch.float32:
            values = to_dtype(graph, values, kind)
        return call_function(graph, _aten.linear.default, (x, values, arguments["bias"]))


def _embedding(
    module: fx.GraphModule, node: fx.Node, arguments: dict[str, Any], weight: PackedWeight
) -> fx.Node:
    table = constant(module, node, "weight", weight.dequantize().to(arguments["result"]))
    with module.graph.inserting_before(node):
        return call_function(module.graph, _aten.embedding.default, (table, arguments["ids"]))


def _is_uniform(weight: PackedWeight) -> bool:
    """Return whether the values of a weight are (code - zero) · scale."""
    return (
        weight.form.dtype.kind == "integer"
        and not weight.form.float_zero
        and weight.shape[1] % weight.scale.shape[1] == 0
    )


def zero_codes(weight: PackedWeight) -> torch.Tensor:
    """Return the codes of 0 of a uniform weight, uint8, [N, G]."""
    params = weight.params
    zero = (
        torch.full_like(params.scale, 2.0 ** (weight.form.bits - 1)) if params.zero is None else params.zero
    )
    return zero.to(torch.uint8)


def to_dtype(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a conversion, inserted where the graph inserts."""
    return call_function(graph, _aten.to.dtype, (value, dtype))


def constant(module: fx.GraphModule, node: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """Return a constant that belongs to an operator, inserted before it."""
    return add_constant(module, node, f"{node.name}_{name}", value, f"{node.name}.{name}")


def _constant_weight(module: fx.GraphModule, arguments: dict[str, Any]) -> PackedWeight | None:
    """Return the weight of a call; None where it is computed."""
    parts = {name: arguments[name] for name in PARTS}
    if any(part is not None and part.op != "get_attr" for part in parts.values()):
        return None
    tensors: dict[str, Any] = {
        name: None if part is None else constant_of(module, part) for name, part in parts.items()
    }
    features = arguments["in_features"] if "in_features" in arguments else arguments["features"]
    return stored_weight(**tensors, dtype=arguments["dtype"], features=features)
