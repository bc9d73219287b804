"""Compare an engine's outputs with the quantized graph's the first time that inputs have new sizes.

Engines choose kernels by sizes, and some kernels are wrong for few sizes only. This check is for engines that
do not expose intermediate values. The graph computes the first and the last sample of a batch. If they
differ, the whole batch is compared: samples of a graph may depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.backends.verify import CHANCE_DB, FLOOR_DB, required_db, shapes
from nc.graph.qdq import QDQGraph
from nc.numerics.metrics import worst_sqnr_db
from nc.process.torch_settings import on_cpu
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
        why_wrong: flat input tensors → why the engine is known to be wrong for their sizes, "" for others.
    """

    def __init__(
        self,
        run: Run,
        graph: QDQGraph,
        engine: str,
        why_wrong: Callable[[Sequence[torch.Tensor]], str] | None = None,
    ) -> None:
        self._run, self._graph, self._engine, self._known_wrong = run, graph, engine, why_wrong
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
        why = "" if self._known_wrong is None else self._known_wrong([tensor.clone() for tensor in inputs])
        ends = None if why else _ends(inputs)
        if ends is not None:
            some = self._of_samples(inputs, ends)
            if (
                some is not None
                and all(map(_tells, (*inputs, *some)))
                and not self._why_unlike(some, _samples(outputs, ends))
            ):
                self._note(sizes, is_right=True)
                return outputs
        expected = self._of_graph(inputs)
        if not why:
            if not all(map(_tells, (*inputs, *expected))):
                return outputs
            why = self._why_unlike(expected, outputs)
        self._note(sizes, is_right=not why)
        if not why:
            return outputs
        warn(
            f"{self._engine} is not used for inputs of sizes {', '.join(map(str, sizes))}: {why}. The "
            "quantized graph itself computes these sizes, in fp32 and slowly. verify_sizes=False does not "
            "compare."
        )
        return expected

    def _of_samples(self, inputs: Sequence[torch.Tensor], ends: torch.Tensor) -> Sequence[Any] | None:
        """Return what the graph computes of some samples; None where it computes no part of these inputs."""
        try:
            return self._of_graph(_samples(inputs, ends))
        except Exception:  # the first dimension is not a batch: compare the whole output
            return None

    def _note(self, sizes: tuple[tuple[int, ...], ...], *, is_right: bool) -> None:
        """Keep whether the engine is right for some sizes."""
        if len(self._is_right) > _MOST_KEPT:
            self._is_right = {_sizes(self._graph.example): True}
        self._is_right[sizes] = is_right

    def _why_unlike(self, expected: Sequence[Any], outputs: Sequence[Any]) -> str:
        if shapes(expected) != shapes(outputs):
            return "it gives outputs of other shapes"
        found = worst_sqnr_db(expected, outputs)
        return (
            ""
            if found >= self._required
            else f"it computes something else: {found:.1f} dB, expected at least {self._required:.0f}"
        )

    def details(self) -> dict[str, str]:
        """Return what a report says of it; nothing where no new sizes came."""
        others, wrong = len(self._is_right) - 1, sum(not right for right in self._is_right.values())
        if not others:
            return {}
        found = f"{wrong} of them wrong: the quantized graph computes those" if wrong else "none wrong"
        return {"sizes compared": f"{others} beside the example's, {found}"}

    def _of_graph(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad(), on_cpu():
            outputs: Sequence[Any] = self._graph.module(*(tensor.clone() for tensor in inputs))
            return outputs


def _ends(inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the indices of the first and the last sample; None where a batch has no others."""
    counts = {len(tensor) if tensor.dim() else 0 for tensor in inputs}
    count = counts.pop() if len(counts) == 1 else 0
    return torch.tensor([0, count - 1], dtype=torch.int64, device="cpu") if count > 2 else None


def _samples(values: Sequence[Any], indices: torch.Tensor) -> list[Any]:
    """Return some samples of each tensor with as many as the last index says, others as they are."""
    count = int(indices[-1]) + 1
    return [
        value.index_select(0, indices)
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == count
        else value
        for value in values
    ]


def _tells(value: Any) -> bool:
    """Return whether a tensor has anything to compare.

    Inputs of warm-ups are often zeros, and NaN differs from NaN.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return True
    return bool(value.any()) and not bool(value.isnan().any())


def _sizes(inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in inputs)
