"""Which choice for each group gives the least error for the time: the convex front of a sum of choices.

Errors and times of groups add up. For a price of time the best assignment takes in each group the option of
least error + price x time (H. Everett, 1963, generalized Lagrange multipliers). As the price grows, groups
move along the lower convex hulls of their options, the cheapest move first. All assignments on the way are
optimal for the time that they take, and nothing but a sort is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What an option of a group is estimated to cost.

    Attributes:
        error: power that it adds to the error of the outputs, as a part of that of the outputs.
        ms: milliseconds of a call.
    """

    error: float
    ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """An option for each group.

    Attributes:
        options: names, by the group's position.
        error: estimated, the sum over all groups.
        ms: likewise.
    """

    options: tuple[str, ...]
    error: float
    ms: float


def front_of(table: Sequence[Mapping[str, Cost]]) -> tuple[Assignment, ...]:
    """Return the assignments from the most accurate to the fastest.

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


def spread(front: Sequence[Assignment], count: int) -> tuple[Assignment, ...]:
    """Return about `count` of a front's assignments, with both ends, at even steps of time."""
    if len(front) <= count:
        return tuple(front)
    first, last = front[0].ms, front[-1].ms
    wanted = [first + (last - first) * i / max(1, count - 1) for i in range(count)]
    nearest = [min(front, key=lambda each: abs(each.ms - ms)) for ms in wanted]
    return tuple(dict.fromkeys([front[0], *nearest[1:-1], front[-1]]))


def in_largest_gap(front: Sequence[Assignment], taken: Sequence[Assignment]) -> Assignment | None:
    """Return an assignment in the middle of the largest gap in time between those that are taken.

    None where nothing lies between them.
    """
    ordered = sorted(taken, key=lambda each: each.ms)
    pairs = sorted(itertools.pairwise(ordered), key=lambda pair: pair[0].ms - pair[1].ms)
    for low, high in pairs:
        inside = [each for each in front if low.ms < each.ms < high.ms and each not in taken]
        if inside:
            return min(inside, key=lambda each: abs(each.ms - (low.ms + high.ms) / 2))
    return None


def _hull(options: Mapping[str, Cost]) -> list[str]:
    """Return the options on the lower convex hull of error over time, the least error first."""
    ordered = sorted(options, key=lambda name: (options[name].error, options[name].ms))
    hull: list[str] = []
    for name in ordered:
        if hull and options[name].ms >= options[hull[-1]].ms:
            continue  # no faster than one with less error
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) >= _slope(
            options[hull[-1]], options[name]
        ):
            hull.pop()
        hull.append(name)
    return hull


def _slope(one: Cost, other: Cost) -> float:
    """Return the error that each millisecond costs which a move from one option to a faster one saves."""
    return (other.error - one.error) / (one.ms - other.ms)


def _assignment(table: Sequence[Mapping[str, Cost]], chosen: Sequence[str]) -> Assignment:
    costs = [options[name] for options, name in zip(table, chosen, strict=True)]
    return Assignment(tuple(chosen), sum(cost.error for cost in costs), sum(cost.ms for cost in costs))
