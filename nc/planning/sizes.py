"""Sizes of operators on the example inputs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from nc.capture.capture import Graph
from nc.capture.naming import Operator
from nc.formats.reasons import Cause, Reason
from nc.graph.fx_utils import run_with
from nc.graph.multiply_adds import multiply_adds
from nc.graph.views import Weighted


class Sizes:
    """Sizes of the operators of a graph on its example inputs. The graph runs once, at the first question."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @functools.cached_property
    def _outputs(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}

        def note(node: fx.Node, value: Any, _: object) -> Any:
            if isinstance(value, torch.Tensor):
                shapes[node.name] = tuple(value.shape)
            return value

        run_with(self._graph.module, self._graph.example, note)
        return shapes

    def weight(self, op: Operator) -> tuple[int, ...]:
        """Shape of an operator's constant weight."""
        return tuple(Weighted.of(self.node(op)).weight.meta["val"].shape)

    def node(self, op: Operator) -> fx.Node:
        """Return the node of an operator."""
        return self._nodes[op.node]

    @functools.cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._graph.module.graph.nodes}

    def multiply_adds(self, op: Operator) -> int | None:
        """How many multiply-adds an operator does on the example; None if that is not known."""
        return multiply_adds(self.node(op), self._outputs, reads_weights=bool(op.weights))

    def one_output(self, op: Operator) -> Reason | None:
        """Why dynamic int8 has nothing to gain for a linear of one output; None for all others.

        To find and apply the ranges of its input takes longer than the whole product in fp32: int8 had 0.15
        to 0.69 times fp32's speed at nine sizes (AMD Zen 4). One weight that is large beside the others takes
        the range of all.
        """
        return Cause.ONE_OUTPUT() if op.kind == "linear" and self.weight(op)[0] == 1 else None
