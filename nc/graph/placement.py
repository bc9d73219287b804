"""Where quantize/dequantize pairs are placed. Accuracy and speed both depend on this.

Quantization is asked for by the *inputs* of integer operators, never by outputs: a tensor that no integer operator reads stays fp32.
Three rules follow from how integer engines fuse:

* a pair sits directly in front of the operator that asks, behind activations (relu, gelu) that the engine fuses into the producer;
* values that are only moved or pooled keep the scale of the tensor that they come from, and pools between two integer operators get a
  pair in front as well, so that they run on codes, unless somebody else needs their input in fp32 (the gate of a squeeze-and-excitation
  block): then the pool reads that too;
* of an addition, one side that a convolution or linear computes only for it stays fp32: engines add the other as a post-operation.
  An addition that stays fp32 behind a convolution reads its shortcut as codes where these exist.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from nc.graph.catalogue import BINARY, MOVES, first_input, kind_of_node, op_name
from nc.graph.dataflow import is_fused_side, origin
from nc.graph.views import Binary, Weighted
from nc.plan import Plan
from nc.spec import Capabilities, TensorSpec
from nc.spec.reasons import Cause


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """One input of one operator that gets a quantize/dequantize pair.

    Attributes:
        reader: the operator's node.
        index: position among its arguments.
        source: the node that is read there.
        origin: the node whose range gives the qparams.
        spec: how it is quantized.
        operator: name of the operator that asked.
    """

    reader: fx.Node
    index: int
    source: fx.Node
    origin: fx.Node
    spec: TensorSpec
    operator: str


def edge_key(edge: Edge) -> tuple[str, TensorSpec]:
    """What edges that share qparams have in common: the tensor and how it is quantized."""
    return edge.origin.name, edge.spec


def works_in_place(module: fx.GraphModule) -> bool:
    """Whether some operator changes a tensor in place: a value then depends on when it is read, so pairs go directly to each reader."""
    return any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in module.graph.nodes)


def place(module: fx.GraphModule, plan: Plan, capabilities: Capabilities, pools: set[fx.Node]) -> list[Edge]:
    """All edges that get a pair, in execution order of their readers; inputs of dynamic operators have no ranges, so no edges.

    Args:
        module: the captured graph.
        plan: what is to be int8.
        capabilities: of the backend that it was planned for.
        pools: those that run on codes, see `dataflow.pools_on_codes`; which tensors have ranges depends on them.
    """
    specs = {d.operator: d.spec for d in plan.quantized if d.spec.mode == "static"}
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    int8 = {n for n in order if n.meta.get("operator") in specs}
    depth = _depths(module, int8)
    edges: dict[tuple[fx.Node, int], Edge] = {}
    if works_in_place(module):
        for node in (n for n in order if n in int8):
            operator = node.meta["operator"]
            for index, source in enumerate(_activations(node)):
                edges[node, index] = Edge(node, index, source, source, specs[operator].input(index), operator)
        return list(edges.values())
    for node in (n for n in order if n in int8):
        operator = node.meta["operator"]
        for index in _quantized_inputs(node, int8, depth, capabilities.fused_add):
            source = _activations(node)[index]
            _add_edge(edges, pools, Edge(node, index, source, origin(source, pools), specs[operator].input(index), operator))
    given_up = {d.operator for d in plan.decisions if d.stays_for(Cause.NO_READER)}
    for node in (n for n in order if n.meta.get("operator") in given_up):
        _share_codes(edges, node, int8, capabilities.fused_add)
    return sorted(edges.values(), key=lambda e: (order[e.reader], e.index))


def _share_codes(edges: dict[tuple[fx.Node, int], Edge], add: fx.Node, int8: set[fx.Node], fused_add: frozenset[str]) -> None:
    """Let a fp32 addition behind a convolution read the shortcut's codes, where an int8 operator needs those anyway.

    So the last block of a network without a head leaves the block before it wholly in int8, instead of asking it for fp32 values too.
    """
    sides = Binary.of(add).sides
    for index, other in enumerate(sides):
        side = sides[1 - index]
        if isinstance(side, fx.Node) and is_fused_side(add, side, int8, fused_add) and (kind_of_node(side) or "").startswith("conv"):
            shared = next((e for e in edges.values() if e.source is other), None)
            if shared is not None:
                edges[add, index] = dataclasses.replace(shared, reader=add, index=index)


def _add_edge(edges: dict[tuple[fx.Node, int], Edge], pools: set[fx.Node], edge: Edge) -> None:
    """Enter an edge, and one for every pool in front of it that runs on codes."""
    edges.setdefault((edge.reader, edge.index), edge)
    node = edge.source
    while (op_name(node) in MOVES or node in pools) and (source := first_input(node)) is not None:
        if node in pools:
            edges.setdefault((node, 0), dataclasses.replace(edge, reader=node, index=0, source=source, origin=origin(source, pools)))
        node = source


def _activations(node: fx.Node) -> tuple[fx.Node, ...]:
    """The activations that an integer operator reads, at the positions that they have among its arguments."""
    return Binary.of(node).sides if kind_of_node(node) in BINARY else (Weighted.of(node).input,)


def _quantized_inputs(node: fx.Node, int8: set[fx.Node], depth: dict[fx.Node, int], fused_add: frozenset[str]) -> list[int]:
    """Positions of the activations that an operator reads as codes."""
    inputs = _activations(node)
    anchors = [i for i, side in enumerate(inputs) if is_fused_side(node, side, int8, fused_add)] if kind_of_node(node) == "add" else []
    if not anchors:
        return list(range(len(inputs)))
    # of two candidates the longer branch: fusers know the residual block whose shortcut, not its main path, is quantized
    fused = max(anchors, key=lambda i: depth[inputs[i]])
    return [1 - fused]


def _depths(module: fx.GraphModule, int8: set[fx.Node]) -> dict[fx.Node, int]:
    """Number of integer operators on the longest path to each node."""
    depth: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0) + (node in int8)
    return depth
