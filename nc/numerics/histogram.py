"""Histograms on a dyadic grid: bins of width 2^k, anchored at 0, so that a wider range merges whole bins.

Counts then depend on the values alone: not on batches, their order, threads or machines, and adding two
histograms is exact. Bin 0 is (-2^k, 2^k), the bins beside it are one width each; values are truncated towards
0, and truncating twice is truncating once.
"""

from __future__ import annotations

import math

import torch

#: Bins on each side of bin 0.
SIDE = 2047
BINS = 2 * SIDE + 1
#: The finest grid: 2^-k must be finite in fp32.
MIN_EXPONENT = -126


def exponent_for(largest: float) -> int:
    """Return the finest grid that holds magnitudes up to `largest`.

    It is the least k with `largest < 2048 * 2^k`.
    """
    return (
        max(math.frexp(largest)[1] - (SIDE + 1).bit_length() + 1, MIN_EXPONENT) if largest else MIN_EXPONENT
    )


def count(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """How many values fall into each bin.

    Args:
        x: any float tensor whose magnitudes fit the grid, see `exponent_for`.
        exponent: k.

    Returns:
        int64 counts, shape [BINS].
    """
    bins = (
        x.detach().float().flatten().mul(2.0**-exponent).to(torch.int32).add_(SIDE)
    )  # to() truncates towards 0
    return torch.bincount(bins, minlength=BINS)


def coarsen(counts: torch.Tensor, by: int) -> torch.Tensor:
    """Return the counts of the same values on a grid that is 2^by times as wide."""
    if by == 0:
        return counts
    bins = torch.arange(-SIDE, SIDE + 1)
    merged = torch.div(bins, 2 ** min(by, 12), rounding_mode="trunc") + SIDE
    return torch.zeros_like(counts).index_add_(0, merged, counts)


def edges(exponent: int) -> torch.Tensor:
    """Return the BINS + 1 borders of the bins, ascending, float64."""
    bins = torch.arange(-SIDE, SIDE + 1, dtype=torch.float64)
    return torch.cat([torch.where(bins <= 0, bins - 1, bins), bins[-1:] + 1]) * 2.0**exponent


def centres(exponent: int, low: float, high: float) -> torch.Tensor:
    """Return a value for each bin, float64: its middle, within the range [low, high] of the data.

    It is 0 for bin 0 where that is inside.
    """
    borders = edges(exponent)
    middle = (borders[:-1] + borders[1:]) / 2
    return middle.clamp(low, high)


def quantile(counts: torch.Tensor, exponent: int, low: float, high: float, share: float) -> float:
    """Return the value below which `share` of the counted values are, interpolated inside its bin.

    Args:
        counts: shape [BINS], not all zero.
        exponent: k.
        low: smallest value counted.
        high: largest value counted.
        share: 0 to 1.
    """
    borders = edges(exponent).clamp(low, high)
    cumulative = counts.cumsum(0)
    target = share * int(cumulative[-1])
    index = min(int(torch.searchsorted(cumulative, target)), BINS - 1)
    inside = int(counts[index])
    before = int(cumulative[index]) - inside
    part = (target - before) / inside if inside else 0.0
    left, right = float(borders[index]), float(borders[index + 1])
    return left + min(max(part, 0.0), 1.0) * (right - left)


def magnitudes(counts: torch.Tensor) -> torch.Tensor:
    """Return counts of absolute values, shape [SIDE + 1]: bin i holds [i, i + 1) widths."""
    folded = counts[SIDE:].clone()
    folded[1:] += counts[:SIDE].flip(0)
    return folded
