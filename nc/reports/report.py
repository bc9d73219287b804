"""The report: what was asked for, what runs, why operators stay fp32, and what it costs."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from nc.backends.base import EngineReport, OpRun
from nc.backends.verdict import Verdict
from nc.calibration.costly import COSTLY, FLOOR
from nc.errors import ConfigError
from nc.formats.checks import checked_path
from nc.formats.reasons import Cause
from nc.graph.accuracy import EXAMPLE, Accuracy
from nc.graph.evidence import Evidence
from nc.graph.plan import Applied, Decision
from nc.graph.products import UnknownProduct, unknown_products, unknown_text
from nc.graph.qdq import Finding, QDQGraph
from nc.graph.shares import fractions, shares_of
from nc.profiling import scaling
from nc.profiling.profile import Profile
from nc.reports.advice import accuracy_lines, next_steps, reason_lines, ways_out
from nc.reports.brief import brief
from nc.reports.front_page import section
from nc.reports.op_report import OpReport
from nc.reports.report_page import FORMAT, SCHEMA, numbers_of, page_of
from nc.storage import marks
from nc.storage.atomic import write_text
from nc.text.html_page import framed
from nc.text.plain import plain
from nc.text.table import flowing, folded, format_table, listed

#: Columns of the text.
_COLUMNS = 80


class FrontLike(Protocol):
    """What `nc.tune` returns: a `Front`."""

    def to_dict(self) -> Mapping[str, Any]:
        """Return plain values."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What runs, and why; `print` shows a table.

    Attributes:
        backend: name of the engine.
        chosen: why "auto" chose this engine; "" if the user named it.
        ops: one entry per operator, in execution order.
        groups: number of fused int8 groups; None if the engine has no groups.
        quantize_outside: quantize nodes that are not fused.
        dequantize_outside: dequantize nodes that are not fused.
        weight_bytes: bytes of the engine model's constants.
        float_bytes: bytes of the fp32 model's constants.
        sqnr_db: engine against reference on the example inputs, in dB; None if it was not measured.
        sqnr_vs_fp32_db: the quantized graph against fp32 on the example inputs, in dB.
        accuracy: the same on calibration data, several batches of it together, and how often scores have
            another largest entry; on the example inputs where no data was kept.
        algorithms: what each algorithm did, or why it did nothing, in the order in which they were applied.
        health: problems that calibration found, the worst of each kind first; see
            docs/how-to/accuracy-dropped.md.
        changes: what `load` changed for this CPU, one line each.
        rewrites: "lint: operator" for each pattern that was rewritten to avoid an engine fault.
        isa: CPU features that the integer ranges need.
        details: further remarks of the backend, and tracebacks of what "auto" passed over.
        verdict: the speed relative to fp32, and the operators that are slower in int8; None if it was not
            measured.
        profile: each step of the engine with its kernels and its time; None if it was not requested.
        unknown_products: weights of products that nc does not quantize, such as those of stacked experts.
        weight_shares: by precision ("int8", "bf16", "fp32", …) the share of the weights' values that
            operators read in it.
        multiply_add_shares: the same of the multiply-adds on the example inputs.
        unknown_multiply_adds: operators whose multiply-adds are not known, and so in no share.
        evidence: configuration, errors along the depth, the worst ranges and channels, see
            `nc.graph.evidence`; None for artefacts that do not have it.
        model: name of the class of the user's model; "" for artefacts that do not have it.
        detailed: whether `print` shows everything; see `text`.
    """

    backend: str
    chosen: str
    ops: tuple[OpReport, ...]
    groups: int | None
    quantize_outside: int
    dequantize_outside: int
    weight_bytes: int
    float_bytes: int
    sqnr_db: float | None
    sqnr_vs_fp32_db: float
    accuracy: Accuracy
    algorithms: tuple[Applied, ...]
    health: tuple[Finding, ...]
    changes: tuple[str, ...]
    rewrites: tuple[str, ...]
    isa: tuple[str, ...]
    details: Mapping[str, Any]
    verdict: Verdict | None = None
    profile: Profile | None = None
    unknown_products: tuple[UnknownProduct, ...] = ()
    weight_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    multiply_add_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unknown_multiply_adds: tuple[str, ...] = ()
    evidence: Evidence | None = None
    model: str = ""
    detailed: bool = False

    @property
    def asked_int8(self) -> int:
        """Number of operators that were asked to run int8."""
        return sum(op.asked == "int8" for op in self.ops)

    @property
    def ran_int8(self) -> int:
        """Number of operators that were asked to run int8, and do."""
        return sum(op.asked == "int8" and op.ran == "int8" for op in self.ops)

    @property
    def not_int8(self) -> tuple[OpReport, ...]:
        """Operators that were asked to run int8, but do not."""
        return tuple(op for op in self.ops if op.asked == "int8" and op.ran != "int8")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        verdict = None if self.verdict is None else self.verdict.to_dict()
        return {
            **dataclasses.asdict(self),
            "verdict": verdict,
            "asked_int8": self.asked_int8,
            "ran_int8": self.ran_int8,
        }

    def save(self, path: str | os.PathLike[str], *, front: FrontLike | None = None) -> None:
        """Write it as one page that needs nothing else (.html), or as plain values (.json).

        Args:
            path: of the file.
            front: of `nc.tune`, which the page shows too.

        Raises:
            ConfigError: another ending; `front` is given for plain values.
            ArtefactError: something else than a page, or a report, is there; or it cannot be written.
        """
        target = checked_path("path", path)
        if target.suffix not in (".html", ".json"):
            msg = f"{target}: a report is saved as .html or .json."
            raise ConfigError(msg)
        if front is not None and target.suffix == ".json":
            msg = f"{target}: front= is for a page; save the front itself as .json."
            raise ConfigError(msg)
        if target.suffix == ".json":
            write_text(target, numbers_of(self), marks.of_format(FORMAT, SCHEMA))
            return
        below = "" if front is None else section(front.to_dict())
        write_text(target, page_of(self, below=below), marks.page)

    def summary(self) -> str:
        """Return the verdict and the figures, without the table of operators."""
        return plain(f"{self._verdict()}\n{self.figures()}")

    def _verdict(self) -> str:
        """Return what decides whether the model is of use, and what to do about that."""
        modes = [op.mode for op in self.ops]
        way = ways_out(self.accuracy, self.health, modes)
        advice = [] if self.verdict is None else self.verdict.advice()
        return "\n".join([*self._accuracy(), *way, *self._speed(), *advice])

    def _not_first(self) -> list[Applied]:
        """Return what algorithms did, without what the report says first."""
        return [applied for applied in self.algorithms if applied.algorithm != FLOOR]

    def _accuracy(self) -> list[str]:
        """Return why operators are in float for accuracy, and how far from fp32 it is where that is far."""
        floor = [applied.text for applied in self.algorithms if applied.algorithm == FLOOR]
        return [*floor, *accuracy_lines(self.accuracy, self.health)]

    def _speed(self) -> list[str]:
        return ["speed against fp32: not measured"] if self.verdict is None else self.verdict.facts()

    def headline(self) -> str:
        """Return how far from fp32 it is where that is far, and the speed, without advice."""
        return "\n".join([*self._accuracy(), *self._speed()])

    def figures(self) -> str:
        """Return the figures: what runs in which precision, sizes, errors, and what algorithms did."""
        lines = [
            f"backend {self.backend}: {self.ran_int8} of {self.asked_int8} operators asked to run int8 do"
        ]
        weights = collections.Counter(op.asked for op in self.ops if op.mode in ("weight_only", "fake_quant"))
        if weights and not self.asked_int8:
            lines.clear()
        lines += [
            f"backend {self.backend}: {count} operators with {asked}" for asked, count in weights.items()
        ]
        lines += shares_of(part for op in self.ops for part in op.parts).lines()
        if self.chosen:
            lines.append(self.chosen)
        if self.groups is not None:
            lines.append(
                f"{self.groups} fused int8 groups; outside them {self.quantize_outside} quantize and "
                f"{self.dequantize_outside} dequantize nodes"
            )
        lines.append(f"constants {self.weight_bytes / 1e6:.1f} MB, fp32 {self.float_bytes / 1e6:.1f} MB")
        lines.append(f"on the example inputs: quantized graph against fp32 {self.sqnr_vs_fp32_db:.1f} dB")
        if self.sqnr_db is not None:
            lines[-1] += f", engine against quantized graph {self.sqnr_db:.1f} dB"
        lines += [f"quantized graph: {self.accuracy}"] * (self.accuracy.data != EXAMPLE)
        if self.isa:
            lines.append(f"the integer ranges rely on {', '.join(self.isa)}")
        lines += [*map(str, self._not_first()), *self.changes]
        lines += self._health()
        lines += [f"rewritten ({rewrite})" for rewrite in self.rewrites]
        if self.unknown_products:
            lines.append(unknown_text(self.unknown_products))
        lines += refused_lines(reason for op in self.ops for reason in op.refused)
        lines += [f"{key}: {value}" for key, value in self.details.items()]
        if self.profile is not None:
            lines += filter(None, (self.profile.summary(), scaling.summary(self.profile.predictions)))
        return "\n".join(lines)

    def _health(self) -> list[str]:
        """Return the worst finding of each kind, and the number of others."""
        kinds: dict[str, list[Finding]] = {}
        for finding in self.health:
            if finding.kind != COSTLY:  # they are at the top, with the verdict
                kinds.setdefault(finding.kind, []).append(finding)
        more = {
            kind: f" ({len(found) - 1} more: report.health)" if len(found) > 1 else ""
            for kind, found in kinds.items()
        }
        return [f"health: {found[0].operator}: {found[0].text}{more[kind]}" for kind, found in kinds.items()]

    def table(self, width: int | None = None, *, fold: bool = False) -> str:
        """One row per operator.

        It has the name, type, what was asked and what ran, in a profile its share of the time, its kernel,
        and why.

        Args:
            width: of the table, see `nc.text.table.format_table`; None: as wide as its texts are.
            fold: write equal blocks ("layer.0", "layer.1", …) once, as `print(report)` does; shares of the
                time are added up.
        """
        shares = [repr(op.share or 0.0) for op in self.ops]
        rows: list[tuple[str, ...]] = [("operator", "type", "asked", "ran", "kernel", "why", "share")]
        rows += [
            (op.operator, op.kind, op.asked, op.ran, op.kernel, op.reason, s)
            for op, s in zip(self.ops, shares, strict=True)
        ]
        _, *body = folded(rows, {6: lambda cells: repr(sum(map(float, cells)))}) if fold else rows

        def shown(share: str, kernel: str) -> tuple[str, ...]:
            if self.profile is not None:
                return share, kernel
            return (kernel,) if any(op.kernel for op in self.ops) else ()

        lines: list[tuple[str, ...]] = [
            ("operator", "type", "asked", "ran", *shown("share", "kernel"), "why")
        ]
        for row in body:
            if len(row) == 1:
                lines.append(row)
                continue
            *first, kernel, why, share = row
            lines.append((*first, *shown(f"{float(share):.1%}" if float(share) else "", kernel), why))
        return format_table(lines, width)

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return framed(page_of(self))

    def __str__(self) -> str:
        """Return what `print` shows: `text`, with details where they were asked for."""
        return self.text(details=self.detailed)

    def text(self, *, details: bool = False) -> str:
        """Return at most 25 lines: what runs, how fast and exact, what is not int8 and why, what to do next.

        Args:
            details: also return the figures of all steps and a table of all operators, in which equal blocks
                are one. Lines have at most 80 columns, except words that are longer.
        """
        if not details:
            return plain(brief(self))
        texts = [
            self.headline(),
            listed("not int8, and why:", reason_lines(self.ops)),
            listed("what to do next:", next_steps(self)),
            self.figures(),
        ]
        parts = ["\n".join(flowing(text, _COLUMNS)) for text in texts if text]
        return plain("\n\n".join([*parts, self.table(_COLUMNS, fold=True)]))


#: What is shown of an operator that the engine does not name.
_UNSAID = OpRun(operator="", ran="unknown", reason="the engine does not say")


def _op_report(decision: Decision, note: str, run: OpRun, kernel: str, share: float | None) -> OpReport:
    """Return what is known of one operator.

    Args:
        decision: of the plan.
        note: why it is fp32 in the quantized graph, though int8 was asked for; "" if it is not.
        run: what the engine says of it.
        kernel: what computed it in the profile; "" without one.
        share: of the profiled time.
    """
    asked, ran = "int8" if note else decision.spec.precision, run.ran
    if decision.stays_for(Cause.LOW_BIT):
        asked = ran = decision.precision
    return OpReport(
        operator=decision.operator,
        kind=decision.kind,
        asked=asked,
        ran=ran,
        rule=decision.rule,
        reason=note or run.reason or _fp32_weights(decision, ran),
        kernel=kernel or run.primitive if run.kernels is None else str(run.kernels),
        share=share,
        mode=decision.spec.mode,
        refused=run.refused if run.kernels is None else (*run.refused, *run.kernels.refused),
        weights=tuple((name, math.prod(shape)) for name, shape in decision.weights),
        float_weights=decision.in_fp32 if ran == "int8" else (),
        multiply_adds=decision.multiply_adds,
    )


def _fp32_weights(decision: Decision, ran: str) -> str:
    """Return which weights of an int8 operator stay fp32; "" for none."""
    if ran != "int8" or not decision.in_fp32:
        return ""
    names = [name.rpartition(".")[2] for name in decision.in_fp32]
    stay = f"{names[0]} stays" if len(names) == 1 else f"{', '.join(names)} stay"
    return f"{stay} fp32: what the first layer reads has no bounds, and its product is small"


def build(
    graph: QDQGraph,
    engine: EngineReport,
    chosen: str = "",
    profile: Profile | None = None,
    verdict: Verdict | None = None,
    *,
    detailed: bool = False,
) -> Report:
    """Combine the plan, the engine's report and the measurements."""
    runs = {run.operator: run for run in engine.ops}
    kernels = profile.kernels() if profile is not None else {}
    ops = [
        _op_report(
            d,
            graph.notes.get(d.operator, ""),
            runs.get(d.operator, _UNSAID),
            *kernels.get(d.operator, ("", None)),
        )
        for d in graph.plan.decisions
    ]
    shares = shares_of(part for op in ops for part in op.parts)
    return Report(
        backend=engine.backend,
        chosen=chosen,
        ops=tuple(ops),
        groups=engine.groups,
        quantize_outside=engine.quantize_outside,
        dequantize_outside=engine.dequantize_outside,
        weight_bytes=engine.weight_bytes,
        float_bytes=graph.float_bytes,
        sqnr_db=engine.sqnr_db,
        sqnr_vs_fp32_db=graph.sqnr_vs_fp32_db,
        accuracy=graph.judged,
        algorithms=graph.applied,
        health=graph.health,
        changes=graph.changes,
        rewrites=tuple(map(str, engine.rewrites)),
        isa=graph.plan.isa,
        details={**engine.details, **{f"{name} failed": text for name, text in graph.failures.items()}},
        verdict=verdict,
        profile=profile,
        unknown_products=unknown_products(graph.plan),
        weight_shares=fractions(shares.weights),
        multiply_add_shares=fractions(shares.multiply_adds),
        unknown_multiply_adds=shares.unknown,
        evidence=graph.evidence,
        model=graph.signature.model,
        detailed=detailed,
    )


def refused_lines(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each kernel that does not compute some layers, and why.

    Args:
        reasons: (kernel, reason) for each layer.
    """
    return [
        f"kernel {name} is not used for {count} layers: {reason}"
        for (name, reason), count in collections.Counter(reasons).items()
    ]
