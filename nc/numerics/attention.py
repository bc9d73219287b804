"""Probabilities of attention."""

from __future__ import annotations

import torch


def probabilities(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores along the last dimension; a row that sees no key gets zeros.

    Args:
        scores: fp32, [..., rows, keys].
        mask: bool, False for keys that a row does not see; or fp32, which is added; None for neither.
    """
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf)
    elif mask is not None:
        scores = scores + mask
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    return torch.softmax(scores, -1).where(seen, 0.0)
