"""Measure whether the quantized model is faster than the user's here, and which operators are slower.

On the example inputs, within about a second. On a machine that computes something else meanwhile it says that
it cannot tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel
from nc.backends.rewrites.attention import recompose
from nc.formats.rule_key import KIND_NAMES
from nc.graph.fx_utils import copy_module
from nc.graph.plan import Plan
from nc.graph.qdq import QDQGraph
from nc.profiling.latency import SpeedComparison, compare, milliseconds
from nc.profiling.load import LoadWatch
from nc.profiling.nodes import node_steps
from nc.profiling.own_model import OwnModel
from nc.profiling.profile import EngineCall
from nc.text.plain import plain

#: What `measure` may take. Half of it is for whole calls, the rest for calls that are taken apart. Three
#: rounds of whole calls, without which nobody can tell, may take longer.
SECONDS = 1.0
_MOST_STEPS = 5
#: Steps are called one by one from Python. A loss counts from a tenth of the fp32 time, and from a hundredth
#: of the whole fp32 call.
_TENTH, _HUNDREDTH = 0.1, 0.01
_SHOWN, _NAMES = 5, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """The time of int8 operators that share a kernel, and of the operators fused into them.

    Attributes:
        operators: their names, in execution order.
        engine_ms: milliseconds in the engine: the kernel, and the conversions to and from codes around it.
        fp32_ms: milliseconds of the same operators in fp32.
    """

    operators: tuple[str, ...]
    engine_ms: float
    fp32_ms: float

    def __str__(self) -> str:
        """Return the names and both times."""
        more = " + …" if len(self.operators) > _NAMES else ""
        return f"{' + '.join(self.operators[:_NAMES])}{more} ({self.times})"

    @property
    def times(self) -> str:
        """Both times, as text."""
        mine = milliseconds(self.engine_ms, self.fp32_ms)
        return f"{mine}, fp32 {milliseconds(self.fp32_ms, self.engine_ms)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The quantized model against the user's, on this machine and the example inputs.

    Attributes:
        fp32_ms: milliseconds of one call of the user's module, the median.
        engine_ms: milliseconds of one call of the quantized model, the median.
        calls: how many calls of each were counted. They took turns.
        threads: of torch.
        costs: int8 operators with their times in both; None when the engine could not be taken apart, or not
            within the time.
        losses: those of `costs` that are slower than in fp32 by more than the spread, the largest loss first.
        exclude: arguments for `config.exclude` that leave the losses in fp32, as Python source.
        rounds: the calls are spread over so many rounds.
        round_ratio: median of the rounds' own ratios of both times; None where they were not compared round
            by round.
        interval: in which that median would be, in 95 of 100 such measurements; None with fewer than three
            rounds.
        quartiles: of the rounds' ratios; None likewise.
        doubt: why the measurement does not tell which one is faster; "" if it tells.
        timed: what was timed instead of the user's module, and why; "" if that was timed.
    """

    fp32_ms: float
    engine_ms: float
    calls: int
    threads: int
    costs: tuple[OpCost, ...] | None = None
    losses: tuple[OpCost, ...] = ()
    exclude: tuple[str, ...] = ()
    rounds: int = 0
    round_ratio: float | None = None
    interval: tuple[float, float] | None = None
    quartiles: tuple[float, float] | None = None
    doubt: str = ""
    timed: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast as fp32 the quantized model is; below 1 it is slower."""
        return self.fp32_ms / self.engine_ms if self.round_ratio is None else self.round_ratio

    @property
    def certain(self) -> bool:
        """Whether the measurement tells which one is faster."""
        return not self.doubt

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "certain": self.certain}

    def __str__(self) -> str:
        """Return the verdict in one line, and in two more what costs more than it gains."""
        return plain("\n".join([*self.facts(), *self.advice()]))

    def brief(self, what: str) -> str:
        """Return both times and their ratio in one sentence; `what` is the precision of the model."""
        mine, other = milliseconds(self.engine_ms, self.fp32_ms), milliseconds(self.fp32_ms, self.engine_ms)
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        times = f"{what} {mine}, {self.timed or 'fp32'} {other} (example inputs, {threads})"
        if self.doubt:
            return f"{times}: cannot tell which one is faster: {self.doubt}"
        bounds = self.interval or self.quartiles
        between = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
        slower = "" if round(self.ratio, 2) >= 1 else "SLOWER than fp32: "
        return f"{slower}{times}: {self.ratio:.2f} times as fast{between}"

    def facts(self) -> list[str]:
        """Return the verdict in one line, and in another one what costs more than it gains."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        calls = (
            f"median of {self.calls} calls each" if self.calls > 1 else "only one call each, for lack of time"
        )
        spread = (
            f"; in half of {self.rounds} rounds {self.quartiles[0]:.2f} to {self.quartiles[1]:.2f} times as "
            "fast"
            if self.quartiles
            else ""
        )
        instead = f"; fp32 is {self.timed}" if self.timed else ""
        what = f"(example inputs, {threads}, {calls}{spread}{instead})"
        mine = milliseconds(self.engine_ms, self.fp32_ms)
        times = f"quantized {mine}, fp32 {milliseconds(self.fp32_ms, self.engine_ms)} {what}"
        if self.doubt:
            return [f"cannot tell whether it is faster than fp32: {self.doubt}. Measured: {times}"]
        if round(self.ratio, 2) >= 1:
            first = f"{self.ratio:.2f} times as fast as fp32: {times}"
        else:
            first = f"SLOWER than fp32: it takes {1 / self.ratio:.2f} times as long, {times}"
        if self.costs is None or not self.losses:
            return [first]
        shown = ", ".join(map(str, self.losses[:_SHOWN])) + (", …" if len(self.losses) > _SHOWN else "")
        if self._all_lose:
            return [first, f"every int8 operator costs more than it gains: {shown}"]
        return [
            first,
            f"{len(self.losses)} of {len(self.costs)} int8 kernels cost more than they gain: {shown}",
        ]

    def advice(self) -> list[str]:
        """Return what to do about what costs time, in one line; [] for nothing."""
        if self.doubt:
            return []
        if self.costs is None:
            hint = (
                "which operators cost more than they gain was not measured; report(profile_inputs=...) "
                "shows the time of each"
            )
            return [hint] if self.ratio < 1 else []
        if not self.losses:
            return []
        if self._all_lose:
            return ["on this machine the fp32 model is the better choice"]
        keys = ", ".join(self.exclude[:_SHOWN]) + (", …" if len(self.exclude) > _SHOWN else "")
        where = " (all: report.verdict.exclude)" if len(self.exclude) > _SHOWN else ""
        return [f"config.exclude({keys}) leaves their operators in fp32{where}"]

    @property
    def _all_lose(self) -> bool:
        return self.costs is not None and len(self.losses) == len(self.costs) and self.ratio < 1


@torch.no_grad()
def measure(
    fp32: fx.GraphModule,
    graph: QDQGraph,
    engine: EngineModel,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    own: OwnModel | None = None,
    quantized: Callable[..., object] | None = None,
    watch: LoadWatch | None = None,
) -> Verdict:
    """Time the quantized model and the user's in turns, both as the user calls them.

    Both run with torch's current number of threads. Where there is no module of the user's, the captured
    graph is timed. Its attention is put back into one call first, as models have it: capture takes it apart.

    Args:
        fp32: the captured model.
        graph: the quantized model.
        engine: what it was lowered to.
        seconds: for all; None: `SECONDS`. One call of each is always made.
        clock: gives the time in seconds.
        own: the user's module.
        quantized: what the user calls, with the arguments of `own`; None: the engine alone is timed.
        watch: looks at the machine.
    """
    seconds = SECONDS if seconds is None else seconds
    module, _ = copy_module(fp32)
    recompose(module)
    module.recompile()
    example = graph.example
    start, watch = clock(), watch or LoadWatch()
    with torch.autocast("cpu", enabled=False):
        with own.called() if own is not None else contextlib.nullcontext((None, "")) as (call, why):
            slow = call or (lambda: module(*example))
            args, kwargs = own.copies() if own is not None else ((), {})  # the model may write into them
            fast = (
                functools.partial(quantized, *args, **kwargs)
                if call and quantized
                else lambda: engine.run(example)
            )
            found = compare(slow, fast, seconds / 2, clock, watch)
        parts: list[tuple[Sequence[EngineCall], Sequence[EngineCall]]] = []
        round_s = sum(found.times.values()) / 1e3
        while engine.steps is not None and len(parts) < _MOST_STEPS and clock() - start + round_s <= seconds:
            parts.append((node_steps(module, frozenset(), example), engine.steps(example)))
    verdict = verdict_of(found, f"the captured graph: {why}" if why else "")
    if not parts:
        return verdict
    runs = [operator_costs(*part, graph.plan) for part in parts]
    costs = operator_costs(fastest([p[0] for p in parts]), fastest([p[1] for p in parts]), graph.plan)
    return judged(verdict, costs, graph.plan, runs)


def verdict_of(found: SpeedComparison, timed: str = "") -> Verdict:
    """Return a verdict on whole calls."""
    return Verdict(
        fp32_ms=found.times["slow"],
        engine_ms=found.times["fast"],
        calls=found.rounds * found.repeats,
        threads=torch.get_num_threads(),
        rounds=found.rounds,
        round_ratio=found.ratio,
        interval=found.interval,
        quartiles=found.quartiles,
        doubt=found.doubt,
        timed=timed,
    )


def fastest(runs: Sequence[Sequence[EngineCall]]) -> tuple[EngineCall, ...]:
    """One call's steps with the least time that each took in any of the runs."""
    return tuple(
        dataclasses.replace(same[0], ms=min(step.ms for step in same)) for same in zip(*runs, strict=True)
    )


def operator_costs(
    fp32: Sequence[EngineCall], engine: Sequence[EngineCall], plan: Plan
) -> tuple[OpCost, ...]:
    """Return times of the int8 operators in both, in execution order.

    Those that one step of either computes together are one entry.

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
    kernels = sorted(
        {g for g in groups.values() if g & int8}, key=lambda g: min(order.index(name) for name in g & int8)
    )
    return tuple(
        OpCost(
            operators=tuple(name for name in order if name in group),
            engine_ms=sum(s.ms for s in engine if group & {*s.operators, s.serves}),
            fp32_ms=sum(s.ms for s in fp32 if group & {*s.operators}),
        )
        for group in kernels
    )


def judged(
    verdict: Verdict, costs: Sequence[OpCost], plan: Plan, runs: Sequence[Sequence[OpCost]] = ()
) -> Verdict:
    """Return the verdict with what the times of its operators say.

    In doubt about whole calls nothing is said of their parts.

    Args:
        verdict: of whole calls.
        costs: the operators' times.
        plan: says which operators are int8.
        runs: the times in single runs; an operator loses only if it does in all but a quarter of them.
    """
    least = _HUNDREDTH * verdict.fp32_ms
    losses = [
        c
        for c in costs
        if verdict.certain and c.engine_ms - c.fp32_ms > max(least, _TENTH * c.fp32_ms) and _loses(c, runs)
    ]
    losses.sort(key=lambda c: c.fp32_ms - c.engine_ms)
    names = [name for cost in losses for name in cost.operators]
    return dataclasses.replace(verdict, costs=tuple(costs), losses=tuple(losses), exclude=_keys(names, plan))


def _loses(cost: OpCost, runs: Sequence[Sequence[OpCost]]) -> bool:
    """Return whether the loss of some operators is beyond the spread of single runs."""
    differences = sorted(
        c.engine_ms - c.fp32_ms for run in runs for c in run if c.operators == cost.operators
    )
    return not differences or differences[len(differences) // 4] > 0


def _keys(names: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """Return what `config.exclude` takes for these operators.

    It takes a type where all its operators are meant, else names.
    """
    kinds: Mapping[str, str] = {d.operator: d.kind for d in plan.quantized}
    keys: list[str] = []
    for name in names:
        if name not in kinds:
            continue  # an fp32 operator that was fused into another one
        same = [operator for operator, kind in kinds.items() if kind == kinds[name]]
        class_name = KIND_NAMES[kinds[name]][0]
        whole = len(same) > 1 and hasattr(torch.nn, class_name) and set(same) <= set(names)
        keys.append(f"torch.nn.{class_name}" if whole else json.dumps(name, ensure_ascii=False))
    return tuple(dict.fromkeys(keys))
