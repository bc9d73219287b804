"""What a lowered graph is compared with.

It is the QDQ graph, compared kernel by kernel and at its outputs, on any inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.backends.verify import agreement_db, reference_outputs, required_db, shapes
from nc.graph.qdq import QDQGraph
from nc.numerics.metrics import worst_sqnr_db
from nc.proof.kernels import LEAST_DB, KernelCheck, check_kernels, compared_names


class Judge:
    """Compares what computes a lowered graph with the graph that was lowered.

    Args:
        graph: the quantized model; it must stay as it is.
        new_sizes: also plans for other sizes than the example's are compared, when they are made.
        always: compare the kernels for the example even if its outputs are those that the graph knows of
            itself, to `LEAST_DB`.
    """

    def __init__(self, graph: QDQGraph, *, new_sizes: bool = True, always: bool = True) -> None:
        self._graph, self._always = graph, always
        self.new_sizes = new_sizes
        self._quantized = frozenset(d.operator for d in graph.plan.quantized)
        #: Names of the nodes whose values `kernels` can use.
        self.names = compared_names(graph.module, self._quantized)
        #: Gives the graph's own outputs for its example.
        self.expected = functools.cache(functools.partial(reference_outputs, graph))

    def kernels(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[Any],
        values: Mapping[str, torch.Tensor],
        *,
        example: bool,
    ) -> KernelCheck:
        """Compare values that an engine had inside of one call; see `nc.proof.kernels`.

        Args:
            inputs: flat inputs.
            outputs: what the engine gives for them.
            values: name of a node of the quantized graph → the engine's value.
            example: the inputs are those of the graph's example.

        Raises:
            ArtefactCorruptError: the file of the graph's weights was written into.
        """
        known = self._graph.expected
        if example and not self._always and known is not None and shapes(known) == shapes(outputs):
            db = worst_sqnr_db(known, outputs)
            if db >= LEAST_DB:
                return KernelCheck(len(known), 0.0, db, (), (), outputs_only=True)
        self._graph.intact()
        copies = [tensor.clone() for tensor in inputs]
        with torch.device("cpu"):  # whatever the user's default is: it is their call that wants new sizes
            return check_kernels(self._graph.module, self._quantized, copies, outputs, values)

    def why_unlike(self, outputs: Sequence[Any]) -> str:
        """Why outputs for the example are not what the graph computes; "" where they are."""
        return self._text(agreement_db(self._graph, outputs, self.expected))

    def why_unlike_for(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> str:
        """Return the same for other inputs than the example."""
        self._graph.intact()
        with torch.no_grad(), torch.device("cpu"):
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
