"""Weight ranges that give the least error: `w_algo="mse"`.

Each channel tries `amax * (1 - i / 100)` for i = 0..79 and keeps the range with the least sum of |w - w^|^2.4
(the grid and the norm of GPTQ's reference code, arXiv 2210.17323; ranges as in OMSE, arXiv 1902.06822).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NORM = 2.4
#: Ranges as parts of the whole one.
SHRINK = tuple(1 - step / 100 for step in range(80))


def best_range(
    rows: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range (low, high) of each row with the least error for symmetric codes, fp32, shape [rows].

    Args:
        rows: fp32, shape [rows, elements].
        rounded: limits, shape [rows] → a new tensor with the values that `rows` get in the ranges [-limit,
            limit].
    """
    amax = rows.abs().amax(1)
    best, least = amax.clone(), torch.full_like(amax, float("inf"))
    for part in SHRINK:
        limit = amax * part
        error = rounded(limit).sub_(rows).abs_().pow_(NORM).sum(1)
        better = error < least
        best, least = torch.where(better, limit, best), torch.where(better, error, least)
    return -best, best
