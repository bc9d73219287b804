"""Scale and zero point of each group of a low-bit weight: range rules "minmax", "mse" and "wls".

All three return scales that are rounded to their storage format (`nc.numerics.stored_scales`).

* minmax: the range of the group. Symmetric integers use `amax / (2^(b-1) - 1)`. Powers of two are chosen as
  `TensorFormat.scale_mode` says.
* mse: of the ranges `(1 - i / 100) * minmax`, i = 0..79, the one with the least sum of |w - w^|^2.4 (the grid
  and the norm of GPTQ's reference code, arXiv 2210.17323). Of powers of two the neighbours are tried.
* wls: weighted least squares, `nc.numerics.least_squares`.

NVFP4: the scale of the tensor is amax / (448 * 6), that of a group E4M3(amax / 6 / tensor scale). torchao
clamps the latter to at least 2^-6; here subnormal numbers down to 2^-9 are used, so that groups of small
weights keep their resolution.

With `double_quant` the rule runs with scales in full precision, which gives the outer scales, then once more
with these fixed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nc.errors import ConfigError
from nc.formats import DType, TensorFormat
from nc.formats import dtype as named
from nc.numerics import mx
from nc.numerics.groups import GroupParams, Outer, chunks, decode, encode, join
from nc.numerics.least_squares import fit
from nc.numerics.stored_scales import LIMITS, outer_of, stored, stored_minimum, tensor_outer

RULES = ("minmax", "mse", "wls")
_SHRINK = tuple(1 - step / 100 for step in range(80))
_SHRINK_POWERS = (1.0, 0.5, 2.0)
_NORM = 2.4
#: A scale of fewer steps of its storage format than this is off by more than 6 %.
_LEAST_STEPS = 8


def choose(
    weight: torch.Tensor,
    form: TensorFormat,
    rule: str = "wls",
    importance: torch.Tensor | None = None,
    outer: Outer | None = None,
    *,
    clip: torch.Tensor | None = None,
    positive: bool = False,
) -> GroupParams:
    """Scale and zero point of each group.

    Args:
        weight: fp32, finite, shape [N, K]: a whole weight, or some groups of it.
        form: the format; its groups divide K.
        rule: one of `RULES`.
        importance: fp32, at least 0, shape [K]: the mean square of each input channel. Only "wls" uses it.
        outer: of formats with two levels, the outer scales, if they are known: those of `choose` for the
            whole weight, and `Outer.of_groups` of them where `weight` is some groups. They are not changed.
        clip: fp32, above 0 to 1, shape [N, G] or what broadcasts to it: the range is that of weights clamped
            to this part of the largest magnitude of their group.
        positive: no scale is to be below 0, no minimum above 0. Formats with two levels or E8M0 scales never
            have such.

    Returns:
        Params of shape [N, K / group]. An all-zero group has the scale 1, or with two levels the least one.

    Raises:
        ConfigError: weights are so large that their scales do not fit the storage format.
        ValueError: there is no such rule.
    """
    group = form.group(weight.shape[1])
    shaped = weight.reshape(weight.shape[0], -1, group)
    if clip is not None:
        limit = shaped.abs().amax(2, keepdim=True) * clip.unsqueeze(-1)
        shaped = shaped.clamp(-limit, limit)
    if outer is None:
        outer = _outer(shaped, form, rule, importance)
    if outer is None:
        _refuse_overflow(shaped, form)
    h = None if importance is None or rule != "wls" else importance.float().reshape(-1, group)
    groups = shaped.shape[1]
    found = []
    for rows in chunks(*weight.shape):
        part = None if outer is None else outer.of_groups(0, groups, groups)
        if part is not None and part.scale.numel() > 1:
            part = Outer(part.scale[rows], None if part.minimum is None else part.minimum[rows])
        found.append(_chosen(shaped[rows], form, rule, h, part, positive))
    return join(found, 0, outer)


def _chosen(
    weight: torch.Tensor,
    form: TensorFormat,
    rule: str,
    h: torch.Tensor | None,
    outer: Outer | None,
    positive: bool,
) -> GroupParams:
    """Params [n, G] of some rows, weight [n, G, group]."""
    start = covering(weight, form, 1.0, outer)
    if rule == "minmax":
        return start
    if rule == "mse":
        return _least_norm(weight, form, start, outer)
    if rule == "wls":
        return fit(weight, form, start, h, positive=positive or outer is not None)
    msg = f"no rule for the ranges of groups is called {rule!r}"
    raise ValueError(msg)


def covering(
    weight: torch.Tensor, form: TensorFormat, part: float, outer: Outer | None = None
) -> GroupParams:
    """Params [n, G] whose range is a part of that of each group; an integer range always holds 0.

    Args:
        weight: shape [n, G, group].
        form: the format.
        part: above 0.
        outer: of formats with two levels; [1, 1] or [n, G].
    """
    low, high = torch.aminmax(weight, dim=2)
    low, high = low.clamp_(max=0.0), high.clamp_(min=0.0)
    zeros = low == high
    outer_scale = None if outer is None else outer.scale
    span = torch.maximum(-low, high) if form.symmetric else high - low
    exact = (
        mx.scales(mx.shared_codes(span, _element(form), form.scale_mode))
        if form.powers
        else span / _largest(form)
    )
    scale = exact * part
    scale = stored(
        torch.where(zeros, torch.ones_like(scale) if outer is None else 0.0, scale), form, outer_scale
    )
    if form.symmetric:
        return GroupParams(scale, outer=outer)
    if form.float_zero:
        return GroupParams(
            scale, None, stored_minimum(low * part, form, None if outer is None else outer.minimum), outer
        )
    return GroupParams(scale, (-low * part / scale).round_().clamp_(0, 2**form.bits - 1), outer=outer)


def _element(form: TensorFormat) -> DType:
    """Return the format whose largest value is that of a group's largest weight."""
    if form.dtype.kind == "float":
        return form.dtype
    return named(f"{'int' if form.symmetric else 'uint'}{form.bits}")


def _largest(form: TensorFormat) -> float:
    """Return what the range of a group is divided by."""
    return _element(form).largest


def _least_norm(
    weight: torch.Tensor, form: TensorFormat, start: GroupParams, outer: Outer | None
) -> GroupParams:
    best, least = start, torch.full_like(start.scale, float("inf"))
    flat = weight.reshape(weight.shape[0], -1)
    for part in _SHRINK_POWERS if form.powers else _SHRINK:
        tried = covering(weight, form, part, outer)
        error = (
            decode(encode(flat, tried, form), tried, form)
            .sub_(flat)
            .abs_()
            .pow_(_NORM)
            .reshape(weight.shape)
            .sum(2)
        )
        better = error < least
        best, least = tried.where(better, best), torch.where(better, error, least)
    return best


def _outer(
    weight: torch.Tensor, form: TensorFormat, rule: str, importance: torch.Tensor | None
) -> Outer | None:
    if form.tensor_scale:
        low, high = torch.aminmax(weight, dim=2)
        span = torch.maximum(-low, high) if form.symmetric else high.clamp(min=0.0) - low.clamp(max=0.0)
        return tensor_outer(span.max() / (LIMITS[form.scale_dtype][1] * _largest(form)))
    if form.double_quant is None:
        return None
    full = replace(form, double_quant=None, scale_dtype="fp32")
    found = choose(weight.flatten(1), full, rule, importance, positive=True)
    return outer_of(replace(found, scale=torch.where(weight.abs().amax(2) == 0, 0.0, found.scale)), form)


def _refuse_overflow(weight: torch.Tensor, form: TensorFormat) -> None:
    span, scale = _span_and_scale(weight, form)
    most = LIMITS[form.scale_dtype][1]
    if scale > most:
        msg = (
            f"The weights go up to {span:.3g} and need a scale of {scale:.3g}; the largest one in "
            f"{form.scale_dtype} is {most:.5g}. Use scale_dtype='bf16' or 'fp32'."
        )
        raise ConfigError(msg)


def refuse_underflow(weight: torch.Tensor, form: TensorFormat) -> None:
    """Raise ConfigError if all weights are too small for the storage format of their scales.

    Their scales are then a few steps of it, or none.

    Args:
        weight: any shape.
        form: the format; one that scales its scales has no such limit, and bf16 has that of fp32.
    """
    if form.tensor_scale or form.double_quant is not None or form.scale_dtype in ("fp32", "bf16"):
        return
    span, scale = _span_and_scale(weight, form)
    least = LIMITS[form.scale_dtype][0]
    if 0 < scale < _LEAST_STEPS * least:
        msg = (
            f"The weights go up to {span:.3g} only and need a scale of {scale:.3g}; {form.scale_dtype} has "
            f"steps of {least:.3g} there, and codes would be far off. Use scale_dtype='bf16' or 'fp32'."
        )
        raise ConfigError(msg)


def _span_and_scale(weight: torch.Tensor, form: TensorFormat) -> tuple[float, float]:
    """Return the range of all weights, and the scale that it needs."""
    low, high = torch.aminmax(weight)
    span = torch.maximum(-low, high) if form.symmetric else high.clamp(min=0.0) - low.clamp(max=0.0)
    return span.item(), span.item() / _largest(form)
