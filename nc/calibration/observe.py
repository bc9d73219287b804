"""Graph + edges → the same graph with observers in it. Values flow past them untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from nc.graph.fx_utils import call_function, copy_module, sizes_of
from nc.graph.placement import Edge, works_in_place
from nc.observers import ALGORITHMS, Observer
from nc.observers.base import Key, Statistic


def observer_key(edge: Edge) -> Key:
    """Key of the observer that collects the statistic for an edge."""
    return edge.origin.name, ALGORITHMS[edge.spec.algo].statistic.name


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """A tensor, and the statistic to collect of it.

    Attributes:
        node: the tensor.
        reader: the operator's node that reads it.
        statistic: which one.
        operator: name of the operator.
    """

    node: fx.Node
    reader: fx.Node
    statistic: Statistic
    operator: str


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """Which tokens of texts are padding.

    Attributes:
        mask: name of the input [texts, length] that is 0 for them.
        texts: names of sizes that are the number of texts.
        length: name of the size that is their length.
    """

    mask: str
    texts: frozenset[str]
    length: str

    def dims_of(self, node: fx.Node) -> tuple[int, int] | None:
        """Return the dimensions of texts and tokens of a value, the first of both; None where it has none."""
        names = sizes_of(node)
        texts = next((dim for dim, name in enumerate(names) if name in self.texts), None)
        return None if texts is None or self.length not in names else (texts, names.index(self.length))


def without_padding(value: torch.Tensor, mask: torch.Tensor, texts: int, tokens: int) -> torch.Tensor:
    """Return the values of real tokens.

    Args:
        value: has `texts` and `tokens` as two of its dimensions.
        mask: [texts, tokens], 0 for padding.
        texts: the first of them.
        tokens: the second one.

    Returns:
        [real tokens, ...], the other dimensions in order; `value` where all tokens are real, or none is.
    """
    real = mask != 0
    if bool(real.all()) or not bool(real.any()) or real.shape != (value.shape[texts], value.shape[tokens]):
        return value
    return value.movedim((texts, tokens), (0, 1))[real]


def watches_for(edges: Sequence[Edge]) -> list[Watch]:
    """Return the statistics from which the ranges of edges are found."""
    return [Watch(e.origin, e.reader, ALGORITHMS[e.spec.algo].statistic, e.operator) for e in edges]


def observed_module(
    module: fx.GraphModule, watches: Sequence[Watch], padding: Padding | None = None
) -> tuple[fx.GraphModule, dict[Key, Observer]]:
    """Return a copy of `module` with one observer per tensor and statistic; constants are shared.

    Args:
        module: the graph.
        watches: what to collect.
        padding: of texts, which no observer sees; None: all tokens are real.

    Returns:
        The copy, and the observers by (node name, statistic).
    """
    copy, mapping = copy_module(module)
    graph = copy.graph
    observers: dict[Key, Observer] = {}
    names: dict[Key, str] = {}
    in_place = works_in_place(module)
    for watch in watches:
        key = watch.node.name, watch.statistic.name
        if key in observers and not in_place:
            continue
        if key not in observers:
            observers[key] = Observer(watch.statistic, watch.operator)
            names[key] = f"observer_{len(observers)}"
            copy.add_submodule(names[key], observers[key])
        where = (
            graph.inserting_before(mapping[watch.reader])
            if in_place
            else graph.inserting_after(mapping[watch.node])
        )
        with where:
            dims = None if padding is None else padding.dims_of(watch.node)
            if padding is None or dims is None:
                graph.call_module(names[key], (mapping[watch.node],))
                continue
            inputs = (node for node in graph.nodes if node.op == "placeholder")
            mask = next(node for node in inputs if node.name == padding.mask)
            real = call_function(graph, without_padding, (mapping[watch.node], mask, *dims))
        with graph.inserting_after(real):
            graph.call_module(names[key], (real,))
    copy.recompile()
    return copy, observers
