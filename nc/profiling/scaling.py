"""What a profile predicts for other numbers of threads.

What is measured, assumed and not known is kept separate:

* Functions in C are called part by part on one thread, in as many parts as they make for that number of
  threads. Their time is that of the longest part, so uneven parts are in it.
* Primitives of oneDNN are assumed to divide their work evenly among all threads.
* Operators of torch are taken as they are: nobody knows how they divide.

Threads that share memory, caches or a core are not in it, so it is what the division of work allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nc.text.table import format_table

#: Numbers of threads that a profile predicts for.
COUNTS = (1, 4, 8, 16, 32, 64)
#: Assumed milliseconds of calling a team and waiting for its last thread: a constant, and for each thread.
BARRIER_MS, BARRIER_MS_PER_THREAD = 0.5e-3, 0.1e-3
#: Number of threads, and share of a call, from which on a step of one thread is named.
AT_THREADS, MOST_ALONE = 16, 0.02
_HEAD = ("threads", "ms", "× one", "barriers", "one thread alone", "assumed to divide", "not known")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DividedStep:
    """A step of a call on some number of threads.

    Attributes:
        name: name of its kernel.
        operators: names of the operators that it computes.
        parts: number of parts of its work; 0 if this is not known.
        barriers: how often all threads are started and waited for.
        alone_ms: time in which one thread works alone, in ms.
        divided_ms: time of the longest part of each division, in ms.
        assumed: whether its parts are assumed, not measured.
        unknown_ms: time of a step whose division is not known, in ms; assumed to stay the same.
    """

    name: str
    operators: tuple[str, ...] = ()
    parts: int = 0
    barriers: int = 0
    alone_ms: float = 0.0
    divided_ms: float = 0.0
    assumed: bool = False
    unknown_ms: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A call on some number of threads.

    Attributes:
        threads: that number.
        steps: in execution order.
    """

    threads: int
    steps: tuple[DividedStep, ...]

    @property
    def barriers(self) -> int:
        """How often all threads are called and waited for."""
        return sum(step.barriers for step in self.steps) if self.threads > 1 else 0

    @property
    def ms(self) -> float:
        """Milliseconds of the call."""
        each = BARRIER_MS + BARRIER_MS_PER_THREAD * self.threads
        steps = sum(step.alone_ms + step.divided_ms + step.unknown_ms for step in self.steps)
        return steps + each * self.barriers

    @property
    def alone(self) -> float:
        """Share of the call in which one thread works and the others wait."""
        return sum(step.alone_ms for step in self.steps) / (self.ms or 1.0)

    @property
    def assumed(self) -> float:
        """Share of the call whose division is assumed."""
        return sum(step.divided_ms for step in self.steps if step.assumed) / (self.ms or 1.0)

    @property
    def unknown(self) -> float:
        """Share of the call whose division is not known."""
        return sum(step.unknown_ms for step in self.steps) / (self.ms or 1.0)

    def alone_too_long(self, most: float = MOST_ALONE) -> list[tuple[DividedStep, float]]:
        """Return steps in which one thread works alone for more than a share of the call, and that share."""
        shares = ((step, step.alone_ms / (self.ms or 1.0)) for step in self.steps)
        return sorted(((step, share) for step, share in shares if share > most), key=lambda each: -each[1])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """Return the inverse of `dataclasses.asdict`, through JSON too."""
        steps = [DividedStep(**{**step, "operators": tuple(step["operators"])}) for step in data["steps"]]
        return cls(threads=data["threads"], steps=tuple(steps))


def summary(predictions: Sequence[Prediction]) -> str:
    """Return one line; "" where there are no predictions.

    Args:
        predictions: in the order of their threads, the first one for one thread.
    """
    if not predictions:
        return ""
    first, *others = predictions
    times = ", ".join(f"{first.ms / p.ms:.1f}" for p in others)
    counts = ", ".join(str(p.threads) for p in others)
    return f"predicted by how the steps divide: {times} times as fast on {counts} threads as on one"


def table(predictions: Sequence[Prediction]) -> str:
    """Return a row for each number of threads, and the steps that one thread does for too long.

    Args:
        predictions: as `summary` takes them.
    """
    if not predictions:
        return "no prediction for other numbers of threads: the engine does not say how its steps divide"
    rows: list[tuple[str, ...]] = [_HEAD]
    for each in predictions:
        shares = (f"{100 * share:.1f} %" for share in (each.alone, each.assumed, each.unknown))
        speed = f"{predictions[0].ms / each.ms:.2f}"
        rows.append((str(each.threads), f"{each.ms:.2f}", speed, str(each.barriers), *shares))
    lines = [format_table(rows)]
    for each in predictions:
        if each.threads == AT_THREADS:
            lines += [
                f"one thread alone for {100 * share:.1f} % on {AT_THREADS} threads: {step.name} "
                f"({', '.join(step.operators) or 'no operator'})"
                for step, share in each.alone_too_long()
            ]
    return "\n".join(lines)
