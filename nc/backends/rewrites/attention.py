"""Attention with fp32 matmuls → `scaled_dot_product_attention`, which does not write the scores to memory."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeGuard

import torch
from torch import fx

from nc.graph.catalogue import input_node, is_float_tensor, kind_of_node, op_name
from nc.graph.fx_utils import call_function, take_over
from nc.graph.placement import works_in_place
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary, DynamicQDQ, Softmax, Transpose
from nc.ops import from_bf16, quantize_dequantize_dynamic, to_bf16

_aten = torch.ops.aten
#: How products are rounded.
Rounding = Literal["", "bf16", "dynamic"]


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """`softmax(factor * query @ key.T + biases) @ value`.

    Attributes:
        query: fp32, [batch, heads, rows, size].
        key: fp32, [batch, heads, columns, size].
        value: fp32, [batch, heads, columns, size].
        factor: what the scores are multiplied by.
        biases: what is added to them.
        inner: what becomes superfluous, from the softmax back to the first product; roundings too.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    factor: float
    biases: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]

    def call(self, graph: fx.Graph, operator: torch._ops.OpOverload) -> fx.Node:
        """Return a call with the arguments of torch's attention, inserted where the graph inserts."""
        bias: fx.Node | None = None
        for term in self.biases:
            bias = term if bias is None else call_function(graph, _aten.add.Tensor, (bias, term))
        return call_function(
            graph, operator, (self.query, self.key, self.value, bias), {"scale": self.factor}
        )


def recompose(module: fx.GraphModule) -> None:
    """Replace every attention of four dimensions by one call.

    Not where operators work in place: there a value depends on when it is read.
    """
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        found = attention_of(node)
        if found is None:
            continue
        with module.graph.inserting_before(node):
            call = found.call(module.graph, _aten.scaled_dot_product_attention.default)
        take_over(call, node)
        call.meta["operators"] = [n.meta["operator"] for n in (node, *found.inner) if "operator" in n.meta]
        node.replace_all_uses_with(call)
        for old in (node, *found.inner):
            module.graph.erase_node(old)


def attention_of(node: fx.Node, *, rounded: Rounding = "") -> Attention | None:
    """Return the attention whose last product a node is.

    None is returned when it is none, or something else reads its scores.

    Args:
        node: any node.
        rounded: "bf16": the sides and results of both products are rounded to bf16. The result is of the
            first one; of the second one the caller looks for it. "dynamic": the sides are rounded with ranges
            of each call.
    """
    if kind_of_node(node) != "matmul" or not _is_4d(node):
        return None
    (softmax, of_softmax), (value, of_value) = (_side(side, rounded) for side in Binary.of(node).sides)
    behind = _behind_scores(Softmax.of(softmax).input, rounded) if _is_over_keys(softmax) else None
    if behind is None or not same_shape(behind.scores.meta["val"].shape, softmax.meta["val"].shape):
        return None  # a bias with more rows or heads than the scores
    (query, of_query), (key, of_key) = (_side(side, rounded) for side in Binary.of(behind.scores).sides)
    if not _is_transposed(key) or not _have_same_batches(query, key, value):
        return None
    transposed = [key] if len(key.users) == 1 else []
    inner = [*of_softmax, softmax, *behind.nodes, behind.scores, *of_key, *transposed, *of_query, *of_value]
    return Attention(query, Transpose.of(key).input, value, behind.factor, behind.biases, tuple(inner))


def _is_over_keys(node: object) -> TypeGuard[fx.Node]:
    """Tell whether a node is a softmax in fp32 over the last of four dimensions, which one product reads."""
    if not _is_own(node, "softmax"):
        return False
    softmax = Softmax.of(node)
    return softmax.dim in (-1, 3) and softmax.dtype in (None, torch.float32)


def _is_transposed(key: object) -> TypeGuard[fx.Node]:
    """Return whether a side is a tensor of four dimensions whose last two are exchanged."""
    if not isinstance(key, fx.Node) or op_name(key) != "transpose" or not _is_4d(key):
        return False
    return {Transpose.of(key).dim0 % 4, Transpose.of(key).dim1 % 4} == {2, 3}


def _have_same_batches(*sides: object) -> bool:
    """Return whether all have four dimensions, and the same first two: `matmul` repeats what is missing."""
    nodes = [side for side in sides if isinstance(side, fx.Node) and _is_4d(side)]
    first = [node.meta["val"].shape[:2] for node in nodes]
    return len(nodes) == len(sides) and all(same_shape(first[0], other) for other in first[1:])


@dataclasses.dataclass(frozen=True, slots=True)
class _Behind:
    """The operators between a product of four dimensions and a softmax.

    It is `factor * scores + biases`, computed by `nodes`, last first.
    """

    scores: fx.Node
    factor: float
    biases: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


def _side(node: Any, rounded: Rounding) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return what a product reads, and the nodes that round it: None for what is not `rounded`."""
    if rounded == "dynamic":
        ranges = isinstance(node, fx.Node) and node.target is quantize_dequantize_dynamic
        return (DynamicQDQ.of(node).input, (node,)) if ranges else (None, ())
    return _result(node, rounded)


def _result(node: Any, rounded: Rounding) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return the same of what a product gives, which ranges of each call are not for."""
    if rounded != "bf16":
        return node, ()
    low = input_node(node) if isinstance(node, fx.Node) and node.target is from_bf16 else None
    return (None, ()) if low is None or low.target is not to_bf16 else (input_node(low), (node, low))


def _behind_scores(node: object, rounded: Rounding) -> _Behind | None:
    """Return the product that a node leads back to through factors, and then biases.

    None is returned where there is something else.
    """
    factor = 1.0
    nodes: list[fx.Node] = []
    biases: list[fx.Node] = []
    while _is_own(node, "add", "mul", "div"):
        nodes.append(node)
        view = Binary.of(node)
        left, right = view.sides
        if op_name(node) != "add":
            if not isinstance(right, (int, float)) or view.rounding_mode is not None:
                return None  # a factor that depends on the inputs, or a division that rounds
            factor = factor * right if op_name(node) == "mul" else factor / right
            node = left
            continue
        if factor != 1.0 or view.alpha != 1:
            return None  # the factor would hold for the bias too
        node, bias = (left, right) if _holds_product(left, rounded) else (right, left)
        if not isinstance(bias, fx.Node) or not is_float_tensor(bias):
            return None
        biases.append(bias)
    product, roundings = _result(node, rounded)
    own = _is_own(product, "matmul") and all(len(each.users) == 1 for each in roundings)
    if not own or not _is_4d(product):
        return None
    return _Behind(product, factor, tuple(biases), (*nodes, *roundings))


def _holds_product(node: object, rounded: Rounding) -> bool:
    """Return whether a side of an addition leads back to the scores rather than to a mask."""
    while _is_own(node, "add", "mul", "div"):
        left, right = Binary.of(node).sides
        if op_name(node) == "add":
            return _holds_product(left, rounded) or _holds_product(right, rounded)
        node = left
    return _is_own(_result(node, rounded)[0], "matmul")


def _is_own(node: object, *names: str) -> TypeGuard[fx.Node]:
    """Return whether a node is one of these kinds or operators, and only one other reads it."""
    return (
        isinstance(node, fx.Node) and (kind_of_node(node) or op_name(node)) in names and len(node.users) == 1
    )


def _is_4d(node: fx.Node) -> bool:
    return bool(node.meta["val"].dim() == 4)
