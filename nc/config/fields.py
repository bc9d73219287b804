"""Fields of configurations: default, check, and JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nc.algorithms import is_algorithm
from nc.algorithms.base import Algorithm, Stage
from nc.errors import ConfigError
from nc.formats import DoubleQuant
from nc.formats.checks import is_number, require
from nc.observers import ALGORITHMS, RangeAlgorithm, register_algorithm

PRECISIONS = ("bf16", "fp16", "fp32", "int8", "uint8")


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What a field takes.

    Attributes:
        take: `(name, value) -> value`, which returns the value to store; raises ConfigError.
        values: the same in words, for documents.
    """

    take: Callable[[str, Any], Any]
    values: str

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value to store; raises ConfigError."""
        return self.take(name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigField:
    """One field.

    Attributes:
        default: its value if none was given.
        check: what it takes.
        outer: the field applies to whole models, so only an outer configuration may have it.
        merge: one value of those of several rules, the most specific first; None: the most specific one.
        register: make objects of the user's own in a value known by their names, under which they are stored
            and found.
    """

    default: Any
    check: Check
    outer: bool = False
    merge: Callable[[Sequence[Any]], Any] | None = None
    register: Callable[[Any], None] | None = None

    def taken(self, name: str, value: Any) -> Any:
        """Return the value to store for a value that was given; raises ConfigError."""
        stored = self.check(name, value)
        if self.register is not None:
            self.register(value)
        return stored

    def takes(self, name: str, value: Any) -> bool:
        """Return whether this is a value of the field."""
        try:
            self.check(name, value)
        except ConfigError:
            return False
        return True

    def encode(self, value: Any) -> Any:
        """Return a checked value as plain values; `check` accepts them."""
        if isinstance(value, tuple):
            return [self.encode(v) for v in value]
        if not dataclasses.is_dataclass(type(value)):
            return value
        return {**({"name": value.name} if hasattr(value, "name") else {}), **dataclasses.asdict(value)}


def one_of(*allowed: str) -> Check:
    """Return a check for one of these names."""

    def check(name: str, value: Any) -> Any:
        require(
            value in allowed,
            name,
            f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 1 else repr(allowed[0]),
            value,
        )
        return value

    return Check(check, ", ".join(f'`"{name}"`' for name in allowed))


def _flag(name: str, value: Any) -> bool:
    require(isinstance(value, bool), name, "True or False", value)
    return bool(value)


#: True or False.
flag = Check(_flag, "`True`, `False`")


def number(low: float, high: float, *, closed: bool = False) -> Check:
    """Return a check for a number above `low` (or from `low` if `closed`) and up to `high`."""

    def check(name: str, value: Any) -> float:
        legal = is_number(value) and (low < value <= high or (closed and value == low))
        require(
            legal,
            name,
            f"a number {'from' if closed else 'above'} {low:g} {'' if closed else 'and '}up to {high:g}",
            value,
        )
        return float(value)

    return Check(check, f"a number {'from' if closed else 'above'} {low:g} to {high:g}")


def _group_size(name: str, value: Any) -> int:
    legal = isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1)
    require(legal, name, "a whole number from 1, or -1 for one scale per output channel", value)
    return int(value)


#: How many neighbours share a scale.
group_size = Check(_group_size, "a whole number from 1; `-1` for all")


def _ratio_or_auto(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value == "auto":
        return "auto"
    require(is_number(value) and 0.0 <= value <= 1.0, name, 'a number from 0 to 1, or "auto"', value)
    return float(value)


#: A number from 0 to 1, or "auto".
ratio_or_auto = Check(_ratio_or_auto, 'a number from 0 to 1; `"auto"`')


def _range_algorithm(name: str, value: Any) -> str:
    return value.name if isinstance(value, RangeAlgorithm) else str(one_of(*ALGORITHMS)(name, value))


#: The name of a range algorithm, or the object that is one.
range_algorithm = Check(_range_algorithm, f"{one_of(*ALGORITHMS).values}; a `RangeAlgorithm` of your own")


def register_range_algorithm(value: Any) -> None:
    """Make an object that is a range algorithm known; raises ConfigError where another one has its name."""
    if isinstance(value, RangeAlgorithm):
        register_algorithm(value)


def _precisions(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    known = isinstance(names, (tuple, list, set, frozenset)) and all(name in PRECISIONS for name in names)
    require(known, name, f"names out of {', '.join(map(repr, PRECISIONS))}", value)
    return tuple(sorted(names, key=PRECISIONS.index))


#: Names of precisions.
precisions = Check(_precisions, f"names out of {one_of(*PRECISIONS).values}")


def plain_object(known: Mapping[str, type], protocol: type) -> Check:
    """Return a check for objects of classes in `known`, or your own, names or plain forms.

    Your own are dataclasses with the members of `protocol`.
    """

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in known:
            return known[value]()
        if isinstance(value, Mapping) and value.get("name") in list(known):
            return _built(known[value["name"]], {k: v for k, v in value.items() if k != "name"})
        own = (
            dataclasses.is_dataclass(type(value))
            and not isinstance(value, type)
            and isinstance(value, protocol)
        )
        require(
            own,
            name,
            f"one of {', '.join(f'{cls.__name__}()' for cls in known.values()) or 'no known class'}",
            value,
        )
        return value

    return Check(check, _classes(known))


def plain_objects(known: Mapping[str, type], protocol: type) -> Check:
    """Return the same for a list, or one."""
    one = plain_object(known, protocol)

    def check(name: str, value: Any) -> tuple[Any, ...]:
        return tuple(one(name, v) for v in (value if isinstance(value, (list, tuple)) else (value,)))

    return Check(check, f"a list of {_classes(known)}")


def _classes(known: Mapping[str, type]) -> str:
    """Return the classes in words."""
    return f"{', '.join(f'`{cls.__name__}()`' for cls in known.values())}; an object of your own"


def _double_quant(name: str, value: Any) -> DoubleQuant | bool:
    if isinstance(value, Mapping):
        return _built(DoubleQuant, value)  # type: ignore[no-any-return]
    if isinstance(value, bool):
        return DoubleQuant() if value else False
    require(isinstance(value, DoubleQuant), name, "a DoubleQuant, a dict of its fields, True or False", value)
    return value  # type: ignore[no-any-return]


#: A `DoubleQuant`, its plain form, True for the default, or False for none.
double_quant = Check(_double_quant, "`DoubleQuant(…)`, a dict of its fields, `True`, `False`")


def _built(cls: type, options: Mapping[str, Any]) -> Any:
    """Return an object of a dataclass from its fields; raises ConfigError for others."""
    names = [f.name for f in dataclasses.fields(cls)]
    require(
        set(options) <= set(names),
        f"the options of {cls.__name__}",
        f"out of {', '.join(names) or 'none'}",
        list(options),
    )
    return cls(**options)


def transforms(stages: Collection[Stage], known: Mapping[str, type]) -> Check:
    """Return a check for lists of algorithms for some stages.

    They are objects of classes in `known` or of your own, or their plain form.
    """

    def one(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("name"), str) and value["name"] in known:
            return _built(known[value["name"]], {k: v for k, v in value.items() if k != "name"})
        require(
            is_algorithm(value, stages, known),
            name,
            f"a list out of {', '.join(f'{cls.__name__}()' for cls in known.values())}",
            value,
        )
        return value

    def check(name: str, value: Any) -> tuple[Any, ...]:
        return tuple(one(name, v) for v in (value if isinstance(value, (list, tuple)) else (value,)))

    return Check(check, f"a list of {_classes(known)}")


def register_algorithms(known: dict[str, type]) -> Callable[[Any], None]:
    """Return what makes the classes of algorithms in a list known by their names."""

    def register(value: Any) -> None:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Algorithm):
                known[one.name] = type(one)

    return register
