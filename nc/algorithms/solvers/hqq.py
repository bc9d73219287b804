"""HQQ: half-quadratic quantization, which needs no data.

See mobiusml, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

It minimises `|W - W^|_p^p`, p < 1, over the zero points: weights with a large error count for little. Two
steps take turns: the errors `e = shrink_p(W - W^)` are split off, and the zero point that fits `W - e` best
follows as a mean.

Differences from the authors' code: errors are measured in units of the scale, so that the result does not
depend on the size of the weights, and groups with a small range are not zeroed; the best step of each group
stays, not the last one; symmetric integers and floats, which have no zero point, get the scale that fits `W -
e` best. The range rule gives the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from nc.algorithms.solvers.base import InputNeeds, Problem
from nc.errors import ConfigError
from nc.formats.checks import is_number, is_whole
from nc.formats.tensor_format import TensorFormat
from nc.numerics.group_ranges import choose
from nc.numerics.groups import GroupParams, Outer, decode, encode, spread
from nc.numerics.packed_weight import PackedWeight, pack
from nc.numerics.stored_scales import stored, stored_minimum


@dataclass(frozen=True)
class HQQ:
    """HQQ. It needs no data.

    Use groups of at most 64: with large groups it is not better than round to nearest.

    Its zero points are not integers. A format with `float_zero` holds them; for others they are rounded, and
    the scale is fitted again by least squares.

    Attributes:
        steps: how often both steps are made.
        p: the norm, above 0 and at most 1.
        beta: the larger, the fewer errors are split off.

    Raises:
        ConfigError: a value that is out of range.
    """

    steps: int = 20
    p: float = 0.7
    beta: float = 10.0

    name: ClassVar[str] = "hqq"

    def __post_init__(self) -> None:
        """Check values."""
        if not (
            is_whole(self.steps)
            and is_number(self.p)
            and 0 < self.p <= 1
            and is_number(self.beta)
            and self.beta > 0
        ):
            msg = f"{self}: steps is a whole number from 0, p above 0 and at most 1, and beta above 0."
            raise ConfigError(msg)

    @property
    def needs(self) -> InputNeeds:
        """Nothing."""
        return InputNeeds()

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`."""
        weight, form = problem.weight, problem.form
        importance = None if problem.inputs is None else problem.inputs.mean_square
        best = choose(weight, form, problem.rule, importance, clip=problem.clip)
        least = self._loss(weight, best, form)
        for tried in self._steps(weight, best, form):
            loss = self._loss(weight, tried, form)
            better = loss < least
            best, least = tried.where(better, best), torch.where(better, loss, least)
        return pack(encode(weight, best, form), best, form)

    def _steps(self, weight: torch.Tensor, start: GroupParams, form: TensorFormat) -> Iterator[GroupParams]:
        """Params after each step."""
        if form.symmetric:
            yield from self._scales(weight, start, form)
            return
        # in the loop zero points are minima, in fp32
        free = replace(form, float_zero=True, scale_dtype="fp32", double_quant=None, tensor_scale=False)
        for now in (_covering(weight, start, form), GroupParams(start.scale, minimum=_minimum(start))):
            for _ in range(self.steps):
                codes = encode(weight, now, free)
                kept = weight - self._shrunk(weight - decode(codes, now, free), now.scale)
                units = decode(codes, GroupParams(now.scale, minimum=torch.zeros_like(now.scale)), free)
                now = GroupParams(now.scale, minimum=_grouped(kept - units, now).mean(2))
                yield from _stored(weight, now, form, start.outer)

    def _scales(self, weight: torch.Tensor, now: GroupParams, form: TensorFormat) -> Iterator[GroupParams]:
        for _ in range(self.steps):
            codes = encode(weight, now, form)
            errors = self._shrunk(weight - decode(codes, now, form), now.scale)
            now = _fitted(weight - errors, codes, now, form)
            yield now

    def _shrunk(self, errors: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """`sign(x) max(|x| - |x|^(p-1) / beta, 0)`, x in units of the scale."""
        sizes = scale.abs().repeat_interleave(errors.shape[1] // scale.shape[1], 1)
        size = errors.abs() / sizes
        return errors.sign() * (size - size.pow(self.p - 1) / self.beta).clamp_(min=0) * sizes

    def _loss(self, weight: torch.Tensor, params: GroupParams, form: TensorFormat) -> torch.Tensor:
        """`|W - W^|_p^p` of each group."""
        return _grouped(
            (weight - decode(encode(weight, params, form), params, form)).abs().pow(self.p), params
        ).sum(2)


def _grouped(weight: torch.Tensor, params: GroupParams) -> torch.Tensor:
    """[N, K] → [N, G, K / G]."""
    return weight.reshape(*params.scale.shape, -1)


def _covering(weight: torch.Tensor, start: GroupParams, form: TensorFormat) -> GroupParams:
    """Params whose range is exactly that of the group, which need not hold 0."""
    low, high = torch.aminmax(_grouped(weight, start), dim=2)
    scale = (high - low) / (2**form.bits - 1)
    return GroupParams(
        _stored_scale(torch.where(scale == 0, start.scale, scale), form, start.outer), minimum=low
    )


def _minimum(params: GroupParams) -> torch.Tensor:
    if params.minimum is not None:
        return params.minimum
    assert params.zero is not None
    return -params.zero * params.scale


def _stored_scale(scale: torch.Tensor, form: TensorFormat, outer: Outer | None) -> torch.Tensor:
    return stored(scale, form, None if outer is None else spread(outer.scale, scale.shape[1]))


def _stored(
    weight: torch.Tensor, params: GroupParams, form: TensorFormat, outer: Outer | None
) -> Iterator[GroupParams]:
    """Params with a free minimum as the format can store them."""
    assert params.minimum is not None
    if form.float_zero:
        outside = (
            None if outer is None or outer.minimum is None else spread(outer.minimum, params.scale.shape[1])
        )
        yield GroupParams(params.scale, minimum=stored_minimum(params.minimum, form, outside), outer=outer)
        return
    zero = (-params.minimum / params.scale).round_().clamp_(0, 2**form.bits - 1)
    rounded = GroupParams(params.scale, zero, outer=outer)
    yield rounded
    yield _fitted(weight, encode(weight, rounded, form), rounded, form)


def _fitted(
    weight: torch.Tensor, codes: torch.Tensor, params: GroupParams, form: TensorFormat
) -> GroupParams:
    """Return the scale with the least squared error for given codes.

    The old one stays where that has no value or changes its sign.
    """
    units = _grouped(decode(codes, GroupParams(torch.ones_like(params.scale), params.zero), form), params)
    squares = units.square().sum(2)
    scale = (_grouped(weight, params) * units).sum(2) / squares
    usable = (squares > 0) & scale.isfinite() & (scale * params.scale > 0)
    scale = torch.where(usable, scale, params.scale)
    return replace(params, scale=torch.where(usable, _stored_scale(scale, form, params.outer), params.scale))
