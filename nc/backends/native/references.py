"""What a lowered graph is compared with.

It is the QDQ graph, compared kernel by kernel and at its outputs, on any inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.proven import Showing
from nc.backends.verify import agreement_db, reference_outputs, required_db, shapes
from nc.graph.qdq import QDQGraph
from nc.graph.views import returned
from nc.kernels.onednn.descriptions import Desc
from nc.numerics.metrics import worst_sqnr_db
from nc.process.torch_settings import on_cpu
from nc.proof.few_places import FewPlaces
from nc.proof.intermediates import Point, points_at
from nc.proof.kernels import KernelCheck, check_kernels, compared_names, is_comparable


class Reference:
    """Compares what computes a lowered graph with the graph that was lowered.

    Args:
        graph: the quantized model; it must stay as it is.
        new_sizes: also plans for other sizes than the example's are compared, when they are made.
        always: compare the kernels for the example even if its outputs are those that the graph knows of
            itself, to `LEAST_DB`.
    """

    def __init__(self, graph: QDQGraph, *, new_sizes: bool = True, always: bool = True) -> None:
        self._graph, self.always, self.new_sizes = graph, always, new_sizes
        self._quantized = frozenset(d.operator for d in graph.plan.quantized)
        #: Names of the nodes whose values `kernels` can use.
        self.names = compared_names(graph.module, self._quantized)
        self._nodes = {node.name: node for node in graph.module.graph.nodes if node.name in self.names}
        #: Gives the points where values of these names are known.
        self._points = functools.lru_cache(8)(self._points_at)
        #: Gives the graph's own outputs for its example.
        self.expected = functools.cache(functools.partial(reference_outputs, graph))

    def kernels(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any], values: Mapping[str, torch.Tensor]
    ) -> KernelCheck:
        """Compare values that an engine had inside of one call; see `nc.proof.kernels`.

        Args:
            inputs: flat inputs.
            outputs: what the engine gives for them.
            values: name of a node of the quantized graph → the engine's value.

        Raises:
            ArtefactCorruptError: the file of the graph's weights was written into.
        """
        self._graph.intact()
        copies = [tensor.clone() for tensor in inputs]
        with on_cpu():
            return check_kernels(self._graph.module, self._quantized, copies, outputs, values)

    def few_places(
        self,
        inputs: Sequence[torch.Tensor],
        values: Mapping[str, Desc],
        outputs: Sequence[Desc | None],
        wanted: Sequence[Showing] | None,
    ) -> FewPlaces:
        """Return a comparison of a few places of an engine's values, see `nc.proof.few_places`.

        Args:
            inputs: flat inputs.
            values: name of a node of the quantized graph → how the engine has its value in memory.
            outputs: layouts of the engine's outputs; None for an output that is not a tensor.
            wanted: of kernels, what shows whether they are right; outputs always do. None: all values.

        Raises:
            ArtefactCorruptError: the file of the graph's weights was written into.
        """
        self._graph.intact()
        module = self._graph.module
        descs = {
            node: values[name]
            for name, node in self._nodes.items()
            if name in values and is_comparable(node, values[name].dtype)
        }
        descs |= {
            leaf: desc
            for leaf, desc in zip(returned(module), outputs, strict=True)
            if desc is not None and isinstance(leaf, fx.Node) and leaf.op == "call_function"
        }
        points = self._points(frozenset(descs))
        chosen = points if wanted is None else self._chosen(points, wanted)
        with torch.no_grad(), on_cpu():
            return FewPlaces(module, points, chosen, inputs, {n: desc.sizes for n, desc in descs.items()})

    def _chosen(self, points: Sequence[Point], wanted: Sequence[Showing]) -> Sequence[Point]:
        """Return the outputs, and for each kernel the points that show it; all points where none does."""
        chosen = {point for point in points if point.node.name not in self.names}
        for each in wanted:
            mine = [
                point
                for point in points
                if point.node.name in each.names or not each.operators.isdisjoint(point.operators)
            ]
            if not mine and (each.operators or each.names):
                return points
            chosen.update(mine)
        return [point for point in points if point in chosen]

    def _points_at(self, nodes: frozenset[fx.Node]) -> tuple[Point, ...]:
        return points_at(self._graph.module, [n for n in nodes if n.name in self.names], self._quantized)

    def why_unlike(self, outputs: Sequence[Any]) -> str:
        """Why outputs for the example are not what the graph computes; "" where they are."""
        return self._text(agreement_db(self._graph, outputs, self.expected))

    def why_unlike_for(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> str:
        """Return the same for other inputs than the example."""
        self._graph.intact()
        with torch.no_grad(), on_cpu():
            expected = self._graph.module(*(tensor.clone() for tensor in inputs))
        return self._text(worst_sqnr_db(expected, outputs) if shapes(expected) == shapes(outputs) else None)

    def _text(self, found: float | None) -> str:
        required = required_db(self._graph)
        if found is None:
            return "gives outputs of other shapes"
        return (
            f"computes something else: {found:.1f} dB, expected at least {required:.0f}"
            if found < required
            else ""
        )
