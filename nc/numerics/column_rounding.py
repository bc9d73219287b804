"""Integer weights whose columns are rounded in sequence: later columns take over the error.

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
#: Columns that are rounded one by one, each of which the others take over at once.
_FEW = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """Codes of two columns that kernels multiply and add in 16 bits.

    Attributes:
        partners: for each column the other one of its pair, or itself, int64, shape [columns].
        limit: of the sum of two codes with one sign, and so of each code alone.
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
    feed = _feed(_ordered(hessian.float(), order))  # most have a factor in fp32, in half the time
    feed = _feed(_ordered(hessian, order)) if feed is None else feed
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
    # In steps of the scale, and a row is a column of the weight from here on.
    original = (weight / scale).transpose(1, 2).gather(1, rows)
    current, codes = original.clone(), torch.zeros_like(original)
    low, high = limits
    ranks = None
    if pairs is not None:
        ranks = _ranks_of_partners(order, pairs.partners)
        low, high = max(low, -pairs.limit), min(high, pairs.limit)  # a code may have no partner but itself

    def each(start: int, end: int) -> None:
        """Round columns in sequence; `current` then has their errors."""
        for k in range(start, end):
            code = current[:, k : k + 1].round().clamp_(low, high)
            if pairs is not None and ranks is not None:
                rank = ranks[:, k : k + 1, None].expand(-1, 1, codes.shape[2])
                partner = codes.gather(1, rank)  # 0 where it is not rounded yet
                room = (partner.abs() - pairs.limit).neg_()
                code = torch.where(code * partner > 0, code.clamp(-room, room), code)
            codes[:, k : k + 1] = code
            error = torch.sub(original[:, k : k + 1], code, out=current[:, k : k + 1])
            current[:, k + 1 : end].baddbmm_(feed[:, k : k + 1, k + 1 : end].transpose(1, 2), error)

    def halves(start: int, end: int) -> None:
        """Round columns; the second half takes over the errors of the first one in one product."""
        if end - start <= _FEW:
            return each(start, end)
        middle = (start + end) // 2
        halves(start, middle)
        current[:, middle:end].baddbmm_(
            feed[:, start:middle, middle:end].transpose(1, 2), current[:, start:middle]
        )
        return halves(middle, end)

    halves(0, weight.shape[2])
    return torch.empty_like(codes).scatter_(1, rows, codes).transpose(1, 2)


def _ranks_of_partners(order: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """Return for each column, in the order of rounding, which one its partner is in that order."""
    return order.argsort(dim=1).gather(1, partners[order])


def _ordered(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the Hessians with rows and columns in another order, damped, of their dtype."""
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
    # The upper factor is the lower one of the matrix in reversed order.
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(1, 2))
    if bool(failed.any()) or not bool(lower.isfinite().all()):
        return None
    upper: torch.Tensor = lower.flip(1, 2).float()
    return upper.div_(upper.diagonal(dim1=1, dim2=2).unsqueeze(1).clone())
