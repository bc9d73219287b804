"""Graph + edges → the same graph with observers in it. Values flow past them untouched."""

from __future__ import annotations

from torch import fx

from nc.graph.placement import Edge, works_in_place
from nc.observers import ALGORITHMS, Observer
from nc.observers.base import Key


def observer_key(edge: Edge) -> Key:
    """Which observer tells the range of an edge."""
    return edge.origin.name, ALGORITHMS[edge.spec.algo].statistic.name


def observed_module(module: fx.GraphModule, edges: list[Edge]) -> tuple[fx.GraphModule, dict[Key, Observer]]:
    """A copy of `module`, sharing its constants, that feeds one observer per tensor and statistic.

    Returns:
        The copy, and the observers by (origin node name, statistic).
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    graph.output(output)
    copy = fx.GraphModule(module, graph)
    observers: dict[Key, Observer] = {}
    names: dict[Key, str] = {}
    in_place = works_in_place(module)
    for edge in edges:
        key = observer_key(edge)
        if key in observers and not in_place:
            continue
        if key not in observers:
            observers[key] = Observer(ALGORITHMS[edge.spec.algo].statistic, edge.operator)
            names[key] = f"observer_{len(observers)}"
            copy.add_submodule(names[key], observers[key])
        where = graph.inserting_before(mapping[edge.reader]) if in_place else graph.inserting_after(mapping[edge.origin])
        with where:
            graph.call_module(names[key], (mapping[edge.origin],))
    copy.recompile()
    return copy, observers
