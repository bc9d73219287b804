"""Assignments on the way are the best for the time that they take: against brute force."""

import itertools
import random

import pytest

from nc.tuning.solve import Assignment, Cost, front_of, in_largest_gap, spread, within


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
        yield sum(c.error for c in costs), sum(c.price for c in costs)


def test_no_assignment_is_better_at_any_price():
    for table in tables():
        front, points = front_of(table), list(every(table))
        for price in (0, 0.01, 0.1, 0.5, 1, 2, 10, 1e6):
            best = min(error + price * ms for error, ms in points)
            assert min(each.error + price * each.price for each in front) == pytest.approx(best)


def test_a_front_goes_from_the_most_accurate_to_the_fastest():
    for table in tables():
        front, points = front_of(table), list(every(table))
        assert front[0].error == pytest.approx(min(error for error, _ in points))
        assert front[-1].price == pytest.approx(min(ms for _, ms in points))
        for one, other in itertools.pairwise(front):
            assert other.price < one.price
            assert other.error >= one.error
        for each in front:
            costs = [row[name] for row, name in zip(table, each.options, strict=True)]
            assert (each.error, each.price) == (
                pytest.approx(sum(c.error for c in costs)),
                pytest.approx(sum(c.price for c in costs)),
            )


def test_a_part_of_a_front_has_both_ends_and_even_steps():
    table = [{"slow": Cost(0.0, 2.0), "fast": Cost(0.1 * i, 1.0)} for i in range(1, 21)]
    front = front_of(table)
    part = spread(front, 5)
    assert len(front) == 21
    assert (part[0], part[-1]) == (front[0], front[-1])
    assert [round(each.price) for each in part] == [40, 35, 30, 25, 20]
    assert spread(front[:3], 5) == front[:3]


def test_the_middle_of_the_largest_gap_comes_next():
    front = [Assignment((str(ms),), 1 / ms, float(ms)) for ms in (20, 16, 14, 9, 4, 2, 1)]
    taken = [front[0], front[-1]]
    found = []
    while (each := in_largest_gap(front, taken)) is not None:
        taken.append(each)
        found.append(each.price)
    assert found[:3] == [9, 14, 4]
    assert sorted(found) == [2, 4, 9, 14, 16]
    assert in_largest_gap(front, front[:1]) is None


def test_within_a_limit_nothing_is_better():
    for table in tables():
        points = list(every(table))
        cheapest, dearest = min(price for _, price in points), max(price for _, price in points)
        for part in (0.0, 0.1, 0.35, 0.7, 1.0):
            limit = cheapest + part * (dearest - cheapest)
            found = within(table, limit)
            assert found.price <= limit * (1 + 1e-9)
            # prices are rounded up, so it may miss what fits by less than that
            tight = limit - len(table) * (limit - cheapest) / 8192
            assert found.error <= min(error for error, price in points if price <= tight + 1e-12) + 1e-12
        assert within(table, cheapest - 0.01) is None
