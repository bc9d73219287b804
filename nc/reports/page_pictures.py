"""Pictures of a page: errors along the depth, ranges as histograms, channels with smoothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from nc.graph.evidence import ChannelView, DepthPoint, Evidence, RangeView
from nc.text.html_page import escaped, table

_WIDTH, _HEIGHT = 1000.0, 200.0
_SMALL = 90.0
STYLE = """
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem }
.grid figure { margin: 0; break-inside: avoid } figcaption { font-size: 13px; overflow-wrap: anywhere }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke }
.local { stroke: var(--int8) } .cumulative { stroke: var(--fp32); stroke-dasharray: 6 3 }
.grid svg { height: 90px; border-bottom: 1px solid var(--line) }
line { vector-effect: non-scaling-stroke; stroke-width: 2 }
.chart { display: grid; grid-template-columns: 3.2rem 1fr } .chart svg { height: 200px }
.ticks { position: relative; font-size: 12px } .ticks span { position: absolute; transform: translateY(-50%) }
.grid-line { stroke: var(--line); stroke-width: 1 } .axis { text-align: center }
.ends { display: flex; justify-content: space-between; gap: 1rem; margin: 0 0 0 3.2rem; font-size: 12px }
.chosen { stroke: var(--fp32) } .bar { fill: var(--int8) } .before { stroke: var(--fp32) }
.after { stroke: var(--int8) }
"""


def pictures(evidence: Evidence | None) -> str:
    """Return all parts that there is something for; a sentence where there is nothing."""
    if evidence is None:
        return ""
    missing = (
        f"<p>Errors along the depth, ranges and channels were not computed: {escaped(evidence.missing)}.</p>"
        if evidence.missing
        else ""
    )
    return missing + _depth(evidence.depth) + _ranges(evidence.ranges) + _channels(evidence.channels)


def configuration(evidence: Evidence | None) -> str:
    """Return the configuration to reproduce the model; "" where it is not known."""
    if evidence is None or evidence.config is None:
        return ""
    text = json.dumps(evidence.config, indent=1, ensure_ascii=False)
    return (
        "<h2>Configuration</h2><details><summary>JSON, for <code>python -m nc quantize --config</code> or "
        f"<code>from_json</code></summary><pre>{escaped(text)}</pre></details>"
    )


def _line(values: Sequence[float], y: Callable[[float], float], kind: str) -> str:
    step = _WIDTH / max(len(values) - 1, 1)
    points = " ".join(f"{i * step:.1f},{y(value):.1f}" for i, value in enumerate(values))
    return f"<polyline class={kind} points='{points}'/>"


def _depth(points: Sequence[DepthPoint]) -> str:
    if not points:
        return ""
    shown = [db for p in points for db in (p.local_db, p.cumulative_db)]
    low, high = 10 * math.floor(min(shown) / 10), 10 * math.ceil(min(max(shown), 80.0) / 10)
    high = max(high, low + 10)

    def y(db: float) -> float:
        return _HEIGHT * (1 - (min(db, high) - low) / (high - low))

    ticks = range(high, low - 1, -10 * math.ceil((high - low) / 50))
    grid = "".join(
        f"<line class=grid-line x1=0 x2={_WIDTH:g} y1={y(db):.1f} y2={y(db):.1f} />" for db in ticks
    )
    labels = "".join(f"<span style=top:{100 * y(db) / _HEIGHT:.1f}%>{db} dB</span>" for db in ticks)
    lines = _line([p.local_db for p in points], y, "local")
    lines += _line([p.cumulative_db for p in points], y, "cumulative")
    worst = sorted(points, key=lambda p: p.cumulative_db)[:8]
    rows = [(p.operator, f"{p.local_db:.1f}", f"{p.cumulative_db:.1f}") for p in worst]
    ends = f"<span>{escaped(points[0].operator)}</span><span>{escaped(points[-1].operator)}</span>"
    return (
        "<h2>Error along the depth</h2><p>Of each quantized operator, on the example inputs at conversion: "
        "its own error for fp32 inputs, and the quantized graph against fp32 there. More dB is better.</p>"
        "<p class=legend><span><b class=int8 aria-hidden=true>—</b> local</span>"
        "<span><b class=fp32 aria-hidden=true>- -</b> cumulative</span></p>"
        f"<div class=chart><div class=ticks aria-hidden=true>{labels}</div>"
        f"<svg viewBox='0 0 {_WIDTH:g} {_HEIGHT:g}' preserveAspectRatio=none role=img aria-label='local and "
        f"cumulative error of {len(points)} operators, {low} to {high} dB'>{grid}{lines}</svg></div>"
        f"<p class=ends>{ends}</p><p class=axis>{len(points)} operators in execution order</p>"
        "<h3>The worst by cumulative error</h3>" + table(("operator", "local dB", "cumulative dB"), rows)
    )


def _ranges(views: Sequence[RangeView]) -> str:
    if not views:
        return ""
    names = list(dict.fromkeys(name for view in views for name in view.others))
    data = escaped(" and ".join(dict.fromkeys(view.data for view in views)))
    rows = [
        (
            view.operator,
            f"{view.db:.1f}",
            _pair(view.chosen),
            *(_pair(view.others[name]) if name in view.others else "" for name in names),
        )
        for view in views
    ]
    return (
        f"<h2>The worst ranges</h2><p>Tensors whose rounding loses most, on {data}. The height of a bar is "
        "the logarithm of a number of values; the lines are the range that the codes cover. The table says "
        "what each algorithm would choose; kl, which takes long, is there where it was asked for.</p>"
        f"<div class=grid>{''.join(map(_histogram, views))}</div>"
        + table(("operator", "dB", "chosen", *names), rows)
    )


def _pair(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3g} … {pair[1]:.3g}"


def _histogram(view: RangeView) -> str:
    low, high = min(view.low, view.chosen[0]), max(view.high, view.chosen[1])
    span = (high - low) or 1.0
    most = math.log1p(max(view.counts)) or 1.0
    width = 300 * (view.high - view.low) / span / len(view.counts)
    start = 300 * (view.low - low) / span
    bars = "".join(
        f"<rect class=bar x={start + i * width:.1f} y={_SMALL * (1 - math.log1p(count) / most):.1f} "
        f"width={max(width - 0.5, 0.5):.1f} height={_SMALL * math.log1p(count) / most:.1f} />"
        for i, count in enumerate(view.counts)
        if count
    )
    marks = "".join(
        f"<line class=chosen x1={x:.1f} x2={x:.1f} y1=0 y2={_SMALL:g} />"
        for x in (300 * (edge - low) / span for edge in view.chosen)
    )
    label = escaped(f"values of the input of {view.operator} from {view.low:.3g} to {view.high:.3g}")
    return (
        f"<figure><svg viewBox='0 0 300 {_SMALL:g}' preserveAspectRatio=none role=img aria-label='{label}'>"
        f"{bars}{marks}</svg><figcaption>{escaped(view.operator)}: {view.db:.1f} dB, values "
        f"{view.low:.3g} … {view.high:.3g}, range {_pair(view.chosen)}</figcaption></figure>"
    )


def _channels(views: Sequence[ChannelView]) -> str:
    if not views:
        return ""
    return (
        "<h2>Channels with and without smoothing</h2><p>Largest magnitudes of groups of channels on the "
        "example inputs, the largest without smoothing at the left: without (upper line at the left) and "
        "with it.</p>"
        f"<div class=grid>{''.join(map(_channel, views))}</div>"
    )


def _channel(view: ChannelView) -> str:
    most = max(*view.before, *view.after, 1e-30)

    def y(value: float) -> float:
        return _SMALL * (1 - value / most)

    lines = _line(view.before, y, "before") + _line(view.after, y, "after")
    label = escaped(f"channels of the input of {view.operator} with and without smoothing")
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH:g} {_SMALL:g}' preserveAspectRatio=none role=img "
        f"aria-label='{label}'>{lines}</svg><figcaption>{escaped(view.operator)}: {view.channels} channels, "
        f"largest {view.before[0]:.3g} without and {max(view.after):.3g} with smoothing</figcaption></figure>"
    )
