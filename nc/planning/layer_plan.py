"""The plan of weight-only quantization.

It has for every linear and embedding its format and solver, and by which rule. It needs no data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from nc.algorithms.solvers import Solver
from nc.algorithms.transforms import Transform
from nc.formats.reasons import NO_RULE, Cause, DecidingRule, Reason
from nc.formats.tensor_format import TensorFormat
from nc.graph.plan import Step, algorithm_lines, explained, named
from nc.graph.shares import Part, Shares, shares_of
from nc.text.html_page import preformatted
from nc.text.table import WIDTH, folded, format_table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerDecision:
    """The decision for one layer.

    Attributes:
        operator: name of the module.
        kind: "linear" or "embedding".
        module_type: its class.
        shape: (N, K), outputs and inputs; of an embedding rows and features.
        form: the format of its weight; None if it stays float.
        rule: range rule of its scales.
        solver: chooses its codes.
        act_dtype: what its input is rounded to: "fp32" (nothing), "bf16", "int8" or "int8_block32".
        transforms: those of blocks that it asks for.
        decided: which rule decided.
        why: why it stays float; None when it is quantized.
        fields: for each field of its configuration the name, the value as text, and the rule that gives it.
    """

    operator: str
    kind: str
    module_type: str
    shape: tuple[int, int]
    form: TensorFormat | None = None
    rule: str = "wls"
    solver: Solver | None = None
    act_dtype: str = "fp32"
    transforms: tuple[Transform, ...] = ()
    decided: DecidingRule = NO_RULE
    why: Reason | None = None
    fields: tuple[tuple[str, str, str], ...] = ()

    @property
    def reason(self) -> str:
        """Why it stays float, as text; "" when it is quantized."""
        return "" if self.why is None else str(self.why)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlan:
    """Decisions for all layers, in the order of the model's modules.

    Attributes:
        decisions: one per layer.
        transforms: applied before layers are solved, in this order: those of the whole model, and those that
            some layer asks for.
        others: names and shapes of weights that are in no linear or embedding; they stay float.
    """

    decisions: tuple[LayerDecision, ...]
    transforms: tuple[Transform, ...] = ()
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __getitem__(self, operator: str) -> LayerDecision:
        """Return the decision for the layer of that name.

        If there is none, KeyError with the closest names.
        """
        return named(self.decisions, operator)

    @property
    def quantized(self) -> tuple[LayerDecision, ...]:
        """Decisions of the layers that are quantized."""
        return tuple(d for d in self.decisions if d.form is not None)

    @property
    def needing_data(self) -> tuple[str, ...]:
        """Names of the transforms and solvers that need calibration data."""
        transforms = [t.name for t in self.transforms if t.needs.data]
        solvers = [d.solver.name for d in self.quantized if d.solver is not None and d.solver.needs.data]
        return tuple(dict.fromkeys([*transforms, *solvers]))

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is needed."""
        return bool(self.needing_data)

    @property
    def algorithms(self) -> tuple[Step, ...]:
        """Transforms and solvers, as in `nc.graph.plan.Plan`."""
        solvers = dict.fromkeys(d.solver for d in self.quantized if d.solver is not None)
        return tuple(
            Step(a.name, stage, ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(a).items()))  # type: ignore[call-overload]
            for stage, some in (("transform", self.transforms), ("solver", solvers))
            for a in some
        )

    @property
    def shares(self) -> Shares:
        """Which share of the weights gets which format."""
        rows = [
            (d.operator, "float" if d.form is None else str(d.form.dtype), math.prod(d.shape))
            for d in self.decisions
        ]
        parts = [
            Part(operator=name, form=form, weights=((name, size),), multiply_adds=0)
            for name, form, size in rows
        ]
        return shares_of([*parts, *other_parts(self.others)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "operator": d.operator,
                "kind": d.kind,
                "module_type": d.module_type,
                "shape": list(d.shape),
                "form": None if d.form is None else d.form.to_dict(),
                "range_rule": d.rule,
                "solver": None if d.solver is None else d.solver.name,
                "act_dtype": d.act_dtype,
                "transforms": [t.name for t in d.transforms],
                "rule": str(d.decided),
                "reason": d.reason,
            }
            for d in self.decisions
        ]
        return {"algorithms": [dataclasses.asdict(step) for step in self.algorithms], "decisions": rows}

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return preformatted(str(self))

    def __str__(self) -> str:
        """Return a table of all layers with repeated blocks as one, then the algorithms."""
        others = [others_text(self.others)] if self.others else []
        return "\n".join(
            [
                self.table(WIDTH, fold=True),
                "",
                *self.shares.lines(),
                *others,
                *algorithm_lines(self.algorithms),
            ]
        )

    def table(self, width: int | None = None, *, fold: bool = False) -> str:
        """One row per layer and other weight.

        It has name, type, sizes, format, range rule, solver, which rule decided, and why it stays float.

        Args:
            width: of the table, see `nc.text.table.format_table`; None: as wide as its texts are.
            fold: write equal blocks ("layer.0", "layer.1", …) once, as `print(plan)` does.
        """
        rows: list[tuple[str, ...]] = [
            ("layer", "type", "N x K", "weight", "range", "solver", "rule", "why float")
        ]
        for d in self.decisions:
            sizes = f"{d.shape[0]} x {d.shape[1]}"
            how = (
                ("float", "-", "-")
                if d.form is None or d.solver is None
                else (str(d.form), d.rule, d.solver.name)
            )
            rows.append((d.operator, d.kind, sizes, *how, str(d.decided), d.reason))
        rows += [
            (name, "parameter", " x ".join(map(str, shape)), "float", "-", "-", "-", str(Cause.NO_LAYER()))
            for name, shape in self.others
        ]
        return format_table(folded(rows) if fold else rows, width)

    def explain(self, operator: str) -> str:
        """For one layer each field of its configuration, the value, and the rule that gives it."""
        decision = self[operator]
        return explained(decision, decision.reason or str(decision.form))


def other_parts(others: Sequence[tuple[str, tuple[int, ...]]]) -> list[Part]:
    """Return what weights that are in no linear or embedding contribute to the shares of a model.

    Their multiply-adds are not known.
    """
    return [Part(operator=name, form="float", weights=((name, math.prod(shape)),)) for name, shape in others]


def others_text(others: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return a line about the weights that are in no linear or embedding, the largest ones first."""
    largest = sorted(others, key=lambda other: -math.prod(other[1]))
    shown = ", ".join(f"{name} {list(shape)}" for name, shape in largest[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    count = sum(math.prod(shape) for _, shape in others)
    return f"{count / 1e6:.1f} M weights in no linear or embedding stay float: {shown}{more}"
