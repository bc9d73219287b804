"""What a mask does to attention, found by computing it for all masks of a few tokens and some of many.

A mask is computed from the mask that the user gives, places of tokens, and constants. For real tokens it must
add the same to a score whatever else is masked, and hide each key that is masked. Then leaving masked tokens
out changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.tensor_meta import TENSORS

#: What is added to a score that is not to count is less than this; fp16 has nothing below -65504.
HIDDEN = -1e4
#: Tokens for which all masks are tried, and lengths for which some are.
_ALL, _SOME = 5, (1, 37, 130)
#: Places for which a table of what is added is made.
MOST_PLACES = 512


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """What a mask adds to the scores of real tokens.

    Attributes:
        table: fp32, [heads or 1, places, places], by the places of the query and the key in their text; None:
            nothing.
        by_distance: the table depends on the difference of both places only.
    """

    table: torch.Tensor | None
    by_distance: bool = True


class Unlike(Exception):
    """A mask does something else than hiding keys; the text says what."""


def computed(
    module: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Mapping[fx.Node, torch.Tensor]
) -> list[Any]:
    """Return values of nodes, from as few other nodes as they need.

    Args:
        module: the graph.
        nodes: whose values.
        inputs: values of placeholders.
    """
    values: dict[fx.Node, Any] = dict(inputs)
    needed: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in values:
            needed.add(node)
            waiting += node.all_input_nodes
    with torch.no_grad():
        for node in module.graph.nodes:
            if node not in needed:
                continue
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            values[node] = target(*args, **kwargs)
    return [values[node] for node in nodes]


def read_values(node: fx.Node) -> frozenset[fx.Node]:
    """Return the placeholders whose values, and not only sizes, a node depends on."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in seen or not isinstance(each.meta.get("val"), (*TENSORS, list, tuple)):
            continue
        seen.add(each)
        if each.op == "placeholder":
            found.add(each)
        waiting += each.all_input_nodes
    return frozenset(found)


def meaning(
    values: Callable[[torch.Tensor], torch.Tensor], places: int
) -> Meaning:
    """Return what a mask adds to scores.

    Args:
        values: int64 mask [texts, length] of the user's → what is added, [texts or 1, heads or 1, length or
            1, length].
        places: the most places of a text.

    Raises:
        Unlike: it does not hide masked keys, or depends on other tokens than a query and a key.
    """
    tables = [_checked(values, mask) for mask in _tried(places)]
    if all(not table.any() for table in tables):
        return Meaning(None)
    count = min(places, MOST_PLACES)
    table = _seen(values(torch.ones(1, count, dtype=torch.int64)), 1, count)[0]
    for small in tables:
        n = small.shape[-1]
        if n <= count and not torch.equal(small.expand_as(table[:, :n, :n]), table[:, :n, :n]):
            msg = "what it adds to scores depends on the length of the texts"
            raise Unlike(msg)
    distance = all(
        torch.equal(table[:, 1:, 1:], table[:, :-1, :-1]) for _ in range(1)
    )
    return Meaning(table, distance)


def _tried(places: int) -> list[torch.Tensor]:
    """Return masks: all of a few tokens, and some of many: padding on both sides, and holes."""
    every = torch.tensor(list(itertools.product((0, 1), repeat=min(_ALL, places))))
    masks = [every[every.any(1)]]
    generator = torch.Generator().manual_seed(0)
    for length in _SOME:
        n = min(length, places)
        some = torch.rand(6, n, generator=generator) < 0.7
        some[0], some[1, n // 2 :], some[2, : n // 2] = True, False, False
        some[:, n // 3] = True
        masks.append(some.long())
    return masks


def _checked(values: Callable[[torch.Tensor], torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Return what is added for places that all are seen; raises `Unlike`."""
    texts, n = mask.shape
    whole = _seen(values(torch.ones(1, n, dtype=torch.int64)), 1, n)[0]
    if (torch.diagonal(whole, dim1=-2, dim2=-1) < HIDDEN).any():
        msg = "a token does not see itself"
        raise Unlike(msg)
    found = _seen(values(mask), texts, n)
    real = mask.bool()
    keys = real[:, None, None, :]
    queries = real[:, None, :, None]
    expected = whole[None].where(keys, torch.finfo(torch.float32).min)
    if not torch.equal(found.where(queries, 0), expected.expand_as(found).where(queries, 0)):
        msg = "it does not just hide the keys that are masked"
        raise Unlike(msg)
    return whole


def _seen(added: torch.Tensor, texts: int, n: int) -> torch.Tensor:
    """Return what is added, the lowest number for what is hidden; [texts, heads or 1, n, n]."""
    if added.dtype is torch.bool:
        added = torch.zeros(()).where(added, torch.finfo(torch.float32).min)
    if added.dim() > 4 or added.shape[-1] not in (1, n):
        msg = f"it has the sizes {tuple(added.shape)}"
        raise Unlike(msg)
    added = added[(None,) * (4 - added.dim())].float()
    heads = added.shape[1]
    lowest = torch.finfo(torch.float32).min
    return added.masked_fill(added < HIDDEN, lowest).expand(texts, heads, n, n)
