"""How a plan divides its work among any number of threads: its functions in C run part by part on one.

See `nc.profiling.scaling` for what is measured and what is assumed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from nc.backends.native.plans.execution_plan import AtenCall, Entry, ExecutionPlan, FunctionCall
from nc.backends.native.plans.plan_instance import PlanInstance
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import in_memory
from nc.profiling.profile import EngineCall
from nc.profiling.scaling import DividedStep, Prediction

#: Runs of which the fastest counts for each step: fewest, most, and seconds from which on there is no other.
_FEWEST, _MOST, _SECONDS = 4, 15, 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """What a call of a function did; times are milliseconds.

    Attributes:
        regions: how often it divided work among threads.
        parts: the most parts of a region; 1 where there is none.
        whole: time of the call.
        alone: outside of all parts.
        each: of each part, for each region.
    """

    regions: int
    parts: int
    whole: float
    alone: float
    each: tuple[tuple[float, ...], ...]

    @property
    def longest(self) -> float:
        """Time of the longest part of each region."""
        return sum(max(parts) for parts in self.each)

    def least(self, other: Turns) -> Turns:
        """Return the least times of two calls that divide alike."""
        each = tuple(
            tuple(map(min, mine, others)) for mine, others in zip(self.each, other.each, strict=True)
        )
        whole, alone = min(self.whole, other.whole), min(self.alone, other.alone)
        return Turns(self.regions, self.parts, whole, alone, each)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Note:
    """Memory in which a call notes what it did, and its own first argument."""

    memory: ctypes.Array[ctypes.c_int64]
    how: ctypes.Array[ctypes.c_int64]

    def read(self) -> Turns:
        """Return what the last call did."""
        _, regions, parts, *seconds = struct.unpack(abi.TURNS.format, bytes(self.memory))
        whole, divided, *each = (1e3 * value for value in seconds)
        most, kept = abi.CONSTANTS.most_parts, min(regions, abi.CONSTANTS.most_regions)
        noted = (each[i * most : i * most + min(parts, most)] for i in range(kept))
        return Turns(regions, parts, whole, max(0.0, whole - divided), tuple(map(tuple, noted)))


def in_turn(plan: ExecutionPlan) -> tuple[ExecutionPlan, list[_Note | None]]:
    """Return a plan that computes the same, and runs the parts of functions in C consecutively.

    Returns:
        The plan, and for each entry where its last call notes what it did; None for other entries.
    """
    entries: list[Entry] = []
    found: list[_Note | None] = []
    for entry in plan.entries:
        if not isinstance(entry, FunctionCall):
            entries.append(entry)
            found.append(None)
            continue
        noted = _Note((ctypes.c_int64 * (abi.TURNS.size // 8))(), in_memory(entry.packed))
        packed = abi.IN_TURN.packed(
            function=entry.function.address,
            how=ctypes.addressof(noted.how),
            turns=ctypes.addressof(noted.memory),
        )
        function = dataclasses.replace(entry.function, address=entry.function.in_turn)
        entries.append(dataclasses.replace(entry, function=function, packed=packed))
        found.append(noted)
    return dataclasses.replace(plan, entries=entries), found


def predicted(
    plans: Mapping[int, ExecutionPlan],
    instance: Callable[[ExecutionPlan], PlanInstance],
    inputs: Sequence[torch.Tensor],
    measured: Sequence[EngineCall],
) -> tuple[Prediction, ...]:
    """Return how long the steps of plans take on the threads that they were made for.

    Args:
        plans: by their number of threads.
        instance: makes what runs a plan entry by entry.
        inputs: of their sizes.
        measured: the steps of the plan for as many threads as torch uses, with their times.
    """
    runs = {threads: _run(plan, instance, inputs) for threads, plan in plans.items()}
    overheads = [ms - turns.whole for run in runs.values() for ms, turns in run if turns]
    overhead = statistics.median(overheads) if overheads else 0.0
    times = [
        [ms for ms, _ in run] for threads, run in runs.items() if _same_steps(plans[threads], measured)
    ]  # steps that are not functions in C are the same in all of them
    least = [min(found) for found in zip(*times, (step.ms for step in measured), strict=True)]
    found = []
    for threads, run in runs.items():
        entries = plans[threads].entries
        own = [ms for ms, _ in run]
        known = least if _same_steps(plans[threads], measured) else own
        steps = [
            _of_function(entry, turns) if turns else _of_other(entry, ms, overhead, threads)
            for entry, ms, (_, turns) in zip(entries, known, run, strict=True)
        ]
        found.append(Prediction(threads=threads, steps=tuple(steps)))
    return tuple(found)


def _same_steps(plan: ExecutionPlan, steps: Sequence[EngineCall]) -> bool:
    return [entry.step.name for entry in plan.entries] == [step.name for step in steps]


def _run(
    plan: ExecutionPlan, instance: Callable[[ExecutionPlan], PlanInstance], inputs: Sequence[torch.Tensor]
) -> list[tuple[float, Turns | None]]:
    """Return for each entry the least milliseconds from Python, and what a function in C did."""
    turned, notes = in_turn(plan)
    runs, start = instance(turned), time.perf_counter()
    times: list[list[float]] = []
    turns: list[list[Turns]] = []
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() - start < _SECONDS):
        times.append(runs.clocked(inputs))
        turns.append([note.read() for note in notes if note])
    best = iter([functools.reduce(Turns.least, calls) for calls in zip(*turns, strict=True)])
    least = map(min, zip(*times, strict=True))
    return [(ms, next(best) if note else None) for ms, note in zip(least, notes, strict=True)]


def _of_function(entry: Entry, turns: Turns) -> DividedStep:
    return DividedStep(
        name=entry.step.kernel,
        operators=entry.step.operators,
        parts=turns.parts,
        barriers=turns.regions,
        alone_ms=turns.alone,
        divided_ms=turns.longest,
    )


def _of_other(entry: Entry, ms: float, overhead: float, threads: int) -> DividedStep:
    """Return a step that took some milliseconds, called from Python, on as many threads as torch uses."""
    step = DividedStep(name=entry.step.kernel, operators=entry.step.operators)
    if isinstance(entry, AtenCall):
        return dataclasses.replace(step, unknown_ms=ms)
    whole = max(0.0, ms - overhead) * torch.get_num_threads()
    return dataclasses.replace(step, parts=threads, barriers=1, divided_ms=whole / threads, assumed=True)
