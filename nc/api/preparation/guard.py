"""Never slower: int8 that costs time is undone, by measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from nc.api.quantized import QuantizedModel
from nc.formats.reasons import Cause, Reason
from nc.graph.plan import Applied
from nc.profiling.latency import milliseconds

#: How many times as fast as fp32 int8 has to be.
LEAST_GAIN = 1.02
NAME = "guard"
#: Makes the model with some operators left in fp32, measured again.
Remake = Callable[[Mapping[str, Reason]], QuantizedModel]


def undone(model: QuantizedModel, remake: Remake, least_gain: float = LEAST_GAIN) -> QuantizedModel:
    """Return the model without the int8 kernels that cost time; all in fp32 where nothing is gained.

    In doubt, as on a busy machine, it stays as it is, and the verdict says so.

    Args:
        model: with its verdict.
        remake: see `Remake`.
        least_gain: how many times as fast as fp32 it has to be.
    """
    best = model
    verdict = model.verdict
    if verdict is not None and verdict.certain and verdict.losses:
        int8 = {d.operator for d in model.graph.plan.quantized}
        slower = {
            name: Cause.SLOWER(int8=milliseconds(cost.engine_ms), fp32=milliseconds(cost.fp32_ms))
            for cost in verdict.losses
            for name in cost.operators
            if name in int8
        }
        if len(slower) < len(int8):
            other = remake(slower)
            if _ratio(other) > _ratio(best):
                best = _noted(other, f"{len(slower)} int8 operators that cost time are in fp32")
    ratio = _ratio(best)
    if 0 < ratio < least_gain:
        why = Cause.NOTHING_GAINED(ratio=f"{ratio:.2f}")
        floats = remake({d.operator: why for d in best.graph.plan.quantized})
        return _noted(floats, f"int8 is {ratio:.2f} times as fast as fp32: all is in fp32")
    return best


def _ratio(model: QuantizedModel) -> float:
    """Return how many times as fast as fp32 a model is; 0 if this is not known."""
    verdict = model.verdict
    return verdict.ratio if verdict is not None and verdict.certain else 0.0


def _noted(model: QuantizedModel, text: str) -> QuantizedModel:
    """Return the model with a line about what was done, which artefacts keep."""
    note = Applied(NAME, (), text)
    graph = dataclasses.replace(model.graph, applied=(*model.graph.applied, note))
    return QuantizedModel(graph, model.engine, model.backend, model.chosen, model.verdict)
