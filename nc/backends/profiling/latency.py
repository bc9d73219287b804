"""Latency of callables that take turns, to compare two models on a machine that is also used for other work.

Published figures come from `benchmarks/`, which runs every engine in its own process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

#: Milliseconds of one round, by candidate.
Round = dict[str, float]


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Round]:
    """Time the candidates one call each per round, so that a slow moment of the machine hits all of them.

    Args:
        candidates: what to call, by name.
        rounds: how many rounds to yield.
        warm_up: calls of each candidate before the first round; fusers compile in the first three.
        clock: gives the time in seconds.

    Example:
        >>> rounds = list(interleaved({"a": lambda: sum(range(9)), "b": lambda: sum(range(99))}, rounds=5))
        >>> len(rounds), sorted(median(rounds))
        (5, ['a', 'b'])
    """
    for call in candidates.values():
        for _ in range(warm_up):
            call()
    for _ in range(rounds):
        times = {}
        for name, call in candidates.items():
            start = clock()
            call()
            times[name] = 1e3 * (clock() - start)
        yield times


def median(rounds: Sequence[Round]) -> Round:
    """Median milliseconds of each candidate."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def ratio(rounds: Sequence[Round], slow: str, fast: str) -> float:
    """How many times faster `fast` is than `slow`: the median of the rounds' own ratios."""
    return statistics.median(r[slow] / r[fast] for r in rounds)
