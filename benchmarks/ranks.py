"""Figures that depend on the order of values only."""

from __future__ import annotations

import torch


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the rank of each value from 1 on; equal ones share the mean of theirs."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the correlation of ranks."""
    return torch.corrcoef(torch.stack((ranks(a), ranks(b))))[0, 1].item()


def area(scores: torch.Tensor, true: torch.Tensor) -> float:
    """Return how often a true one is above a false one: the area under the ROC curve."""
    hits, others = int(true.sum()), int((~true).sum())
    above = ranks(scores)[true].sum().item() - hits * (hits + 1) / 2
    return above / max(1, hits * others)
