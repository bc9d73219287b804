"""Solvers by name. A new one is a file here and a line below."""

from __future__ import annotations

from nc.lowbit.solvers.autoround import AutoRound
from nc.lowbit.solvers.base import BlockProblem, BlockSolver, Needs, Problem, Solver
from nc.lowbit.solvers.best import keep_best, solve_best
from nc.lowbit.solvers.gptq import GPTQ
from nc.lowbit.solvers.hqq import HQQ
from nc.lowbit.solvers.rtn import RTN

SOLVERS: dict[str, type] = {cls.name: cls for cls in (RTN, GPTQ, HQQ, AutoRound)}

__all__ = [
    "GPTQ",
    "HQQ",
    "RTN",
    "SOLVERS",
    "AutoRound",
    "BlockProblem",
    "BlockSolver",
    "Needs",
    "Problem",
    "Solver",
    "keep_best",
    "solve_best",
]
