"""Tensors of a QDQ graph at which engines can be compared: codes, fp32 results of int8 operators, outputs.

A point cuts the graph. An engine may fuse the operators between two points, so points are where values are in
memory anyway: codes, and fp32 values that several operators read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from nc.graph.catalogue import first_input, input_node, is_float_tensor, kind_of_node
from nc.graph.fx_utils import call_operator, copy_module
from nc.graph.placement import works_in_place
from nc.graph.tensor_meta import TENSORS
from nc.graph.views import LowBitLinear, Quantize, returned
from nc.numerics.low_bit import ROUNDED
from nc.ops import (
    RECURRENT,
    dequantize_per_tensor,
    quant_linear,
    quantize_dequantize_dynamic,
    quantize_per_tensor,
)

#: Calls that quantize inside.
_RECURRENT = frozenset(RECURRENT.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One tensor.

    Attributes:
        node: a quantize node, whose codes are compared, or any other node that yields a tensor.
        how: "codes"; "fp32"; "dynamic" and "recurrent" for fp32 results of operators that quantize their
            inputs themselves; "exact" for outputs of another dtype.
        operator: name of the int8 operator between it and the points above that made it; where there is none,
            of another operator, or of the input.
        operators: names of all operators between it and the points above, in execution order.
        above: indices of the points that it is computed from.
    """

    node: fx.Node
    how: str
    operator: str
    operators: tuple[str, ...]
    above: tuple[int, ...]


def outputs_of(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Return the computed tensors that a graph returns, each once, in the order of its outputs."""
    leaves = dict.fromkeys(leaf for leaf in returned(module) if isinstance(leaf, fx.Node))
    return tuple(n for n in leaves if n.op == "call_function" and isinstance(n.meta.get("val"), TENSORS))


def places_of(module: fx.GraphModule, quantized: frozenset[str]) -> tuple[fx.Node, ...]:
    """All that can be compared but outputs, in execution order.

    Args:
        module: a QDQ graph.
        quantized: names of the operators that are to run in int8.
    """
    nodes = list(module.graph.nodes)
    chosen = {n for n in nodes if n.target is quantize_per_tensor}
    if not works_in_place(module):  # else a value depends on when it is read
        for node in (n for n in nodes if n.meta.get("operator") in quantized or n.target in _RECURRENT):
            chosen.update(_results(node))
        chosen.update(
            input_node(n) for n in nodes if n.target is quantize_dequantize_dynamic or n.target in _RECURRENT
        )
        for node in filter(rounds_input, nodes):
            chosen.update((node, LowBitLinear.of(node).input))
    chosen -= {*outputs_of(module)}
    return tuple(n for n in nodes if n in chosen and n.op == "call_function")


def points_at(
    module: fx.GraphModule, places: Iterable[fx.Node], quantized: frozenset[str]
) -> tuple[Point, ...]:
    """Points at these nodes and the outputs, in execution order; `quantized` as in `places_of`."""
    chosen = {*places, *outputs_of(module)}
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    index = {node: i for i, node in enumerate(n for n in order if n in chosen)}
    found = []
    for node in index:
        between, above = _segment(node, index)
        named = [n for n in sorted(between, key=order.__getitem__) if "operator" in n.meta]
        operators = tuple(dict.fromkeys(n.meta["operator"] for n in named))
        int8 = [name for name in operators if name in quantized]
        start = next((n.name for n in between if n.op == "placeholder"), node.name)
        found.append(
            Point(
                node,
                _how(node, between),
                [start, *operators[-1:], *int8[-1:]][-1],
                operators,
                tuple(sorted(above)),
            )
        )
    return tuple(found)


def rounds_input(node: fx.Node) -> bool:
    """Return whether a node is a linear with a low-bit weight that rounds its input to codes."""
    return node.target is quant_linear and LowBitLinear.of(node).act_dtype in ROUNDED


def name_of(place: fx.Node) -> str:
    """How a tensor is called: the value's name, whether it is seen as codes or not."""
    return Quantize.of(place).input.name if place.target is quantize_per_tensor else place.name


def with_outputs(module: fx.GraphModule, places: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a copy of a QDQ graph that also returns the values of nodes, after its outputs.

    For codes, it returns the dequantized fp32 values.
    """
    copy, mapping = copy_module(module)
    output = next(iter(reversed(copy.graph.nodes)))
    values = []
    with copy.graph.inserting_before(output):
        for place in places:
            node = mapping[place]
            if place.target is quantize_per_tensor:
                codes = Quantize.of(place)
                node = call_operator(copy.graph, dequantize_per_tensor, node, *codes.qparams, codes.dtype)
                node.meta["val"] = place.meta.get("val")
            values.append(node)
    output.args = ((*returned(copy), *values),)
    copy.graph.lint()
    copy.recompile()
    return copy


def _results(node: fx.Node) -> list[fx.Node]:
    """Return the fp32 tensors in which the result of an int8 operator is first kept in memory.

    [] if it is kept as codes.
    """
    if node.target in _RECURRENT:
        return list(node.users)
    source = first_input(node)
    if source is not None and source.target is quantize_dequantize_dynamic:
        return [node]
    while len(node.users) == 1 and is_float_tensor(user := next(iter(node.users))):
        if user.target is quantize_per_tensor:
            return []
        node = user
    return [] if all(user.target is quantize_per_tensor for user in node.users) else [node]


def _how(node: fx.Node, between: Collection[fx.Node]) -> str:
    if node.target is quantize_per_tensor:
        return "codes"
    if not is_float_tensor(node):
        return "exact"
    if any(n.target in _RECURRENT for n in between):
        return "recurrent"
    first = first_input(node)
    if kind_of_node(node) == "linear" and first is not None and first.target is quantize_dequantize_dynamic:
        return "dynamic"
    return "fp32"


def _segment(node: fx.Node, index: dict[fx.Node, int]) -> tuple[set[fx.Node], set[int]]:
    """Return the nodes between a point and the points above it, and the indices of those.

    The point itself is included.
    """
    between, above, stack = {node}, set(), [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in index:
                above.add(index[source])
            elif source not in between:
                between.add(source)
                stack.append(source)
    return between, above
