"""GPTQ and its two-sided forms.

Columns are rounded in sequence, and later columns take over the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from nc.algorithms.solvers.base import InputNeeds, Problem
from nc.algorithms.solvers.rtn import RTN
from nc.errors import ConfigError, UnsupportedError
from nc.formats.checks import is_number, is_whole
from nc.numerics.error_feedback import Factor, factor, round_columns
from nc.numerics.group_ranges import choose
from nc.numerics.groups import GroupParams, join
from nc.numerics.packed_weight import PackedWeight, pack

Order = Literal["none", "static", "groups"]
TwoSided = Literal["gptaq", "qronos"]
#: How often damp is raised where the Hessian is not positive definite, each time ten times.
_RAISES = 4


@dataclass(frozen=True)
class GPTQ:
    """GPTQ (arXiv 2210.17323, algorithm 1), without a permutation that kernels would have to know.

    Channels that calibration never saw a value of are rounded to nearest. Where the Hessian is not positive
    definite, damp is raised, and if that does not help the layer is rounded to nearest; `Problem.notes` says
    both.

    Measured on 25 linears of SmolLM2-135M: the H-weighted loss as a part of that of round to nearest,
    geometric mean, with order "none", "groups" and "static" is 0.30, 0.26, 0.25 (int4, groups of 64); 0.27,
    0.24, 0.21 (int3); 0.22, 0.18, 0.16 (uint4 with zero points).

    Attributes:
        damp: share of the mean of diag(H) that is added to it.
        block: columns whose updates are put together before the rest is updated.
        order: of the columns. "none": as given. "static": those with the largest E[x^2] first; all
            scales come from the original weight. "groups": the groups with the largest E[x^2] first, and in a
            group its largest first.
        static_groups: all scales come from the original weight; otherwise those of a group from the weight
            when the group begins, with the errors of earlier columns in it.
        two_sided: corrects also what earlier layers did to the inputs: |X W - X~ Q| is made small, X being
            the inputs of the float model. "gptaq" (arXiv 2504.02692) or "qronos" (arXiv 2505.11695). For 2
            and 3 bits. The layers of a block are solved in sequence, each for the inputs that earlier layers
            give: the block is run once more for each.
        alpha: share of GPTAQ's correction that is made.

    Raises:
        ConfigError: a value that is out of range.
    """

    damp: float = 0.01
    block: int = 128
    order: Order = "static"
    static_groups: bool = False
    two_sided: TwoSided | None = None
    alpha: float = 0.25

    name: ClassVar[str] = "gptq"

    def __post_init__(self) -> None:
        """Check values."""
        if self.order not in get_args(Order):
            msg = f"GPTQ has no order {self.order!r}; use one of {', '.join(get_args(Order))}."
            raise ConfigError(msg)
        if self.two_sided not in (None, *get_args(TwoSided)):
            msg = f"GPTQ has no two_sided {self.two_sided!r}; use None, {' or '.join(get_args(TwoSided))}."
            raise ConfigError(msg)
        fits = (
            is_number(self.damp)
            and self.damp >= 0
            and is_whole(self.block, 1)
            and is_number(self.alpha)
            and 0 <= self.alpha <= 1
        )
        if not (fits and isinstance(self.static_groups, bool)):
            msg = (
                f"{self}: damp is at least 0, block a whole number from 1, alpha from 0 to 1, and "
                "static_groups True or False."
            )
            raise ConfigError(msg)

    @property
    def needs(self) -> InputNeeds:
        """The Hessian, and for the two-sided forms the float model's inputs."""
        return InputNeeds(squares=True, hessian=True, float_inputs=self.two_sided is not None)

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`."""
        assert problem.inputs is not None
        found = self._factored(problem)
        if found is None:
            return RTN().solve(problem)
        parts, perm = found
        weight, form = problem.weight, problem.form
        importance = problem.inputs.mean_square
        group = form.group(weight.shape[1])
        feed = parts.feed(self.block, group)
        if self.two_sided is None:
            del found, parts  # four times the size of the feed
            target, first, value_feed = weight.T.index_select(0, perm).T, None, None
        else:
            target, first, value_feed = self._two_sided(problem, parts, perm)

        index = (perm // group).tolist()
        scales: dict[int, GroupParams] = {}
        groups = weight.shape[1] // group
        fixed = self.static_groups or self.order == "static"
        outer = None
        if (
            fixed or form.two_levels
        ):  # scales of scales depend on all groups, and are those of the weight before rounding
            whole = choose(
                weight if self.two_sided is None else _unordered(target, perm),
                form,
                problem.rule,
                importance,
                clip=problem.clip,
            )
            outer = whole.outer
        if fixed:
            scales = {i: whole.of_group(i) for i in range(groups)}

        def begin(column: int, updated: torch.Tensor) -> None:
            i = index[column]
            known = None if outer is None else outer.of_groups(i, 1, groups)
            clip = None if problem.clip is None else problem.clip[:, i : i + 1]
            scales[i] = choose(
                updated, form, problem.rule, importance[perm[column : column + group]], known, clip=clip
            )

        def of_column(column: int) -> GroupParams:
            return scales[index[column]]

        codes = round_columns(
            target,
            form,
            feed,
            of_column,
            block=self.block,
            group=group,
            begin=None if fixed else begin,
            value_feed=value_feed,
            first=first,
        )
        return pack(_unordered(codes, perm), join([scales[i] for i in range(groups)], outer=outer), form)

    def _factored(self, problem: Problem) -> tuple[Factor, torch.Tensor] | None:
        """Return the factor of the Hessian in the order of the columns, and that order.

        None is returned if it cannot be factored.
        """
        assert problem.inputs is not None
        sums, tokens = problem.inputs.outer, problem.inputs.tokens
        assert sums is not None
        perm = column_order(sums.diagonal() / tokens, problem.form.group(len(sums)), self.order)
        for tried in range(_RAISES + 1):
            damp = self.damp if not tried else max(self.damp, 1e-3) * 10**tried
            found = factor(sums, damp, perm, tokens)
            if found is not None:
                if tried:
                    problem.notes.append(
                        f"its Hessian is not positive definite: damp was raised from {self.damp:g} to "
                        f"{damp:g}"
                    )
                return found, perm
        problem.notes.append("its Hessian cannot be factored: rounded to nearest")
        return None

    def _two_sided(
        self, problem: Problem, parts: Factor, perm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the weight to round in its columns' order, and what the first column is rounded from.

        What values add to later columns is returned too.

        With C = E[(y - x) x^T], y the float model's input: the best weight without rounding is W (I + C
        H^-1).
        """
        weight = problem.weight[:, perm].float()
        assert problem.inputs is not None
        if problem.inputs.cross is None:
            msg = (
                f"GPTQ(two_sided={self.two_sided!r}) needs the inputs of the float model, and "
                f"{problem.name!r} has none; use two_sided=None."
            )
            raise UnsupportedError(msg)
        cross = (problem.inputs.cross / problem.inputs.tokens)[perm][:, perm]
        if self.two_sided == "qronos":
            moved = weight.double() @ cross
            # the first column is rounded as if the others did not change; they fit best to what it became
            first = weight[:, 0] + (moved[:, 0] / parts.first).float()
            return weight + parts.solve(moved.T).T.float(), first, None
        # the paper adds w_i P_i to later columns, P = alpha strict_upper(C U^T) U with U = R^-1; in units of
        # the diagonal of R U drops out
        product = torch.linalg.solve_triangular(parts.upper, cross.T, upper=True).T
        return weight, None, (self.alpha * product.triu(1) / parts.upper.diagonal()).float()


def column_order(diagonal: torch.Tensor, group: int, order: Order) -> torch.Tensor:
    """In which order columns are rounded: a permutation of 0..K-1.

    Args:
        diagonal: E[x^2] of each channel, shape [K].
        group: channels that share a scale.
        order: see `GPTQ`; "groups" keeps the channels of a group together.
    """
    if order == "none":
        return torch.arange(len(diagonal))
    if order == "static":
        return diagonal.argsort(descending=True, stable=True)
    inside = diagonal.reshape(-1, group).sort(dim=1, descending=True, stable=True)
    first = inside.values[:, 0].argsort(descending=True, stable=True)
    return (inside.indices + torch.arange(0, len(diagonal), group).unsqueeze(1))[first].reshape(-1)


def _unordered(columns: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(columns)
    result[:, perm] = columns
    return result
