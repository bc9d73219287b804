"""A front as one page, or as a section of a report's: a picture and a table, without scripts and requests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nc.text.html_page import bullets, document, escaped, table

_WIDTH, _HEIGHT, _EDGE = 720, 360, 56


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    """What a point is paid with."""

    name: str
    unit: str
    of: Callable[[Mapping[str, Any]], float]


_TIME = _Axis("latency", "ms", lambda point: point["ms"])
_SIZE = _Axis("size", "MB", lambda point: point["weight_bytes"] / 1e6)


def page_of(front: Mapping[str, Any]) -> str:
    """Return the page of a front.

    Args:
        front: from `Front.to_dict`.
    """
    title = f"Accuracy and {_axis(front).name}"
    return document(
        title,
        f"<h1>{title}</h1>{_measured(front)}<h2>Configurations</h2>{_configurations(front['points'])}",
    )


def section(front: Mapping[str, Any]) -> str:
    """Return a front as a section of a report's page.

    Args:
        front: from `Front.to_dict`, through JSON too.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: it is not what `to_dict` gives.
    """
    return (
        f"<h2>What was measured when it was tuned: accuracy and {_axis(front).name}</h2>{_measured(front)}"
        f"<h3>Configurations</h3>{_configurations(front['points'])}"
    )


def _axis(front: Mapping[str, Any]) -> _Axis:
    return _SIZE if front["by_size"] else _TIME


def _measured(front: Mapping[str, Any]) -> str:
    """Return the picture, the table, and what the estimates were worth."""
    axis = _axis(front)
    points, names = sorted(front["points"], key=axis.of), set(front["front"])
    correlation = front["rank_correlation"]
    said = (
        [f"Rank correlation of estimated and measured error: {correlation:.2f}."]
        if correlation is not None
        else []
    )
    said.append(f"The measured front is {'' if front['monotone'] else 'not '}monotone in the estimate.")
    return (
        f"{_picture(points, names, axis)}{_table(points, names)}{bullets((*said, *map(str, front['notes'])))}"
    )


def _picture(points: Sequence[Mapping[str, Any]], names: set[str], axis: _Axis) -> str:
    """Return the price to the right, metric upwards; numbers are those of the table."""
    prices = [axis.of(p) for p in points]
    x = _scale(prices, _EDGE, _WIDTH - _EDGE)
    y = _scale([p["metric"] for p in points], _HEIGHT - _EDGE, _EDGE)
    front = sorted((axis.of(p), p["metric"]) for p in points if p["name"] in names)
    line = " ".join(f"{x(price):.1f},{y(metric):.1f}" for price, metric in front)
    marks = []
    for number, p in enumerate(points, 1):
        colour = "int8" if p["name"] in names else "line"
        title = f"{escaped(p['name'])}: {p['metric']:.5g}, {axis.of(p):.3g} {axis.unit}"
        marks.append(
            f"<circle cx={x(axis.of(p)):.1f} cy={y(p['metric']):.1f} r=5 fill='var(--{colour})'>"
            f"<title>{title}</title></circle>"
        )
        marks.append(f"<text x={x(axis.of(p)) - 4:.1f} y={y(p['metric']) - 9:.1f}>{number}</text>")
    low, high = min(p["metric"] for p in points), max(p["metric"] for p in points)
    least, most = min(prices), max(prices)
    axes = (
        f"<text x={_EDGE} y={_HEIGHT - 12}>{least:.3g} {axis.unit}</text>"
        f"<text x={_WIDTH - _EDGE} y={_HEIGHT - 12} text-anchor=end>{most:.3g} {axis.unit}</text>"
        f"<text x=4 y={_HEIGHT - _EDGE}>{low:.4g}</text><text x=4 y={_EDGE}>{high:.4g}</text>"
    )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='metric over {axis.name}'>"
        f"<polyline points='{line}' fill=none stroke='var(--int8)'/>{''.join(marks)}{axes}</svg>"
    )


def _scale(values: Sequence[float], start: float, end: float) -> Any:
    """Return what maps numbers to a length between start and end."""
    low, size = min(values), (max(values) - min(values)) or 1.0
    return lambda value: start + (end - start) * (value - low) / size


def _table(points: Sequence[Mapping[str, Any]], names: set[str]) -> str:
    rows = [
        (
            number,
            p["name"],
            f"{p['metric']:.5g}",
            f"{p['drop']:.3g}",
            f"{p['ms']:.3g}",
            f"{p['fp32_ratio']:.2f}",
            f"{p['weight_bytes'] / 1e6:.1f}",
            "yes" if p["name"] in names else "",
            p["note"],
        )
        for number, p in enumerate(points, 1)
    ]
    return table(("", "point", "metric", "drop", "ms", "× fp32", "MB", "on the front", "doubt"), rows)


def _configurations(points: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"<details><summary>{escaped(p['name'])}</summary>"
        f"<pre>{escaped(json.dumps(p['config'], indent=1))}</pre></details>"
        for p in points
    )
