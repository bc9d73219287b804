"""Read JSON text, of which nothing is assumed: it may be damaged, or written to do harm.

`parsed` takes what JSON has, within limits. `built` makes a dataclass of it, whose annotations are the
schema. Both raise ValueError; `nc.storage.json_file` says which file it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

#: Most bytes of a text. The graph of a model has a few MB.
MOST_BYTES = 1 << 28
#: Most brackets inside each other: Python itself ends somewhere above it.
MOST_DEPTH = 100
#: Most digits of an integer; more than 308 are beyond what a float can hold.
MOST_DIGITS = 40

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
Built = TypeVar("Built")


def parsed(text: str | bytes | bytearray, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Numbers have a limited number of digits, no key occurs twice in an object, and strings can be written
    again.

    Args:
        text: UTF-8.
        finite: False: numbers may be NaN and Infinity, which Python's own writer makes and JSON has not.

    Raises:
        ValueError: the text is not such JSON; the message says what is wrong.
    """
    if len(text) > MOST_BYTES:
        _wrong(f"it has {len(text)} bytes, more than {MOST_BYTES}")
    if not isinstance(text, str):
        text = text.decode("utf-8")
    _check_depth(text)
    constant = _constant if finite else None
    found = json.loads(
        text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=constant
    )
    if "\\ud" in text or "\\uD" in text:  # a half of a pair can't be written as UTF-8
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _wrong(what: str) -> NoReturn:
    raise ValueError(what)


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in re.findall(r"[][{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            _wrong(f"more than {MOST_DEPTH} lists and objects are inside each other")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        _wrong(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        _wrong(f"the number {text[:12]}… has {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _wrong(f"the number {text[:20]} is too large")
    return value


def _constant(text: str) -> NoReturn:
    _wrong(f"{text} is not a number of JSON")


def built(kind: type[Built], value: Any, where: str = "the value") -> Built:
    """Return a dataclass, made of parsed JSON by its annotations.

    Args:
        kind: a dataclass. Annotations are bool, int, float, str, Any, literals, tuples, lists, tables by
            string, dataclasses, and any of these or None. `__post_init__` checks ranges.
        value: parsed.
        where: what it is, for messages.

    Raises:
        ValueError: a field is missing, unknown, or of another type; says which.
    """
    if not isinstance(value, dict):
        _wrong(f"{where} is {_shown(value)}, and not an object")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    needed = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    for what, names in (("no", needed - set(value)), ("an unknown", set(value) - set(fields))):
        if names:
            _wrong(f"{where} has {what} field {min(names)!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _of(hints[name], each, f"{name!r}") for name, each in value.items()})


def _of(kind: Any, value: Any, where: str) -> Any:
    """Return a value of an annotation's type; raises ValueError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        kinds = [each for each in inner if each is not types.NoneType]
        return None if value is None and len(kinds) < len(inner) else _of(kinds[0], value, where)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in inner):
            _wrong(f"{where} is {_shown(value)}, and not one of {inner}")
        return value
    if dataclasses.is_dataclass(kind):
        return built(kind, value, where)  # type: ignore[arg-type]
    if origin in (tuple, list):
        return _row(origin, inner, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            _wrong(f"{where} is {_shown(value)}, and not an object")
        return {key: _of(inner[1], each, f"{where}[{key!r}]") for key, each in value.items()}
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        _wrong(f"{where} is {_shown(value)}, and not a {kind.__name__}")
    return value


def _row(origin: type, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        _wrong(f"{where} is {_shown(value)}, and not a list")
    any_length = origin is list or inner[-1] is Ellipsis
    if not any_length and len(value) != len(inner):
        _wrong(f"{where} has {len(value)} entries, and not {len(inner)}")
    kinds = inner[:1] * len(value) if any_length else inner
    pairs = enumerate(zip(kinds, value, strict=True))
    return origin(_of(each, one, f"{where}[{i}]") for i, (each, one) in pairs)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
