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

#: What is added to a score that is not to count is less than this; old models add -10000.
HIDDEN = -5e3
#: Tokens for which all masks are tried, and lengths for which some are.
_ALL, _SOME = 5, (1, 37)
#: The most tokens of a text, and with a table of what is added by places.
MOST_TOKENS, MOST_PLACES = 2048, 512


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """What masks add to the scores of real tokens.

    Attributes:
        table: fp32, [heads or 1, places, places], by the places of the query and the key in their text; None:
            nothing.
        by_distance: the table depends on the difference of both places only.
    """

    table: torch.Tensor | None
    by_distance: bool = True


class Unlike(Exception):
    """A mask does something else than hiding keys; the text says what."""


#: int64 mask of texts [texts, length] → what it makes of it.
Computed = Callable[[torch.Tensor], torch.Tensor]


def values_of(
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


def inputs_read(node: fx.Node) -> frozenset[fx.Node]:
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


def meaning(added: Computed, places: int, *, masked: bool = True) -> Meaning:
    """Return what masks add to scores.

    Args:
        added: mask → fp32 [texts, heads or 1, length, length]; less than `HIDDEN` for what is hidden.
        places: the most places of a text.
        masked: tokens may be masked; False: the model reads no mask.

    Raises:
        Unlike: they do not hide the keys that are masked, or depend on other tokens than a query and a key.
    """
    masks = tried(places) if masked else [torch.ones_like(mask[:1]) for mask in tried(places)]
    tables = [_checked(added, mask) for mask in masks]
    count = min(places, MOST_PLACES)
    table = _lowest(added(torch.ones(1, count, dtype=torch.int64)))[0]
    if not any(each.any() for each in (table, *tables)):
        longest = torch.ones(1, min(places, MOST_TOKENS), dtype=torch.int64)
        if not _lowest(added(longest)).any():
            return Meaning(None)
    for small in tables:
        n = small.shape[-1]
        if n <= count and not torch.equal(small.expand_as(table[:, :n, :n]), table[:, :n, :n]):
            msg = "what they add to scores depends on the length of the texts"
            raise Unlike(msg)
    return Meaning(table.clone(), torch.equal(table[:, 1:, 1:], table[:, :-1, :-1]))


def is_one(value: Computed, places: int) -> bool:
    """Return whether a value [texts or 1, (1,) length, 1] is 1 for all real tokens, whatever is masked."""
    for mask in tried(places):
        found = value(mask)
        found = found.reshape(found.shape[0], 1, *found.shape[-2:])
        real = mask.bool()[:, None, :, None].expand(mask.shape[0], *found.shape[1:])
        if not bool((found.expand_as(real)[real] == 1).all()):
            return False
    return True


def tried(places: int) -> list[torch.Tensor]:
    """Return masks: all of a few tokens, and some of many: padding on both sides, and holes."""
    every = torch.tensor(list(itertools.product((0, 1), repeat=min(_ALL, places))), dtype=torch.int64)
    masks = [every[every.any(1)]]
    generator = torch.Generator().manual_seed(0)
    for length in _SOME:
        n = min(length, places)
        some = torch.rand(6, n, generator=generator, dtype=torch.float32) < 0.7
        some[0], some[1, n // 2 :], some[2, : n // 2] = True, False, False
        some[:, n // 3] = True
        masks.append(some.long())
    return masks


def _checked(added: Computed, mask: torch.Tensor) -> torch.Tensor:
    """Return what is added for places that all are seen, [heads or 1, length, length]; raises `Unlike`."""
    whole = _lowest(added(torch.ones(1, mask.shape[1], dtype=torch.int64)))[0]
    if (torch.diagonal(whole, dim1=-2, dim2=-1) < HIDDEN).any():
        msg = "a token does not see itself"
        raise Unlike(msg)
    found, real = _lowest(added(mask)), mask.bool()
    expected = whole[None].where(real[:, None, None, :], torch.finfo(torch.float32).min)
    queries = real[:, None, :, None]
    if not torch.equal(found.where(queries, 0), expected.expand_as(found).where(queries, 0)):
        msg = "they do not just hide the keys that are masked"
        raise Unlike(msg)
    return whole


def _lowest(added: torch.Tensor) -> torch.Tensor:
    """Return what is added, with the lowest number for what is hidden."""
    return added.masked_fill(added < HIDDEN, torch.finfo(torch.float32).min)
