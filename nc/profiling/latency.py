"""Latency of callables that take turns, to compare two models on a machine that is also used for other work.

Published figures come from `benchmarks/`, which runs every engine in its own process.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nc.profiling.load import Load, LoadWatch

#: Milliseconds of one round, by candidate.
Round = dict[str, float]


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 1,
) -> Iterator[Round]:
    """Time the candidates in turns, so that a slow moment of the machine hits all of them.

    Args:
        candidates: what to call, by name.
        rounds: how many rounds to yield.
        warm_up: calls of each candidate before the first round; fusers compile in the first three.
        clock: gives the time in seconds.
        repeats: calls of each candidate per round; the milliseconds are those of one.

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
            for _ in range(repeats):
                call()
            times[name] = 1e3 * (clock() - start) / repeats
        yield times


def median(rounds: Sequence[Round]) -> Round:
    """Median milliseconds of each candidate."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def ratio(rounds: Sequence[Round], slow: str, fast: str) -> float:
    """How many times faster `fast` is than `slow`: the median of the rounds' own ratios."""
    return statistics.median(r[slow] / r[fast] for r in rounds)


#: Upper over lower quartile of the rounds' ratios from which on they say nothing.
MOST_SPREAD = 1.5
#: A round takes at least so many seconds for each candidate, in at most so many calls: clocks and caches
#: disturb shorter ones.
_ROUND, _MOST_REPEATS = 2e-4, 50
_MOST_ROUNDS = 60
#: Fewer rounds have no spread.
LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedComparison:
    """How much faster one callable is than another.

    Attributes:
        times: median time of one call of each, in ms.
        ratio: slow over fast: the median of the ratios of the rounds.
        interval: 95% confidence interval of `ratio`; None with fewer than three rounds.
        quartiles: quartiles of the rounds' ratios; None with fewer than three rounds.
        rounds: number of rounds that were counted.
        repeats: calls of each in a round.
        load: load of the machine.
        doubt: why the measurement does not tell which one is faster; "" if it does.
    """

    times: Round
    ratio: float
    interval: tuple[float, float] | None
    quartiles: tuple[float, float] | None
    rounds: int
    repeats: int
    load: Load
    doubt: str


def compare(
    slow: Callable[[], object],
    fast: Callable[[], object],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    watch: LoadWatch | None = None,
) -> SpeedComparison:
    """Time two callables in turns.

    Args:
        slow: the one that is to be beaten.
        fast: the other one.
        seconds: for all, except that each is called once in any case.
        clock: gives the time in seconds.
        watch: looks at the machine.
    """
    candidates = {"slow": slow, "fast": fast}
    rounds, repeats, load = timed_rounds(candidates, seconds, clock, watch, LEAST_ROUNDS)
    return compared(rounds, repeats, load)


def timed_rounds(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    watch: LoadWatch | None = None,
    least: int = 1,
) -> tuple[list[Round], int, Load]:
    """Time candidates in turns, as long as there is time.

    Args:
        candidates: what to call, by name.
        seconds: for all, except that each is called once in any case.
        clock: gives the time in seconds.
        watch: looks at the machine.
        least: rounds after the warm-up, even if they take longer; none where the warm-up alone takes longer.

    Returns:
        The rounds without the warm-up, or only the warm-up if there was no time for others; calls of each
        candidate in a round; the load.
    """
    start, watch = clock(), watch or LoadWatch()
    (first,) = interleaved(
        candidates, 1, warm_up=0, clock=clock
    )  # warms up, and says how often calls fit in a round
    repeats = min(_MOST_REPEATS, max(1, math.ceil(1e3 * _ROUND / max(1e-6, *first.values()))))
    counted: list[Round] = []
    if clock() - start < seconds:
        for times in interleaved(candidates, _MOST_ROUNDS, warm_up=0, clock=clock, repeats=repeats):
            counted.append(times)
            watch.look()
            if clock() - start >= seconds and len(counted) >= least:
                break
    return counted or [first], repeats if counted else 1, watch.load()


def compared(
    rounds: Sequence[Round], repeats: int, load: Load, slow: str = "slow", fast: str = "fast"
) -> SpeedComparison:
    """Return what some rounds say of two of their candidates."""
    ratios = sorted(times[slow] / max(times[fast], 1e-9) for times in rounds)
    enough = len(rounds) >= LEAST_ROUNDS
    interval = _interval_of_median(ratios) if enough else None
    quartiles = (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]) if enough else None
    times = median(rounds)
    return SpeedComparison(
        times={"slow": times[slow], "fast": times[fast]},
        ratio=statistics.median(ratios),
        interval=interval,
        quartiles=quartiles,
        rounds=len(rounds),
        repeats=repeats,
        load=load,
        doubt=doubt(interval, quartiles, load),
    )


def doubt(interval: tuple[float, float] | None, quartiles: tuple[float, float] | None, load: Load) -> str:
    """Why a measurement does not tell which one is faster; "" if it does.

    Arguments are those of `SpeedComparison`.
    """
    if interval is None or quartiles is None:
        return "there was no time for more calls, so that nobody knows how much they differ"
    if load.disturbed():
        return load.disturbed()
    if quartiles[1] > MOST_SPREAD * quartiles[0]:
        return (
            f"the ratios of single rounds differ too much, by a factor of {quartiles[1] / quartiles[0]:.1f} "
            "between the quartiles"
        )
    if interval[0] <= 1 <= interval[1]:
        return (
            f"the difference is smaller than the spread, {interval[0]:.2f} to {interval[1]:.2f} times as fast"
        )
    return ""


def _interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median is, with 95 % confidence; sorted values."""
    outside = max(0, math.floor((len(values) - 1.96 * math.sqrt(len(values))) / 2))
    return values[outside], values[-1 - outside]


def milliseconds(ms: float, beside: float | None = None) -> str:
    """Return a time for people, in a unit that suits another one beside it too."""
    return f"{ms:.2f} ms" if min(ms, ms if beside is None else beside) >= 0.1 else f"{1e3 * ms:.1f} us"
