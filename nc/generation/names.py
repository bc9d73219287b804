"""What transformers calls a cache of keys and values.

It is `cache` in version 5.24, and `past_key_values` in others, which newer ones warn about.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

#: The newer name first.
CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of the argument of a model's `forward` that takes the cache."""
    return _first(inspect.signature(model.forward).parameters)


def cache_field(output: type) -> str:
    """Return the name of the field of an output's class that holds the cache."""
    return _first({field.name: None for field in dataclasses.fields(output)})


def cache_of(given: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, by either name; None where there is none."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def _first(names: Mapping[str, Any]) -> str:
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])
