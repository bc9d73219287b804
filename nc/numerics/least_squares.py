"""Range rule "wls": the scale, and zero point or minimum, with the least weighted square error of a group.

For each of some scales the weights are rounded, and then the scale that fits these codes best is the solution
of a least-squares problem: `s = sum(h w q) / sum(h q^2)`; with a minimum m it is one of two unknowns. The
best of all stays, by `sum(h (w - w^)^2)` with scales as they are stored. The idea and the form of the search
are those of GGUF's k-quants (ggml-quants.c, make_qx_quants and make_qkx2_quants).

h is the mean square of each input channel, where calibration gives it. Else it is `|w| + rms of the group`,
as in k-quants: large weights matter more than their square error says. With h = 1 the search would clip them,
which lowers the error of the weights and raises that of the model (SmolLM2, int4, groups of 64).

Errors are sums of residuals `r = w - w^` of the scale that was tried, and change with it as a quadratic form
of `sum(h r^2)`, `sum(h r q)`, `sum(h q^2)`...: that is exact where `sum(h w^2) - ...` would lose all digits
at 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nc.formats.tensor_format import TensorFormat
from nc.numerics import formats
from nc.numerics.groups import GroupParams
from nc.numerics.stored_scales import stored, stored_minimum

#: Bits → the least and the largest inverse scale that is tried, as parts of that of min-max: the best ones of
#: normal and of heavy-tailed groups are inside. Fewer bits clip more.
_SYMMETRIC = {
    2: (1.2, 5.0),
    3: (1.1, 2.6),
    4: (1.05, 1.7),
    5: (1.0, 1.4),
    6: (1.0, 1.25),
    7: (0.99, 1.15),
    8: (0.99, 1.1),
}
_AFFINE = {
    2: (0.8, 3.0),
    3: (0.85, 2.0),
    4: (0.9, 1.5),
    5: (0.95, 1.25),
    6: (0.97, 1.15),
    7: (0.98, 1.1),
    8: (0.99, 1.06),
}
_FLOAT = (0.75, 1.8)
#: How many between these; with 12 and 9, int4 has 99 % of the gain of 65.
_TRIES, _AFFINE_TRIES = 12, 9
_POWERS = (1.0, 0.5, 2.0)  # neighbours
#: The best scale is tried again with its fitted value, more often where a minimum is fitted too.
_REPEATS, _MINIMUM_REPEATS = 1, 3
#: Up to so many bits each scale is tried with both signs, or with two zero points.
_COARSE = 4
_TINY = torch.finfo(torch.float32).tiny


def fit(
    weight: torch.Tensor, form: TensorFormat, start: GroupParams, h: torch.Tensor | None, *, positive: bool
) -> GroupParams:
    """Return the best params of each group.

    Args:
        weight: fp32, shape [n, G, group].
        form: the format.
        start: those of min-max, [n, G]; they stay where nothing is better. Their outer scales are kept.
        h: at least 0, shape [G, group]; None: the magnitudes of the weights, see the module text.
        positive: no scale is to be below 0, no minimum above 0.
    """
    if h is None:
        h = weight.abs().add_(weight.square().mean(2, keepdim=True).sqrt_())
    search = (
        _Symmetric(weight, form, start, h)
        if form.symmetric
        else _Affine(weight, form, start, h, positive=positive)
    )
    first = [start.scale]
    if form.symmetric and form.dtype.kind == "integer" and not (positive or form.powers):
        low, high = torch.aminmax(weight, dim=2)
        # the largest weight gets code 0, which is one further from the middle than the last one
        first = [torch.where(high > -low, -start.scale, start.scale)]
        if form.bits <= _COARSE:
            first.append(-first[0])
    for scale in first:
        for stretch in _stretches(form):
            search.attempt(scale / stretch)
    for _ in range(_MINIMUM_REPEATS if form.float_zero else _REPEATS):
        search.attempt(search.best.scale, again=True)
    return search.best


def _stretches(form: TensorFormat) -> tuple[float, ...]:
    if form.powers:
        return _POWERS
    tries = _TRIES if form.symmetric else _AFFINE_TRIES
    least, most = (
        _FLOAT if form.dtype.kind == "float" else (_SYMMETRIC if form.symmetric else _AFFINE)[form.bits]
    )
    return tuple(least + (most - least) * step / (tries - 1) for step in range(tries))


class _Work:
    """Tensors of the shape of the weight that each try overwrites: they stay in the cache."""

    def __init__(self, weight: torch.Tensor, h: torch.Tensor) -> None:
        self.weight, self.h = weight, h
        self.q, self.rest, self.product = (torch.empty_like(weight) for _ in range(3))

    def scaled(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Write `weight / scale` into `q`, and return it; `scale` has shape [n, G]."""
        return torch.mul(weight, (1 / scale).unsqueeze(2), out=self.q)

    def sums(
        self, weight: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, linear: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the sums of h r^2, h r q and h q^2 over each group, where `r = weight - q scale`.

        Args:
            weight: fp32, shape [n, G, group].
            q: codes, in the shape of `weight`; overwritten.
            scale: shape [n, G].
            linear: return the sums of h r and h q too.

        Returns:
            3 or 5 tensors of shape [n, G].
        """
        rest = torch.addcmul(weight, q, scale.unsqueeze(2), value=-1, out=self.rest)
        hr = torch.mul(rest, self.h, out=self.product)
        more = [hr.sum(2)] if linear else []
        rr = torch.mul(hr, rest, out=rest).sum(2)
        rq = torch.mul(hr, q, out=hr).sum(2)
        hq = torch.mul(q, self.h, out=hr)
        more += [hq.sum(2)] if linear else []
        return rr, rq, torch.mul(hq, q, out=q).sum(2), *more


class _Symmetric:
    """Formats that have a scale only."""

    def __init__(self, weight: torch.Tensor, form: TensorFormat, start: GroupParams, h: torch.Tensor) -> None:
        self.work, self.form, self.scale = _Work(weight, h), form, start.scale
        self.round = _rounding(form)
        self.least = torch.full_like(start.scale, float("inf"))
        self.outer = start.outer
        self.attempt(start.scale)

    @property
    def best(self) -> GroupParams:
        """The params with the least error so far."""
        return GroupParams(self.scale, outer=self.outer)

    def attempt(self, scale: torch.Tensor, *, again: bool = False) -> None:  # of the other search
        """Try a scale, and the one that fits its codes best."""
        outer = None if self.outer is None else self.outer.scale
        scale = stored(scale, self.form, outer)
        rr, rq, qq = self.work.sums(
            self.work.weight, self.round(self.work.scaled(self.work.weight, scale)), scale, linear=False
        )
        fitted = scale + rq / qq.clamp(min=_TINY)
        fitted = stored(torch.where(fitted == 0, scale, fitted), self.form, outer)
        change = fitted - scale
        error = rr - change * (2 * rq - change * qq)
        scale = torch.where(error < rr, fitted, scale)
        error = torch.minimum(error, rr)
        self.scale = torch.where(error < self.least, scale, self.scale)
        self.least = torch.minimum(error, self.least)


class _Affine:
    """Integer formats that have a scale, and a zero point or a minimum.

    Attributes:
        best: the params with the least error so far.
    """

    def __init__(
        self, weight: torch.Tensor, form: TensorFormat, start: GroupParams, h: torch.Tensor, *, positive: bool
    ) -> None:
        self.work, self.form, self.positive = _Work(weight, h), form, positive
        self.steps = 2**form.bits - 1
        self.best, self.first = start, start
        self.least = torch.full_like(start.scale, float("inf"))
        self.sum_h = h.sum(-1)
        low, high = torch.aminmax(weight, dim=2)
        if form.float_zero and not positive:
            self.low, self.middle = low, (low + high) / 2
        else:
            self.low = low.clamp(max=0.0)
            self.middle = (self.low + high.clamp(min=0.0)) / 2
        self._attempt(start.scale, self._minimum(start))

    def attempt(self, scale: torch.Tensor, *, again: bool = False) -> None:
        """Try a scale around the middle of a group's range.

        With `again`, the scale is tried around that of the best params so far.
        """
        scale = stored(scale, self.form, self._outer("scale"))
        minimum = self._minimum(self.best) if again else self.middle - scale * (self.steps / 2)
        if self.form.float_zero or again:
            self._attempt(scale, minimum)
            return
        zero = -minimum / scale
        for near in (zero.floor(), zero.ceil()) if self.form.bits <= _COARSE else (zero.round(),):
            self._attempt(scale, -near.clamp_(0, self.steps) * scale)

    def _minimum(self, params: GroupParams) -> torch.Tensor:
        if params.minimum is not None:
            return params.minimum
        assert params.zero is not None
        return -params.zero * params.scale

    def _outer(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = None if self.best.outer is None else getattr(self.best.outer, name)
        return found

    def _attempt(self, scale: torch.Tensor, minimum: torch.Tensor) -> None:
        shifted = torch.sub(self.work.weight, minimum.unsqueeze(2), out=self.work.rest)
        q = self.work.scaled(shifted, scale).round_().clamp_(0, self.steps)
        rr, rq, qq, r, q = self.work.sums(shifted, q, scale, linear=True)
        sums = _Sums(rr, rq, qq, r, q, self.sum_h)
        free_scale, free_minimum = sums.free(scale, minimum)
        if self.form.float_zero:
            outer = self._outer("minimum")
            free_minimum = stored_minimum(
                free_minimum.clamp(max=0.0) if self.positive else free_minimum, self.form, outer
            )
            free_scale = sums.scale_for(scale, free_minimum - minimum)
            fitted = stored(torch.where(free_scale > 0, free_scale, scale), self.form, self._outer("scale"))
            self._keep(
                GroupParams(fitted, None, free_minimum), sums.error(fitted - scale, free_minimum - minimum)
            )
            return
        for zero in ((-minimum / scale), (-free_minimum / free_scale)):
            zero = zero.round().clamp_(0, self.steps)
            fitted = sums.scale_with_zero(scale, minimum, zero)
            fitted = stored(torch.where(fitted > 0, fitted, scale), self.form, self._outer("scale"))
            self._keep(GroupParams(fitted, zero), sums.error(fitted - scale, -zero * fitted - minimum))

    def _keep(self, tried: GroupParams, error: torch.Tensor) -> None:
        better = error < self.least
        self.best = GroupParams(tried.scale, tried.zero, tried.minimum, self.best.outer).where(
            better, self.best
        )
        self.least = torch.where(better, error, self.least)


class _Sums:
    """The square error of `w - s q - m` as a function of changes of s and m, for given codes q."""

    def __init__(
        self,
        rr: torch.Tensor,
        rq: torch.Tensor,
        qq: torch.Tensor,
        r: torch.Tensor,
        q: torch.Tensor,
        one: torch.Tensor,
    ) -> None:
        self.rr, self.rq, self.qq, self.r, self.q, self.one = rr, rq, qq, r, q, one

    def error(self, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        """For changes of both."""
        linear = scale * self.rq + minimum * self.r
        return (
            self.rr
            - 2 * linear
            + scale * (scale * self.qq + 2 * minimum * self.q)
            + minimum * minimum * self.one
        )

    def free(self, scale: torch.Tensor, minimum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best scale and minimum; the old ones where all codes are equal."""
        det = self.qq * self.one - self.q * self.q
        usable = det > 1e-6 * self.qq * self.one
        det = torch.where(usable, det, 1.0)
        found = (
            scale + (self.rq * self.one - self.r * self.q) / det,
            minimum + (self.r * self.qq - self.rq * self.q) / det,
        )
        usable &= found[0] > 0
        return torch.where(usable, found[0], scale), torch.where(usable, found[1], minimum)

    def scale_for(self, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        """Return the best scale if the minimum changes by this much."""
        return scale + (self.rq - minimum * self.q) / self.qq.clamp(min=_TINY)

    def scale_with_zero(self, scale: torch.Tensor, minimum: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the best scale s if the minimum becomes `-zero * s`."""
        change = -zero * scale - minimum  # of the minimum, with the old scale
        square = self.qq - 2 * zero * self.q + zero * zero * self.one
        part = self.rq - zero * self.r - change * (self.q - zero * self.one)
        return scale + part / square.clamp(min=_TINY)


def _rounding(form: TensorFormat) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what rounds a tensor to the values of a format, with scale 1; it may do so in place."""
    if form.dtype.kind == "integer":
        return lambda x: x.round_().clamp_(-form.middle, form.middle - 1)
    return lambda x: formats.nearest_values(x, form.dtype)
