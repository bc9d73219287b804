"""A report as one page: a strip of the model, where the time goes, a table with reasons, findings.

The page needs nothing else: no request, plain SVG, and a few lines of script for the zoom, without which all
of it can be read. Names of operators are escaped.
"""

from __future__ import annotations

import collections
import json
import platform
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from nc._version import __version__
from nc.api.op_report import OpReport
from nc.backends import cpu
from nc.backends.profiling.profile import Profile
from nc.graph.plan import Applied
from nc.graph.qdq import Finding
from nc.text.html_page import bullets, document, escaped, table
from nc.text.table import folded

_WIDTH, _HEIGHT = 1000.0, 64
#: The narrowest cell of the strip.
_LEAST = 0.4
#: Steps and kernels that the table of times has at most.
_MOST_KERNELS = 12
_COLOURS = {"int8": "int8", "bf16": "bf16", "fp32": "fp32"}
_STYLE = """
svg.strip { height: 64px } svg rect { stroke: var(--back); stroke-width: .3; cursor: pointer }
.int8 { color: var(--int8); fill: var(--int8) } .bf16 { color: var(--bf16); fill: var(--bf16) }
.fp32 { color: var(--fp32); fill: var(--fp32) } .other { color: var(--other); fill: var(--other) }
.legend span { margin-right: 1rem }
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


def page_of(report: Shown, title: str = "", above: str = "") -> str:
    """Return the page of a report.

    Args:
        report: it.
        title: of the page; "" takes the verdict.
        above: content on top, whose texts are escaped.
    """
    verdict, _, rest = report.summary().partition("\n")
    parts = [
        f"<h1>{escaped(title)}</h1>{above}<h2>{escaped(verdict)}</h2>"
        if title
        else f"<h1>{escaped(verdict)}</h1>",
        f"<pre>{escaped(rest)}</pre>",
        "<h2>The model, operator by operator</h2>",
        _strip(report.ops),
        _next_steps(report),
        _times(report),
        "<h2>All operators</h2>",
        _table(report),
        _findings(report),
        "<h2>Where this was made</h2>",
        table(("", ""), _machine().items()),
    ]
    return document(title or "Report of a quantized model", "".join(parts), style=_STYLE, script=_ZOOM)


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
        title = escaped(f"{op.operator}: {op.kind}, {op.ran}{why}, {weight / total:.1%}")
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
    return "<h2>Asked to run int8, and does not</h2>" + table(("why", "operators", "which"), rows)


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
    return "<h2>Where the time goes</h2>" + table(("kernel", "ms", "share"), rows)


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
    return table(head, shown)


def _findings(report: Shown) -> str:
    lines = [f"{finding.operator}: {finding.text}" for finding in report.health]
    lines += [*map(str, report.algorithms), *report.changes, *report.rewrites]
    return f"<h2>Findings</h2>{bullets(lines)}" if lines else ""


def _machine() -> dict[str, str]:
    return {
        "CPU": cpu.model_name(),
        "features": ", ".join(cpu.features()) or "none that int8 kernels use",
        "threads": str(torch.get_num_threads()),
        "versions": f"nc {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def numbers_of(report: Shown) -> str:
    """Return the report as JSON."""
    return json.dumps(report.to_dict(), indent=1, default=str) + "\n"
