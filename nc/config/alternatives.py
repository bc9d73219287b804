"""Several configurations written as one: `RTNConfig(bits=[4, 8])`, for `TuningConfig`.

A list in a field that takes single values makes `Alternatives` instead of a configuration. Whatever takes one
configuration refuses them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from nc.errors import ConfigError, UnsupportedError
from nc.process.warn import warn

_P = ParamSpec("_P")
_Made = TypeVar("_Made")


@dataclasses.dataclass(frozen=True, slots=True)
class Alternatives:
    """Configurations that differ in some fields.

    Attributes:
        title: of the configuration, for messages.
        varied: names of the fields that have several values.
        configs: one for each combination of values; the last field varies the fastest.
    """

    title: str
    varied: tuple[str, ...]
    configs: tuple[Any, ...]

    def set_local(self, key: Any, config: Any) -> Alternatives:
        """Give each of the configurations a rule; returns `self`. See `QuantConfig.set_local`."""
        for each in self.configs:
            each.set_local(key, config)
        return self

    def exclude(self, *keys: Any) -> Alternatives:
        """Leave operators in fp32 in each of the configurations; returns `self`."""
        for each in self.configs:
            each.exclude(*keys)
        return self

    def __add__(self, other: object) -> Any:
        """Raise ConfigError: a sum has one value of each field."""
        return single(self)


def single(value: Any) -> Any:
    """Return a value that is not an `Alternatives`.

    Raises:
        ConfigError: it is one; one configuration is expected here.
    """
    if isinstance(value, Alternatives):
        msg = (
            f"{value.title} has several values for {', '.join(value.varied)}, which only "
            "TuningConfig(config_set=…) takes, for autotune. Give one value."
        )
        raise ConfigError(msg)
    return value


def all_of(value: Any) -> tuple[Any, ...]:
    """Return the configurations that a value stands for."""
    return value.configs if isinstance(value, Alternatives) else (value,)


def alternatives(
    make: Callable[..., Any],
    title: str,
    takes: Mapping[str, Callable[[Any], bool]],
    args: Sequence[Any],
    fields: Mapping[str, Any],
) -> Alternatives | None:
    """Return what a call with lists of values stands for; None where it has none.

    Args:
        make: makes a configuration.
        title: its name.
        takes: parameter → whether a list is one value; in the order of positions.
        args: values by position.
        fields: values by name.

    Raises:
        ConfigError: an empty list, or a value that does not exist.
        UnsupportedError: no combination is supported. Single ones are left out with an `NCWarning`.
    """
    names = tuple(takes)
    given = {**dict(zip(names, args, strict=False)), **fields}
    several = {
        name: given[name]
        for name, is_value in takes.items()
        if isinstance(given.get(name), list) and not is_value(given[name])
    }
    if not several:
        return None
    empty = next((name for name, values in several.items() if not values), None)
    if empty is not None:
        msg = f"{title}({empty}=[]): expected at least one value."
        raise ConfigError(msg)
    configs: list[Any] = []
    refused: list[UnsupportedError] = []
    for values in itertools.product(*several.values()):
        chosen = dict(zip(several, values, strict=True))
        placed = [
            *(chosen.get(name, value) for name, value in zip(names, args, strict=False)),
            *args[len(names) :],
        ]
        try:
            configs.append(make(*placed, **{name: chosen.get(name, value) for name, value in fields.items()}))
        except UnsupportedError as error:
            warn(f"{title} with {', '.join(f'{k}={v!r}' for k, v in chosen.items())} is left out: {error}")
            refused.append(error)
    if not configs:
        raise refused[0]
    return Alternatives(title, tuple(several), tuple(configs))


def with_alternatives(make: Callable[_P, _Made]) -> Callable[_P, _Made]:
    """Decorate a function that makes a configuration: lists of values give `Alternatives`.

    A white list is one value, and so is what a parameter like `**others` takes.
    """
    takes: dict[str, Callable[[Any], bool]] = {
        parameter.name: _always if parameter.name == "white_list" else _never
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }

    @functools.wraps(make)
    def made(*args: _P.args, **fields: _P.kwargs) -> _Made:
        found: Any = alternatives(make, make.__name__, takes, args, fields)
        return make(*args, **fields) if found is None else found

    return made


def _always(_: object) -> bool:
    return True


def _never(_: object) -> bool:
    return False
