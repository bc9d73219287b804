"""A graph with nodes of its own."""

from __future__ import annotations

from torch import fx


def copy_module(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy whose nodes can be changed, and the copy of each node; constants are shared."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, mapping))
    return fx.GraphModule(module, graph), mapping
