"""Which option for each group gives the least error for a price, in milliseconds or in bytes.

Errors and prices of groups add up. For a multiplier m the best assignment takes in each group the option of
least error + m x price (H. Everett, 1963, generalized Lagrange multipliers). As m grows, groups move along
the lower convex hulls of their options, the cheapest move first. All assignments on the way are optimal for
their price, and nothing but a sort is needed. Assignments between them are found by dynamic programming over
a limit (the multiple-choice knapsack; K. Dudzinski and S. Walukiewicz, 1987).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: Parts of a limit that prices are rounded up to.
_PARTS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What an option of a group is estimated to cost.

    Attributes:
        error: power that it adds to the error of the outputs, as a part of that of the outputs.
        price: milliseconds of a call, or bytes.
    """

    error: float
    price: float


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """An option for each group.

    Attributes:
        options: names, by the group's position.
        error: estimated, the sum over all groups.
        price: likewise.
    """

    options: tuple[str, ...]
    error: float
    price: float


def front_of(table: Sequence[Mapping[str, Cost]]) -> tuple[Assignment, ...]:
    """Return the assignments from the most accurate to the cheapest.

    Args:
        table: for each group the options by name.
    """
    hulls = [_hull(options) for options in table]
    moves = sorted(
        (_slope(options[hull[i]], options[hull[i + 1]]), group, i)
        for group, (options, hull) in enumerate(zip(table, hulls, strict=True))
        for i in range(len(hull) - 1)
    )
    chosen = [hull[0] for hull in hulls]
    found = [_assignment(table, chosen)]
    for _, group, i in moves:
        chosen[group] = hulls[group][i + 1]
        found.append(_assignment(table, chosen))
    return tuple(found)


def within(table: Sequence[Mapping[str, Cost]], limit: float) -> Assignment | None:
    """Return the assignment of least error whose price is at most a limit; None where there is none.

    Prices are rounded up to parts of what the limit leaves above the cheapest options: it is optimal but for
    that.

    Args:
        table: for each group the options by name.
        limit: of the price.
    """
    least = [min(cost.price for cost in options.values()) for options in table]
    room = limit - sum(least)
    if room < 0:
        return None
    unit = max(room, 1e-12) / _PARTS
    error = np.zeros(_PARTS + 1)  # by the parts that may be spent
    taken: list[tuple[list[str], NDArray[np.intp]]] = []
    for options, base in zip(table, least, strict=True):
        names = list(options)
        rows = np.full((len(names), _PARTS + 1), np.inf)
        for row, name in zip(rows, names, strict=True):
            spent = math.ceil((options[name].price - base) / unit - 1e-9)
            if spent <= _PARTS:
                row[spent:] = error[: _PARTS + 1 - spent] + options[name].error
        taken.append((names, rows.argmin(0)))
        error = rows.min(0)
    left, chosen = _PARTS, []
    for (names, best), options, base in reversed(list(zip(taken, table, least, strict=True))):
        name = names[best[left]]
        chosen.append(name)
        left -= math.ceil((options[name].price - base) / unit - 1e-9)
    return _assignment(table, chosen[::-1])


def spread(front: Sequence[Assignment], count: int) -> tuple[Assignment, ...]:
    """Return about `count` of a front's assignments, with both ends, at even steps of the price."""
    if len(front) <= count:
        return tuple(front)
    first, last = front[0].price, front[-1].price
    wanted = [first + (last - first) * i / max(1, count - 1) for i in range(count)]
    nearest = [min(front, key=lambda each: abs(each.price - price)) for price in wanted]
    return tuple(dict.fromkeys([front[0], *nearest[1:-1], front[-1]]))


def in_largest_gap(front: Sequence[Assignment], taken: Sequence[Assignment]) -> Assignment | None:
    """Return an assignment in the middle of the largest gap in price between those that are taken.

    Returns None if there is none between them.
    """
    ordered = sorted(taken, key=lambda each: each.price)
    pairs = sorted(itertools.pairwise(ordered), key=lambda pair: pair[0].price - pair[1].price)
    for low, high in pairs:
        inside = [each for each in front if low.price < each.price < high.price and each not in taken]
        if inside:
            return min(inside, key=lambda each: abs(each.price - (low.price + high.price) / 2))
    return None


def _hull(options: Mapping[str, Cost]) -> list[str]:
    """Return the options on the lower convex hull of error over price, the least error first."""
    ordered = sorted(options, key=lambda name: (options[name].error, options[name].price))
    hull: list[str] = []
    for name in ordered:
        if hull and options[name].price >= options[hull[-1]].price:
            continue  # no cheaper than one with less error
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) >= _slope(
            options[hull[-1]], options[name]
        ):
            hull.pop()
        hull.append(name)
    return hull


def _slope(one: Cost, other: Cost) -> float:
    """Return what a move from one option to a cheaper one adds to the error, for each unit that it saves."""
    return (other.error - one.error) / (one.price - other.price)


def _assignment(table: Sequence[Mapping[str, Cost]], chosen: Sequence[str]) -> Assignment:
    costs = [options[name] for options, name in zip(table, chosen, strict=True)]
    return Assignment(tuple(chosen), sum(cost.error for cost in costs), sum(cost.price for cost in costs))
