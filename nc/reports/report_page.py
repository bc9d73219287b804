"""A report as one page: four figures, a strip of the model, where the time goes, why, and all operators.

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
from nc.calibration.costly import trouble
from nc.kernels import cpu
from nc.numerics.metrics import relative_error
from nc.reports.advice import next_steps, reasons
from nc.reports.brief import Told, counted, error_text, megabytes_text, speed_text, tried, warnings_of
from nc.reports.page_pictures import STYLE as PICTURES
from nc.reports.page_pictures import configuration, pictures
from nc.reports.page_strip import SCRIPT, strip
from nc.reports.page_strip import STYLE as STRIP
from nc.reports.page_times import times
from nc.text.html_page import SORTING, bullets, document, escaped, table
from nc.text.table import folded

#: Of files of plain values.
FORMAT, SCHEMA = "nc-report", 1


class Shown(Told, Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def rewrites(self) -> Sequence[str]: ...  # noqa: D102

    def figures(self) -> str: ...  # noqa: D102
    def to_dict(self) -> dict[str, Any]: ...  # noqa: D102


STYLE = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem }
.cards div { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; font-size: 13px }
.cards b { display: block; font-size: 1.7rem; line-height: 1.3 } .doubt { color: var(--fp32) }
"""


def page_of(report: Shown, title: str = "", above: str = "", below: str = "") -> str:
    """Return a report as an HTML page.

    Args:
        report: the report.
        title: title of the page; "" takes the name of the model.
        above: HTML at the top, whose texts are escaped.
        below: HTML after the findings, whose texts are escaped.
    """
    name = f"{report.model or 'A quantized model'} on {report.backend}"
    notes = warnings_of(report)
    parts = [
        f"<h1>{escaped(title or name)}</h1>{above}",
        f"<h2>{escaped(name)}</h2>" if title else "",
        f"<p>{escaped('{CPU} · {threads} threads · {versions}'.format(**_machine()))}</p>",
        "".join(f"<p class=doubt>{escaped(line)}</p>" for line in notes),
        _cards(report),
        _next_steps(report),
        "<h2>The model, operator by operator</h2>",
        strip(report.ops, report.profile),
        times(report.profile, report.ops),
        _tried(report),
        _not_int8(report),
        pictures(report.evidence),
        "<h2>All operators</h2>",
        _table(report),
        _findings(report),
        below,
        "<h2>Where this was made</h2>",
        table(("what", "value"), _machine().items()),
        configuration(report.evidence),
        f"<h2>Details</h2><details><summary>What was compared and computed</summary>"
        f"{bullets(report.figures().splitlines())}</details>",
    ]
    style = STYLE + STRIP + PICTURES
    return document(title or name, "".join(parts), style=style, script=SCRIPT + SORTING)


def _cards(report: Shown) -> str:
    """Return the four figures that decide: speed, error, share of int8, size."""
    verdict, db = report.verdict, report.accuracy.sqnr_db
    products, quantized, form = counted(report)
    cards = [
        ("?" if verdict is None else f"{verdict.ratio:.2f} ×", speed_text(report)),
        (f"{100 * relative_error(db):.2g} %", f"error: {error_text(report.accuracy)}"),
        (f"{quantized} of {products}", f"products run in {form}"),
        (
            megabytes_text(report.weight_bytes),
            f"of constants; fp32 has {megabytes_text(report.float_bytes)}",
        ),
    ]
    unsure = [verdict is None or not verdict.certain, bool(trouble(report.accuracy)), not quantized, False]
    made = (
        f"<div><b{' class=doubt' * doubt}>{escaped(figure)}</b>{escaped(text)}</div>"
        for (figure, text), doubt in zip(cards, unsure, strict=True)
    )
    return f"<div class=cards>{''.join(made)}</div>"


def _tried(report: Shown) -> str:
    """Return what was tried, as a table, and why one way was chosen."""
    rows, why = tried(report.algorithms)
    if not rows:
        return ""
    return f"<h2>What was tried</h2><p>{escaped(why)}</p>" + table(rows[0], rows[1:])


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
    return table(head, shown, bars=len(head) - 1)


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
