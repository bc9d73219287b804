"""What is chosen, for given measurements."""

import pytest

from nc.api.auto.choice import Trial, choose, costly_few


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
