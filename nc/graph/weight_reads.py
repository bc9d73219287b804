"""Which operators of a captured graph read weights.

They read them directly or through what is computed from constants alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from nc.formats.reasons import Cause, Reason
from nc.graph.catalogue import JOINS, LOW_BIT, MOVES, is_float_tensor, op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS

#: Operators that pick rows or points of a table.
LOOK_UPS = frozenset(
    {
        "embedding",
        "embedding_bag",
        "index",
        "index_select",
        "gather",
        "take",
        "take_along_dim",
        "grid_sampler",
    }
)
#: Further elementwise operators, which torch does not tag as such.
_ELEMENTWISE = frozenset({"prelu", "rsub", "clamp", "type_as", "to"})
#: Of a batch norm, "layer_norm" and the like.
_NORM = "norm"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that an operator reads.

    Attributes:
        name: of the parameter or buffer.
        shape: of what the graph holds.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def varying(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on the values of an input, not on constants and sizes alone."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(
            n in found for n in node.all_input_nodes if op_name(n) != "sym_size"
        ):
            found.add(node)
    return found


def weights_read(module: fx.GraphModule, parameters: Collection[str]) -> dict[fx.Node, tuple[Weight, ...]]:
    """For each operator that depends on an input, the weights that it reads.

    Operators that read none are left out.

    A weight has two or more dimensions, and is a parameter, or a buffer that a product reads. What reads a
    view of it, or what is computed from it and other constants, reads it. Operators that work element by
    element, or move values, read a weight only where two of its dimensions are larger than 1: others are
    vectors, such as scales of channels.

    Args:
        module: captured graph.
        parameters: names of the model's parameters.
    """
    changing = varying(module)
    constants: dict[fx.Node, tuple[fx.Node, ...]] = {}
    found: dict[fx.Node, tuple[Weight, ...]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            is_table = is_float_tensor(node) and node.meta["val"].dim() > 1
            constants[node] = (node,) if is_table else ()
            continue
        read = tuple(
            dict.fromkeys(c for n in node.all_input_nodes if n not in changing for c in constants.get(n, ()))
        )
        if node not in changing:
            constants[node] = read if _holds_tensors(node) else ()
        elif op_name(node) in LOW_BIT:
            found[node] = (_low_bit(node),)
        elif node.op == "call_function" and (weights := _of(node, read, parameters)):
            found[node] = weights
    return found


def _holds_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (TENSORS, tuple, list)) or value is None


def _of(node: fx.Node, constants: Collection[fx.Node], parameters: Collection[str]) -> tuple[Weight, ...]:
    lone = is_elementwise(node) or moves(node)
    weights = []
    for constant in constants:
        name, shape = str(constant.meta.get("fqn") or constant.target), tuple(constant.meta["val"].shape)
        is_vector = sum(size > 1 for size in shape) < 2
        if lone and (is_vector or name not in parameters):
            continue
        if name in parameters or (not is_vector and not is_norm(node)):
            weights.append(Weight(name, shape))
    return tuple(weights)


def _low_bit(node: fx.Node) -> Weight:
    """Return the weight of a low-bit operator, whose codes may be packed."""
    arguments = schema_arguments(node)
    codes = arguments["codes"]
    features = arguments["in_features"] if "in_features" in arguments else arguments["features"]
    return Weight(
        str(codes.meta.get("fqn") or codes.target).removesuffix(".codes"),
        (codes.meta["val"].shape[0], features),
    )


def is_elementwise(node: fx.Node) -> bool:
    """Return whether an operator computes each value of its result from the values at the same place."""
    return (
        torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node).rstrip("_") in _ELEMENTWISE
    )


def moves(node: fx.Node) -> bool:
    """Return whether an operator only moves values, or puts them together."""
    name = op_name(node).rstrip("_")
    return name not in LOOK_UPS and (
        name in MOVES or name in JOINS or name in ("copy", "index_put", "slice_scatter", "select_scatter")
    )


def is_norm(node: fx.Node) -> bool:
    """Return whether an operator normalises: its weights are factors and offsets."""
    return _NORM in op_name(node)


def why_float(node: fx.Node) -> Reason:
    """Why an operator that reads a weight, and is of no quantizable kind, stays fp32."""
    name = op_name(node)
    if name in LOOK_UPS:
        return Cause.LOOK_UP()
    if is_elementwise(node):
        return Cause.ELEMENTWISE()
    if moves(node):
        return Cause.MOVED()
    if "::" in name:
        return Cause.CUSTOM_OPERATOR(kind=name)
    return Cause.NO_INTEGER_FORM(kind=name)
