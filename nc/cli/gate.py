"""Whether an artefact may be published: quality and speed against the float model and another artefact.

A limit is missed if the whole 95 % interval of what was measured misses it, and met if the whole interval
meets it; what is between is not decided. What can't be measured is an error, and never a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nc.cli.inputs import RequestError, users_code
from nc.errors import NCError
from nc.profiling.latency import SpeedComparison, compare
from nc.text.plain import said, shown

#: The other model is the user's own; else it is an artefact.
FP32 = "fp32"
#: 97.5 % quantile of the normal distribution, and of Student's with one and two degrees of freedom.
_NORMAL, _FEW = 1.959964, {1: 12.7062, 2: 4.3027}
Interval = tuple[float, float]
#: Upper over lower end of an interval of speeds from which on the rounds tell nothing, whatever the limit is.
MOST_SPREAD = 3.0


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
        interval = self.speedup_interval
        if min_speedup is not None and interval is not None and interval[1] < min_speedup:
            found.append(
                f"{self.speedup:.2f} times as fast as {self.what} ({interval[0]:.2f} to {interval[1]:.2f}), "
                f"less than {min_speedup:.2f}"
            )
        return found

    def undecided(self, max_drop: float, min_speedup: float | None) -> list[str]:
        """Return which limits the intervals neither miss nor meet as a whole."""
        found = []
        if self.drop_interval is not None and self.drop_interval[0] <= max_drop < self.drop_interval[1]:
            low, high = self.drop_interval
            found.append(
                f"against {self.what} the metric drops by {low:.4g} to {high:.4g}, and {max_drop:.4g} is "
                "between them: give scores for each sample, or more samples"
            )
        if min_speedup is None:
            return found
        more = (
            f"give more --seconds, or a machine without other work{f' ({self.doubt})' if self.doubt else ''}"
        )
        if self.speedup_interval is None:
            found.append(f"{self.speedup:.2f} times as fast as {self.what} in too few rounds: {more}")
            return found
        low, high = self.speedup_interval
        if low < min_speedup <= high:
            found.append(
                f"{low:.2f} to {high:.2f} times as fast as {self.what}, and {min_speedup:.2f} is between "
                f"them: {more}"
            )
        elif high >= min_speedup and high > MOST_SPREAD * low:
            found.append(f"{low:.2f} to {high:.2f} times as fast as {self.what} is too wide to tell: {more}")
        return found


def scores(metric: Callable[[Any], Any], model: Any) -> list[float]:
    """Return what a metric gives: one number, or one for each sample.

    Numbers are those of Python, NumPy and torch; rows of them are lists, tuples, arrays and tensors.

    Raises:
        RequestError: it fails, or gives no finite numbers.
    """
    with users_code("The metric failed"), torch.no_grad():
        value = metric(model)
        if isinstance(value, (np.ndarray, torch.Tensor)):
            value = value.reshape(-1).tolist()
        values = value if isinstance(value, (list, tuple)) else [value]
        found = [_number(each) for each in values]
    if not found or not all(map(math.isfinite, found)):
        msg = (
            f"The metric gave {shown(value)}: expected a finite number, or one for each sample; larger is "
            "better."
        )
        raise RequestError(msg)
    return found


def _number(value: Any) -> float:
    """Return a number; NaN for what is none, such as a text, or too large."""
    if not hasattr(type(value), "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def drop_of(ours: Sequence[float], others: Sequence[float]) -> tuple[float, Interval]:
    """Return how much the mean of paired scores drops, and its 95 % interval.

    Raises:
        RequestError: there are other numbers of scores, or the difference is too large for a number.
    """
    if len(ours) != len(others):
        msg = f"The metric gave {len(ours)} scores for one model and {len(others)} for another."
        raise RequestError(msg)
    differences = [other - own for own, other in zip(ours, others, strict=True)]
    count = len(differences)
    try:
        drop, reach = statistics.fmean(differences), 0.0
        if count > 1:
            reach = student(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    except (OverflowError, ValueError, AttributeError):  # how the versions of Python say infinite
        drop = reach = math.inf
    low, high = drop - reach, drop + reach
    if not (math.isfinite(low) and math.isfinite(high)):
        msg = "The scores are so large that their differences are not finite numbers."
        raise RequestError(msg)
    return drop, (low, high)


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
        RequestError: the other one fails on the example inputs of the artefact, or later.
    """
    drop, interval = drop_of(ours, others) if ours is not None and others is not None else (None, None)
    theirs = _others(what, other_call)
    with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
        theirs()
        call()
        found: SpeedComparison = compare(theirs, call, seconds)
    return AgainstOne(
        what=what,
        metric=_mean(ours),
        other_metric=_mean(others),
        drop=drop,
        drop_interval=interval,
        speedup=found.ratio,
        speedup_interval=found.interval,
        ms=found.times["fast"],
        other_ms=found.times["slow"],
        doubt=found.doubt,
    )


def _others(what: str, call: Callable[[], object]) -> Callable[[], object]:
    """Return the call of the other model, whose errors are RequestErrors: all those of a model of the user's.

    Of an artefact only errors with a type of nc are: another one is a defect, as in the artefact itself.
    """
    kinds: type[BaseException] = BaseException if what == FP32 else NCError

    def run() -> object:
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except kinds as error:
            why = f"{said(error)}; --debug shows the traceback"
            msg = f"{what} fails on the example inputs of the artefact: {why}."
            raise RequestError(msg) from error

    return run


def _mean(scores: Sequence[float] | None) -> float | None:
    """Return the mean of finite scores, whose sum need not be finite."""
    return None if scores is None else math.fsum(score / len(scores) for score in scores)
