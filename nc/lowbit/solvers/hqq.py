"""HQQ: half-quadratic quantization, which needs no data (mobiusml, "Half-Quadratic Quantization of Large Machine Learning Models", 2023).

It minimises `|W - W^|_p^p`, p < 1, over the zero points: weights with a large error count for little. Two steps take turns: the errors
`e = shrink_p(W - W^)` are split off, and the zero point that fits `W - e` best follows as a mean.

Differences from the authors' code: errors are measured in units of the scale, so that the result does not depend on the size of the
weights, and groups with a small range are not zeroed; the best step of each group stays, not the last one; symmetric integers and floats,
which have no zero point, get the scale that fits `W - e` best. The range rule gives the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from nc.errors import ConfigError
from nc.lowbit.solvers.base import Needs, Problem
from nc.numerics.group_ranges import choose
from nc.numerics.groups import GroupParams, decode, encode
from nc.numerics.stored_scales import round_scale
from nc.numerics.packed_weight import PackedWeight, pack
from nc.spec.weight_format import WeightFormat


@dataclass(frozen=True)
class HQQ:
    """HQQ. It needs no data. Use groups of at most 64: with large groups it is no better than round to nearest.

    Its zero points are no whole numbers. A format with `float_zero` holds them; for others they are rounded, and the scale is fitted again
    by least squares.

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
        if not (self.steps >= 0 and 0 < self.p <= 1 and self.beta > 0):
            msg = f"{self}: steps is at least 0, p above 0 and at most 1, and beta above 0."
            raise ConfigError(msg)

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`."""
        weight, form = problem.weight, problem.form
        group = form.group(weight.shape[1])
        start = choose(weight, form, problem.rule)
        if form.two_levels:  # the scales are codes themselves, and stay
            return pack(encode(weight, start, form), start, form)
        rows = weight.reshape(-1, group)
        best = GroupParams(*(None if part is None else part.reshape(-1, 1) for part in (start.scale, start.zero, start.minimum)))  # type: ignore[arg-type]
        least = self._loss(rows, best, form)
        for tried in self._steps(rows, best, form):
            loss = self._loss(rows, tried, form)
            best, least = _better(best, least, tried, loss)
        shape = start.scale.shape
        found = GroupParams(*(None if part is None else part.reshape(shape) for part in (best.scale, best.zero, best.minimum)))  # type: ignore[arg-type]
        return pack(encode(weight, found, form), found, form)

    def _steps(self, rows: torch.Tensor, start: GroupParams, form: WeightFormat) -> Iterator[GroupParams]:
        """Params after each step; of rows of shape [groups, group]."""
        if form.symmetric:
            yield from self._scales(rows, start, form)
            return
        # in the loop zero points are minima, in fp32
        free = replace(form, float_zero=True, scale_dtype="fp32")
        for now in (_covering(rows, form), GroupParams(start.scale, minimum=_minimum(start))):
            for _ in range(self.steps):
                codes = encode(rows, now, free)
                errors = self._shrunk(rows - decode(codes, now, free), now.scale)
                now = GroupParams(now.scale, minimum=(rows - errors - codes * now.scale).mean(1, keepdim=True))
                yield from _stored(rows, now, form)

    def _scales(self, rows: torch.Tensor, now: GroupParams, form: WeightFormat) -> Iterator[GroupParams]:
        for _ in range(self.steps):
            codes = encode(rows, now, form)
            errors = self._shrunk(rows - decode(codes, now, form), now.scale)
            now = _fitted(rows - errors, codes, now, form)
            yield now

    def _shrunk(self, errors: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """`sign(x) max(|x| - |x|^(p-1) / beta, 0)`, x in units of the scale."""
        size = (errors / scale).abs()
        return errors.sign() * (size - size.pow(self.p - 1) / self.beta).clamp_(min=0) * scale.abs()

    def _loss(self, rows: torch.Tensor, params: GroupParams, form: WeightFormat) -> torch.Tensor:
        """`|W - W^|_p^p` of each row."""
        return (rows - decode(encode(rows, params, form), params, form)).abs().pow(self.p).sum(1)


def _covering(rows: torch.Tensor, form: WeightFormat) -> GroupParams:
    """Params whose range is exactly that of the row, which need not hold 0."""
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    scale = round_scale((high - low) / (2**form.bits - 1), form.scale_dtype)
    return GroupParams(torch.where(scale == 0, torch.ones_like(scale), scale), minimum=low)


def _minimum(params: GroupParams) -> torch.Tensor:
    if params.minimum is not None:
        return params.minimum
    assert params.zero is not None
    return -params.zero * params.scale


def _stored(rows: torch.Tensor, params: GroupParams, form: WeightFormat) -> Iterator[GroupParams]:
    """Params with a free minimum as the format can store them."""
    assert params.minimum is not None
    if form.float_zero:
        yield GroupParams(params.scale, minimum=round_scale(params.minimum, form.scale_dtype))
        return
    zero = (-params.minimum / params.scale).round_().clamp_(0, 2**form.bits - 1)
    rounded = GroupParams(params.scale, zero)
    yield rounded
    yield _fitted(rows, encode(rows, rounded, form), rounded, form)


def _fitted(rows: torch.Tensor, codes: torch.Tensor, params: GroupParams, form: WeightFormat) -> GroupParams:
    """The scale with the least squared error for given codes; the old one where that has no value."""
    units = decode(codes, GroupParams(torch.ones_like(params.scale), params.zero), form)
    scale = (rows * units).sum(1, keepdim=True) / units.square().sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = round_scale(scale, form.scale_dtype)
    usable = (scale != 0) & scale.isfinite()
    return GroupParams(torch.where(usable, scale, params.scale), params.zero)


def _better(best: GroupParams, least: torch.Tensor, tried: GroupParams, loss: torch.Tensor) -> tuple[GroupParams, torch.Tensor]:
    """Of each row the params with the smaller loss."""
    better = (loss < least).unsqueeze(1)

    def of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
        return None if a is None or b is None else torch.where(better, a, b)

    kept = GroupParams(torch.where(better, tried.scale, best.scale), of(tried.zero, best.zero), of(tried.minimum, best.minimum))
    return kept, torch.where(better[:, 0], loss, least)
