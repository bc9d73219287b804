"""Checks of single values from users."""

from __future__ import annotations

import math
import numbers
import os
from pathlib import Path

from nc.errors import ConfigError, InputError
from nc.text.plain import shown

#: Bytes of a path and of one name in it, as Linux limits them.
_MOST_OF_PATH, _MOST_OF_NAME = 4095, 255


def is_number(value: object) -> bool:
    """Return whether a value is one finite real number, NumPy's included."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float can hold
        return False


def is_whole(value: object, least: int = 0) -> bool:
    """Return whether a value is a whole number, not a bool, and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(holds: bool, name: str, what: str, value: object) -> None:
    """Raise ConfigError unless the value of a field is one that it can hold."""
    if not holds:
        msg = f"Expected {name} to be {what}, but got {value!r}."
        raise ConfigError(msg)


def check_callable(name: str, value: object, what: str) -> None:
    """Raise InputError for an argument that is not None and can't be called.

    Args:
        name: of the argument.
        value: given for it.
        what: it has to be.
    """
    if value is not None and not callable(value):
        msg = f"Expected {name} to be {what}, but got {kind_of(value)}."
        raise InputError(msg)


def checked_path(name: str, value: object) -> Path:
    """Return a path; raises InputError for what is none, such as None, an empty text and one too long.

    Args:
        name: of the argument.
        value: given for it.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not _names_a_file(value):
        got = shown(value) if isinstance(value, str) else kind_of(value)
        msg = f"Expected {name} to be a path, but got {got}."
        raise InputError(msg)
    return Path(value)


def _names_a_file(text: str) -> bool:
    """Return whether Linux can have a file of that name."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    parts = map(len, data.split(b"/"))
    return 0 < len(data) <= _MOST_OF_PATH and max(parts) <= _MOST_OF_NAME and b"\0" not in data


def kind_of(value: object) -> str:
    """Return the type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
