"""What each option is estimated to cost each group: noise of its operators, time of the engine's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from nc.api.quantized import QuantizedModel
from nc.backends.rewrites.attention import recompose
from nc.backends.verdict import fastest
from nc.graph.fx_utils import copy_module
from nc.graph.plan import Plan
from nc.profiling.nodes import node_steps
from nc.profiling.profile import EngineCall
from nc.tuning.groups import Group
from nc.tuning.mixed import FP32
from nc.tuning.solve import Cost

#: How often the steps of a model are timed; the least time of each counts.
_TIMES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """An option for the whole model, converted.

    Attributes:
        model: the converted model.
        steps: steps of its engine, each with the least time that it took; () if the engine has no steps.
        ms: milliseconds of a call.
        error: power of the error of its outputs, relative to the power of the outputs.
    """

    model: QuantizedModel
    steps: tuple[EngineCall, ...]
    ms: float
    error: float


@torch.no_grad()
def table_of(
    graph: fx.GraphModule,
    example: Sequence[torch.Tensor],
    groups: Sequence[Group],
    tried: Mapping[str, Tried],
    fp32_ms: float,
) -> list[dict[str, Cost]]:
    """Return for each group what its options cost; of those that ask for the same, the first.

    Steps are called one by one, so they are scaled to what a whole call takes. Groups of equal blocks share
    the mean of their times: what differs between them is chance.

    Args:
        graph: the captured model.
        example: flat inputs.
        groups: the decisions.
        tried: options by name.
        fp32_ms: milliseconds of a call of the user's model.
    """
    fp32 = _times(groups, _fp32_steps(graph, example), fp32_ms)
    table = [{FP32: Cost(0.0, ms)} for ms in fp32]
    seen: list[set[object]] = [{_asked(None, group)} for group in groups]
    for name, option in tried.items():
        graph_of = option.model.graph
        times = (
            _times(groups, option.steps, option.ms)
            if option.steps
            else _by_work(groups, graph_of.plan, option.ms)
        )
        noise = _noise(groups, option)
        for row, known, group, ms, error in zip(table, seen, groups, times, noise, strict=True):
            asked = _asked(graph_of.plan, group)
            if asked not in known:
                row[name] = Cost(error, ms)
            known.add(asked)
    return table


def _asked(plan: Plan | None, group: Group) -> tuple[object, ...]:
    """Return what a plan makes of a group's operators; of None, that all stay in fp32."""
    decisions = [None if plan is None or not _counts(plan, name) else plan[name] for name in group.operators]
    return tuple(d and (d.spec, tuple(field[:2] for field in d.fields)) for d in decisions)


def _counts(plan: Plan, operator: str) -> bool:
    """Return whether an operator computes in another precision than fp32."""
    return plan[operator].spec.quantized or plan[operator].spec.bf16


def _noise(groups: Sequence[Group], option: Tried) -> list[float]:
    """Return the error of each group: that of its operators, or its part of the whole by its work."""
    graph = option.model.graph
    if graph.noise:
        return [sum(graph.noise.get(operator, 0.0) for operator in group.operators) for group in groups]
    work = [_work(group, graph.plan) for group in groups]
    return [option.error * each / max(1, sum(work)) for each in work]


def _work(group: Group, plan: Plan) -> int:
    """Return the multiply-adds of those operators of a group that compute in another precision than fp32."""
    return sum(plan[name].multiply_adds or 1 for name in group.operators if _counts(plan, name))


def _by_work(groups: Sequence[Group], plan: Plan, ms: float) -> list[float]:
    """Return the groups' parts of a call by their multiply-adds, where an engine can't be taken apart."""
    work = [sum(plan[name].multiply_adds or 1 for name in group.operators) for group in groups]
    return [ms * each / max(1, sum(work)) for each in work]


def _fp32_steps(graph: fx.GraphModule, example: Sequence[torch.Tensor]) -> tuple[EngineCall, ...]:
    module, _ = copy_module(graph)
    recompose(module)
    module.recompile()
    return fastest([node_steps(module, frozenset(), example) for _ in range(_TIMES)])


@torch.no_grad()
def steps_of(model: QuantizedModel, example: Sequence[torch.Tensor]) -> tuple[EngineCall, ...]:
    """Return the steps of a model's engine; () where it can't be taken apart."""
    steps = model.engine.steps
    return () if steps is None else fastest([steps(example) for _ in range(_TIMES)])


def _times(groups: Sequence[Group], steps: Sequence[EngineCall], ms: float) -> list[float]:
    """Return the milliseconds of each group, of a call that takes `ms`.

    A step of several groups counts for each of them in part.
    """
    place = {name: index for index, group in enumerate(groups) for name in group.operators}
    found = [0.0] * len(groups)
    for step in steps:
        owners = {place[name] for name in (*step.operators, step.serves) if name in place}
        for owner in owners:
            found[owner] += step.ms / len(owners)
    scale = ms / max(1e-9, sum(step.ms for step in steps))
    alike: dict[str, list[float]] = {}
    for group, own in zip(groups, found, strict=True):
        alike.setdefault(group.pattern, []).append(own)
    means = {pattern: sum(values) / len(values) for pattern, values in alike.items()}
    return [scale * means[group.pattern] for group in groups]
