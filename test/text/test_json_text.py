"""JSON that is damaged or hostile, and dataclasses as schemas."""

import dataclasses
from typing import Any, Literal

import pytest

from nc.text.json_text import MOST_DEPTH, MOST_DIGITS, built, parsed

WRONG = {
    "too large a float": "1e400",
    "no number": "NaN",
    "infinite": "-Infinity",
    "digits": "9" * (MOST_DIGITS + 1),
    "deep": "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
    "very deep": "[" * 100_000,
    "deep objects": '{"a":' * 5000,
    "twice": '{"a": 1, "b": {"c": 1, "c": 1}}',
    "half of a pair": '["\\ud83d"]',
    "half of a pair as a key": '{"\\uDE00": 1}',
    "cut": '{"a": 1',
    "empty": "",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("form", [str, str.encode])
def test_what_is_wrong_is_a_value_error(name, form):
    with pytest.raises(ValueError, match="."):
        parsed(form(WRONG[name]))


def test_what_is_right_comes_back():
    assert parsed("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    assert parsed("9" * MOST_DIGITS) == 10**MOST_DIGITS - 1
    assert parsed('{"a": ["\\ud83d\\ude00", "é", "[[[", "\\"[", 1.5, null, true]}'.encode()) == {
        "a": ["😀", "é", "[[[", '"[', 1.5, None, True]
    }
    assert parsed("[NaN, 1e400]".replace("1e400", "Infinity"), finite=False)[1] == float("inf")
    with pytest.raises(ValueError, match="utf-8"):
        parsed(b'"\xff"')


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    ms: float
    name: str
    pair: tuple[float, float]
    rest: tuple[int, ...]
    table: dict[str, Inner]
    kind: Literal["a", "b"] = "a"
    note: str | None = None
    any: Any = None


GIVEN = {"ms": 1, "name": "x", "pair": [1, 2.5], "rest": [], "table": {"k": {"count": 3}}}


def test_a_dataclass_is_made_by_its_annotations():
    found = built(Outer, GIVEN)
    assert found == Outer(1.0, "x", (1.0, 2.5), (), {"k": Inner(3)})
    assert type(found.ms) is float
    assert built(Outer, {**GIVEN, "note": "n", "any": [1], "kind": "b"}).any == [1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ms": "0.9"}, "'ms' is '0.9', and not a float"),
        ({"ms": False}, "'ms' is False, and not a float"),
        ({"ms": None}, "'ms' is None"),
        ({"name": 5}, "'name' is 5, and not a str"),
        ({"pair": [1]}, "'pair' has 1 entries, and not 2"),
        ({"pair": {}}, "'pair' is {}, and not a list"),
        ({"rest": [1.5]}, r"'rest'\[0\] is 1.5, and not a int"),
        ({"rest": [True]}, r"'rest'\[0\] is True"),
        ({"table": []}, r"'table' is \[\], and not an object"),
        ({"table": {"k": {"count": 1, "x": 2}}}, r"'table'\['k'\] has an unknown field 'x'"),
        ({"kind": "c"}, "'kind' is 'c', and not one of"),
        ({"note": 1}, "'note' is 1, and not a str"),
        ({"more": 1}, "the value has an unknown field 'more'"),
    ],
)
def test_a_value_of_another_type_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        built(Outer, {**GIVEN, **change})


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="has no field 'ms'"):
        built(Outer, {name: value for name, value in GIVEN.items() if name != "ms"})
    with pytest.raises(ValueError, match="and not an object"):
        built(Outer, [])
