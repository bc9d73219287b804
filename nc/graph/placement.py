"""Where quantize/dequantize pairs are placed. Accuracy and speed both depend on this.

Quantization is asked for by the *inputs* of integer operators, never by outputs: a tensor that no integer
operator reads stays fp32. Three rules follow from how integer engines fuse:

* a pair is directly before the operator that asks for it, after activations (relu, gelu) that the engine
  fuses into the producer;
* values that are only moved or pooled keep the scale of the tensor that they come from. A pool between two
  integer operators also gets a pair before it, so that it runs on codes, unless another operator needs its
  input in fp32 (the gate of a squeeze-and-excitation block): then the pool reads fp32 too;
* the side of an addition that a convolution or linear computes for it alone stays fp32: engines add the other
  side as a post-operation. An addition that stays fp32 after a convolution reads its shortcut as codes if
  these exist.

Some engines fuse whole units only, from codes to codes. For them a plan can ask for outputs as well: then
what a convolution or addition gives becomes codes, whoever reads it, and additions read both sides as codes.
Linears and matmuls have kernels that give fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from nc.formats import Capabilities, OpSpec, TensorFormat
from nc.formats.reasons import Cause
from nc.graph.catalogue import BINARY, MOVES, first_input, kind_of_node, op_name
from nc.graph.dataflow import is_fused_side, origin
from nc.graph.plan import INPUTS, Plan
from nc.graph.views import Binary, Weighted

#: Operators that engines leave out before codes whose range ends where these clip.
_CLIPS = frozenset({"relu", "relu6", "hardtanh", "clamp"})


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """One input of one operator that gets a quantize/dequantize pair.

    Attributes:
        reader: the operator's node; for an output what is read.
        index: position among its arguments; None for an output: all readers without their own pair.
        source: the node that is read there.
        origin: the node whose range gives the qparams.
        spec: how it is quantized.
        operator: name of the operator that asked.
    """

    reader: fx.Node
    index: int | None
    source: fx.Node
    origin: fx.Node
    spec: TensorFormat
    operator: str


def edge_key(edge: Edge) -> tuple[str, TensorFormat]:
    """Return what edges that share qparams have in common: the tensor and how it is quantized."""
    return edge.origin.name, edge.spec


def works_in_place(module: fx.GraphModule) -> bool:
    """Return whether some operator changes a tensor in place.

    A value then depends on when it is read, so pairs go directly to each reader.
    """
    return any(
        isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
        for n in module.graph.nodes
    )


def place(module: fx.GraphModule, plan: Plan, capabilities: Capabilities, pools: set[fx.Node]) -> list[Edge]:
    """All edges that get a pair, in execution order of their readers.

    Inputs of dynamic operators have no ranges, so no edges.

    Args:
        module: the captured graph.
        plan: what is to be int8.
        capabilities: of the backend that it was planned for.
        pools: those that run on codes, see `dataflow.pools_on_codes`; which tensors have ranges depends on
            them.
    """
    specs = {d.operator: d.spec for d in plan.quantized if d.spec.mode == "static"}
    fused_add = capabilities.fused_add if plan.placement == INPUTS else frozenset()
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    int8 = {n for n in order if n.meta.get("operator") in specs}
    readers = [node for node in order if node in int8]
    if works_in_place(module):
        return [edge for node in readers for edge in _edges_in_place(node, specs[node.meta["operator"]])]
    depth = _depths(module, int8)
    edges: dict[tuple[fx.Node, int | None], Edge] = {}
    for node in readers:
        for index in _quantized_inputs(node, int8, depth, fused_add):
            _add_edge(edges, pools, _edge(node, index, pools, specs[node.meta["operator"]]))
    for node in _given_up(order, plan):
        _share_codes(edges, node, int8, fused_add)
    found = sorted(edges.values(), key=lambda e: (order[e.reader], e.index or 0))
    return found if plan.placement == INPUTS else [*found, *_outputs(found, readers, specs)]


def _given_up(nodes: Iterable[fx.Node], plan: Plan) -> list[fx.Node]:
    """Return the operators that stay fp32 because nothing would read their codes."""
    operators = {d.operator for d in plan.decisions if d.stays_for(Cause.NO_READER)}
    return [node for node in nodes if node.meta.get("operator") in operators]


def _edge(node: fx.Node, index: int, pools: set[fx.Node], spec: OpSpec) -> Edge:
    """Return the edge of one input of an operator."""
    source = _activations(node)[index]
    return Edge(node, index, source, origin(source, pools), spec.input(index), node.meta["operator"])


def _edges_in_place(node: fx.Node, spec: OpSpec) -> Iterator[Edge]:
    """Yield the edges of an operator in a model that changes tensors in place.

    Each input gets its own codes.
    """
    for index, source in enumerate(_activations(node)):
        yield Edge(node, index, source, source, spec.input(index), node.meta["operator"])


def _outputs(edges: list[Edge], int8: list[fx.Node], specs: dict[str, OpSpec]) -> list[Edge]:
    """Return an edge for the output of each convolution and addition.

    Each has the ranges that its readers have.
    """
    found = []
    for node in int8:
        kind, operator = kind_of_node(node) or "", node.meta["operator"]
        if not kind.startswith("conv") and kind != "add":
            continue
        own = specs[operator].input(0)
        output, readers = node, list(node.users)
        if len(readers) == 1 and op_name(readers[0]) in _CLIPS and not own.dtype.signed:
            output = readers[0]  # what it cuts off has no codes
        spec = next((e.spec for e in edges if e.origin is output), own)
        found.append(Edge(output, None, output, output, spec, operator))
    return found


def _share_codes(
    edges: dict[tuple[fx.Node, int | None], Edge], add: fx.Node, int8: set[fx.Node], fused_add: frozenset[str]
) -> None:
    """Let an fp32 addition after a convolution read the shortcut's codes.

    This is done if an int8 operator needs those codes anyway.

    So the last block of a network without a head leaves the block before it wholly in int8, instead of asking
    it for fp32 values too.
    """
    sides = Binary.of(add).sides
    for index, other in enumerate(sides):
        side = sides[1 - index]
        if (
            isinstance(side, fx.Node)
            and is_fused_side(add, side, int8, fused_add)
            and (kind_of_node(side) or "").startswith("conv")
        ):
            shared = next((e for e in edges.values() if e.source is other), None)
            if shared is not None:
                edges[add, index] = dataclasses.replace(shared, reader=add, index=index)


def _add_edge(edges: dict[tuple[fx.Node, int | None], Edge], pools: set[fx.Node], edge: Edge) -> None:
    """Enter an edge, and one for every pool before it that runs on codes."""
    edges.setdefault((edge.reader, edge.index), edge)
    node = edge.source
    while (op_name(node) in MOVES or node in pools) and (source := first_input(node)) is not None:
        if node in pools:
            edges.setdefault(
                (node, 0),
                dataclasses.replace(edge, reader=node, index=0, source=source, origin=origin(source, pools)),
            )
        node = source


def _activations(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the activations that an integer operator reads.

    They are at the positions that they have among its arguments.
    """
    return Binary.of(node).sides if kind_of_node(node) in BINARY else (Weighted.of(node).input,)


def _quantized_inputs(
    node: fx.Node, int8: set[fx.Node], depth: dict[fx.Node, int], fused_add: frozenset[str]
) -> list[int]:
    """Positions of the activations that an operator reads as codes."""
    inputs = _activations(node)
    anchors = (
        [i for i, side in enumerate(inputs) if is_fused_side(node, side, int8, fused_add)]
        if kind_of_node(node) == "add"
        else []
    )
    if not anchors:
        return list(range(len(inputs)))
    # of two candidates the longer branch: fusers know the residual block whose shortcut, not its main path,
    # is quantized
    fused = max(anchors, key=lambda i: depth[inputs[i]])
    return [1 - fused]


def _depths(module: fx.GraphModule, int8: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the number of integer operators on the longest path to each node."""
    depth: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        depth[node] = max((depth[n] for n in node.all_input_nodes), default=0) + (node in int8)
    return depth
