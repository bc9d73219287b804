"""What is chosen, for given measurements."""

import pytest

from nc.api.auto.choice import Trial, choose, costly_few, most_lost, next_in_float


def trial(name, db, ms=None, failed=""):
    return Trial(name=name, sqnr_db=db, ms=ms, failed=failed)


@pytest.mark.parametrize(
    ("trials", "factor", "chosen"),
    [
        ([("a", 28.0, 7.0), ("b", 26.0, 5.0), ("c", 20.0, 3.0)], 2.0, "b"),  # c is 8 dB from the best one
        ([("a", 28.0, 7.0), ("b", 26.0, 5.0), ("c", 20.0, 3.0)], 10.0, "c"),
        ([("a", 28.0, 7.0), ("b", 26.0, 5.0)], 1.0, "a"),
        ([("a", 28.0, 5.0), ("b", 40.0, 9.0)], 2.0, "b"),
        ([("a", 44.5, 0.24), ("b", 46.2, 0.6)], 1.2, "a"),  # both are good
        ([("a", 36.5, 0.24), ("b", 38.2, 0.6)], 1.2, "b"),
        ([("a", 43.0, 0.24), ("b", 52.0, 0.6)], 1.2, "b"),
        ([("a", float("inf"), 5.0), ("b", 40.0, 1.0)], 2.0, "a"),  # nothing is lost
        ([("a", float("-inf"), 5.0), ("b", float("-inf"), 1.0)], 2.0, "b"),
        ([("a", 28.0, 5.0), ("b", 29.0, 5.2)], 2.0, "b"),  # as fast, and better
        ([("a", 28.0, 5.0), ("b", 29.0, 5.3)], 2.0, "a"),
        ([("a", 30.0, 5.0), ("b", 30.0, 5.0)], 2.0, "a"),  # of equals the one that suits the model
    ],
)
def test_the_fastest_near_the_least_error(trials, factor, chosen):
    given = [trial(*each) for each in trials]
    found = choose(given, factor, 1.02)
    assert given[found.index].name == chosen
    assert "fastest" in found.why


def test_what_failed_is_never_taken():
    given = [trial("a", -float("inf"), failed="no kernel"), trial("b", 12.0, 3.0)]
    assert choose(given, 2.0, 1.02).index == 1
    assert choose(given[:1], 2.0, 1.02) is None
    assert str(given[0]) == "a: no kernel"


@pytest.mark.parametrize("doubt", ["this machine is busy: 9 threads want its 2 cores", ""])
def test_without_times_the_first_near_the_least_error(doubt):
    given = [trial("a", 20.0), trial("b", 27.0), trial("c", 28.0)]
    if doubt:
        given = [trial(t.name, t.sqnr_db, ms) for t, ms in zip(given, (1.0, 3.0, 2.0), strict=True)]
    found = choose(given, 2.0, 1.02, doubt)
    assert given[found.index].name == "b"
    assert (doubt or "not measured") in found.why
    assert "suits this kind of model" in found.why


@pytest.mark.parametrize(("ms", "chosen"), [(5.0, "a"), (3.04, "bf16"), (2.9, "bf16"), (None, "a")])
def test_int8_that_gains_nothing_over_bf16_is_not_taken(ms, chosen):
    bf16 = Trial(name="bf16", sqnr_db=45.0, ms=ms, int8=False)
    given = [trial("a", 28.0, 3.0), trial("b", 20.0, 1.0), bf16]
    assert given[choose(given, 2.0, 1.02).index].name == chosen


def test_in_doubt_of_times_it_is_int8():
    bf16 = Trial(name="bf16", sqnr_db=45.0, ms=1.0, int8=False)
    given = [bf16, trial("a", 28.0, 3.0)]
    assert choose(given, 2.0, 1.02, "this machine is busy").index == 1


@pytest.mark.parametrize("doubt", ["", "this machine is busy"])
def test_what_is_below_the_floor_is_taken_only_where_all_is(doubt):
    given = [trial("a", 12.0, 1.0), trial("b", 25.0, 3.0), trial("c", 24.9, 2.0)]
    assert given[choose(given, 1e9, 0.0, doubt, floor=20.0).index].name == ("b" if doubt else "c")
    assert given[choose(given, 1e9, 0.0, doubt, floor=None).index].name == "a"
    assert given[choose(given[:1], 1e9, 0.0, doubt, floor=20.0).index].name == "a"


def test_without_data_held_out_those_with_the_fewest_fitted_ranges():
    given = [
        Trial(name=name, sqnr_db=db, ms=1.0, fitted=fitted)
        for name, db, fitted in (("a", 45.0, 9), ("b", 30.0, 2), ("c", 31.0, 2))
    ]
    assert choose(given, 2.0, 0.0).index == 0
    assert choose(given, 2.0, 0.0, held_out=False).index == 2
    assert choose(given, 2.0, 0.0, "no times", held_out=False).index == 1


def test_float_that_failed_is_not_taken():
    given = [trial("a", 28.0, 3.0), Trial(name="bf16", sqnr_db=45.0, ms=1.0, int8=False, failed="a defect")]
    assert choose(given, 2.0, 1.02).index == 0


@pytest.mark.parametrize("db", [-1e5, -400.0, float("-inf")])
def test_errors_without_bound_are_numbers(db):
    given = [trial("a", db), trial("b", 3.0)]
    assert choose(given, 2.0, 1.02).index == 1


def test_the_time_that_may_be_lost_rises_with_the_error():
    found = [most_lost(db, 20.0) for db in (45.0, 30.0, 29.0, 25.0, 20.0, 19.9, float("-inf"))]
    assert found == pytest.approx([1.05, 1.05, 1.10, 1.30, 1.55, float("inf"), float("inf")])
    assert most_lost(10.0, None) == pytest.approx(2.05)


@pytest.mark.parametrize(
    ("noise", "least", "expected"),
    [
        ({"a": 0.5, "b": 0.004, "c": 0.004}, 0, ["a"]),  # 21 dB are left
        ({"a": 0.5, "b": 0.008, "c": 0.004}, 0, ["a", "b"]),
        ({"a": 0.5, "b": 0.004, "c": 0.004}, 2, ["a", "b"]),
        ({"a": 1e-4, "b": 1e-5}, 0, ["a"]),  # what is estimated is not what is measured
        ({}, 0, ["c", "b", "a", "d"]),
        ({"e": 1.0}, 0, ["c", "b", "a", "d"]),
    ],
)
def test_those_that_add_most_go_to_float_first(noise, least, expected):
    assert next_in_float(noise, ["c", "b", "a", "d"], 20.0, least) == expected


@pytest.mark.parametrize(
    ("noise", "few"),
    [
        ({"a": 6.0, "b": 2.0, "c": 2.0}, ["a"]),
        ({"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}, ["a", "b"]),
        ({name: 1.0 for name in "abcdefghij"}, []),  # they share the error
        ({"a": 1.0}, []),  # nothing would be int8
        ({"a": 0.0, "b": 0.0}, []),
        ({}, []),
    ],
)
def test_the_few_that_add_most_of_the_error(noise, few):
    found = costly_few(noise)
    assert list(found) == few
    assert all(found[name] == noise[name] / sum(noise.values()) for name in few)
