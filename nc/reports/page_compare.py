"""Two artefacts side by side on a page: both verdicts, figures, and the operators that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nc.profiling.profile import Profile
from nc.reports.brief import Told
from nc.reports.op_report import OpReport
from nc.text.html_page import table

#: What of an operator is compared.
_SHOWN = ("asked", "ran", "kernel")


class Compared(Told, Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def sqnr_vs_fp32_db(self) -> float: ...  # noqa: D102
    @property
    def asked_int8(self) -> int: ...  # noqa: D102
    @property
    def ran_int8(self) -> int: ...  # noqa: D102

    def headline(self) -> str: ...  # noqa: D102


def comparison(one: Compared, other: Compared, names: tuple[str, str]) -> str:
    """Return a section that compares two reports.

    Args:
        one: the report that the page is of.
        other: another one.
        names: what to call both.
    """
    rows = [
        ("verdict", *(r.headline() for r in (one, other))),
        ("engine", *(r.backend for r in (one, other))),
        ("time of a call, profiled", *(_time(r.profile) for r in (one, other))),
        ("constants", *(f"{r.weight_bytes / 1e6:.1f} MB" for r in (one, other))),
        ("quantized graph against fp32", *(f"{r.sqnr_vs_fp32_db:.1f} dB" for r in (one, other))),
        ("int8, of those asked for", *(f"{r.ran_int8} of {r.asked_int8}" for r in (one, other))),
    ]
    different = differences(one.ops, other.ops)
    found = (
        "<h3>Operators that differ</h3>" + table(("operator", "what", *names), different)
        if different
        else "<p>All operators run alike.</p>"
    )
    return f"<h2>Two artefacts compared</h2>{table(('what', *names), rows)}{found}"


def differences(one: Sequence[OpReport], other: Sequence[OpReport]) -> list[tuple[str, ...]]:
    """Return what differs: the operator, what of it, and both values; operators are known by their names."""
    left, right = ({op.operator: op for op in ops} for ops in (one, other))
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys((*left, *right)):
        if name not in left or name not in right:
            rows.append((name, "exists", *("yes" if name in ops else "no" for ops in (left, right))))
            continue
        both = left[name], right[name]
        pairs = [(what, _text(both[0], what), _text(both[1], what)) for what in _SHOWN]
        changed = [(name, what, first, second) for what, first, second in pairs if first != second]
        rows += changed
        if changed and any(op.share for op in both):
            rows.append((name, "share", *(f"{op.share or 0.0:.1%}" for op in both)))
    return rows


def _text(op: OpReport, what: str) -> str:
    value: Any = getattr(op, what)
    return str(value)


def _time(profile: Profile | None) -> str:
    return "not measured" if profile is None else f"{profile.call_ms:.2f} ms"
