"""The end of a conversion: the verdict on speed, what the guard undoes, and what is warned of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from nc.api.preparation.base import Conversion
from nc.api.preparation.guard import undone
from nc.api.quantized import QuantizedModel
from nc.backends.reference import NAME as REFERENCE
from nc.backends.verdict import Verdict
from nc.backends.verdict import measure as speed_verdict
from nc.calibration.costly import trouble
from nc.calibration.sensitivity import ranking
from nc.capture.capture import Graph
from nc.config import AnyConfig
from nc.formats.reasons import Reason
from nc.graph.plan import Applied, Plan
from nc.graph.qdq import QDQGraph
from nc.planning.nothing import nothing_quantized
from nc.process.warn import warn
from nc.profiling.latency import milliseconds
from nc.profiling.own_model import OwnModel
from nc.reports.advice import trouble_text


class Lowering(Protocol):
    """What is finished: the preparation of a captured model.

    Attributes:
        graph: the captured model.
        plan: the decisions.
        quant_config: the configuration.
        own: the user's module, while it exists, and its example arguments.
    """

    graph: Graph
    plan: Plan
    quant_config: AnyConfig
    own: OwnModel | None

    def lowered(self, asked: Conversion) -> QuantizedModel:
        """Return the model on an engine, compared with the reference."""

    def leaving(self, reasons: Mapping[str, Reason]) -> Lowering:
        """Return the same preparation with some operators in float."""


def finished(
    prepared: Lowering, q_model: QuantizedModel, asked: Conversion, planned: Plan | None = None
) -> QuantizedModel:
    """Return a quantized model with the verdict on its speed; warns where it is hardly worth it.

    With `guard="undo"`, what costs time is undone. `planned` is what was asked for, if that is not the plan
    of the preparation.
    """
    model = _judged(prepared, q_model, asked)
    if asked.guard == "undo":

        def remake(reasons: Mapping[str, Reason]) -> QuantizedModel:
            other = prepared.leaving(reasons)
            return _judged(other, other.lowered(asked), asked)

        model = undone(model, remake)
    _warn_of_result(planned or prepared.plan, prepared.quant_config, model.graph, model.verdict)
    return model


def _judged(prepared: Lowering, q_model: QuantizedModel, asked: Conversion) -> QuantizedModel:
    """Return the model with its verdict."""
    graph = q_model.graph
    if asked.measure and q_model.backend != REFERENCE:
        # a model that fills lists or caches is another one in each call of the same arguments
        own = None if graph.signature.effects.after is not None else prepared.own
        verdict = speed_verdict(prepared.graph.module, graph, q_model.engine, own=own, quantized=q_model)
        graph = dataclasses.replace(graph, applied=_with_times(graph, verdict))
        return QuantizedModel(graph, q_model.engine, q_model.backend, q_model.chosen, verdict)
    return q_model


def _with_times(graph: QDQGraph, verdict: Verdict) -> tuple[Applied, ...]:
    """Return what was applied; the operators that add most of the error have their times."""
    times = {
        name: f"{milliseconds(cost.engine_ms)}, fp32 {milliseconds(cost.fp32_ms)}"
        + (f" with {len(cost.operators) - 1} more" if len(cost.operators) > 1 else "")
        for cost in verdict.costs or ()
        for name in cost.operators
    }
    timed = ranking(graph.noise, times)
    return tuple(timed if each.algorithm == timed.algorithm else each for each in graph.applied)


def _warn_of_result(planned: Plan, config: AnyConfig, graph: QDQGraph, verdict: Verdict | None) -> None:
    """Warn of a model in which nothing is quantized any more, which is far from fp32, or slower than it."""
    nothing = nothing_quantized(graph.plan, config) if planned.quantized else None
    if nothing is not None:
        warn(nothing.text)
    if trouble(graph.judged):
        modes = [decision.spec.mode for decision in graph.plan.quantized]
        warn(trouble_text(graph.judged, graph.health, modes))
    if graph.plan.quantized and verdict is not None and verdict.certain and round(verdict.ratio, 2) < 1:
        warn(str(verdict))
