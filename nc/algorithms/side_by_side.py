"""Run a graph over all kept batches at once, node by node.

So the fp32 graph and its QDQ graph can go side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.algorithms.base import Batch
from nc.graph.catalogue import PRODUCTS, kind_of_node, works_in_place

#: How many nodes `Stream.ahead` looks at.
_AHEAD = 48


class Stream:
    """One graph and the values of its nodes for all batches, as far as they are computed and still read.

    Args:
        module: flat graph.
        batches: flat inputs, each with its own shapes; they do not change.
    """

    def __init__(self, module: fx.GraphModule, batches: Sequence[Batch]) -> None:
        self._runs = [_interpreter(module, {}) for _ in batches]
        for run, batch in zip(self._runs, batches, strict=True):
            run.args_iter = iter([t.clone() for t in batch])  # graphs may write into their inputs
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._order = {node: i for i, node in enumerate(self._nodes)}
        self._last_use = _last_use(self._nodes)
        self._constant: set[fx.Node] = set()
        self._position = 0

    def __getitem__(self, node: fx.Node) -> list[Any]:
        """Return the values of a node, one per batch."""
        return [run.env[node] for run in self._runs]

    def until(self, node: fx.Node) -> None:
        """Compute a node and all nodes before it."""
        for each in self._nodes[self._position : self._order[node] + 1]:
            for run, value in zip(self._runs, self._values(each), strict=True):
                run.env[each] = value
                for done in self._last_use.get(each, ()):
                    del run.env[done]
        self._position = max(self._position, self._order[node] + 1)

    def replace(self, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        """Go on with other values of a node that was computed last."""
        for run, value in zip(self._runs, values, strict=True):
            run.env[node] = value

    def again(self, node: fx.Node) -> None:
        """Compute a constant again whose values in the module have changed."""
        if node in self._runs[0].env:
            trial = _interpreter(self._module, {})
            for source in node.all_input_nodes:
                trial.env[source] = trial.run_node(source)
            self.replace(node, [trial.run_node(node)] * len(self._runs))

    def outputs(self) -> list[tuple[Any, ...]]:
        """Compute the rest; the graph's flat outputs, one tuple per batch."""
        self.until(self._nodes[-2])
        return [tuple(run.run_node(self._nodes[-1])) for run in self._runs]

    def behind(self, node: fx.Node) -> list[fx.Node]:
        """Return what can be computed from the value of a node now, up to the next products.

        This means activations, additions and norms.
        """
        found: dict[fx.Node, None] = {}
        known = self._runs[0].env
        start = self._order[node] + 1
        for each in self._nodes[start : start + _AHEAD]:
            sources = each.all_input_nodes
            if each.op != "call_function" or not any(s is node or s in found for s in sources):
                continue
            if kind_of_node(each) in PRODUCTS or works_in_place(each):
                break
            if all(s in known or s in found or s.op == "get_attr" for s in sources):
                found[each] = None
        return list(found)

    def ahead(
        self, node: fx.Node, values: Sequence[torch.Tensor], nodes: Sequence[fx.Node], wanted: Collection[str]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the values of some later nodes for other values of a node.

        There is one mapping by name for each batch; the stream does not change.

        Args:
            node: the node that was computed last.
            values: of `node`.
            nodes: of `behind`.
            wanted: names of the nodes whose values are returned.
        """
        for run, value in zip(self._runs, values, strict=True):
            trial = _interpreter(self._module, {**run.env, node: value})
            for each in nodes:
                for source in each.all_input_nodes:
                    if source not in trial.env:
                        trial.env[source] = trial.run_node(source)
                trial.env[each] = trial.run_node(each)
            yield {each.name: trial.env[each] for each in nodes if each.name in wanted}

    def _values(self, node: fx.Node) -> list[Any]:
        if node.op == "get_attr" or (
            node.all_input_nodes and self._constant.issuperset(node.all_input_nodes)
        ):
            self._constant.add(node)  # a weight: the same for every batch
            return [self._runs[0].run_node(node)] * len(self._runs)
        return [run.run_node(node) for run in self._runs]


def _interpreter(module: fx.GraphModule, env: dict[fx.Node, Any]) -> fx.Interpreter:
    made = fx.Interpreter(module, garbage_collect_values=False)
    made.env = env
    return made


def _last_use(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that it is the last to read."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last[source] = node
    result: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        result.setdefault(node, []).append(source)
    return result
