"""Markdown tables from rows: which rows, what names a line, and which figure stands in which column."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from results_rows import Row, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        header: of the column.
        figure: name of the figure that stands in its cells.
        digits: behind the point; None: the value as it is.
        where: what a row must have in `what` to stand here.
        mean: the geometric mean of the column stands below it.
        spread: the smallest and the largest measurement stand behind the value.
        beside: names of figures of the same row that stand behind the value in parentheses, if there.
    """

    header: str
    figure: str
    digits: int | None = None
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mean: bool = False
    spread: bool = False
    beside: Sequence[str] = ()

    def row(self, rows: Iterable[Row]) -> Row | None:
        """Return the row of a line that stands here.

        Of several the last one, so that a new run replaces an old one.
        """
        found = [row for row in rows if self.figure in row.figures and matches(row, self.where)]
        return found[-1] if found else None

    def cell(self, rows: Iterable[Row]) -> str:
        """Return the text for the rows of one line; "" if none stands here."""
        row = self.row(rows)
        if row is None:
            return ""
        figure, shown = row.figures[self.figure], [text(row.figures[self.figure].value, self.digits)]
        if self.spread and figure.low is not None and figure.high is not None:
            shown.append(f"({text(figure.low, self.digits)} to {text(figure.high, self.digits)})")
        if more := [str(row.figures[name].value) for name in self.beside if name in row.figures]:
            shown.append(f"({', '.join(more)})")
        return " ".join(shown)

    def value(self, rows: Iterable[Row]) -> float | None:
        """Return the number that `cell` shows."""
        row = self.row(rows)
        value = None if row is None else row.value(self.figure)
        return float(value) if isinstance(value, int | float) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table of each machine.

    Attributes:
        where: what a row must have in `what` to be part of it.
        lines: header → key of `what` that names a line.
        columns: of figures. A column without any cell is left out.
        by: title → key of `what` whose values get tables of their own, as "title value".
        apart: packages whose minor versions get tables of their own.
    """

    where: Mapping[str, Any]
    lines: Mapping[str, str]
    columns: Sequence[Column]
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: Sequence[str] = ()

    def render(self, rows: Sequence[Row]) -> str:
        """Return Markdown: for each machine a heading and its tables."""
        chosen = [row for row in rows if matches(row, self.where)]
        parts = []
        for same in grouped(chosen, self._conditions):
            parts.append(caption(same))
            for part in grouped(
                same, lambda row: tuple(str(row.what.get(key, "")) for key in self.by.values())
            ):
                titles = [
                    f"{title} {part[0].what[key]}".strip()
                    for title, key in self.by.items()
                    if key in part[0].what
                ]
                parts += [f"*{', '.join(titles)}*"] if titles else []
                parts.append(self._one(part))
        return "\n\n".join(parts)

    def _conditions(self, row: Row) -> tuple[str, ...]:
        return (
            row.machine,
            row.isa,
            *(".".join(row.versions.get(name, "").split(".")[:2]) for name in self.apart),
        )

    def _one(self, rows: Sequence[Row]) -> str:
        lines = grouped(rows, lambda row: tuple(str(row.what.get(key, "")) for key in self.lines.values()))
        columns = [column for column in self.columns if any(column.cell(line) for line in lines)]
        names = {
            header: key for header, key in self.lines.items() if any(key in line[0].what for line in lines)
        }
        body = [
            [
                *(text(line[0].what.get(key, ""), None) for key in names.values()),
                *(c.cell(line) or "–" for c in columns),
            ]
            for line in lines
        ]
        if any(column.mean for column in columns) and len(lines) > 1:
            means = [_mean([c.value(line) for line in lines], c.digits) if c.mean else "" for c in columns]
            body.append(["geometric mean", *[""] * (len(names) - 1), *means])
        made = markdown([*names, *(column.header for column in columns)], body, numbers=len(columns))
        notes = list(dict.fromkeys(row.note for row in rows if row.note))
        return "\n".join([made, *([""] if notes else []), *(f"* {note}" for note in notes)])


def matches(row: Row, where: Mapping[str, Any]) -> bool:
    """Tell whether a row has these values in `what`.

    A tuple stands for any of its members, None for a key that is absent.
    """
    return all(
        row.what.get(key) in (wanted if isinstance(wanted, tuple) else (wanted,))
        for key, wanted in where.items()
    )


def grouped(rows: Iterable[Row], key: Any) -> list[list[Row]]:
    """Return the rows in groups of equal keys, in the order in which the keys occur first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def caption(rows: Sequence[Row]) -> str:
    """Return the heading for rows of one machine: its name, instruction sets, all versions, the days."""
    packages = {name: None for row in rows for name in row.versions}
    versions = [
        f"{name} {' and '.join(sorted({row.versions[name] for row in rows if name in row.versions}))}"
        for name in packages
    ]
    days = sorted({row.date for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"**{rows[0].machine}** ({rows[0].isa}; {', '.join(versions)}; {when})"


def markdown(header: Sequence[str], body: Iterable[Sequence[str]], numbers: int) -> str:
    """Return a table whose last `numbers` columns are aligned to the right."""
    marks = [*["---"] * (len(header) - numbers), *["---:"] * numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, marks, *body))


def text(value: Value | bool, digits: int | None) -> str:
    """Return a value as a cell shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or digits is None:
        return str(value)
    return f"{value:.{digits}f}"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _mean(values: Sequence[float | None], digits: int | None) -> str:
    known = [value for value in values if value is not None]
    return text(geometric_mean(known), digits) if known else ""
