"""Integer weights whose columns are rounded one after the other: those behind take over the error.

It minimises `tr((Q - W) H (Q - W)^T)` over the codes of Q greedily, for many weights at once: the groups of
a convolution. This is GPTQ (arXiv 2210.17323, algorithm 1) in the form of LDLQ (arXiv 2307.13304, theorem
6). With `H = (A + I) D (A + I)^T`, A strictly upper triangular, column k is rounded from
`w_k + sum_{j<k} (w_j - q_j) A_jk`.
"""

from __future__ import annotations

import dataclasses

import torch

#: Share of the mean of the diagonal that is added to it, as in the paper.
DAMP = 0.01
#: Columns whose errors are put together before those behind take them over.
_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """Codes of two columns that kernels multiply and add in 16 bits.

    Attributes:
        partners: for each column the other one of its pair, or itself, int64, shape [columns].
        limit: of the sum of two codes with one sign, at least as large as that of one code.
    """

    partners: torch.Tensor
    limit: int


@dataclasses.dataclass(frozen=True, slots=True)
class HessianFactor:
    """The factor of Hessians of weights.

    Attributes:
        order: in which columns are rounded, int64, shape [groups, columns].
        feed: A in that order, fp32, shape [groups, columns, columns].
    """

    order: torch.Tensor
    feed: torch.Tensor


def factored(hessian: torch.Tensor) -> HessianFactor | None:
    """Return the factor of sums of x x^T, float64, shape [groups, columns, columns]; None if one has none.

    The columns with the largest inputs come first.
    """
    order = hessian.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    feed = _feed(_ordered(hessian, order))
    return None if feed is None else HessianFactor(order, feed)


def round_columns(
    weight: torch.Tensor,
    scale: torch.Tensor,
    factor: HessianFactor,
    limits: tuple[int, int],
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """Return the codes of weights, those of the largest inputs first.

    Args:
        weight: fp32, shape [groups, outputs, columns].
        scale: fp32, shape [groups, outputs, 1].
        factor: of what they are multiplied with.
        limits: the least and the largest code.
        pairs: which codes may not become too large together; None: each may have any value.

    Returns:
        fp32 whole numbers, of the weight's shape.
    """
    order, feed = factor.order, factor.feed
    rows = order.unsqueeze(2).expand(-1, -1, weight.shape[1])
    original = weight.transpose(1, 2).gather(1, rows)  # a row is a column of the weight from here on
    current, codes = original.clone(), torch.zeros_like(original)
    partners = None if pairs is None else _ranks_of_partners(order, pairs.partners)
    step = scale.transpose(1, 2)
    columns = weight.shape[2]
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        for k in range(start, end):
            code = torch.round(current[:, k : k + 1] / step).clamp_(*limits)
            if pairs is not None and partners is not None:
                rank = partners[:, k : k + 1, None].expand(-1, 1, codes.shape[2])
                partner = codes.gather(1, rank)  # 0 where it is not rounded yet
                code = torch.minimum(code, pairs.limit - partner.clamp(min=0))
                code = torch.maximum(code, -pairs.limit - partner.clamp(max=0))
            codes[:, k : k + 1] = code
            error = original[:, k : k + 1] - code * step
            current[:, k : k + 1] = error  # nobody reads the column itself again
            current[:, k + 1 : end].baddbmm_(feed[:, k : k + 1, k + 1 : end].transpose(1, 2), error)
        current[:, end:].baddbmm_(feed[:, start:end, end:].transpose(1, 2), current[:, start:end])
    return torch.empty_like(codes).scatter_(1, rows, codes).transpose(1, 2)


def _ranks_of_partners(order: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """Return for each column, in the order of rounding, which one its partner is in that order."""
    return order.argsort(dim=1).gather(1, partners[order])


def _ordered(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the Hessians with rows and columns in another order, damped, float64."""
    size = hessian.shape[1]
    rows = hessian.gather(1, order.unsqueeze(2).expand(-1, -1, size))
    damped = rows.gather(2, order.unsqueeze(1).expand(-1, size, -1))
    diagonal = damped.diagonal(dim1=1, dim2=2)
    never = diagonal == 0  # inputs that are always zero are rounded to nearest
    mean = (diagonal.sum(1) / (~never).sum(1).clamp(min=1)).clamp(min=torch.finfo(torch.float32).tiny)
    diagonal += torch.where(never, mean.unsqueeze(1), DAMP * mean.unsqueeze(1))
    return damped


def _feed(hessian: torch.Tensor) -> torch.Tensor | None:
    """Return A, fp32, of the Hessians' shape; None where one is not positive definite."""
    reverse = hessian.flip(1, 2)  # the upper factor is the lower one of the matrix in reversed order
    lower = _lower(reverse.float())  # half the time, and damped as they are most have a factor in fp32
    if lower is None:
        lower = _lower(reverse)
    if lower is None:
        return None
    upper = lower.flip(1, 2).float()
    return upper.div_(upper.diagonal(dim1=1, dim2=2).unsqueeze(1).clone())


def _lower(matrices: torch.Tensor) -> torch.Tensor | None:
    """Return the lower factors; None where one is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(matrices)
    return None if bool(failed.any()) or not bool(lower.isfinite().all()) else lower
