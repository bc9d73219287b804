"""Solvers by name. A new one is a file here and a line below."""

from __future__ import annotations

from nc.algorithms.solvers.autoround import AutoRound
from nc.algorithms.solvers.base import BlockProblem, BlockSolver, InputNeeds, Problem, Solver
from nc.algorithms.solvers.best import keep_best, solve_best
from nc.algorithms.solvers.gptq import GPTQ
from nc.algorithms.solvers.hqq import HQQ
from nc.algorithms.solvers.rtn import RTN

SOLVERS: dict[str, type] = {cls.name: cls for cls in (RTN, GPTQ, HQQ, AutoRound)}

__all__ = [
    "GPTQ",
    "HQQ",
    "RTN",
    "SOLVERS",
    "AutoRound",
    "BlockProblem",
    "BlockSolver",
    "InputNeeds",
    "Problem",
    "Solver",
    "keep_best",
    "solve_best",
]
