"""A report as one page: a strip of the model, where the time goes, a table with reasons, findings.

The page needs nothing else: no request, plain SVG, and a few lines of script for zooming and sorting,
without which all of it can be read. Names of operators are escaped.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from nc._version import __version__
from nc.api.advice import next_steps, reasons
from nc.api.op_report import OpReport
from nc.api.page_pictures import STYLE as PICTURES
from nc.api.page_pictures import configuration, pictures
from nc.api.page_strip import SCRIPT, STYLE, strip
from nc.api.page_times import times
from nc.backends import cpu
from nc.backends.profiling.profile import Profile
from nc.backends.profiling.verdict import Verdict
from nc.graph.accuracy import Accuracy
from nc.graph.evidence import Evidence
from nc.graph.plan import Applied
from nc.graph.qdq import Finding
from nc.text.html_page import SORTING, bullets, document, escaped, table
from nc.text.table import folded

#: Of files of plain values.
FORMAT, SCHEMA = "nc-report", 1


class Shown(Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def ops(self) -> Sequence[OpReport]: ...  # noqa: D102
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

    @property
    def evidence(self) -> Evidence | None: ...  # noqa: D102
    @property
    def verdict(self) -> Verdict | None: ...  # noqa: D102
    @property
    def accuracy(self) -> Accuracy: ...  # noqa: D102

    def headline(self) -> str: ...  # noqa: D102
    def figures(self) -> str: ...  # noqa: D102
    def to_dict(self) -> dict[str, Any]: ...  # noqa: D102


def page_of(report: Shown, title: str = "", above: str = "", below: str = "") -> str:
    """Return the page of a report.

    Args:
        report: it.
        title: of the page; "" takes the verdict.
        above: content on top, whose texts are escaped.
        below: content behind the findings, likewise.
    """
    verdict, *more = report.headline().splitlines()
    parts = [
        f"<h1>{escaped(title)}</h1>{above}<h2>{escaped(verdict)}</h2>"
        if title
        else f"<h1>{escaped(verdict)}</h1>",
        "".join(f"<p>{escaped(line)}</p>" for line in more),
        "<h2>The model, operator by operator</h2>",
        strip(report.ops, report.profile),
        _next_steps(report),
        times(report.profile, report.ops),
        pictures(report.evidence),
        _not_int8(report),
        "<h2>All operators</h2>",
        _table(report),
        _findings(report),
        below,
        f"<h2>Figures</h2><pre>{escaped(report.figures())}</pre>",
        "<h2>Where this was made</h2>",
        table(("what", "value"), _machine().items()),
        configuration(report.evidence),
    ]
    name = title or "Report of a quantized model"
    return document(name, "".join(parts), style=STYLE + PICTURES, script=SCRIPT + SORTING)


def _not_int8(report: Shown) -> str:
    """Return what is not int8 and why; what was asked for comes first."""
    found = reasons(report.ops)
    if not found:
        return ""
    rows = [
        (why, str(len(names)), ", ".join(names[:8]) + (", …" if len(names) > 8 else ""))
        for why, names in found.items()
    ]
    return "<h2>Not int8, and why</h2>" + table(("why", "operators", "which"), rows)


def _next_steps(report: Shown) -> str:
    """Return what to do next."""
    steps = bullets(next_steps(report))
    return f"<h2>What to do next</h2>{steps}" if steps else ""


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
        "features": ", ".join(cpu.machine_features()) or "none that int8 kernels use",
        "threads": str(torch.get_num_threads()),
        "versions": f"nc {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def numbers_of(report: Shown) -> str:
    """Return the report as JSON."""
    document = {"format": FORMAT, "schema": SCHEMA, **_finite(report.to_dict())}
    return json.dumps(document, indent=1, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return plain values with null for numbers that JSON has not, such as the SQNR of equal outputs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
