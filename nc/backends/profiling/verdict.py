"""Measure whether the engine is faster than fp32 here, and which operators are slower. On the example inputs, within about a second."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from nc.backends.base import EngineModel
from nc.backends.profiling.latency import Round, interleaved, median
from nc.backends.profiling.nodes import node_steps
from nc.backends.profiling.profile import Step
from nc.config.rule_key import KIND_NAMES
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.plan import Plan

#: What `measure` may take. Half of it is for whole calls, the rest for calls that are taken apart.
SECONDS = 1.0
_MOST_CALLS, _MOST_STEPS = 20, 5
#: Steps are called one by one from Python. A loss counts from a tenth of the fp32 time, and from a hundredth of the whole fp32 call.
_TENTH, _HUNDREDTH = 0.1, 0.01
_SHOWN, _NAMES = 5, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """Int8 operators that share a kernel, with what is fused into them.

    Attributes:
        operators: their names, in execution order.
        engine_ms: milliseconds in the engine: the kernel, and the conversions to and from codes that are made for it.
        fp32_ms: milliseconds of the same operators in fp32.
    """

    operators: tuple[str, ...]
    engine_ms: float
    fp32_ms: float

    def __str__(self) -> str:
        """The names and both times."""
        more = " + …" if len(self.operators) > _NAMES else ""
        return f"{' + '.join(self.operators[:_NAMES])}{more} ({self.engine_ms:.2f} ms, fp32 {self.fp32_ms:.2f} ms)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The engine against fp32, on this machine and the example inputs.

    Attributes:
        fp32_ms: milliseconds of one call of the captured fp32 model in eager PyTorch, the median.
        engine_ms: milliseconds of one call of the engine, the median.
        calls: how many calls of each were counted. They took turns.
        threads: of torch.
        costs: int8 operators with their times in both; None when the engine could not be taken apart, or not within the time.
        losses: those of `costs` that are slower than in fp32, the largest loss first.
        exclude: arguments for `config.exclude` that leave the losses in fp32, as Python source.
    """

    fp32_ms: float
    engine_ms: float
    calls: int
    threads: int
    costs: tuple[OpCost, ...] | None = None
    losses: tuple[OpCost, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times as fast as fp32 the engine is; below 1 it is slower."""
        return self.fp32_ms / self.engine_ms

    def __str__(self) -> str:
        """The verdict in one line, and in two more what costs more than it gains."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        calls = f"median of {self.calls} calls each" if self.calls > 1 else "only one call each, for lack of time"
        times = f"{self.engine_ms:.2f} ms against {self.fp32_ms:.2f} ms (example inputs, {threads}, {calls})"
        if round(self.ratio, 2) >= 1:
            first = f"{self.ratio:.2f} times as fast as fp32: {times}"
        else:
            first = f"SLOWER than fp32: it takes {1 / self.ratio:.2f} times as long, {times}"
        return "\n".join([first, *self._losses()])

    def _losses(self) -> list[str]:
        if self.costs is None:
            hint = "which operators cost more than they gain was not measured; report(profile_inputs=...) shows the time of each"
            return [hint] if self.ratio < 1 else []
        if not self.losses:
            return []
        shown = ", ".join(map(str, self.losses[:_SHOWN])) + (", …" if len(self.losses) > _SHOWN else "")
        keys = ", ".join(self.exclude[:_SHOWN]) + (", …" if len(self.exclude) > _SHOWN else "")
        where = " (all: report.verdict.exclude)" if len(self.exclude) > _SHOWN else ""
        if len(self.losses) == len(self.costs) and self.ratio < 1:
            return [f"every int8 operator costs more than it gains: {shown}", "on this machine the fp32 model is the better choice"]
        return [
            f"{len(self.losses)} of {len(self.costs)} int8 kernels cost more than they gain: {shown}",
            f"config.exclude({keys}) leaves their operators in fp32{where}",
        ]


@torch.no_grad()
def measure(
    fp32: fx.GraphModule, graph: QDQGraph, engine: EngineModel, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter
) -> Verdict:
    """Time the engine and the captured fp32 model in turns, with torch's current number of threads.

    Attention of the fp32 graph is put back into one call first, as models have it: capture takes it apart.

    Args:
        fp32: the captured model.
        graph: the quantized model.
        engine: what it was lowered to.
        seconds: for all; None: `SECONDS`. One call of each is always made.
        clock: gives the time in seconds.
    """
    from nc.backends.native.attention import recompose

    seconds = SECONDS if seconds is None else seconds
    module, _ = copy_module(fp32)
    recompose(module)
    module.recompile()
    example = graph.example
    start = clock()
    with torch.autocast("cpu", enabled=False):
        rounds: list[Round] = []
        candidates = {"fp32": lambda: module(*example), "engine": lambda: engine.run(example)}
        for times in interleaved(candidates, _MOST_CALLS + 1, warm_up=0, clock=clock):
            rounds.append(times)
            if clock() - start >= seconds / 2:
                break
        counted = rounds[1:] or rounds  # the first round warms up
        parts: list[tuple[Sequence[Step], Sequence[Step]]] = []
        round_s = sum(counted[-1].values()) / 1e3
        while engine.steps is not None and len(parts) < _MOST_STEPS and clock() - start + round_s <= seconds:
            parts.append((node_steps(module, frozenset(), example), engine.steps(example)))
    middle = median(counted)
    found = Verdict(fp32_ms=middle["fp32"], engine_ms=middle["engine"], calls=len(counted), threads=torch.get_num_threads())
    if not parts:
        return found
    costs = operator_costs(fastest([p[0] for p in parts]), fastest([p[1] for p in parts]), graph.plan)
    return judged(found, costs, graph.plan)


def fastest(runs: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """One call's steps with the least time that each took in any of the runs."""
    return tuple(dataclasses.replace(same[0], ms=min(step.ms for step in same)) for same in zip(*runs, strict=True))


def operator_costs(fp32: Sequence[Step], engine: Sequence[Step], plan: Plan) -> tuple[OpCost, ...]:
    """Times of the int8 operators in both, in execution order; operators that one step of either computes together are one entry.

    Args:
        fp32: steps of the fp32 graph.
        engine: steps of the engine.
        plan: says which operators are int8.
    """
    int8 = {decision.operator for decision in plan.quantized}
    groups: dict[str, frozenset[str]] = {}
    for step in (*engine, *fp32):
        together = frozenset().union(*(groups.get(name, {name}) for name in step.operators))
        groups.update(dict.fromkeys(together, together))
    order = [decision.operator for decision in plan.decisions]
    kernels = sorted({g for g in groups.values() if g & int8}, key=lambda g: min(order.index(name) for name in g & int8))
    return tuple(
        OpCost(
            operators=tuple(name for name in order if name in group),
            engine_ms=sum(s.ms for s in engine if group & {*s.operators, s.serves}),
            fp32_ms=sum(s.ms for s in fp32 if group & {*s.operators}),
        )
        for group in kernels
    )


def judged(verdict: Verdict, costs: Sequence[OpCost], plan: Plan) -> Verdict:
    """The verdict with what the times of its operators say."""
    least = _HUNDREDTH * verdict.fp32_ms
    losses = [c for c in costs if c.engine_ms - c.fp32_ms > max(least, _TENTH * c.fp32_ms)]
    losses.sort(key=lambda c: c.fp32_ms - c.engine_ms)
    names = [name for cost in losses for name in cost.operators]
    return dataclasses.replace(verdict, costs=tuple(costs), losses=tuple(losses), exclude=_keys(names, plan))


def _keys(names: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """What `config.exclude` takes for these operators: a type where all its operators are meant, else names."""
    kinds: Mapping[str, str] = {d.operator: d.kind for d in plan.quantized}
    keys: list[str] = []
    for name in names:
        if name not in kinds:
            continue  # fused into another one, and fp32 of its own accord
        same = [operator for operator, kind in kinds.items() if kind == kinds[name]]
        class_name = KIND_NAMES[kinds[name]][0]
        whole = len(same) > 1 and hasattr(torch.nn, class_name) and set(same) <= set(names)
        keys.append(f"torch.nn.{class_name}" if whole else json.dumps(name, ensure_ascii=False))
    return tuple(dict.fromkeys(keys))
