"""What a report says first: how far from fp32, what is not int8 and why, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from nc.backends.verdict import Verdict
from nc.calibration.costly import COSTLY, trouble
from nc.formats import Mode
from nc.graph.accuracy import Accuracy
from nc.graph.qdq import Finding
from nc.reports.op_report import OpReport

#: How operators are quantized → what else may be tried.
_WAYS_OUT: Mapping[Mode, tuple[str, ...]] = {
    "static": (
        "nc.SmoothQuantConfig()",
        'nc.DynamicQuantConfig(act_granularity="per_token")',
        "calibration data like real inputs",
    ),
    "dynamic": ('nc.DynamicQuantConfig(w_dtype="bf16", act_dtype="bf16") on CPUs that have bf16',),
}
#: Kind of a finding → what to do, given the name of the operator as Python source.
_STEPS: Mapping[str, Callable[[str], str]] = {
    "never_ran": lambda name: f"calibrate with data that reaches {name}",
    "still_growing": lambda name: f"calibrate with more data: the range of {name} still grew at the end",
    "saturation": lambda name: f'try act_algo="minmax" or "auto": the range of {name} leaves out values',
    "inaccurate": lambda name: f"config.exclude({name}) leaves it in fp32: its own result is inaccurate",
}
#: Names that a line has at most.
_NAMES = 3


class Judged(Protocol):
    """What is read of a `Report`, whose docstring says what it means."""

    @property
    def ops(self) -> Sequence[OpReport]: ...  # noqa: D102
    @property
    def health(self) -> Sequence[Finding]: ...  # noqa: D102
    @property
    def verdict(self) -> Verdict | None: ...  # noqa: D102
    @property
    def accuracy(self) -> Accuracy: ...  # noqa: D102


def reasons(ops: Iterable[OpReport]) -> dict[str, list[str]]:
    """Return why operators are not int8, and the names of those.

    What was asked to be int8 comes first, then other products.
    """
    found: dict[str, list[str]] = {}
    known = list(ops)
    asked = [op for op in known if op.asked == "int8" != op.ran]
    others = [op for op in known if op.asked != "int8" and op.ran == "fp32" and op.reason]
    for op in (*asked, *sorted(others, key=lambda op: op.multiply_adds == 0)):
        found.setdefault(op.reason or "the engine does not say", []).append(op.operator)
    return found


def reason_lines(ops: Iterable[OpReport]) -> list[str]:
    """Return a line for each reason why operators are not int8, with their number and some names."""
    return [f"{len(names)} x {why}: {some_names(names)}" for why, names in reasons(ops).items()]


def some_names(names: Sequence[str]) -> str:
    """Return the first names as Python source, and how many there are beside them."""
    more = f", … ({len(names) - _NAMES} more)" if len(names) > _NAMES else ""
    return f"{', '.join(map(source, names[:_NAMES]))}{more}"


def accuracy_lines(accuracy: Accuracy, health: Iterable[Finding]) -> list[str]:
    """Return what to say first of a model that is far from fp32; [] for one that is not.

    Args:
        accuracy: of the quantized graph against fp32.
        health: with findings about the operators that cost most, if these were measured.
    """
    what = trouble(accuracy)
    if not what:
        return []
    lines = [f"{what} accuracy: {accuracy}"]
    costly = [finding for finding in health if finding.kind == COSTLY]
    if costly:
        lines.append(f"most of it: {', '.join(f'{f.operator} ({f.value:.0%}, {f.text})' for f in costly)}")
    return lines


def ways_out(accuracy: Accuracy, health: Iterable[Finding], modes: Iterable[Mode]) -> list[str]:
    """Return what to do about a model that is far from fp32; [] for one that is not.

    Args:
        accuracy: of the quantized graph against fp32.
        health: with findings about the operators that cost most, if these were measured.
        modes: how operators are quantized.
    """
    if not trouble(accuracy):
        return []
    costly = [source(finding.operator) for finding in health if finding.kind == COSTLY]
    known = set(modes)
    ways = [way for mode, ways in _WAYS_OUT.items() if mode in known for way in ways]
    lines = [f"config.exclude({', '.join(costly)}) leaves them in fp32"] if costly else []
    return [*lines, f"other ways out: {', '.join(ways)}"] if ways else lines


def trouble_text(accuracy: Accuracy, health: Sequence[Finding], modes: Iterable[Mode]) -> str:
    """Return both in lines: how far a model is from fp32, and what to do."""
    return "\n".join([*accuracy_lines(accuracy, health), *ways_out(accuracy, health, modes)])


def next_steps(report: Judged) -> list[str]:
    """Return what to do next, one line each; [] where nothing is to be done."""
    lines = ways_out(report.accuracy, report.health, [op.mode for op in report.ops])
    for kind, step in _STEPS.items():
        names = [finding.operator for finding in report.health if finding.kind == kind]
        if names:
            more = f" ({len(names) - 1} more: report.health)" if len(names) > 1 else ""
            lines.append(f"{step(source(names[0]))}{more}")
    return [*lines, *(report.verdict.advice() if report.verdict is not None else [])]


def source(name: str) -> str:
    """Return a name as Python source."""
    return json.dumps(name, ensure_ascii=False)
