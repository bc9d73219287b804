"""Assignments on the way are the best for the time that they take: against brute force."""

import itertools
import random

import pytest

from nc.api.tune.solve import Assignment, Cost, front_of, in_largest_gap, spread


def tables(count=40):
    chance = random.Random(0)
    for _ in range(count):
        yield [
            {name: Cost(chance.random() ** 3, chance.random()) for name in "abcd"[: chance.randint(1, 4)]}
            for _ in range(chance.randint(1, 5))
        ]


def every(table):
    for options in itertools.product(*table):
        costs = [row[name] for row, name in zip(table, options, strict=True)]
        yield sum(c.error for c in costs), sum(c.ms for c in costs)


def test_no_assignment_is_better_at_any_price():
    for table in tables():
        front, points = front_of(table), list(every(table))
        for price in (0, 0.01, 0.1, 0.5, 1, 2, 10, 1e6):
            best = min(error + price * ms for error, ms in points)
            assert min(each.error + price * each.ms for each in front) == pytest.approx(best)


def test_a_front_goes_from_the_most_accurate_to_the_fastest():
    for table in tables():
        front, points = front_of(table), list(every(table))
        assert front[0].error == pytest.approx(min(error for error, _ in points))
        assert front[-1].ms == pytest.approx(min(ms for _, ms in points))
        for one, other in itertools.pairwise(front):
            assert other.ms < one.ms
            assert other.error >= one.error
        for each in front:
            costs = [row[name] for row, name in zip(table, each.options, strict=True)]
            assert (each.error, each.ms) == (
                pytest.approx(sum(c.error for c in costs)),
                pytest.approx(sum(c.ms for c in costs)),
            )


def test_a_part_of_a_front_has_both_ends_and_even_steps():
    table = [{"slow": Cost(0.0, 2.0), "fast": Cost(0.1 * i, 1.0)} for i in range(1, 21)]
    front = front_of(table)
    part = spread(front, 5)
    assert len(front) == 21
    assert (part[0], part[-1]) == (front[0], front[-1])
    assert [round(each.ms) for each in part] == [40, 35, 30, 25, 20]
    assert spread(front[:3], 5) == front[:3]


def test_the_middle_of_the_largest_gap_comes_next():
    front = [Assignment((str(ms),), 1 / ms, float(ms)) for ms in (20, 16, 14, 9, 4, 2, 1)]
    taken = [front[0], front[-1]]
    found = []
    while (each := in_largest_gap(front, taken)) is not None:
        taken.append(each)
        found.append(each.ms)
    assert found[:3] == [9, 14, 4]
    assert sorted(found) == [2, 4, 9, 14, 16]
    assert in_largest_gap(front, front[:1]) is None
