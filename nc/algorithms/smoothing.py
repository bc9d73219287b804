"""SmoothQuant between calibration and quantization: statistics in, a smoothed graph and the statistics of its tensors out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from nc.algorithms.smooth_quant import Smoothed, smooth
from nc.calibration.observe import Watch, observed_module
from nc.calibration.statistics import Collected
from nc.errors import StateError
from nc.observers import ALGORITHMS
from nc.observers.channels import CHANNEL_EXTREMES
from nc.observers.minmax import EXTREMES
from nc.plan import Plan
from nc.spec import OpSpec


def smoothed(module: fx.GraphModule, plan: Plan, found: Collected) -> tuple[fx.GraphModule, Plan, Collected, tuple[str, ...]]:
    """The graph with the linears smoothed that the plan says; all three as they are when it says none.

    Min-max ranges of smoothed tensors follow from the ranges of their channels. Other algorithms need histograms, which smoothing changes:
    they look at the kept calibration samples once more.

    Returns:
        The graph, the plan with the alphas that "auto" found, the statistics with those of the tensors that operators read now, and what
        there is to say of it.

    Raises:
        StateError: samples are needed, and none were kept.
    """
    specs = {d.operator: d.spec for d in plan.quantized if d.spec.smooth is not None}
    left = sum(d.kind == "linear" and d.spec.smooth is None and any(field == "alpha" for field, _, _ in d.fields) for d in plan.quantized)
    note = (f"smooth_quant: {left} linears that read the result of a matmul (attention) are quantized without it",) if left else ()
    if not specs:
        return module, plan, found, note
    again = any(s.smooth.alpha is None or ALGORITHMS[s.activation.algo].statistic is not EXTREMES for s in specs.values())
    if again and not found.samples:
        msg = (
            'SmoothQuant with alpha="auto", or with another act_algo than "minmax", looks at calibration samples again; none were kept: '
            "each batch is larger than 64 MB. Calibrate with smaller batches, or choose a number for alpha and min-max."
        )
        raise StateError(msg)
    channels = {name: (state["low"], state["high"]) for (name, what), state in found.states.items() if what == CHANNEL_EXTREMES.name}
    result = smooth(module, specs, channels, found.samples)
    states, seen = dict(found.states), dict(found.seen)
    for name, (low, high) in result.ranges.items():
        states[name, EXTREMES.name] = {"low": low, "high": high}
        seen[name, EXTREMES.name] = found.seen[result.sources[name], CHANNEL_EXTREMES.name].stretched(float(low), float(high))
    watches = _watches(result, specs)
    if watches:
        copy, observers = observed_module(result.module, watches)
        with torch.no_grad():
            for batch in found.samples:
                copy(*batch)
        states |= {key: observer.state for key, observer in observers.items()}
        seen |= {key: observer.seen for key, observer in observers.items()}
    return result.module, _with_alphas(plan, result), dataclasses.replace(found, states=states, seen=seen), (_text(result), *note)


def _watches(result: Smoothed, specs: Mapping[str, OpSpec]) -> list[Watch]:
    """The tensors whose ranges need another statistic than extremes."""
    nodes = [n for n in result.module.graph.nodes if n.meta.get("operator") in specs]
    watches = [Watch(n.args[0], n, ALGORITHMS[specs[n.meta["operator"]].activation.algo].statistic, n.meta["operator"]) for n in nodes]
    return [w for w in watches if w.statistic is not EXTREMES]


def _text(result: Smoothed) -> str:
    low, high = min(result.alphas.values()), max(result.alphas.values())
    alphas = f"alpha {low:g}" if low == high else f"alpha {low:g} to {high:g}"
    return f"smooth_quant: {len(result.alphas)} linears, {alphas}; folded into what is in front for {len(result.folded)} of them"


def _with_alphas(plan: Plan, result: Smoothed) -> Plan:
    decisions = []
    for d in plan.decisions:
        if d.operator in result.alphas:
            options = dataclasses.replace(d.spec.smooth, alpha=result.alphas[d.operator])
            d = dataclasses.replace(d, spec=dataclasses.replace(d.spec, smooth=options))
        decisions.append(d)
    return dataclasses.replace(plan, decisions=tuple(decisions))
