"""SmoothQuant between calibration and quantization: statistics in, a smoothed graph and the statistics of its tensors out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from nc.algorithms.smooth_quant import Smoothed, smooth
from nc.errors import StateError
from nc.graph.catalogue import MOVES, kind_of_node, op_name
from nc.graph.observe import Watch, observed_module
from nc.observers import ALGORITHMS
from nc.observers.channels import CHANNEL_EXTREMES
from nc.observers.minmax import EXTREMES
from nc.plan import Plan
from nc.spec import OpSpec
from nc.statistics import Collected


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
    behind = _behind_attention(module, specs)
    plan, specs = _without(plan, behind), {name: spec for name, spec in specs.items() if name not in behind}
    note = (f"smooth_quant: {len(behind)} linears that read the result of a matmul (attention) are quantized without it",) if behind else ()
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
        seen[name, EXTREMES.name] = next(iter(found.seen.values()))
    watches = _watches(result, specs)
    if watches:
        copy, observers = observed_module(result.module, watches)
        with torch.no_grad():
            for batch in found.samples:
                copy(*batch)
        states |= {key: observer.state for key, observer in observers.items()}
        seen |= {key: observer.seen for key, observer in observers.items()}
    return result.module, _with_alphas(plan, result), dataclasses.replace(found, states=states, seen=seen), (_text(result), *note)


def _behind_attention(module: fx.GraphModule, specs: Mapping[str, OpSpec]) -> set[str]:
    """Linears whose input a matmul made: a multiplication there would cut the attention in front of it out of the engine's int8 groups."""
    found = set()
    for node in module.graph.nodes:
        if node.meta.get("operator") in specs:
            source = node.args[0]
            while op_name(source) in MOVES:
                source = source.args[0]
            if kind_of_node(source) == "matmul":
                found.add(node.meta["operator"])
    return found


def _without(plan: Plan, operators: set[str]) -> Plan:
    """The plan with some operators not smoothed."""
    decisions = (
        dataclasses.replace(d, spec=dataclasses.replace(d.spec, smooth=None)) if d.operator in operators else d for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=tuple(decisions))


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
