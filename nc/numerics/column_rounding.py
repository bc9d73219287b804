"""Integer weights whose columns are rounded one after the other: those behind take over the error.

It minimises `tr((Q - W) H (Q - W)^T)` over the codes of Q greedily, for many weights at once: the groups of
a convolution. This is GPTQ (arXiv 2210.17323, algorithm 1) in the form of LDLQ (arXiv 2307.13304, theorem
6). With `H = (A + I) D (A + I)^T`, A strictly upper triangular, column k is rounded from
`w_k + sum_{j<k} (w_j - q_j) A_jk`.
"""

from __future__ import annotations

import torch

#: Share of the mean of the diagonal that is added to it, as in the paper.
DAMP = 0.01
#: Columns whose errors are put together before those behind take them over.
_BLOCK = 128


def round_columns(
    weight: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor, limits: tuple[int, int]
) -> torch.Tensor | None:
    """Return the codes of weights, those of the largest inputs first.

    Args:
        weight: fp32, shape [groups, outputs, columns].
        scale: fp32, shape [groups, outputs, 1].
        hessian: sums of x x^T, float64, shape [groups, columns, columns].
        limits: the least and the largest code.

    Returns:
        fp32 whole numbers, of the weight's shape; None where a Hessian cannot be factored.
    """
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    order = diagonal.argsort(dim=1, descending=True, stable=True)
    feed = _feed(_ordered(hessian, order))
    if feed is None:
        return None
    rows = order.unsqueeze(2).expand(-1, -1, weight.shape[1])
    original = weight.transpose(1, 2).gather(1, rows)  # a row is a column of the weight from here on
    current, codes = original.clone(), torch.empty_like(original)
    step = scale.transpose(1, 2)
    columns = weight.shape[2]
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        for k in range(start, end):
            code = torch.round(current[:, k : k + 1] / step).clamp_(*limits)
            codes[:, k : k + 1] = code
            error = original[:, k : k + 1] - code * step
            current[:, k : k + 1] = error  # nobody reads the column itself again
            current[:, k + 1 : end].baddbmm_(feed[:, k : k + 1, k + 1 : end].transpose(1, 2), error)
        current[:, end:].baddbmm_(feed[:, start:end, end:].transpose(1, 2), current[:, start:end])
    return torch.empty_like(codes).scatter_(1, rows, codes).transpose(1, 2)


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
    lower, failed = torch.linalg.cholesky_ex(
        hessian.flip(1, 2)
    )  # the upper factor is the lower one of the matrix in reversed order
    if bool(failed.any()) or not bool(lower.isfinite().all()):
        return None
    upper = lower.flip(1, 2)
    feed: torch.Tensor = upper / upper.diagonal(dim1=1, dim2=2).unsqueeze(1)
    return feed.float()
