"""A backend as a list of named passes over a graph; each can say why it leaves an operator alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from torch import fx

#: What passes give other than a kernel.
_NO_KERNELS = ("int8", "bf16", "")


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite of a graph.

    Attributes:
        name: for reports and messages.
        run: changes a graph in place; returns the names of the operators that a report should show as
            rewritten, or None.
        why: called after the pass for every operator, and for every node where the pass gives a kernel: why
            it leaves that node alone; "" where it does not, or where the node is not its concern.
        gives: what operators get by this pass: a precision, "int8" or "bf16", or a kernel of the name that
            reports have for it, instead of other kernels; "" where it gives neither.
        avoids: the engine's fault that the pass is there to avoid; "" where it avoids none.
    """

    name: str
    run: Callable[[fx.GraphModule], Iterable[str] | None]
    why: Callable[[fx.Node], str] | None = None
    gives: str = ""
    avoids: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
    """An operator that a pass rewrote.

    Attributes:
        name: of the pass.
        operator: name of the operator.
    """

    name: str
    operator: str

    def __str__(self) -> str:
        """For reports."""
        return f"{self.name}: {self.operator}"


@dataclasses.dataclass(frozen=True, slots=True)
class PassesResult:
    """What a list of passes did.

    Attributes:
        rewrites: operators that were rewritten, in order.
        refused: (operator, what a pass gives) → why the first pass that gives this left the operator alone.
    """

    rewrites: tuple[Rewrite, ...]
    refused: Mapping[tuple[str, str], str]

    def passed_over(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each operator, or node that is none, the kernels that it did not get, and why."""
        found: dict[str, tuple[tuple[str, str], ...]] = {}
        for (operator, gives), why in self.refused.items():
            if gives not in _NO_KERNELS:
                found[operator] = (*found.get(operator, ()), (gives, why))
        return found


def run_passes(module: fx.GraphModule, passes: Iterable[Pass]) -> PassesResult:
    """Run passes in order, on a graph that they change in place."""
    rewrites: list[Rewrite] = []
    refused: dict[tuple[str, str], str] = {}
    for each in passes:
        rewrites += [Rewrite(each.name, operator) for operator in each.run(module) or ()]
        if each.why is None:
            continue
        for node in module.graph.nodes:
            # sums, roots and the like are not in the plan, but kernels compute some of them together
            operator = node.meta.get("operator", "" if each.gives in _NO_KERNELS else node.name)
            why = each.why(node) if operator else ""
            if why:
                refused.setdefault((operator, each.gives), why)
    module.graph.lint()
    module.recompile()
    return PassesResult(tuple(rewrites), refused)
