"""Round to nearest: each weight gets the code that is nearest to it. The range rule decides the scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nc.algorithms.solvers.base import InputNeeds, Problem
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode
from nc.numerics.packed_weight import PackedWeight, pack


@dataclass(frozen=True)
class RTN:
    """Round to nearest. It needs no data."""

    name: ClassVar[str] = "rtn"

    @property
    def needs(self) -> InputNeeds:
        """Nothing."""
        return InputNeeds()

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`.

        Where statistics were collected for other reasons, range rule "wls" uses them.
        """
        importance = None if problem.inputs is None else problem.inputs.mean_square
        found = choose(problem.weight, problem.form, problem.rule, importance, clip=problem.clip)
        return pack(encode(problem.weight, found, problem.form), found, problem.form)
