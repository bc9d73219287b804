"""Producers and readers of values, also through operators that only move codes; used for q/dq placement."""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import fx

from nc.formats.reasons import Cause, Reason
from nc.graph.catalogue import (
    ACTIVATIONS,
    JOINS,
    MOVES,
    POOLS,
    climb,
    first_input,
    kind_of_node,
    op_name,
    schema_arguments,
)
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary

#: Moves that keep only part of their input: a part can have a much smaller range than the whole.
_PARTS = frozenset(
    {
        "slice",
        "select",
        "narrow",
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "getitem",
        "unsafe_chunk",
        "index_select",
    }
)


def origin(node: fx.Node, pools: set[fx.Node]) -> fx.Node:
    """Return the tensor whose codes `node` carries.

    It goes up through whole moves, and through `pools`, those that run on codes.
    """
    return climb(node, lambda n: op_name(n) in MOVES - _PARTS or n in pools)


def pools_on_codes(module: fx.GraphModule, asked: Set[str]) -> set[fx.Node]:
    """Return the pools of the results of integer operators (`asked`) that no operator reads in fp32.

    With such a reader, a pool on codes would save nothing.
    """
    int8 = {n for n in module.graph.nodes if n.meta.get("operator") in asked}
    pools = {n for n in module.graph.nodes if _takes_codes(n)}
    passing = {n for n in module.graph.nodes if n in int8 or n in pools or op_name(n) in MOVES}
    sources = {n: source for n in pools if (source := first_input(n)) is not None}
    return {n for n, source in sources.items() if producer(source) in int8 and set(source.users) <= passing}


def _takes_codes(node: fx.Node) -> bool:
    """Return whether a pool can run on codes.

    A pool that counts padding cannot: with a zero point other than 0 the code of a zero is not 0.
    """
    if op_name(node) not in POOLS:
        return False
    arguments = schema_arguments(node)
    padded = any(arguments.get("padding") or ())
    return not ("avg" in op_name(node) and padded and arguments["count_include_pad"])


def producer(node: fx.Node) -> fx.Node:
    """Return the operator that computed a tensor.

    Operators after it that an engine fuses into it, or that pass codes on, are skipped.
    """
    return climb(node, lambda n: op_name(n) in MOVES | POOLS | ACTIVATIONS)


def consumers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators that read a tensor, seen through moves, pools, joins and elementwise activations.

    Each comes once.
    """
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                if op_name(user) in MOVES | POOLS | JOINS | ACTIVATIONS:
                    stack.append(user)
                else:
                    yield user


def behind_matmul(module: fx.GraphModule) -> frozenset[str]:
    """Names of the operators whose first input a matmul made: what reads an attention's result."""
    found = set()
    for node in module.graph.nodes:
        source = first_input(node) if kind_of_node(node) is not None else node
        source = climb(source, lambda n: op_name(n) in MOVES) if source is not None else node
        if source is not node and kind_of_node(source) == "matmul":
            found.add(node.meta.get("operator"))
    return frozenset(found - {None})


def weighs_values(matmul: fx.Node) -> bool:
    """Return whether a matmul multiplies what a softmax gives with a tensor of the same batches."""
    left, right = Binary.of(matmul).sides
    if not isinstance(right, fx.Node) or op_name(left) not in ("softmax", "_softmax"):
        return False
    return same_shape(left.meta["val"].shape[:-2], right.meta["val"].shape[:-2])


def is_fused_side(add: fx.Node, side: object, int8: set[fx.Node], fused_add: frozenset[str]) -> bool:
    """Whether an engine can make an addition a post-operation of what computes this side, for it alone."""
    left, right = Binary.of(add).sides
    return side in int8 and kind_of_node(side) in fused_add and set(side.users) == {add} and left is not right


def useless_adds(
    module: fx.GraphModule, asked: set[str], keep: set[str], fused_add: frozenset[str]
) -> dict[str, Reason]:
    """Additions that int8 would not help: operator name → reason.

    An int8 addition pays when an int8 operator produces one side and an int8 operator reads the sum. A
    residual stream that ends in a normalisation (transformers) or in the model's output does neither: its sum
    is an fp32 post-operation of the operator before it.
    """
    int8 = {n for n in module.graph.nodes if n.meta.get("operator") in asked}
    adds = [n for n in int8 if kind_of_node(n) == "add" and n.meta["operator"] not in keep]
    useless: dict[str, Reason] = {}
    changed = True
    while changed:
        changed = False
        for node in adds:
            reason = _why_useless(node, int8, fused_add) if node in int8 else None
            if reason is not None:
                useless[node.meta["operator"]] = reason
                int8.discard(node)
                changed = True
    return useless


def _why_useless(add: fx.Node, int8: set[fx.Node], fused_add: frozenset[str]) -> Reason | None:
    sides = Binary.of(add).sides
    if not any(producer(side) in int8 for side in sides if isinstance(side, fx.Node)):
        return Cause.NO_PRODUCER()
    if not any(reader in int8 for reader in consumers(add)):
        return Cause.NO_READER()
    if fused_add and not any(is_fused_side(add, side, int8, fused_add) for side in sides):
        return Cause.NOT_FUSABLE()
    return None
