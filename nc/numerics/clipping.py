"""The clip search of AWQ: how much of a group's range to keep, so that the layer's output loses least."""

from __future__ import annotations

import torch

from nc.formats.tensor_format import TensorFormat
from nc.numerics.group_ranges import choose
from nc.numerics.groups import decode, encode


def search(
    weight: torch.Tensor,
    form: TensorFormat,
    hessian: torch.Tensor,
    rule: str = "minmax",
    importance: torch.Tensor | None = None,
    grid: int = 20,
) -> torch.Tensor:
    """Return for each group the part of its largest magnitude that its range is found for.

    This is arXiv 2306.00978, section 4.1, and llm-awq's auto_clip. Of the parts `1 - i / grid` down to above
    1/2 it is the one with the least error of the group's share of the output, over all tokens: `(w - w^)^T H
    (w - w^)` with the group's own part of H. The whole range is the first candidate.

    Args:
        weight: fp32, shape [N, K].
        form: the format; its groups divide K.
        hessian: H = E[x x^T], fp32, shape [K, K].
        rule: range rule, see `nc.numerics.group_ranges.choose`.
        importance: likewise.
        grid: twice the number of candidates.

    Returns:
        fp32, above 0.5 to 1, shape [N, K / group].
    """
    group = form.group(weight.shape[1])
    groups = weight.shape[1] // group
    own = torch.stack([hessian[i : i + group, i : i + group] for i in range(0, weight.shape[1], group)])
    best = torch.ones(weight.shape[0], groups, dtype=torch.float32)
    least = torch.full_like(best, float("inf"))
    for step in range(max(1, grid // 2)):
        part = torch.full_like(best, 1 - step / grid)
        found = choose(weight, form, rule, importance, clip=part)
        rounded = decode(encode(weight, found, form), found, form)
        error = (weight - rounded).reshape(-1, groups, group).transpose(0, 1)
        lost = ((error @ own) * error).sum(2).t()
        better = lost < least
        best, least = torch.where(better, part, best), torch.where(better, lost, least)
    return best
