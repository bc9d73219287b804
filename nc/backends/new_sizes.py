"""Compare an engine's outputs with the quantized graph's the first time that inputs have new sizes.

Engines choose kernels by sizes, and some of these are wrong for few sizes only. This is for engines that show no values inside of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.backends.verify import CHANCE_DB, FLOOR_DB, required_db, shapes
from nc.graph.qdq import QDQGraph
from nc.numerics.metrics import worst_sqnr_db
from nc.process.warn import warn

#: Sizes that are known at a time.
_MOST_KEPT = 4096
#: Flat input tensors → flat outputs.
Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


class NewSizes:
    """Calls an engine; for sizes for which it is wrong, the quantized graph computes instead, with a warning.

    Args:
        run: the engine.
        graph: the quantized model; it must stay as it is.
        engine: how it is called in messages.
    """

    def __init__(self, run: Run, graph: QDQGraph, engine: str) -> None:
        self._run, self._graph, self._engine = run, graph, engine
        self._is_right = {_sizes(graph.example): True}
        # other inputs than the example's lose more or less to quantization
        self._required = max(FLOOR_DB, required_db(graph) - CHANCE_DB)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Flat outputs for flat inputs."""
        sizes = _sizes(inputs)
        known = self._is_right.get(sizes)
        if known is not None:
            return self._run(inputs) if known else self._of_graph(inputs)
        outputs = self._run(inputs)
        if torch._C._is_tracing():  # the graph's operators would become part of the trace
            return outputs
        expected = self._of_graph(inputs)
        if not all(map(_tells, (*inputs, *expected))):
            return outputs
        found = worst_sqnr_db(expected, outputs) if shapes(expected) == shapes(outputs) else None
        right = found is not None and found >= self._required
        if len(self._is_right) > _MOST_KEPT:
            self._is_right = {_sizes(self._graph.example): True}
        self._is_right[sizes] = right
        if right:
            return outputs
        what = "gives outputs of other shapes"
        if found is not None:
            what = f"computes something else: {found:.1f} dB, expected at least {self._required:.0f}"
        warn(
            f"For inputs of sizes {', '.join(map(str, sizes))} {self._engine} {what}. The quantized graph itself computes these "
            "sizes, in fp32 and slowly. verify_sizes=False does not compare."
        )
        return expected

    def details(self) -> dict[str, str]:
        """Return what a report says of it; nothing where no new sizes came."""
        others, wrong = len(self._is_right) - 1, sum(not right for right in self._is_right.values())
        if not others:
            return {}
        found = f"{wrong} of them wrong: the quantized graph computes those" if wrong else "none wrong"
        return {"sizes compared": f"{others} beside the example's, {found}"}

    def _of_graph(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad(), torch.device("cpu"):  # whatever the user's default is
            outputs: Sequence[Any] = self._graph.module(*(tensor.clone() for tensor in inputs))
            return outputs


def _tells(value: Any) -> bool:
    """Whether a tensor has anything to compare: inputs of warm-ups are often zeros, and NaN differs from NaN."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return True
    return bool(value.any()) and not bool(value.isnan().any())


def _sizes(inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in inputs)
