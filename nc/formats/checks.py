"""Checks of single values from users."""

from __future__ import annotations

import math
import numbers

from nc.errors import ConfigError


def is_number(value: object) -> bool:
    """Whether a value is one finite real number, NumPy's included."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float can hold
        return False


def is_whole(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number, not a bool, and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(holds: bool, name: str, what: str, value: object) -> None:
    """Raise ConfigError unless the value of a field is one that it can hold."""
    if not holds:
        msg = f"Expected {name} to be {what}, but got {value!r}."
        raise ConfigError(msg)
