"""Graph + edges → the same graph with observers in it. Values flow past them untouched."""

from __future__ import annotations

import dataclasses

from torch import fx

from nc.graph.fx_utils import copy_module
from nc.graph.placement import Edge, works_in_place
from nc.observers import ALGORITHMS, Observer
from nc.observers.base import Key, Statistic
from nc.observers.channels import CHANNEL_EXTREMES
from nc.plan import Plan


def observer_key(edge: Edge) -> Key:
    """Which observer tells the range of an edge."""
    return edge.origin.name, ALGORITHMS[edge.spec.algo].statistic.name


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """A tensor and what is to be collected of it.

    Attributes:
        node: the tensor.
        reader: the operator's node that reads it.
        statistic: what is collected.
        operator: the operator's name.
    """

    node: fx.Node
    reader: fx.Node
    statistic: Statistic
    operator: str


def watches_for(module: fx.GraphModule, edges: list[Edge], plan: Plan) -> list[Watch]:
    """What the ranges of edges need, and what SmoothQuant does."""
    found = [Watch(e.origin, e.reader, ALGORITHMS[e.spec.algo].statistic, e.operator) for e in edges]
    smooth = {d.operator for d in plan.quantized if d.spec.smooth is not None}
    readers = [n for n in module.graph.nodes if n.meta.get("operator") in smooth]
    return found + [Watch(n.args[0], n, CHANNEL_EXTREMES, n.meta["operator"]) for n in readers]


def observed_module(module: fx.GraphModule, watches: list[Watch]) -> tuple[fx.GraphModule, dict[Key, Observer]]:
    """A copy of `module`, sharing its constants, that feeds one observer per tensor and statistic.

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
        where = graph.inserting_before(mapping[watch.reader]) if in_place else graph.inserting_after(mapping[watch.node])
        with where:
            graph.call_module(names[key], (mapping[watch.node],))
    copy.recompile()
    return copy, observers
