"""Times of calls that take turns: what else the machine does hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from results_rows import Figure, median

#: How long all threads rest before a timed call, and how long one timing takes at least, in seconds.
REST, SPAN = 0.02, 0.05
#: Name of the call whose duration says how often all are repeated, and that speeds are relative to.
BASE = "fp32"


def timings(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return for each name the seconds of a call in each of the rounds."""
    start = time.perf_counter()
    calls[BASE]()
    repeats = max(1, round(SPAN / (time.perf_counter() - start)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(REST)
            call()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            found[name].append((time.perf_counter() - start) / repeats)
    return found


def speed(base: Sequence[float], seconds: Sequence[float]) -> Figure:
    """Return how many times as fast as fp32 a call is: the median of the rounds."""
    return median([a / b for a, b in zip(base, seconds, strict=True)], "x fp32")


def duration(seconds: Sequence[float]) -> Figure:
    """Return the median of the rounds in milliseconds."""
    return median([1e3 * each for each in seconds], "ms")
