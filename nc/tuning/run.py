"""What a search has found so far: its points and notes, the budget, the trials, and who is told."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from nc.config import AnyConfig
from nc.config.auto import AutoConfig
from nc.process.progress import shown
from nc.text.plain import plain
from nc.tuning.executor_metrics import Elsewhere
from nc.tuning.front import Front, FrontPoint, certain_first, front_of_points
from nc.tuning.identity import plain_or_described
from nc.tuning.low_bit_costs import LayerCosts
from nc.tuning.trials import Result, Trials

#: Notes of a search that is not whole.
CTRL_C = "The search was ended by Ctrl-C."
OUT_OF_TIME = "The budget ended before all points were measured."
#: The part of the budget in which times are measured, where metrics are computed elsewhere.
_TIMES = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneProgress:
    """Where a search is.

    Attributes:
        phase: what is done now.
        done: points that are measured.
        total: points that are to be measured, as far as that is known.
        seconds_left: of the budget.
        best: the fastest point so far that loses at most 1 % of fp32's metric; None at the start.
    """

    phase: str
    done: int
    total: int
    seconds_left: float
    best: FrontPoint | None = None

    def __str__(self) -> str:
        """Return one line."""
        best = "" if self.best is None else f"; best so far {self.best.name}, {self.best.ms:.3g} ms"
        return plain(f"[{self.done}/{self.total}, {self.seconds_left:.0f} s left] {self.phase}{best}")


@contextlib.contextmanager
def telling(
    progress: Callable[[TuneProgress], object] | bool | None,
) -> Iterator[Callable[[TuneProgress], object]]:
    """Yield what a search tells where it is: the caller's function, or what shows it; see `shown`."""
    if callable(progress):
        yield progress
        return
    with shown(progress, "tune") as tell:
        yield lambda where: tell(where.done, where.total, where.phase)


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """A point whose metric is computed elsewhere."""

    name: str
    config: AnyConfig | AutoConfig
    estimated: tuple[float, float] | None
    result: Result
    key: Mapping[str, Any]


class Run:
    """The state of a search.

    Attributes:
        points: that are measured, the float model's first.
        notes: what is to be said.
        total: points that are to be measured, as far as that is known.
        elsewhere: where metrics are computed; None: here.
    """

    def __init__(
        self,
        key: Mapping[str, Any],
        trials: Trials,
        end: float,
        progress: Callable[[TuneProgress], object],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.points: list[FrontPoint] = []
        self.notes: list[str] = []
        self.total = 0
        self.elsewhere = elsewhere
        self._key, self._trials, self._end, self._progress = key, trials, end, progress
        self._open: list[_Open] = []
        self._begin = now = time.monotonic()
        # metrics elsewhere are computed when all times were measured
        self._last = end if elsewhere is None else now + _TIMES * (end - now)

    def key_of(self, config: AnyConfig | AutoConfig) -> dict[str, Any]:
        """Return what determines the result of a configuration; nothing where nothing is kept."""
        return {**self._key, "config": plain_or_described(config)} if self._trials.folder else {}

    def find(self, config: AnyConfig | AutoConfig) -> Result | None:
        """Return the result of a trial that was kept."""
        return self._trials.find(self.key_of(config))

    def find_estimates(self, configs: Mapping[str, AnyConfig]) -> LayerCosts | None:
        """Return the estimates for some candidates that were kept."""
        return self._trials.read(self._estimates_key(configs), LayerCosts.from_dict)

    def keep_estimates(self, configs: Mapping[str, AnyConfig], costs: LayerCosts) -> None:
        """Keep the estimates for some candidates."""
        self._trials.write(self._estimates_key(configs), dataclasses.asdict(costs))

    def _estimates_key(self, configs: Mapping[str, AnyConfig]) -> dict[str, Any]:
        if not self._trials.folder:
            return {}
        return {**self._key, "estimates": {n: plain_or_described(c) for n, c in configs.items()}}

    def same_as(self, config: AnyConfig | AutoConfig) -> str | None:
        """Return the name of the point that has this configuration."""
        return next((known.name for known in self._all() if known.config == config), None)

    def names(self) -> list[str]:
        """Return the names of all points."""
        return [known.name for known in self._all()]

    def _all(self) -> list[FrontPoint | _Open]:
        return [*self.points, *self._open]

    def is_over(self) -> bool:
        """Return whether the budget has ended; the first time that is noted."""
        if time.monotonic() <= self._last:
            return False
        self.note(OUT_OF_TIME)
        return True

    def spent(self) -> float:
        """Return the part of the budget that is over."""
        return (time.monotonic() - self._begin) / max(self._last - self._begin, 1e-9)

    def note(self, text: str) -> None:
        """Keep what is to be said, once."""
        self.notes += [] if text in self.notes else [text]

    def add(
        self,
        name: str,
        config: AnyConfig | AutoConfig,
        result: Result,
        *,
        estimated: tuple[float, float] | None = None,
        model: Any = None,
    ) -> None:
        """Add a point, and keep its trial.

        Args:
            name: for people.
            config: of the point.
            result: what was measured.
            estimated: see `FrontPoint`.
            model: whose metric is computed elsewhere, and not in the result; None: the result is whole.
        """
        if model is not None:
            assert self.elsewhere is not None
            self.elsewhere.keep(model)
            self._open.append(_Open(name, config, estimated, result, self.key_of(config)))
            return
        self._trials.keep(self.key_of(config), result)
        self._append(name, config, result, estimated)

    def settle(self) -> None:
        """Compute the metrics that are computed elsewhere, and add their points."""
        if self.elsewhere is None or not self._open:
            return
        self.say(f"{len(self._open)} metrics elsewhere")
        waiting, self._open = self._open, []
        try:
            for index, value in self.elsewhere.values(lambda: self._end - time.monotonic()):
                each = waiting[index]
                if isinstance(value, str):
                    self.note(f"{each.name} is left out: {value}")
                    continue
                result = dataclasses.replace(each.result, metric=value)
                self._trials.keep(each.key, result)
                self._append(each.name, each.config, result, each.estimated)
                self.say(f"{each.name}'s metric")
        except KeyboardInterrupt:
            self.note(CTRL_C)

    def _append(
        self,
        name: str,
        config: AnyConfig | AutoConfig,
        result: Result,
        estimated: tuple[float, float] | None,
    ) -> None:
        drop = self.points[0].metric - result.metric if self.points else 0.0
        self.points.append(
            FrontPoint(name=name, config=config, result=result, drop=drop, estimated=estimated)
        )

    def say(self, phase: str) -> None:
        """Tell where the search is."""
        near = [p for p in self.points if p.drop <= 0.01 * abs(self.points[0].metric)]
        self._progress(
            TuneProgress(
                phase=phase,
                done=len(self.points),
                total=self.total,
                seconds_left=max(0.0, self._end - time.monotonic()),
                best=min(certain_first(near), key=lambda p: p.ms) if near else None,
            )
        )


class PointSearch(Protocol):
    """What measures points into a `Run`.

    Attributes:
        total: points that are to be measured, as far as that is known.
        by_size: the front is by size, and not by time.
    """

    total: int
    by_size: bool

    def measure(self) -> None:
        """Measure the float model, the candidates and the points between them."""


def front_by(search: PointSearch, run: Run) -> Front:
    """Return the front that a search finds; Ctrl-C ends it."""
    run.total = search.total
    try:
        search.measure()
    except KeyboardInterrupt:
        run.note(CTRL_C)
    run.settle()
    return front_of_points(run.points, run.notes, by_size=search.by_size)
