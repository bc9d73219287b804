"""Whether an artefact may be published: quality and speed against the float model and another artefact.

Noise fails nothing: a limit is missed only if the whole 95 % interval of what was measured misses it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.backends.profiling.latency import SpeedComparison, compare
from nc.cli.inputs import RequestError
from nc.errors import NCError

#: 97.5 % quantile of the normal distribution, and of Student's with one and two degrees of freedom.
_NORMAL, _FEW = 1.959964, {1: 12.7062, 2: 4.3027}
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgainstOne:
    """An artefact beside something else.

    Attributes:
        what: "fp32" or "baseline".
        metric: of the artefact; None where there is no metric.
        other_metric: of the other one.
        drop: what is lost, the other one's metric minus this one's.
        drop_interval: 95 % interval of it, from paired samples; `drop` twice where the metric is one number.
        speedup: median of the rounds' ratios: how many times as fast the artefact is.
        speedup_interval: 95 % interval of that median; None with fewer than three rounds.
        ms: milliseconds of a call.
        other_ms: of the other one.
        doubt: why the times do not tell which one is faster; "" if they do.
    """

    what: str
    metric: float | None
    other_metric: float | None
    drop: float | None
    drop_interval: Interval | None
    speedup: float
    speedup_interval: Interval | None
    ms: float
    other_ms: float
    doubt: str

    def why_not(self, max_drop: float, min_speedup: float | None) -> list[str]:
        """Return why the artefact does not pass; empty if it does."""
        found = []
        if self.drop_interval is not None and self.drop_interval[0] > max_drop:
            low, high = self.drop_interval
            found.append(
                f"against {self.what} the metric drops by {self.drop:.4g} ({low:.4g} to {high:.4g}), more "
                f"than {max_drop:.4g}"
            )
        interval = self.speedup_interval or (self.speedup, self.speedup)
        if min_speedup is not None and interval[1] < min_speedup:
            found.append(
                f"{self.speedup:.2f} times as fast as {self.what} ({interval[0]:.2f} to {interval[1]:.2f}), "
                f"less than {min_speedup:.2f}"
            )
        return found


def scores(metric: Callable[[Any], Any], model: Any) -> list[float]:
    """Return what a metric gives: one number, or one for each sample.

    Raises:
        RequestError: it fails, or gives no finite numbers.
    """
    try:
        with torch.no_grad():
            value = metric(model)
    except Exception as error:  # the user's code can raise anything
        msg = f"The metric failed: {type(error).__name__}: {error}; --debug shows the traceback."
        raise RequestError(msg) from error
    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    try:
        found = [float(each) for each in (values if isinstance(values, (list, tuple)) else [values])]
    except (TypeError, ValueError):
        found = []
    if not found or not all(map(math.isfinite, found)):
        msg = (
            f"The metric gave {value!r}: expected a finite number, or one for each sample; larger is better."
        )
        raise RequestError(msg)
    return found


def drop_of(ours: Sequence[float], others: Sequence[float]) -> tuple[float, Interval]:
    """Return how much the mean of paired scores drops, and its 95 % interval.

    Raises:
        RequestError: there are other numbers of scores.
    """
    if len(ours) != len(others):
        msg = f"The metric gave {len(ours)} scores for one model and {len(others)} for another."
        raise RequestError(msg)
    differences = [other - own for own, other in zip(ours, others, strict=True)]
    drop = statistics.fmean(differences)
    count = len(differences)
    if count == 1:
        return drop, (drop, drop)
    reach = student(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return drop, (drop - reach, drop + reach)


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, to 0.1 %.

    From three degrees of freedom on by its expansion around the normal one (M. Abramowitz, I. Stegun, 1964,
    26.7.5).
    """
    if freedom in _FEW:
        return _FEW[freedom]
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def against(
    what: str,
    ours: Sequence[float] | None,
    others: Sequence[float] | None,
    call: Callable[[], object],
    other_call: Callable[[], object],
    seconds: float,
) -> AgainstOne:
    """Return how an artefact compares with something else; the calls take turns.

    Raises:
        RequestError: the other one fails on the example inputs of the artefact.
    """
    drop, interval = drop_of(ours, others) if ours is not None and others is not None else (None, None)
    with torch.no_grad():
        try:
            other_call()
        except NCError:
            raise
        except Exception as error:  # the user's model can raise anything
            msg = f"{what} fails on the example inputs of the artefact: {type(error).__name__}: {error}"
            raise RequestError(msg) from error
        call()
        found: SpeedComparison = compare(other_call, call, seconds)
    return AgainstOne(
        what=what,
        metric=None if ours is None else statistics.fmean(ours),
        other_metric=None if others is None else statistics.fmean(others),
        drop=drop,
        drop_interval=interval,
        speedup=found.ratio,
        speedup_interval=found.interval,
        ms=found.times["fast"],
        other_ms=found.times["slow"],
        doubt=found.doubt,
    )
