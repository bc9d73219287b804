"""The plan: the decision for every operator and its reason, made without calibration data."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from nc.formats import FLOAT, PER_TOKEN, OpSpec
from nc.formats.reasons import NO_RULE, Cause, DecidingRule, Reason
from nc.graph.shares import Part, Shares, shares_of
from nc.text.html_page import preformatted
from nc.text.table import WIDTH, folded, format_table

#: Codes are what int8 operators read; or also what int8 convolutions and additions give, whoever reads that.
INPUTS, OUTPUTS = PLACEMENTS = ("inputs", "outputs")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision for one operator.

    Attributes:
        operator: its name.
        kind: "linear", "conv2d", "matmul", "add", or the name of a float operator.
        module_type: class of the module that it runs in.
        spec: what it is quantized to.
        decided: which rule decided.
        why: why it stays fp32; None when it is quantized.
        fallback: its precision if the backend has no int8 kernel for it, "fp32" or "bf16".
        unsmoothed: SmoothQuant was asked for, and its input, the result of a matmul, is not smoothed.
        keep_inaccurate: as dynamic operator it stays int8 however inaccurate its own result is on the example
            inputs.
        fields: for each field of its configuration the name, the value as text, and the rule that gives it
            ("default" if no rule does).
        weights: names and shapes of the weights that it reads.
        float_weights: names of the weights that stay fp32 because each row has its own range.
        multiply_adds: how many it does on the example inputs; None if that is not known.
    """

    operator: str
    kind: str
    module_type: str
    spec: OpSpec = FLOAT
    decided: DecidingRule = NO_RULE
    why: Reason | None = None
    fallback: str = "fp32"
    unsmoothed: bool = False
    keep_inaccurate: bool = False
    fields: tuple[tuple[str, str, str], ...] = ()
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    float_weights: tuple[str, ...] = ()
    multiply_adds: int | None = None

    @property
    def rule(self) -> str:
        """The rule that decided, as text.

        It is "global", "name 'fc'", "pattern '.*attn.*'", "type 'Linear'", or "-" where no rule applies.
        """
        return str(self.decided)

    @property
    def reason(self) -> str:
        """Why it stays fp32, as text; "" when it is quantized."""
        return "" if self.why is None else str(self.why)

    def argument(self, name: str) -> str:
        """Return an argument of the reason why it stays fp32; "" if it has none of that name."""
        return "" if self.why is None else dict(self.why.arguments).get(name, "")

    def stays_for(self, cause: Cause) -> bool:
        """Return whether it stays fp32 for this reason."""
        return self.why is not None and self.why.cause is cause

    @property
    def precision(self) -> str:
        """What it should compute in.

        It is "int8", "bf16", "fp32", "int4 weight", or the formats of a simulated operator.
        """
        return f"{self.argument('dtype')} weight" if self.stays_for(Cause.LOW_BIT) else self.spec.precision

    @property
    def in_fp32(self) -> tuple[str, ...]:
        """Names of its weights that stay fp32 though it is quantized."""
        rows = self.spec.mode == "dynamic" and self.spec.input(0).granularity == PER_TOKEN
        return self.float_weights if rows else ()

    def parts(self, form: str) -> tuple[Part, ...]:
        """Return what it contributes to a model in which it computes in `form`."""
        weights = tuple((name, math.prod(shape)) for name, shape in self.weights)
        whole = Part(operator=self.operator, form=form, weights=weights, multiply_adds=self.multiply_adds)
        return whole.without(self.in_fp32)

    @property
    def rules(self) -> str:
        """The rule that decided, and in parentheses the fields that come from another rule."""
        others = [
            f"{name}: {rule}" for name, _, rule in self.fields if rule not in (self.rule, "global", "default")
        ]
        return f"{self.rule} ({', '.join(others)})" if others else self.rule

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `rule` and `reason` also as text."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["spec"] = self.spec.to_dict()
        values["decided"] = self.decided.to_dict()
        values["why"] = None if self.why is None else self.why.to_dict()
        return {**values, "rule": self.rule, "reason": self.reason}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Decision:
        """Return the inverse of `to_dict`."""
        values = {key: value for key, value in data.items() if key not in ("rule", "reason")}
        values["spec"] = OpSpec.from_dict(data["spec"])
        values["decided"] = DecidingRule.from_dict(data["decided"])
        values["why"] = None if data["why"] is None else Reason.from_dict(data["why"])
        values["fields"] = tuple(map(tuple, data["fields"]))
        values["weights"] = tuple((name, tuple(shape)) for name, shape in data["weights"])
        values["float_weights"] = tuple(data.get("float_weights", ()))
        names = *(name for name, _ in values["weights"]), *values["float_weights"]
        sizes = [size for _, shape in values["weights"] for size in shape]
        if not all(isinstance(name, str) for name in names) or not all(type(size) is int for size in sizes):
            msg = f"expected names and sizes of weights, but got {data['weights']!r}"
            raise TypeError(msg)
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One algorithm of a plan.

    Attributes:
        algorithm: its name.
        stage: when it is applied: "float graph", "statistics", "qparams" or "codes".
        options: as text, "iterations=10, tolerance=2e-07".
    """

    algorithm: str
    stage: str
    options: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What one algorithm did.

    Attributes:
        algorithm: its name.
        operators: names of the operators that it changed, in execution order.
        text: what it did, or why it did nothing.
        rows: what it found as a table, whose first row is the header; a row of one cell is a sentence.
    """

    algorithm: str
    operators: tuple[str, ...]
    text: str
    rows: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        """Return a line of the report."""
        return f"{self.algorithm}: {self.text}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Decisions for all operators, in execution order.

    Attributes:
        decisions: one per operator.
        backend: name of the backend that it was made for.
        isa: CPU features that the integer ranges need.
        algorithms: the algorithms that change the model, in this order.
        placement: where codes are, one of `PLACEMENTS`.
    """

    decisions: tuple[Decision, ...]
    backend: str
    isa: tuple[str, ...] = ()
    algorithms: tuple[Step, ...] = ()
    placement: str = INPUTS

    def __getitem__(self, operator: str) -> Decision:
        """Return the decision for the operator of that name.

        If there is none, KeyError with the closest names.
        """
        return named(self.decisions, operator)

    @property
    def quantized(self) -> tuple[Decision, ...]:
        """Decisions of the operators whose weight or activations are quantized."""
        return tuple(d for d in self.decisions if d.spec.quantized)

    @property
    def static(self) -> frozenset[str]:
        """Names of the operators that run in int8 with ranges from calibration."""
        return frozenset(d.operator for d in self.quantized if d.spec.mode == "static")

    @property
    def shares(self) -> Shares:
        """Which share of the weights and of the multiply-adds should be computed in which precision."""
        return shares_of(part for d in self.decisions for part in d.parts(d.precision))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "backend": self.backend,
            "isa": list(self.isa),
            "placement": self.placement,
            "algorithms": [dataclasses.asdict(step) for step in self.algorithms],
            "decisions": [d.to_dict() for d in self.decisions],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Return the inverse of `to_dict`."""
        decisions = tuple(Decision.from_dict(d) for d in data["decisions"])
        steps = tuple(Step(**step) for step in data["algorithms"])
        isa = tuple(data["isa"])
        if not all(isinstance(feature, str) for feature in isa):
            msg = f"expected names of CPU features, but got {data['isa']!r}"
            raise TypeError(msg)
        return cls(
            decisions=decisions,
            backend=data["backend"],
            isa=isa,
            algorithms=steps,
            placement=data["placement"],
        )

    def fingerprint(self) -> str:
        """SHA-256 of the plan's contents, in hex."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return preformatted(str(self))

    def __str__(self) -> str:
        """Return a table of operators, shares, algorithms, and where codes are.

        Equal blocks are shown once. The shares are those of weights and multiply-adds.
        """
        outputs = (
            ["", "What int8 convolutions and additions give becomes codes, whoever reads it."]
            if self.placement == OUTPUTS
            else []
        )
        shares = self.shares.lines()
        return "\n".join(
            [
                self.table(WIDTH, fold=True),
                *([""] if shares else []),
                *shares,
                *algorithm_lines(self.algorithms),
                *outputs,
            ]
        )

    def table(self, width: int | None = None, *, fold: bool = False) -> str:
        """One row per operator: name, type, dtypes of activations and weight, rule, why it stays fp32.

        Args:
            width: of the table, see `nc.text.table.format_table`; None: as wide as its texts are.
            fold: write equal blocks ("layer.0", "layer.1", …) once, as `print(plan)` does.
        """
        rows = [("operator", "type", "activations", "weight", "rule", "why fp32")]
        rows += [
            (d.operator, d.kind, d.spec.activations, d.spec.weights, d.rules, d.reason)
            for d in self.decisions
        ]
        return format_table(folded(rows) if fold else rows, width)

    def explain(self, operator: str) -> str:
        """For one operator each field of its configuration, the value, and the rule that gives it."""
        decision = self[operator]
        return explained(decision, decision.reason or decision.spec.precision)


class AnyDecision(Protocol):
    """What decisions about operators, and about layers with low-bit weights, have in common."""

    @property
    def operator(self) -> str:
        """Its name."""
        ...

    @property
    def kind(self) -> str:
        """Its kind."""
        ...

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """For each field of its configuration the name, the value as text, and the rule that gives it."""
        ...


D = TypeVar("D", bound=AnyDecision)


def named(decisions: Sequence[D], operator: str) -> D:
    """Return the decision for the operator named `operator`.

    Raises:
        KeyError: no decision has this name; the message has the closest names.
    """
    for decision in decisions:
        if decision.operator == operator:
            return decision
    near = difflib.get_close_matches(operator, [d.operator for d in decisions], n=3, cutoff=0.0)
    msg = f"no operator is named {operator!r}; the closest: {', '.join(near)}"
    raise KeyError(msg)


def explained(decision: AnyDecision, what: str) -> str:
    """Return a line that says what was decided, and a table of the fields."""
    head = f"{decision.operator} ({decision.kind}): {what}"
    rows = [("field", "value", "from"), *decision.fields]
    return f"{head}\n{format_table(rows)}" if decision.fields else head


def algorithm_lines(steps: Sequence[Step]) -> list[str]:
    """Return the algorithms of a plan, one line each, below a heading."""
    lines = [
        f"{i}. {s.algorithm} ({s.stage})" + f": {s.options}" * bool(s.options) for i, s in enumerate(steps, 1)
    ]
    return ["", "algorithms, in this order:", *lines] if lines else []
