"""A backend as a list of named passes over a graph; each can say why it leaves an operator alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from torch import fx


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite of a graph.

    Attributes:
        name: for reports and messages.
        run: changes a graph in place; returns the names of the operators that a report should show as
            rewritten, or None.
        why: asked of every operator behind the pass: why it leaves that node alone, "" where it does not, or
            where the node is none of its business.
        gives: the precision that operators get by this pass, "int8" or "bf16"; "" where it gives none.
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
        refused: (operator, precision) → why the first pass that gives this precision left the operator alone.
    """

    rewrites: tuple[Rewrite, ...]
    refused: Mapping[tuple[str, str], str]


def run_passes(module: fx.GraphModule, passes: Iterable[Pass]) -> PassesResult:
    """Run passes in order, on a graph that they change in place."""
    rewrites: list[Rewrite] = []
    refused: dict[tuple[str, str], str] = {}
    for each in passes:
        rewrites += [Rewrite(each.name, operator) for operator in each.run(module) or ()]
        if each.why is None:
            continue
        for node in module.graph.nodes:
            why = each.why(node) if "operator" in node.meta else ""
            if why:
                refused.setdefault((node.meta["operator"], each.gives), why)
    module.graph.lint()
    module.recompile()
    return PassesResult(tuple(rewrites), refused)
