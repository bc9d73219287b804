"""Graph + edges → the same graph with observers in it. Values flow past them untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from nc.graph.fx_utils import copy_module
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


def watches_for(edges: Sequence[Edge]) -> list[Watch]:
    """Return the statistics from which the ranges of edges are found."""
    return [Watch(e.origin, e.reader, ALGORITHMS[e.spec.algo].statistic, e.operator) for e in edges]


def observed_module(
    module: fx.GraphModule, watches: Sequence[Watch]
) -> tuple[fx.GraphModule, dict[Key, Observer]]:
    """Return a copy of `module` with one observer per tensor and statistic; constants are shared.

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
            graph.call_module(names[key], (mapping[watch.node],))
    copy.recompile()
    return copy, observers
