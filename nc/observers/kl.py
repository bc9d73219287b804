"""KL: the clipped range whose quantized distribution diverges least from the data's (Migacz, GTC 2017).

See "8-bit inference with TensorRT" there.

For each candidate range, P is the histogram with everything outside added to its outermost bins, and Q the
histogram inside it (without that addition) merged into as many levels as there are codes, each level's mass
spread evenly over its bins that hold any. The range with the least KL(P || Q) wins, out of 256 between one
bin per code and all bins. Data of both signs is clipped by the same factor on both sides, so that affine
codes are searched too. Of zeros no more count than the bins beside them hold: Migacz leaves all of them out.
"""

from __future__ import annotations

import math

import torch

from nc.formats import TensorFormat
from nc.numerics.histogram import SIDE, edges
from nc.observers.base import RangeAlgorithm, State
from nc.observers.histogram import HISTOGRAM

_CANDIDATES = 256
#: Mass given to levels that would make the divergence infinite (Migacz's smoothing).
_EPSILON = 1e-4


def divergence(counts: torch.Tensor, first: int, last: int, levels: int) -> float:
    """KL(P || Q) of the bins first..last, in nats.

    Args:
        counts: float64, all bins.
        first: index of the first bin inside.
        last: index of the last.
        levels: number of codes.
    """
    inside = counts[first : last + 1]
    p = inside.clone()
    p[0] += counts[:first].sum()
    p[-1] += counts[last + 1 :].sum()
    level = torch.arange(len(inside)) * levels // len(inside)
    filled = (inside > 0).double()
    mass = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, inside)
    bins = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, filled)
    q = filled * (mass / bins.clamp(min=1))[level]
    p, q = p / p.sum(), q / q.sum()
    missing = (p > 0) & (q == 0)
    if bool(missing.any()):
        q = torch.where(missing, _EPSILON, q * (1 - _EPSILON * int(missing.sum())))
    some = p > 0
    return float((p[some] * (p[some] / q[some]).log()).sum())


def find_range(state: State, spec: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidate that diverges least.

    It is the whole range where the histogram has no more bins than there are codes.
    """
    low, high, exponent = float(state["low"]), float(state["high"]), int(state["exponent"])
    counts = state["counts"].double()
    codes = spec.quant_max - spec.quant_min + 1
    used = torch.nonzero(state["counts"]).flatten() - SIDE
    left, right = min(int(used[0]), 0), max(int(used[-1]), 0)
    if spec.symmetric:  # one side's codes cover the magnitudes
        left, right = -max(-left, right), max(-left, right)
    if right - left + 1 <= codes:
        return state["low"], state["high"]
    # a ReLU's zeros are exact in every candidate; spread over a level, they would outweigh everything else
    counts[SIDE] = min(counts[SIDE], counts[SIDE - 1] + counts[SIDE + 1])
    steps = max(-left, right)
    smallest = math.ceil(steps * codes / (right - left + 1))
    best, least = steps, math.inf
    for step in range(steps, smallest - 1, -max(1, (steps - smallest) // _CANDIDATES)):
        first, last = SIDE + round(left * step / steps), SIDE + round(right * step / steps)
        if counts[first : last + 1].sum() == 0:
            continue
        found = divergence(counts, first, last, codes)
        if found < least:
            best, least = step, found
    borders = edges(exponent)
    first, last = SIDE + round(left * best / steps), SIDE + round(right * best / steps)
    ends = max(float(borders[first]), low), min(float(borders[last + 1]), high)
    return torch.tensor(ends[0], dtype=torch.float32), torch.tensor(ends[1], dtype=torch.float32)


KL = RangeAlgorithm("kl", HISTOGRAM, find_range)
