"""Attention with fp32 matmuls → `scaled_dot_product_attention`, which does not write the scores to memory."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import torch
from torch import fx

from nc.graph.catalogue import is_float_tensor, kind_of_node, op_name
from nc.graph.fx_utils import call_function, take_over
from nc.graph.placement import works_in_place
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary, Softmax, Transpose

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """`softmax(factor * query @ key.T + biases) @ value`.

    Attributes:
        query: fp32, [batch, heads, rows, size].
        key: fp32, [batch, heads, columns, size].
        value: fp32, [batch, heads, columns, size].
        factor: what the scores are multiplied by.
        biases: what is added to them.
        inner: what becomes superfluous, from the softmax back to the first product.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    factor: float
    biases: tuple[fx.Node, ...]
    inner: tuple[fx.Node, ...]


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
            bias: fx.Node | None = None
            for term in found.biases:
                bias = term if bias is None else call_function(module.graph, _aten.add.Tensor, (bias, term))
            arguments = (found.query, found.key, found.value, bias)
            call = call_function(
                module.graph, _aten.scaled_dot_product_attention.default, arguments, {"scale": found.factor}
            )
        take_over(call, node)
        call.meta["operators"] = [n.meta["operator"] for n in (node, *found.inner) if "operator" in n.meta]
        node.replace_all_uses_with(call)
        for old in (node, *found.inner):
            module.graph.erase_node(old)


def attention_of(node: fx.Node) -> Attention | None:
    """Return the attention whose last product a node is.

    None is returned when it is none, or something else reads its scores.
    """
    if kind_of_node(node) != "matmul" or not _is_4d(node):
        return None
    softmax, value = Binary.of(node).sides
    if (
        not _is_own(softmax, "softmax")
        or Softmax.of(softmax).dim not in (-1, 3)
        or Softmax.of(softmax).dtype not in (None, torch.float32)
    ):
        return None
    behind = _behind_scores(Softmax.of(softmax).input)
    if behind is None or not same_shape(behind.scores.meta["val"].shape, softmax.meta["val"].shape):
        return None  # a bias with more rows or heads than the scores
    query, key = Binary.of(behind.scores).sides
    if (
        op_name(key) != "transpose"
        or not _is_4d(key)
        or {Transpose.of(key).dim0 % 4, Transpose.of(key).dim1 % 4} != {2, 3}
    ):
        return None
    batches = [side.meta["val"].shape[:2] for side in (query, key, value)]
    if not all(same_shape(batches[0], other) for other in batches[1:]) or not (
        _is_4d(query) and _is_4d(value)
    ):
        return None  # `matmul` repeats what is missing, the one call does not
    inner = [softmax, *behind.nodes, behind.scores, *([key] if len(key.users) == 1 else [])]
    return Attention(query, Transpose.of(key).input, value, behind.factor, behind.biases, tuple(inner))


@dataclasses.dataclass(frozen=True, slots=True)
class _Behind:
    """What lies between a product of four dimensions and a softmax.

    It is `factor * scores + biases`, computed by `nodes`, last first.
    """

    scores: fx.Node
    factor: float
    biases: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


def _behind_scores(node: object) -> _Behind | None:
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
        node, bias = (left, right) if _holds_product(left) else (right, left)
        if not isinstance(bias, fx.Node) or not is_float_tensor(bias):
            return None
        biases.append(bias)
    return (
        _Behind(node, factor, tuple(biases), tuple(nodes))
        if _is_own(node, "matmul") and _is_4d(node)
        else None
    )


def _holds_product(node: object) -> bool:
    """Whether a side of an addition leads back to the scores rather than to a mask."""
    while _is_own(node, "add", "mul", "div"):
        left, right = Binary.of(node).sides
        if op_name(node) == "add":
            return _holds_product(left) or _holds_product(right)
        node = left
    return _is_own(node, "matmul")


def _is_own(node: object, *names: str) -> TypeGuard[fx.Node]:
    """Whether a node is one of these kinds or operators, and only one other reads it."""
    return (
        isinstance(node, fx.Node) and (kind_of_node(node) or op_name(node)) in names and len(node.users) == 1
    )


def _is_4d(node: fx.Node) -> bool:
    return bool(node.meta["val"].dim() == 4)
