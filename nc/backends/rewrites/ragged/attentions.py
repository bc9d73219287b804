"""Attentions of a graph over tokens: queries, keys and values, and all that is added to scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.rewrites.ragged.distances import (
    ROUNDINGS,
    ByDistance,
    by_distance,
    factor_of,
    number_of,
    scaled,
    unrounded,
)
from nc.backends.rewrites.ragged.masks import HIDDEN
from nc.graph.catalogue import kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import call_function, sizes_of
from nc.graph.views import Binary, Softmax, set_argument

_aten = torch.ops.aten
#: Operators that may occur between a softmax and its product with values.
_AFTER_SOFTMAX = ROUNDINGS | {"dropout", "to"}
_RESHAPES = ("reshape", "view", "_unsafe_view")


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
        scores: the products of queries and keys; likewise.
        distances: what is added to them by distance. Queries, keys and values are then those before rounding.
        scale: of the products of these queries and keys.
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
    scores: fx.Node | None = None
    distances: tuple[ByDistance, ...] = ()
    scale: float = 1.0

    @property
    def sides(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

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
    between, terms, node, scale = [softmax], [], view.input, 1.0
    distances: list[ByDistance] = []
    is_scaled = False
    while kind_of_node(node) != "matmul":
        between.append(node)
        before, added = _before(module, node)
        if added is not None and is_scaled:
            msg = f"a factor follows {node.name} ({op_name(node)}), which changes scores"
            raise OtherAttention(msg)
        if isinstance(added, Term):
            terms.append(added)
        elif added is not None:
            distances += added
        if (number := factor_of(module, node)) is not None:
            is_scaled, scale = True, scale * number
        node = before
    between.append(node)
    query, key = Binary.of(node).sides
    if any(map(_is_square, (query, key))):
        msg = f"{node.name} is not a product of queries and keys"
        raise OtherAttention(msg)
    result = _weighed(softmax, between)
    found = TokenAttention(
        query,
        key,
        Binary.of(result).right,
        True,
        tuple(terms),
        False,
        result,
        frozenset(between),
        softmax,
        node,
    )
    return _with_distances(module, found, distances, scale) if distances else found


def _with_distances(
    module: fx.GraphModule, found: TokenAttention, distances: Sequence[ByDistance], scale: float
) -> TokenAttention:
    """Return an attention with scores by distance; raises `OtherAttention` where these are of other rows."""
    query, key = scaled(module, found.query), scaled(module, found.key)
    other = query.turned or not key.turned
    if other or any(each.rows is not (key if each.of_keys else query).node for each in distances):
        msg = f"{found.result.name} adds products of other than its queries and keys to scores"
        raise OtherAttention(msg)
    return dataclasses.replace(
        found,
        query=query.node,
        key=key.node,
        value=unrounded(found.value),
        turned=False,
        distances=tuple(distances),
        scale=scale * query.factor * key.factor,
    )


def leave_rounding_out(found: Sequence[TokenAttention]) -> None:
    """Let attentions with scores by distance read values before they are rounded."""
    for each in found:
        for product in (each.scores, each.result) if each.distances else ():
            assert product is not None, "it is in parts"
            for side in product.all_input_nodes:
                product.replace_input_with(side, unrounded(side))


def _before(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Term | Sequence[ByDistance] | None]:
    """Return the scores that a node changes, and how; raises `OtherAttention`."""
    name, before, term = op_name(node), None, None
    if name == "add" and Binary.of(node).alpha == 1:
        for before, other in (Binary.of(node).sides, Binary.of(node).sides[::-1]):
            distances = by_distance(module, other)
            if distances and isinstance(before, fx.Node):
                return before, distances
        before, other = _scores_first(*Binary.of(node).sides)
        term = Term(node, before, other) if isinstance(other, fx.Node) else None
    elif factor_of(module, node) is not None:
        before = Binary.of(node).left
    elif name == "masked_fill" and _is_low(module, schema_arguments(node)["value"]):
        before = schema_arguments(node)["self"]
        term = Term(node, before, schema_arguments(node)["mask"], hides=True)
    elif name == "where":
        a = schema_arguments(node)
        before = a["self"] if isinstance(a["self"], fx.Node) and _is_square(a["self"]) else None
        if before is not None and _is_low(module, a["other"]):
            term = Term(node, before, a["condition"])
    elif name in ("to", "type_as", "contiguous", "clone", "to_bf16", "from_bf16") or _keeps_pairs(node):
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
    """Return whether a value depends on a product of activations or weights."""
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


def _keeps_pairs(node: fx.Node) -> bool:
    """Return whether a node gives other sizes to what is before queries and keys."""
    return op_name(node) in _RESHAPES and sizes_of(node)[-2:] == sizes_of(node.all_input_nodes[0])[-2:]


def _is_low(module: fx.GraphModule, value: object) -> bool:
    """Return whether a score that is replaced by a value is hidden."""
    number = number_of(module, value)
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
        is_known = op_name(reader) in _AFTER_SOFTMAX or _keeps_pairs(reader)
        if not is_known or reader.all_input_nodes[0] is not node:
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
