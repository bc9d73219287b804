"""What can be done to the few operators that add most of the error, the least loss of speed first."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator

from nc.config import AnyConfig, DynamicQuantConfig, StaticQuantConfig
from nc.config.base import QuantConfig
from nc.graph.plan import Plan

#: Kinds of operators for which each row can have a range.
_OF_ROWS = frozenset({"linear"})


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to mend operators.

    Attributes:
        name: for reports.
        rule: the configuration of these operators; None: they stay in float.
        operators: those that it is for.
    """

    name: str
    rule: QuantConfig | None
    operators: tuple[str, ...]

    def put_into(self, config: AnyConfig) -> AnyConfig:
        """Return a configuration with this way's rule for its operators."""
        changed = copy.copy(config)
        if self.rule is not None:
            changed.set_local(list(self.operators), self.rule)
        return changed

    def is_in(self, plan: Plan) -> bool:
        """Whether its operators are in a plan as it wants them: an engine may have no kernel for that."""
        specs = [plan[name].spec for name in self.operators]
        return self.rule is None or all(spec.mode == "dynamic" or spec.bf16 for spec in specs)


def ways(plan: Plan, worst: Collection[str], *, bf16: bool) -> Iterator[Way]:
    """Yield the ways to mend some operators.

    Args:
        plan: what they are.
        worst: their names.
        bf16: the CPU computes in it.
    """
    static = [d for d in plan.quantized if d.operator in worst and d.spec.mode == "static"]
    of_rows = tuple(d.operator for d in static if d.kind in _OF_ROWS)
    if of_rows:
        yield Way("with ranges per row", DynamicQuantConfig(), of_rows)
    if bf16:
        yield Way("in bf16", StaticQuantConfig(w_dtype="bf16", act_dtype="bf16"), tuple(worst))
    yield Way("in float", None, tuple(worst))
