"""Scale and zero point of each group of a low-bit weight: range rules "minmax", "mse" and "wls".

All three return scales that are rounded to their storage format (`nc.numerics.groups.round_scale`).

* minmax: the range of the group. Symmetric integers use `amax / (2^(b-1) - 1)`.
* mse: of the ranges `(1 - i / 100) * minmax`, i = 0..79, the one with the least sum of |w - w^|^2.4 (the grid and the norm of GPTQ's
  reference code, arXiv 2210.17323).
* wls: weighted least squares. For each of some inverse scales codes are chosen, and the scale that fits these codes best,
  `s = sum(h w q) / sum(h q^2)`; the scale with the least error `sum(h (w - w^)^2)` stays. h is the mean square of each input channel where
  calibration gives it, else 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nc.numerics.groups import GroupParams, decode, encode, round_scale
from nc.spec.weight_format import SCALE_DTYPES, WeightFormat

RULES = ("minmax", "mse", "wls")
_SHRINK = tuple(1 - step / 100 for step in range(80))
_NORM = 2.4
#: Inverse scales that `wls` tries, as parts of that of min-max.
_STRETCH = tuple(1 + step / 40 for step in range(-4, 17))


def choose(weight: torch.Tensor, form: WeightFormat, rule: str = "wls", importance: torch.Tensor | None = None) -> GroupParams:
    """Scale and zero point of each group.

    Args:
        weight: fp32, finite, shape [N, K].
        form: the format; its groups divide K.
        rule: one of `RULES`.
        importance: fp32, at least 0, shape [K]: the mean square of each input channel. Only "wls" uses it.

    Returns:
        Params of shape [N, K / group]. An all-zero group has scale 1.
    """
    group = form.group(weight.shape[1])
    rows = weight.reshape(-1, group)
    if rule == "minmax":
        found = _covering(*torch.aminmax(rows, dim=1), form, 1.0)
    elif rule == "mse":
        found = _best(rows, form, _SHRINK, lambda error: error.abs_().pow_(_NORM).sum(1))
    else:
        h = None if importance is None else importance.reshape(-1, group).repeat(weight.shape[0], 1)
        found = _least_squares(rows, form, h)
    shape = (weight.shape[0], -1)
    return GroupParams(*(None if part is None else part.reshape(shape) for part in (found.scale, found.zero, found.minimum)))  # type: ignore[arg-type]


def _covering(low: torch.Tensor, high: torch.Tensor, form: WeightFormat, part: float, sign: torch.Tensor | None = None) -> GroupParams:
    """Params whose range is a part of [low, high], shape [rows, 1]; an integer range always holds 0."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    amax = torch.maximum(-low, high)
    steps = 2**form.bits - 1
    if form.dtype.kind == "float":
        return GroupParams(_stored(amax * part / form.dtype.largest, amax, form))
    if form.symmetric:
        scale = amax * part / (form.middle - 1)
        return GroupParams(_stored(scale if sign is None else scale * sign, amax, form))
    scale = _stored((high - low) * part / steps, amax, form)
    if form.float_zero:
        return GroupParams(scale, minimum=round_scale(low * part, form.scale_dtype).unsqueeze(1))
    return GroupParams(scale, (-low * part / scale[:, 0]).round_().clamp_(0, steps).unsqueeze(1))


def _stored(scale: torch.Tensor, amax: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Scales in their storage format, shape [rows, 1]; 1 for groups that are all zero."""
    least = torch.finfo(SCALE_DTYPES[form.scale_dtype]).tiny
    rounded = round_scale(torch.where(amax == 0, torch.ones_like(scale), scale), form.scale_dtype)
    return torch.where(rounded == 0, torch.full_like(rounded, least), rounded).unsqueeze(1)


def _best(rows: torch.Tensor, form: WeightFormat, parts: tuple[float, ...], norm: Callable[[torch.Tensor], torch.Tensor]) -> GroupParams:
    low, high = torch.aminmax(rows, dim=1)
    best, least = _covering(low, high, form, 1.0), torch.full_like(low, float("inf"))
    for part in parts:
        tried = _covering(low, high, form, part)
        error = norm(decode(encode(rows, tried, form), tried, form).sub_(rows))
        best, least = _keep(best, least, tried, error)
    return best


def _keep(best: GroupParams, least: torch.Tensor, tried: GroupParams, error: torch.Tensor) -> tuple[GroupParams, torch.Tensor]:
    """Of each row the params with the smaller error."""
    better = (error < least).unsqueeze(1)

    def of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
        return None if a is None or b is None else torch.where(better, a, b)

    scale = torch.where(better, tried.scale, best.scale)
    return GroupParams(scale, of(tried.zero, best.zero), of(tried.minimum, best.minimum)), torch.where(better[:, 0], error, least)


def _least_squares(rows: torch.Tensor, form: WeightFormat, h: torch.Tensor | None) -> GroupParams:
    low, high = torch.aminmax(rows, dim=1)
    amax = torch.maximum(-low, high)
    best, least = _covering(low, high, form, 1.0), torch.full_like(low, float("inf"))
    weights = torch.ones_like(rows) if h is None else h
    # the side with one more code takes the largest weight
    signs = [None, torch.where(high > -low, -1.0, 1.0)] if form.symmetric and form.dtype.kind == "integer" else [None]
    for sign in signs:
        for stretch in _STRETCH:
            start = _covering(low, high, form, 1 / stretch, sign)
            fitted = _refit(rows, encode(rows, start, form), start, form, weights, amax)
            for tried in (start, fitted):
                error = decode(encode(rows, tried, form), tried, form).sub_(rows).square_().mul_(weights).sum(1)
                best, least = _keep(best, least, tried, error)
    return best


def _refit(
    rows: torch.Tensor, codes: torch.Tensor, params: GroupParams, form: WeightFormat, h: torch.Tensor, amax: torch.Tensor
) -> GroupParams:
    """The scale with the least error for given codes; zero points and minima stay."""
    one = GroupParams(torch.ones_like(params.scale), params.zero, None if params.minimum is None else torch.zeros_like(params.minimum))
    q = decode(codes, one, form)
    target = rows if params.minimum is None else rows - params.minimum
    scale = (h * target * q).sum(1) / (h * q * q).sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return GroupParams(_stored(torch.where(scale == 0, params.scale[:, 0], scale), amax, form), params.zero, params.minimum)
