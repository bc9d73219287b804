"""Measured points, and those of them that no other one beats."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nc.config import AnyConfig
from nc.config.auto import AutoConfig
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactSchemaError, ConfigError, StateError
from nc.formats.checks import checked_path, is_number
from nc.process.warn import warn
from nc.reports.front_page import page_of
from nc.storage import marks
from nc.storage.atomic import write_text
from nc.storage.json_file import json_value
from nc.text.html_page import framed, preformatted
from nc.text.json_text import built
from nc.text.plain import plain, shown
from nc.text.table import format_table
from nc.tuning.trials import Result, result_of

#: Of files of plain values.
_FORMAT, _SCHEMA = "nc-front", 1
#: Name of the point that everything is compared with.
REFERENCE = "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrontPoint:
    """A model that was converted and measured.

    Attributes:
        name: for people.
        config: gives it again with `nc.quantize`.
        result: what was measured.
        drop: how much of the metric is lost against fp32.
        estimated: error and milliseconds that it was expected to have; None where nothing was expected.
    """

    name: str
    config: AnyConfig | AutoConfig
    result: Result
    drop: float
    estimated: tuple[float, float] | None = None

    @property
    def ms(self) -> float:
        """Milliseconds of a call."""
        return self.result.ms

    @property
    def metric(self) -> float:
        """The result of the user's function; larger is better."""
        return self.result.metric

    @property
    def weight_bytes(self) -> int:
        """Bytes of the constants."""
        return self.result.weight_bytes

    @property
    def is_uncertain(self) -> bool:
        """Whether something disturbed the measurement of its time."""
        return bool(self.result.note)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "config": self.config.to_dict(),
            "drop": self.drop,
            "estimated": self.estimated,
            **dataclasses.asdict(self.result),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """What was measured.

    Attributes:
        measured: all points, in the order in which they were measured; the first is fp32.
        rank_correlation: of estimated and measured errors (Spearman); None with fewer than three points.
        notes: what is to be said of the search.
        by_size: the front is one of metric and bytes, not of metric and time.
    """

    measured: tuple[FrontPoint, ...]
    rank_correlation: float | None = None
    notes: tuple[str, ...] = ()
    by_size: bool = False

    @property
    def points(self) -> tuple[FrontPoint, ...]:
        """Return the points that no other one beats in metric and time (or bytes), the cheapest first."""
        found: list[FrontPoint] = []
        for point in sorted(self.measured, key=lambda each: (self._price(each), -each.metric)):
            if not found or point.metric > found[-1].metric:
                found.append(point)
        return tuple(found)

    def _price(self, point: FrontPoint) -> float:
        return point.weight_bytes if self.by_size else point.ms

    @property
    def monotone(self) -> bool:
        """Whether the points that were solved for have metrics in the order of their estimated errors."""
        solved = sorted(
            ((p.estimated[0], p.metric) for p in self.measured if p.estimated is not None), reverse=True
        )
        return all(one[1] <= other[1] for one, other in zip(solved, solved[1:], strict=False))

    def fastest(self, *, max_drop: float) -> FrontPoint:
        """Return the fastest point that loses at most so much of the metric; fp32 loses nothing.

        Points whose times are certain come first. Where none of them is quantized, it is the fastest of the
        others that is faster than fp32 by the lower quartile of its rounds, with an `NCWarning`.
        """
        _check("max_drop", max_drop)
        return self._best(
            lambda p: p.drop <= max_drop,
            lambda p: p.ms,
            lambda p: p.drop,
            f"{max_drop=}",
            timed=True,
        )

    def most_accurate(self, *, max_ms: float | None = None, max_bits: float | None = None) -> FrontPoint:
        """Return the point with the largest metric that takes at most so long, or has at most so many bits.

        Where none does, it is the fastest, or the smallest, with an `NCWarning`.

        Args:
            max_ms: milliseconds of a call.
            max_bits: of each weight, on average, for a search with `target_bits`.

        Raises:
            ConfigError: both are given, or none is.
        """
        if (max_ms is None) == (max_bits is None):
            msg = "most_accurate: expected max_ms= or max_bits=."
            raise ConfigError(msg)
        if max_ms is not None:
            limit = _check("max_ms", max_ms)
            return self._best(
                lambda p: p.ms <= limit, lambda p: -p.metric, lambda p: p.ms, f"{max_ms=}", timed=True
            )
        limit = _check("max_bits", max_bits)
        if any(point.result.bits is None for point in self.measured):
            msg = "most_accurate: max_bits= is for a search with target_bits=."
            raise ConfigError(msg)

        def bits(point: FrontPoint) -> float:
            return point.result.bits or 0.0

        return self._best(
            # what is stored is a few bytes more or less than a whole number of them
            lambda p: bits(p) <= limit + 1e-6,
            lambda p: -p.metric,
            bits,
            f"{max_bits=}",
        )

    def smallest(self, *, max_drop: float) -> FrontPoint:
        """Return the point with the fewest bytes that loses at most so much of the metric."""
        _check("max_drop", max_drop)
        return self._best(
            lambda p: p.drop <= max_drop,
            lambda p: (p.weight_bytes, p.ms),
            lambda p: p.drop,
            f"{max_drop=}",
        )

    def _best(
        self,
        meets: Callable[[FrontPoint], bool],
        rank: Callable[[FrontPoint], Any],
        distance: Callable[[FrontPoint], float],
        asked: str,
        *,
        timed: bool = False,
    ) -> FrontPoint:
        self._check_measured()
        found = [point for point in self.measured if meets(point)]
        if found:
            best = min(certain_first(found) if timed else found, key=rank)
            if timed and best.is_uncertain:
                warn(
                    f"The time of {best.name!r} is uncertain, and so is whether it is the best: "
                    f"{best.result.note}. Measure again on a machine without other work."
                )
            return best
        nearest = min(self.measured, key=distance)
        warn(
            f"No measured point meets {asked}. The nearest is {nearest.name!r}: metric "
            f"{nearest.metric:.6g}, {nearest.ms:.3g} ms."
        )
        return nearest

    def _check_measured(self) -> None:
        if not self.measured:
            msg = "Nothing was measured: the search ended before its first point."
            raise StateError(msg)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "points": [point.to_dict() for point in self.measured],
            "front": [point.name for point in self.points],
            "rank_correlation": self.rank_correlation,
            "monotone": self.monotone,
            "notes": list(self.notes),
            "by_size": self.by_size,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the front: as a page with a picture (.html), or as plain values (.json).

        Raises:
            ConfigError: another ending.
            StateError: nothing was measured.
            InputError: it is not a path.
            ArtefactError: something else than a page, or a front, is there; or it cannot be written.
        """
        self._check_measured()
        target = checked_path("path", path)
        if not target.parent.is_dir():
            msg = f"{target}: there is no folder {str(target.parent)!r}; make it first."
            raise ArtefactError(msg)
        if target.suffix == ".html":
            write_text(target, page_of(self.to_dict()), marks.page)
        elif target.suffix == ".json":
            write_text(
                target, marks.described(_FORMAT, _SCHEMA, self.to_dict()), marks.of_format(_FORMAT, _SCHEMA)
            )
        else:
            msg = f"{target}: a front is saved as .html or .json."
            raise ConfigError(msg)

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return framed(page_of(self.to_dict())) if self.measured else preformatted(str(self))

    def __str__(self) -> str:
        """Return a table, and what the estimates were worth."""
        on_front = {point.name for point in self.points}
        bits = ("bits",) if self.by_size else ()
        head = ("", "point", "metric", "drop", "ms", "× fp32", "MB", *bits)
        rows = [
            (
                "*" if p.name in on_front else "",
                p.name,
                f"{p.metric:.5g}",
                f"{p.drop:.3g}",
                f"{p.ms:.3g}",
                f"{p.result.fp32_ratio:.2f}",
                f"{p.weight_bytes / 1e6:.1f}",
                *((f"{p.result.bits or 0:.2f}",) if self.by_size else ()),
            )
            for p in sorted(self.measured, key=self._price)
        ]
        price = "size" if self.by_size else "time"
        lines = [format_table([head, *rows]), f"* no other point is better in metric and {price}"]
        if self.rank_correlation is not None:
            order = "is" if self.monotone else "is not"
            lines.append(
                f"rank correlation of estimated and measured error {self.rank_correlation:.2f}; the front "
                f"{order} monotone"
            )
        doubts = [
            f"the time of {p.name} is uncertain: {p.result.note}" for p in self.measured if p.result.note
        ]
        return plain("\n".join([*lines, *doubts, *self.notes]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    """A file of plain values; its fields are those of `Front.to_dict`."""

    format: str
    schema: int
    points: list[dict[str, Any]]
    front: list[str]
    rank_correlation: float | None
    monotone: bool
    notes: list[str]
    by_size: bool


def read_front(path: Path) -> dict[str, Any]:
    """Return the plain values of a front that `Front.save` wrote as .json, as `Front.to_dict` gives them.

    Raises:
        ArtefactMissingError, ArtefactCorruptError: there is no such file, or it is something else or damaged.
        ArtefactSchemaError: a newer nc wrote it.
    """
    try:
        found = json_value(path)
        if not isinstance(found, dict):
            msg = f"it is a {type(found).__name__}"
            raise ValueError(msg)
        found = {"format": _FORMAT, "schema": _SCHEMA, **found}  # which the first fronts did not say
        if not marks.is_of(found, _FORMAT, _SCHEMA, path):
            msg = f"its format is {found['format']!r}"
            raise ValueError(msg)
        front = built(_Document, found, "the front")
        if not front.points:
            msg = "it has no points"
            raise ValueError(msg)
        points = [_point_of(point) for point in front.points]
    except ArtefactSchemaError:
        raise
    except ValueError as error:
        msg = f"{path}: it is not what front.save({path.name!r}) of nc.tune writes: {error}."
        raise ArtefactCorruptError(msg) from error
    return {**dataclasses.asdict(front), "points": points}


def _point_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a `FrontPoint` with all fields; raises ValueError for others."""
    point = built(_Point, {name: value for name, value in values.items() if name in _OF_POINT}, "a point")
    result = result_of({name: value for name, value in values.items() if name not in _OF_POINT})
    return {**dataclasses.asdict(point), **dataclasses.asdict(result)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """What a point has beside its result."""

    name: str
    config: dict[str, Any]
    drop: float
    estimated: tuple[float, float] | None


_OF_POINT = {field.name for field in dataclasses.fields(_Point)}


def front_of_points(points: Sequence[FrontPoint], notes: Sequence[str], *, by_size: bool = False) -> Front:
    """Return the front of measured points, with what the estimates of some of them were worth."""
    solved = [(point.estimated[0], point.metric) for point in points if point.estimated is not None]
    correlation = rank_correlation([-error for error, _ in solved], [metric for _, metric in solved])
    return Front(measured=tuple(points), rank_correlation=correlation, notes=tuple(notes), by_size=by_size)


def certain_first(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Return the points among which to choose by time.

    They are those with certain times and fp32, if one of them is quantized; else those that are faster than
    fp32 by the lower quartile of their rounds, and fp32.
    """
    others = [point for point in points if point.name != REFERENCE]
    certain = [p for p in others if not p.is_uncertain] or [p for p in others if p.result.spread[0] > 1]
    chosen = [point for point in points if point.name == REFERENCE or point in certain]
    return chosen or list(points)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's correlation of two rows of numbers; None with fewer than three, or equal ones."""
    if len(one) < 3:
        return None
    a, b = _ranks(one), _ranks(other)
    mean = (len(one) - 1) / 2
    above = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    below = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return above / below if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _check(name: str, value: Any) -> float:
    """Return a limit, which may be infinite; an error if it is none."""
    if not (is_number(value) or value == math.inf) or not value >= 0:
        msg = f"{name}={shown(value)}: expected a number of at least 0."
        raise ConfigError(msg)
    return float(value)
