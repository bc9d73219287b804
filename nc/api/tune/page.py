"""A front as one page: a picture and a table, without scripts and without requests."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT, _EDGE = 720, 360, 56
_STYLE = """
:root { color-scheme: light dark; --line: #888; --front: #1565c0; --other: #777; --text: #222; --back: #fff }
@media (prefers-color-scheme: dark) {
  :root { --front: #8ab4f8; --other: #aaa; --text: #eee; --back: #161616 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem }
td, th { border-bottom: 1px solid var(--line) } pre { overflow-x: auto; font-size: 12px }
svg { width: 100%; height: auto } svg text { fill: var(--text); font-size: 12px }
"""


def page_of(front: Mapping[str, Any]) -> str:
    """Return the page of a front.

    Args:
        front: from `Front.to_dict`.
    """
    points, names = sorted(front["points"], key=lambda point: point["ms"]), set(front["front"])
    correlation = front["rank_correlation"]
    said = (
        []
        if correlation is None
        else [f"Rank correlation of estimated and measured error: {correlation:.2f}."]
    )
    said.append(f"The measured front is {'' if front['monotone'] else 'not '}monotone in the estimate.")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in (*said, *front["notes"]))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Accuracy and latency</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<main><h1>Accuracy and latency</h1>{_picture(points, names)}{_table(points, names)}"
        f"<ul>{notes}</ul><h2>Configurations</h2>{_configurations(points)}</main></html>\n"
    )


def _picture(points: Sequence[Mapping[str, Any]], names: set[str]) -> str:
    """Return time to the right, metric upwards; numbers are those of the table."""
    x = _scale([p["ms"] for p in points], _EDGE, _WIDTH - _EDGE)
    y = _scale([p["metric"] for p in points], _HEIGHT - _EDGE, _EDGE)
    front = sorted((p["ms"], p["metric"]) for p in points if p["name"] in names)
    line = " ".join(f"{x(ms):.1f},{y(metric):.1f}" for ms, metric in front)
    marks = []
    for number, p in enumerate(points, 1):
        name, colour = html.escape(p["name"]), "front" if p["name"] in names else "other"
        title = f"{name}: {p['metric']:.5g}, {p['ms']:.3g} ms"
        marks.append(
            f"<circle cx={x(p['ms']):.1f} cy={y(p['metric']):.1f} r=5 fill='var(--{colour})'>"
            f"<title>{title}</title></circle>"
        )
        marks.append(f"<text x={x(p['ms']) - 4:.1f} y={y(p['metric']) - 9:.1f}>{number}</text>")
    low, high = min(p["metric"] for p in points), max(p["metric"] for p in points)
    fast, slow = min(p["ms"] for p in points), max(p["ms"] for p in points)
    axes = (
        f"<text x={_EDGE} y={_HEIGHT - 12}>{fast:.3g} ms</text>"
        f"<text x={_WIDTH - _EDGE} y={_HEIGHT - 12} text-anchor=end>{slow:.3g} ms</text>"
        f"<text x=4 y={_HEIGHT - _EDGE}>{low:.4g}</text><text x=4 y={_EDGE}>{high:.4g}</text>"
    )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='metric over milliseconds'>"
        f"<polyline points='{line}' fill=none stroke='var(--front)'/>{''.join(marks)}{axes}</svg>"
    )


def _scale(values: Sequence[float], start: float, end: float) -> Any:
    """Return what maps numbers to a length between start and end."""
    low, size = min(values), (max(values) - min(values)) or 1.0
    return lambda value: start + (end - start) * (value - low) / size


def _table(points: Sequence[Mapping[str, Any]], names: set[str]) -> str:
    rows = []
    for number, p in enumerate(points, 1):
        cells = (
            str(number),
            p["name"],
            f"{p['metric']:.5g}",
            f"{p['drop']:.3g}",
            f"{p['ms']:.3g}",
            f"{p['fp32_ratio']:.2f}",
            f"{p['weight_bytes'] / 1e6:.1f}",
            "yes" if p["name"] in names else "",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    titles = ("", "point", "metric", "drop", "ms", "× fp32", "MB", "on the front")
    head = "".join(f"<th scope=col>{title}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _configurations(points: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"<details><summary>{html.escape(p['name'])}</summary>"
        f"<pre>{html.escape(json.dumps(p['config'], indent=1))}</pre></details>"
        for p in points
    )
