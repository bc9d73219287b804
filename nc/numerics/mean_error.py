"""The mean error of a tensor per channel, and whether subtracting it helps.

The mean is over rows that tell something; other rows show whether it helps. Padding repeats one row many
times, and a masked row can be a thousand times as large as the others. Neither may decide the mean: equal
rows count as one, and a row whose power is far above the median counts less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Power of a row, relative to the median, above which it counts less: 20 dB.
_OUTLIER = 100.0
#: Rows are equal if they are to so many steps of their size: kernels round the same row differently at an
#: edge.
_STEPS = 2.0**13
#: Rows are compared by their size and so many random projections.
_PROJECTIONS = 3
#: Number of parts into which one sample is cut, to leave out one at a time.
_PARTS = 8


@dataclass(frozen=True, slots=True)
class MeanError:
    """What subtracting the mean error does.

    Attributes:
        delta: weighted mean of `expected - got` per channel, float64 [channels].
        before: weighted square error.
        held_out: the same after the correction, where each sample is corrected by the mean of the others;
            None if all rows are equal.
    """

    delta: torch.Tensor
    before: float
    held_out: float | None


def mean_error(expected: torch.Tensor, got: torch.Tensor, samples: torch.Tensor) -> MeanError:
    """Return the weighted mean error, judged by leaving out one sample at a time.

    Args:
        expected: fp32 [rows, channels].
        got: the same, quantized.
        samples: int64 [rows], ascending: which sample a row is of.
    """
    error = expected - got
    classes = equal_rows(expected)
    weights = row_weights(expected, classes)
    groups = _groups(classes, samples)
    sizes = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, weights.double())
    sums = (
        torch.zeros(len(sizes), error.shape[1], dtype=torch.float32)
        .index_add_(0, groups, weights[:, None] * error)
        .double()
    )
    total, whole = sums.sum(0), sizes.sum()
    before = float(weights.double() @ error.double().square().sum(1))
    if len(sizes) == 1:
        return MeanError(total / whole, before, None)
    others = (total - sums) / (whole - sizes)[:, None]
    held_out = before - 2 * float((others * sums).sum()) + float((sizes[:, None] * others.square()).sum())
    return MeanError(total / whole, before, held_out)


def equal_rows(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, the same for rows that are equal but for rounding, int64 [rows].

    Args:
        values: fp32 [rows, channels].
    """
    sizes = values.double().square().sum(1).sqrt().float()
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(values.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float32)
    directions /= directions.norm(dim=0)
    tiny = torch.finfo(torch.float32).tiny
    parts = torch.cat(
        [values @ directions / sizes[:, None].clamp(min=tiny), sizes[:, None].clamp(min=tiny).log2() / 16], 1
    )
    digits = (parts * _STEPS).round().nan_to_num(0.0, 0.0, 0.0).long()
    keys = digits[:, 0]
    for column in digits.T[1:]:
        keys = keys * int(4 * _STEPS) + column
    return _numbered(keys)


def row_weights(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the weight of each row in a mean: 1 / (number of equal rows) * min(1, limit / power).

    The limit is 100 times the median power of distinct rows that are not zero.

    Args:
        values: fp32 [rows, channels].
        classes: the class of each row, from `equal_rows`, int64 [rows].

    Returns:
        fp32 [rows].
    """
    powers = values.double().square().sum(1)
    weights = 1 / classes.bincount().float()[classes]
    positive = powers > 0
    if not bool(positive.any()):
        return weights
    once = torch.zeros(int(classes.max()) + 1, dtype=torch.float64).scatter_(0, classes, powers)
    limit = _OUTLIER * once[once > 0].median()
    return (weights * limit / powers.clamp(min=limit)).nan_to_num(0.0).float()


def square_errors(expected: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Square error over all rows, and the same weighted as above.

    Args:
        expected: fp32 [rows, channels].
        got: the same, computed in another way.
    """
    same = expected == got  # also -inf in both, as masks are
    squares = (expected - got).masked_fill(same, 0.0).double().square().sum(1)  # no fp32 number is that small
    return float(squares.sum()), float(row_weights(expected, equal_rows(expected)).double() @ squares)


def _groups(classes: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Rows that are left out together: those of one sample, or of a part of the only one.

    Equal rows are in the group of the first.
    """
    first = torch.full((int(classes.max()) + 1,), len(classes), dtype=torch.int64)
    first.scatter_reduce_(0, classes, torch.arange(len(classes)), "amin")
    groups = _numbered(samples[first])
    if int(groups.max()) == 0 and len(first) > 1:
        groups = first.argsort().argsort() * min(_PARTS, len(first)) // len(first)
    return groups[classes]


def _numbered(values: torch.Tensor) -> torch.Tensor:
    """Return the rank of each value among those that differ, int64."""
    inverse: torch.Tensor = torch.unique(values, return_inverse=True)[1]
    return inverse
