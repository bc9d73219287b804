"""What transformers calls the arguments of a decoding step, and parts of a cache.

A cache of keys and values is `cache` in version 5.24, and `past_key_values` in others, which newer ones warn
about.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

#: The newer name first.
CACHE_NAMES = ("cache", "past_key_values")


@dataclasses.dataclass(frozen=True, slots=True)
class StepNames:
    """Names of arguments of a model's `forward`.

    Attributes:
        ids: of tokens.
        mask: of the tokens in the cache.
        source_mask: of what an encoder has read; "" where there is none.
    """

    ids: str = "input_ids"
    mask: str = "attention_mask"
    source_mask: str = ""


_ENCODER_DECODER = StepNames("decoder_input_ids", "decoder_attention_mask", "attention_mask")


def step_names(model: Any) -> StepNames:
    """Return the names of a language model's arguments."""
    return _ENCODER_DECODER if getattr(model.config, "is_encoder_decoder", False) else StepNames()


def own_part(cache: Any) -> Any:
    """Return the cache of the tokens themselves; a decoder that reads an encoder has another one for that."""
    return getattr(cache, "self_attention_cache", cache)


def source_part(cache: Any) -> Any:
    """Return the cache of what an encoder has read; None where there is none."""
    return getattr(cache, "cross_attention_cache", None)


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
