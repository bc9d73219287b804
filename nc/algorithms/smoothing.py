"""SmoothQuant as an algorithm between calibration and quantization; `smooth_quant.py` has the mathematics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import Bound, Context, Needs, Stage
from nc.algorithms.smooth_quant import Smoothed, smooth
from nc.calibration.observe import Watch, observed_module
from nc.errors import StateError
from nc.formats import OpSpec
from nc.graph.plan import Applied, Plan
from nc.graph.views import Weighted
from nc.observers import ALGORITHMS
from nc.observers.channels import CHANNEL_EXTREMES
from nc.observers.minmax import EXTREMES

#: Samples after which no further batch is looked at, to see where smoothing harms.
_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class SmoothQuant:
    """See the module text. Its options belong to each linear: they are in the plan, as `OpSpec.smooth`."""

    name: ClassVar[str] = "smooth_quant"
    stage: ClassVar[Stage] = Stage.STATISTICS

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return the extremes of each channel that a linear reads, and samples.

        Samples are for where a search or a histogram looks at them again.
        """
        specs = _specs(plan)
        readers = [n for n in module.graph.nodes if n.meta.get("operator") in specs]
        watches = tuple(Watch(Weighted.of(n).input, n, CHANNEL_EXTREMES, n.meta["operator"]) for n in readers)
        return Needs(watches, Bound() if _looks_again(specs) else Bound(rows=_ROWS) if specs else None)

    def apply(self, context: Context) -> Applied:
        """Smooth the linears that the plan says.

        The result is the graph, the alphas in the plan, and the statistics of what operators read now.

        Min-max ranges of smoothed tensors follow from the ranges of their channels. Other algorithms need
        histograms, which smoothing changes: they look at the kept calibration samples once more.

        Raises:
            StateError: samples are needed, and none were kept.
        """
        plan, found, specs = context.plan, context.found, _specs(context.plan)
        left = sum(d.unsmoothed for d in plan.quantized)
        note = (
            (f"{left} linears that read the result of a matmul (attention) are quantized without it",)
            if left
            else ()
        )
        if not specs:
            return Applied(self.name, (), "; ".join(("no linears to smooth", *note)))
        if _looks_again(specs) and not context.batches:
            msg = (
                'SmoothQuant with alpha="auto", or with another act_algo than "minmax", looks at '
                "calibration samples again; none were "
                "kept: each batch is larger than 64 MB. Calibrate with smaller batches, or choose a number "
                "for alpha and min-max."
            )
            raise StateError(msg)
        assert found is not None
        channels = {
            name: (state["low"], state["high"])
            for (name, what), state in found.states.items()
            if what == CHANNEL_EXTREMES.name
        }
        result = smooth(context.module, specs, channels, context.batches)
        states, seen = dict(found.states), dict(found.seen)
        for name, (low, high) in result.ranges.items():
            states[name, EXTREMES.name] = {"low": low, "high": high}
            seen[name, EXTREMES.name] = found.seen[result.sources[name], CHANNEL_EXTREMES.name].stretched(
                float(low), float(high)
            )
        watches = _watches(result, specs)
        if watches:
            copy, observers = observed_module(result.module, watches)
            with torch.no_grad():
                for batch in context.batches:
                    copy(*batch)
            states |= {key: observer.state for key, observer in observers.items()}
            seen |= {key: observer.seen for key, observer in observers.items()}
        context.module, context.plan = result.module, _with_alphas(plan, result)
        context.found = dataclasses.replace(found, states=states, seen=seen)
        return Applied(self.name, tuple(result.alphas), "; ".join((_text(result), *note)))


def _specs(plan: Plan) -> dict[str, OpSpec]:
    return {d.operator: d.spec for d in plan.quantized if d.spec.smooth is not None}


def _looks_again(specs: Mapping[str, OpSpec]) -> bool:
    return any(
        (s.smooth is not None and s.smooth.alpha is None)
        or ALGORITHMS[s.input(0).algo].statistic is not EXTREMES
        for s in specs.values()
    )


def _watches(result: Smoothed, specs: Mapping[str, OpSpec]) -> list[Watch]:
    """Return the tensors whose ranges need another statistic than extremes."""
    named = [(n, n.meta["operator"]) for n in result.module.graph.nodes if n.meta.get("operator") in specs]
    watches = [
        Watch(Weighted.of(n).input, n, ALGORITHMS[specs[name].input(0).algo].statistic, name)
        for n, name in named
    ]
    return [w for w in watches if w.statistic is not EXTREMES]


def _text(result: Smoothed) -> str:
    low, high = min(result.alphas.values()), max(result.alphas.values())
    alphas = f"alpha {low:g}" if low == high else f"alpha {low:g} to {high:g}"
    text = (
        f"{len(result.alphas)} linears, {alphas}; folded into what is in front for {len(result.folded)} of "
        "them"
    )
    if not result.worse:
        return text
    names = ", ".join(result.worse[:3]) + (", …" if len(result.worse) > 3 else "")
    return (
        f"{text}; {len(result.worse)} have a larger error on calibration samples than without it ({names}): "
        "give them another alpha"
    )


def _with_alphas(plan: Plan, result: Smoothed) -> Plan:
    decisions = []
    for d in plan.decisions:
        if d.operator in result.alphas and d.spec.smooth is not None:
            options = dataclasses.replace(d.spec.smooth, alpha=result.alphas[d.operator])
            d = dataclasses.replace(d, spec=dataclasses.replace(d.spec, smooth=options))
        decisions.append(d)
    return dataclasses.replace(plan, decisions=tuple(decisions))
