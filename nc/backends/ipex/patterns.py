"""Names of the neighbourhood of each int8 operator.

With them a graph is compared with the patterns that the test suite runs.
"""

from __future__ import annotations

from torch import fx

from nc.graph.catalogue import BINARY, MOVES, WEIGHTED, climb, kind_of_node, op_name
from nc.graph.views import Binary, Weighted
from nc.ops import dequantize_per_tensor, quantize_per_tensor


def patterns(module: fx.GraphModule) -> frozenset[str]:
    """Return for each int8 operator what surrounds it.

    That is what made its inputs, its kind, and what reads its result up to the next quantize.
    """
    found = set()
    for node in module.graph.nodes:
        read = _read(node)
        if any(map(_is_dequantize, read)):
            sources = ",".join(_source(a) for a in read if isinstance(a, fx.Node))
            found.add(f"{sources} > {kind_of_node(node)} > {'/'.join(sorted(_readers(node)))}")
    return frozenset(found)


def _read(node: fx.Node) -> tuple[object, ...]:
    """Return what an operator that can be int8 reads: two activations, or an activation and a weight."""
    if kind_of_node(node) in BINARY:
        return Binary.of(node).sides
    return (Weighted.of(node).input, Weighted.of(node).weight) if kind_of_node(node) in WEIGHTED else ()


def _is_dequantize(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is dequantize_per_tensor


def _source(node: fx.Node) -> str:
    """Return what made a tensor, with "q:" in front when it comes as codes."""
    codes = _is_dequantize(node)
    node = climb(node, lambda n: _is_dequantize(n) or n.target is quantize_per_tensor or op_name(n) in MOVES)
    return ("q:" if codes else "") + (op_name(node) or node.op)


def _readers(node: fx.Node) -> set[str]:
    """Names of what reads a result, through moves."""
    names: set[str] = set()
    for user in node.users:
        names |= _readers(user) if op_name(user) in MOVES else {op_name(user) or user.op}
    return names
