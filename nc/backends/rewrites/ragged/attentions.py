"""Attentions of a graph over tokens: queries, keys and values, and all that is added to scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.rewrites.ragged.masks import HIDDEN
from nc.graph.catalogue import kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import call_function, constant_value, sizes_of
from nc.graph.views import Binary, Softmax, set_argument

_aten = torch.ops.aten
#: Operators that may stand between a softmax and its product with values.
_ROUNDINGS = frozenset(
    {"quantize_per_tensor", "dequantize_per_tensor", "quantize_dequantize_dynamic", "to_bf16", "from_bf16"}
    | {"dropout", "to"}
)


class OtherAttention(Exception):
    """An attention is computed in a way of which nothing is known here; the text says which."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Term:
    """What changes scores by the places of a query and a key.

    Attributes:
        node: changes them.
        scores: before that.
        value: what is added, or a mask of booleans.
        hides: the mask says where scores are hidden; False: it says where they are seen, or is added.
    """

    node: fx.Node
    scores: fx.Node
    value: fx.Node
    hides: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenAttention:
    """An attention of tokens to tokens.

    Attributes:
        query: [..., tokens, width].
        key: [..., width, tokens] where it is `turned`, else [..., tokens, width].
        value: [..., tokens, width].
        turned: see `key`.
        terms: what changes the scores, the last first.
        causal: a query sees keys up to its own only.
        result: the node that gives the result.
        between: nodes from the scores to before the result.
        softmax: of the scores; None where the attention is one operator.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    turned: bool
    terms: tuple[Term, ...]
    causal: bool
    result: fx.Node
    between: frozenset[fx.Node]
    softmax: fx.Node | None

    def set_term(self, graph: fx.Graph, value: fx.Node) -> None:
        """Let a value be all that is added to the scores."""
        if self.softmax is None:
            set_argument(self.result, "attn_mask", value)
            set_argument(self.result, "is_causal", False)
            return
        last, *others = self.terms or (None,)
        for other in others:
            assert other is not None
            other.node.replace_all_uses_with(other.scores)
        if last is not None and op_name(last.node) == "add":
            scores = others[-1].scores if others and last.scores is others[0].node else last.scores
            last.node.args, last.node.kwargs = (scores, value), {}
            return
        if last is not None:
            last.node.replace_all_uses_with(last.scores)
        before = Softmax.of(self.softmax).input
        with graph.inserting_before(self.softmax):
            add = call_function(graph, _aten.add.Tensor, (before, value))
        add.meta["val"] = before.meta["val"]
        set_argument(self.softmax, "input", add)


def attentions(module: fx.GraphModule) -> list[TokenAttention]:
    """Return the attentions of a graph whose inputs are tokens.

    Raises:
        OtherAttention: one is computed otherwise than known here.
    """
    found = []
    for node in module.graph.nodes:
        if op_name(node) == "scaled_dot_product_attention":
            found.append(_whole(node))
        elif op_name(node) in ("softmax", "_softmax") and _is_square(node):
            found.append(_in_parts(module, node))
    return found


def _is_square(node: object) -> bool:
    """Whether the last two dimensions of a tensor have the same free size: it has a number for two tokens."""
    names = sizes_of(node)
    return len(names) > 1 and names[-1] == names[-2] and not names[-1].isdigit()


def _whole(node: fx.Node) -> TokenAttention:
    """Return an attention that is one operator."""
    a = schema_arguments(node)
    mask = a["attn_mask"]
    terms = () if mask is None else (Term(node, node, mask),)
    if a["dropout_p"] or not isinstance(a["query"], fx.Node):
        msg = f"{node.name} drops values"
        raise OtherAttention(msg)
    return TokenAttention(
        a["query"], a["key"], a["value"], False, terms, bool(a["is_causal"]), node, frozenset(), None
    )


def _in_parts(module: fx.GraphModule, softmax: fx.Node) -> TokenAttention:
    """Return the attention whose softmax a node is."""
    view, names = Softmax.of(softmax), sizes_of(softmax)
    if view.dim not in (-1, len(names) - 1):
        msg = f"{softmax.name} is not over keys"
        raise OtherAttention(msg)
    between, terms, node, is_scaled = [softmax], [], view.input, False
    while kind_of_node(node) != "matmul":
        between.append(node)
        before, term = _before(module, node)
        if term is not None:
            if is_scaled:
                msg = f"a factor follows {node.name} ({op_name(node)}), which changes scores"
                raise OtherAttention(msg)
            terms.append(term)
        is_scaled = is_scaled or op_name(node) in ("mul", "div")
        node = before
    between.append(node)
    query, key = Binary.of(node).sides
    if any(map(_is_square, (query, key))):
        msg = f"{node.name} is not a product of queries and keys"
        raise OtherAttention(msg)
    result = _weighed(softmax, between)
    value = Binary.of(result).right
    return TokenAttention(query, key, value, True, tuple(terms), False, result, frozenset(between), softmax)


def _before(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Term | None]:
    """Return the scores that a node changes, and how; raises `OtherAttention`."""
    name, before, term = op_name(node), None, None
    if name == "add" and Binary.of(node).alpha == 1:
        before, other = _scores_first(*Binary.of(node).sides)
        term = Term(node, before, other) if isinstance(other, fx.Node) else None
    elif name in ("mul", "div") and _number_of(module, Binary.of(node).right) is not None:
        before = Binary.of(node).left
    elif name == "masked_fill" and _is_low(module, schema_arguments(node)["value"]):
        before = schema_arguments(node)["self"]
        term = Term(node, before, schema_arguments(node)["mask"], hides=True)
    elif name == "where":
        a = schema_arguments(node)
        before = a["self"] if isinstance(a["self"], fx.Node) and _is_square(a["self"]) else None
        if before is not None and _is_low(module, a["other"]):
            term = Term(node, before, a["condition"])
    elif name in ("to", "type_as", "contiguous", "clone", "to_bf16", "from_bf16"):
        before = node.all_input_nodes[0]
    if not isinstance(before, fx.Node) or (term is not None and not isinstance(term.value, fx.Node)):
        msg = f"{node.name} ({name}) is between the scores and the softmax of an attention"
        raise OtherAttention(msg)
    return before, term


def _scores_first(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the scores and what is added: no mask comes from a product."""
    if isinstance(right, fx.Node) and _comes_from_products(right):
        return right, left
    return left, right


def _comes_from_products(node: fx.Node) -> bool:
    """Whether a value depends on a product of activations or weights."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if kind_of_node(each) not in (None, "add"):
            return True
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return False


def _number_of(module: fx.GraphModule, value: object) -> float | None:
    """Return a number that is the same for all inputs; None for what is not one."""
    if isinstance(value, (int, float)):
        return float(value)
    constant = constant_value(module, value)
    return float(constant) if constant is not None and constant.numel() == 1 else None


def _is_low(module: fx.GraphModule, value: object) -> bool:
    """Whether a score that is replaced by a value is hidden."""
    number = _number_of(module, value)
    return number is not None and number < HIDDEN


def _weighed(softmax: fx.Node, between: list[fx.Node]) -> fx.Node:
    """Return the product of probabilities and values; what rounds the probabilities goes `between`."""
    node = softmax
    while True:
        readers = list(node.users)
        if len(readers) != 1:
            msg = f"something else than one product reads the probabilities {node.name}"
            raise OtherAttention(msg)
        (reader,) = readers
        if kind_of_node(reader) == "matmul" and Binary.of(reader).left is node:
            return reader
        if op_name(reader) not in _ROUNDINGS or reader.all_input_nodes[0] is not node:
            msg = f"{reader.name} ({op_name(reader)}) is between a softmax and its product with values"
            raise OtherAttention(msg)
        between.append(reader)
        node = reader


def dead_terms(found: Sequence[TokenAttention]) -> dict[fx.Node, set[fx.Node]]:
    """Return what nodes read that changes scores, and is not needed once masks are left out."""
    dropped: dict[fx.Node, set[fx.Node]] = {}
    for each in found:
        for term in each.terms:
            dropped.setdefault(term.node, set()).add(term.value)
    return dropped
