"""GPTQ: columns are rounded one after the other, and those behind take over the error (arXiv 2210.17323, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from nc.lowbit.solvers.base import Needs, Problem
from nc.numerics.group_ranges import choose
from nc.numerics.groups import GroupParams, decode, encode
from nc.numerics.packed_weight import PackedWeight, pack


@dataclass(frozen=True)
class GPTQ:
    """GPTQ.

    Attributes:
        damp: share of the mean of diag(H) that is added to it.
        block: columns whose updates are put together before the rest is updated.
    """

    damp: float = 0.01
    block: int = 128

    name: ClassVar[str] = "gptq"

    @property
    def needs(self) -> Needs:
        """The Hessian."""
        return Needs(squares=True, hessian=True)

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`."""
        assert problem.inputs is not None
        weight, form = problem.weight.clone(), problem.form
        group = form.group(weight.shape[1])
        factor, dead = _factor(problem.inputs.hessian, self.damp)
        weight[:, dead] = 0
        importance = problem.inputs.mean_square
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        found: list[GroupParams] = []
        for start in range(0, weight.shape[1], self.block):
            end = min(start + self.block, weight.shape[1])
            errors = torch.zeros(weight.shape[0], end - start)
            for i in range(start, end):
                if i % group == 0:
                    part = slice(i, i + group)
                    found.append(choose(weight[:, part], form, problem.rule, importance[part]))
                column = weight[:, i : i + 1]
                code = encode(column, found[-1], form)
                codes[:, i : i + 1] = code
                error = (column - decode(code, found[-1], form)) / factor[i, i]
                weight[:, i + 1 : end] -= error @ factor[i : i + 1, i + 1 : end]
                errors[:, i - start] = error[:, 0]
            weight[:, end:] -= errors @ factor[start:end, end:]
        return pack(codes, _joined(found), form)


def _factor(hessian: torch.Tensor, damp: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper Cholesky factor of the damped inverse, fp32, and which channels never had a value."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    diagonal += damp * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float(), dead


def _joined(found: list[GroupParams]) -> GroupParams:
    def of(name: str) -> torch.Tensor | None:
        parts = [getattr(p, name) for p in found]
        return None if parts[0] is None else torch.cat(parts, 1)

    scale = of("scale")
    assert scale is not None
    return GroupParams(scale, of("zero"), of("minimum"))
