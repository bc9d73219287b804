"""What `print(report)` shows of a captured model: the answer to each question that people ask, in 25 lines.

What runs, how fast, how exact, how large; what was tried; what is not int8 and why; what costs most; what to
do next. Everything else is in `report(details=True)`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Protocol

from nc.calibration import sensitivity
from nc.calibration.costly import FLOOR, trouble
from nc.graph.accuracy import Accuracy
from nc.graph.evidence import Evidence
from nc.graph.plan import Applied
from nc.graph.products import UnknownProduct, unknown_text
from nc.numerics.metrics import relative_error
from nc.profiling.profile import Profile
from nc.reports.advice import Judged, accuracy_lines, next_steps, reason_lines, reasons, some_names, source
from nc.reports.op_report import OpReport
from nc.text.fitted import COLUMNS, REST, Section, fitted
from nc.text.table import columns, flowing

#: Operators that are named as the most costly ones.
_NAMED = 3
#: What operators ran in that are not quantized, as far as the engine says.
_NOTHING = ("fp32", "unknown")
FOOT = "All operators, kernels and checks: report(details=True)"


class Told(Judged, Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def backend(self) -> str: ...  # noqa: D102
    @property
    def profile(self) -> Profile | None: ...  # noqa: D102
    @property
    def changes(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def unknown_products(self) -> Sequence[UnknownProduct]: ...  # noqa: D102
    @property
    def algorithms(self) -> Sequence[Applied]: ...  # noqa: D102
    @property
    def evidence(self) -> Evidence | None: ...  # noqa: D102
    @property
    def weight_bytes(self) -> int: ...  # noqa: D102
    @property
    def float_bytes(self) -> int: ...  # noqa: D102


def brief(report: Told) -> str:
    """Return the text; see the module."""
    where = f"{report.model or 'the model'} on {report.backend}"
    runs, warnings = _what_runs(report), warnings_of(report)
    head = [*warnings, f"{where}: {runs}"] if runs else [f"{where}: {_why_nothing(report)}", *warnings]
    head.append(f"speed: {speed_text(report)}")
    if not trouble(report.accuracy):  # of which the warnings have it
        head.append(f"error: {error_text(report.accuracy)}")
    head.append(f"size: {megabytes_text(report.weight_bytes)}, fp32 {megabytes_text(report.float_bytes)}")
    head += report.changes
    unknown = [unknown_text(report.unknown_products)] if report.unknown_products else []
    return fitted(
        head,
        [
            Section(*_rows(report.algorithms), 9),
            Section(
                "not int8, and why:", [f"- {line}" for line in (*unknown, *reason_lines(report.ops))], REST
            ),
            Section("", costly("most error", _errors(report)), 3),
            Section("", costly("most time", _times(report)), 3),
            Section("what to do next:", [f"- {step}" for step in next_steps(report)], 5),
        ],
        FOOT,
    )


def error_text(accuracy: Accuracy) -> str:
    """Return how far from fp32 outputs are, and on which data."""
    if math.isinf(accuracy.sqnr_db) and accuracy.sqnr_db > 0:
        return f"none: the outputs are those of fp32 on {accuracy.data}"
    scores = "" if accuracy.changed is None else f"; {accuracy.changed:.1%} of the largest entries change"
    return f"{decibels_text(accuracy.sqnr_db)} against fp32 on {accuracy.data}{scores}"


def decibels_text(decibels: float) -> str:
    """Return an SQNR, and the error as a share of the outputs: 40 dB are 1 %."""
    return f"{decibels:.1f} dB ({100 * relative_error(decibels):.2g} %)"


def megabytes_text(count: int) -> str:
    """Return a number of bytes in a unit for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def warnings_of(report: Told) -> list[str]:
    """Return what is wrong with the accuracy, or was until operators went to float."""
    floor = [applied.text for applied in report.algorithms if applied.algorithm == FLOOR]
    _, *most = accuracy_lines(report.accuracy, report.health) or [""]
    what = trouble(report.accuracy)
    return [*floor, *([f"{what} accuracy: {error_text(report.accuracy)}", *most] if what else [])]


def _what_runs(report: Told) -> str:
    """Return how many products run in which precision; "" where all are in fp32."""
    products = _products(report)
    forms = {
        form: sum(op.ran == form for op in products)
        for form in dict.fromkeys(op.ran for op in products if op.ran not in _NOTHING)
    }
    simulated = [op.asked for op in report.ops if op.mode == "fake_quant"]
    if simulated:
        return f"{len(simulated)} operators with {', '.join(dict.fromkeys(simulated))}"
    return ", ".join(f"{count} of {len(products)} products run in {form}" for form, count in forms.items())


def _products(report: Told) -> list[OpReport]:
    return [op for op in report.ops if op.multiply_adds != 0]


def _why_nothing(report: Told) -> str:
    """Return that nothing runs in int8, and the first reasons."""
    products = _products(report)
    found = list(reasons(products).items())
    if not found:
        why = "nobody says why" if products else "the model has no product of tensors"
        return f"nothing runs in int8: {why}"
    more = f"; and {len(found) - 2} more reasons" if len(found) > 2 else ""
    why = "; ".join(f"{some_names(names)}: {why}" for why, names in found[:2])
    return f"nothing runs in int8: {why}{more}"


def counted(report: Told) -> tuple[int, int, str]:
    """Return the number of products, how many run in the most frequent precision but fp32, and which."""
    products = _products(report)
    forms = collections.Counter(op.ran for op in products if op.ran not in _NOTHING)
    form, count = next(iter(forms.most_common(1)), ("int8", 0))
    return len(products), count, form


def speed_text(report: Told) -> str:
    """Return the speed relative to fp32, or that it was not measured."""
    what = next((op.ran for op in _products(report) if op.ran not in _NOTHING), "quantized")
    return "not measured against fp32" if report.verdict is None else report.verdict.brief(what)


def tried(algorithms: Sequence[Applied]) -> tuple[list[tuple[str, ...]], str]:
    """Return a table of the ways that were tried, with its header, and why one of them was chosen."""
    for applied in algorithms:
        if applied.algorithm != sensitivity.NAME and applied.rows:
            sentences = [row[0] for row in applied.rows if len(row) == 1]
            return [row for row in applied.rows if len(row) > 1], "; ".join(sentences)
    return [], ""


def _rows(algorithms: Sequence[Applied]) -> tuple[str, list[str]]:
    rows, why = tried(algorithms)
    return why or "tried:", [f"  {line}" for line in columns(rows)]


def costly(what: str, parts: Sequence[str]) -> list[str]:
    """Return the line about the operators that cost most; as many as `_NAMED` lines have room for."""
    fits = (f"{what}: {', '.join(parts[:count])}" for count in range(len(parts), 1, -1))
    short = next((line for line in fits if len(flowing(line, COLUMNS)) <= _NAMED), None)
    return [short or f"{what}: {parts[0]}"] if parts else []


def _errors(report: Told) -> list[str]:
    """Return the operators that add most of the error."""
    for applied in report.algorithms:
        if applied.algorithm == sensitivity.NAME:
            rows = [row for row in applied.rows if len(row) > 1][1 : _NAMED + 1]
            return [f"{source(name)} {share}" for name, share, *_ in rows if share != "0%"]
    depth = () if report.evidence is None else report.evidence.depth
    worst = sorted((point for point in depth if math.isfinite(point.local_db)), key=lambda p: p.local_db)
    return [f"{source(point.operator)} {point.local_db:.1f} dB alone" for point in worst[:_NAMED]]


def _times(report: Told) -> list[str]:
    """Return the operators that take most of the time."""
    if report.profile is not None:
        timed = sorted((op for op in report.ops if op.share), key=lambda op: -(op.share or 0.0))
        return [f"{source(op.operator)} {op.share:.0%}" for op in timed[:_NAMED]]
    costs = (report.verdict.costs if report.verdict is not None else None) or ()
    return [
        f"{source(cost.operators[0])}{_others(cost.operators)} {cost.times}"
        for cost in sorted(costs, key=lambda cost: -cost.engine_ms)[:_NAMED]
    ]


def _others(names: Sequence[str]) -> str:
    return f" + {len(names) - 1} more" if len(names) > 1 else ""
