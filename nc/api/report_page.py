"""A report as one page: a strip of the model, where the time goes, a table with reasons, findings.

The page needs nothing else: no request, plain SVG, and a few lines of script for the zoom, without which all
of it can be read. Names of operators are escaped.
"""

from __future__ import annotations

import collections
import html
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nc._version import __version__
from nc.api.op_report import OpReport
from nc.backends import cpu
from nc.backends.profiling.profile import Profile
from nc.graph.plan import Applied
from nc.graph.qdq import Finding
from nc.text.table import folded

_WIDTH, _HEIGHT = 1000.0, 64
#: The narrowest cell of the strip.
_LEAST = 0.4
#: Steps and kernels that the table of times has at most.
_MOST_KERNELS = 12
_COLOURS = {"int8": "int8", "bf16": "bf16", "fp32": "fp32"}
_STYLE = """
:root { color-scheme: light dark; --text: #1f1f1f; --back: #fff; --line: #bbb; --int8: #1565c0;
  --bf16: #2e7d32; --fp32: #c75300; --other: #6a4fb3; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --back: #161616; --line: #555; --int8: #8ab4f8;
  --bf16: #81c995; --fp32: #fcad70; --other: #c6b3ff; --bad: #ff8a80 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: 13px } td, th { text-align: left;
  padding: .15rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { white-space: nowrap } th.block { white-space: normal }
td:first-child, td:nth-child(n + 5) { overflow-wrap: anywhere }
pre { white-space: pre-wrap } svg { width: 100%; height: 64px; display: block }
svg rect { stroke: var(--back); stroke-width: .3; cursor: pointer }
.int8 { color: var(--int8); fill: var(--int8) } .bf16 { color: var(--bf16); fill: var(--bf16) }
.fp32 { color: var(--fp32); fill: var(--fp32) } .other { color: var(--other); fill: var(--other) }
.legend span { margin-right: 1rem } .block { font-weight: 600 } @media print { body { max-width: none } }
"""
#: A click on a cell shows it and its neighbours; another one shows all.
_ZOOM = """
document.querySelectorAll("svg.strip").forEach(function (strip) {
  var whole = strip.getAttribute("viewBox");
  strip.addEventListener("click", function (event) {
    var cell = event.target.closest("rect"), zoomed = strip.getAttribute("viewBox") !== whole;
    if (!cell || zoomed) { strip.setAttribute("viewBox", whole); return; }
    var x = +cell.getAttribute("x"), width = +cell.getAttribute("width"), all = Math.max(20 * width, 10);
    strip.setAttribute("viewBox", Math.max(0, x + width / 2 - all / 2) + " 0 " + all + " 64");
  });
});
"""


class Shown(Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def ops(self) -> Sequence[OpReport]: ...  # noqa: D102
    @property
    def not_int8(self) -> Sequence[OpReport]: ...  # noqa: D102
    @property
    def profile(self) -> Profile | None: ...  # noqa: D102
    @property
    def health(self) -> Sequence[Finding]: ...  # noqa: D102
    @property
    def algorithms(self) -> Sequence[Applied]: ...  # noqa: D102
    @property
    def changes(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def rewrites(self) -> Sequence[str]: ...  # noqa: D102

    def summary(self) -> str: ...  # noqa: D102
    def to_dict(self) -> dict[str, Any]: ...  # noqa: D102


def page_of(report: Shown) -> str:
    """Return the page of a report."""
    verdict, _, rest = report.summary().partition("\n")
    parts = [
        f"<h1>{_escaped(verdict)}</h1>",
        f"<pre>{_escaped(rest)}</pre>",
        "<h2>The model, operator by operator</h2>",
        _strip(report.ops),
        _next_steps(report),
        _times(report),
        "<h2>All operators</h2>",
        _table(report),
        _findings(report),
        "<h2>Where this was made</h2>",
        _facts(_machine()),
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Report of a quantized model</title>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{_ZOOM}</script></body></html>\n"
    )


def _escaped(text: object) -> str:
    return html.escape(str(text))


def _class_of(op: OpReport) -> str:
    return _COLOURS.get(op.ran, "other")


def _weights_of(ops: Sequence[OpReport]) -> tuple[list[float], str]:
    """Return how wide the cell of each operator is, and what the width means."""
    if any(op.share for op in ops):
        return [op.share or 0.0 for op in ops], "share of the time"
    return [float(op.multiply_adds or 0) for op in ops], "multiply-adds on the example inputs"


def _strip(ops: Sequence[OpReport]) -> str:
    """Return one cell for each operator in execution order."""
    weights, meaning = _weights_of(ops)
    total = sum(weights) or 1.0
    widths = [max(_LEAST, _WIDTH * weight / total) for weight in weights]
    scale, x, cells = _WIDTH / max(sum(widths), 1e-9), 0.0, []
    for op, weight, width in zip(ops, weights, widths, strict=True):
        why = f" ({op.reason})" if op.reason else ""
        title = _escaped(f"{op.operator}: {op.kind}, {op.ran}{why}, {weight / total:.1%}")
        cells.append(
            f"<rect class={_class_of(op)} x={x * scale:.3f} y=0 width={width * scale:.3f} height={_HEIGHT}>"
            f"<title>{title}</title></rect>"
        )
        x += width
    counts = collections.Counter(map(_class_of, ops))
    legend = "".join(
        f"<span><b class={name} aria-hidden=true>■</b> {name}: {count}</span>"
        for name, count in counts.items()
    )
    label = f"{len(ops)} operators in execution order, width: {meaning}"
    return (
        f"<svg class=strip viewBox='0 0 {_WIDTH:g} {_HEIGHT}' preserveAspectRatio=none role=img "
        f"aria-label='{label}'>{''.join(cells)}</svg>"
        f"<p class=legend>{legend}<span>width: {meaning}; a click zooms</span></p>"
    )


def _next_steps(report: Shown) -> str:
    """Return what is not int8 though it was asked for, with the reasons."""
    reasons: dict[str, list[str]] = {}
    for op in report.not_int8:
        reasons.setdefault(op.reason or "the engine does not say", []).append(op.operator)
    if not reasons:
        return ""
    rows = [(why, str(len(names)), ", ".join(names[:8]) + (", …" if len(names) > 8 else "")) for why, names in
            reasons.items()]  # fmt: skip
    return "<h2>Asked to run int8, and does not</h2>" + _rows(("why", "operators", "which"), rows)


def _times(report: Shown) -> str:
    """Return the kernels that take most of the time."""
    if report.profile is None:
        return ""
    by_kernel: dict[str, float] = {}
    for step in report.profile.steps:
        by_kernel[f"{step.role}: {step.kernel}"] = by_kernel.get(f"{step.role}: {step.kernel}", 0.0) + step.ms
    total = sum(by_kernel.values()) or 1.0
    largest = sorted(by_kernel.items(), key=lambda each: -each[1])[:_MOST_KERNELS]
    rows = [(name, f"{ms:.3f}", f"{ms / total:.1%}") for name, ms in largest]
    return "<h2>Where the time goes</h2>" + _rows(("kernel", "ms", "share"), rows)


def _table(report: Shown) -> str:
    """Return all operators, equal blocks once."""
    rows = [("operator", "type", "asked", "ran", "kernel", "why", "share")]
    rows += [
        (op.operator, op.kind, op.asked, op.ran, op.kernel, op.reason, repr(op.share or 0.0))
        for op in report.ops
    ]
    head, *body = folded(rows, {6: lambda cells: repr(sum(map(float, cells)))})
    shown = [
        row if len(row) == 1 else (*row[:-1], f"{float(row[-1]):.1%}" if float(row[-1]) else "")
        for row in body
    ]
    return _rows(head, shown)


def _findings(report: Shown) -> str:
    lines = [f"{finding.operator}: {finding.text}" for finding in report.health]
    lines += [*map(str, report.algorithms), *report.changes, *report.rewrites]
    if not lines:
        return ""
    return "<h2>Findings</h2><ul>" + "".join(f"<li>{_escaped(line)}</li>" for line in lines) + "</ul>"


def _machine() -> dict[str, str]:
    return {
        "CPU": cpu.model_name(),
        "features": ", ".join(cpu.features()) or "none that int8 kernels use",
        "threads": str(torch.get_num_threads()),
        "versions": f"nc {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def _facts(facts: Mapping[str, str]) -> str:
    return _rows(("", ""), list(facts.items()))


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a row of one cell is a heading of those below it."""
    titles = "".join(f"<th scope=col>{_escaped(title)}</th>" for title in head)
    body = "".join(
        f"<tr><th class=block colspan={len(head)} scope=rowgroup>{_escaped(row[0])}</th></tr>"
        if len(row) == 1
        else "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def numbers_of(report: Shown) -> str:
    """Return the report as JSON."""
    return json.dumps(report.to_dict(), indent=1, default=str) + "\n"
