"""The arguments of a decoding step, for a language model that has not generated anything yet."""

from __future__ import annotations

from typing import Any

import torch

from nc.generation.memory import empty_cache
from nc.generation.names import cache_argument, step_names

#: Tokens that are read, and the one that follows.
_READ, _NEXT = (0, 1, 2), 3
#: Rows of an encoder's result.
_SOURCE = 5


def first_step(model: Any) -> dict[str, Any]:
    """Return keyword arguments of a model's `forward` for one token after others, whose keys the cache has.

    Args:
        model: a language model of transformers; where its decoder reads an encoder, it reads random numbers.
    """
    names = step_names(model)
    held: dict[str, Any] = {cache_argument(model): empty_cache(model), "use_cache": True}
    if names.source_mask:
        generator = torch.Generator().manual_seed(0)  # the user's own numbers stay as they are
        sizes = (1, _SOURCE, source_width(model))
        states = torch.randn(sizes, dtype=torch.float32, generator=generator, device="cpu")
        held["encoder_outputs"] = encoder_result(model, states)
    model(**{names.ids: torch.tensor([_READ], dtype=torch.int64)}, **held)
    return {names.ids: torch.tensor([[_NEXT]], dtype=torch.int64), **held}


def source_width(model: Any) -> int:
    """Return the number of elements of a hidden state of a model's encoder."""
    config = getattr(model.config, "encoder", model.config)  # of two models that were put together
    width: int = config.hidden_size
    return width


def encoder_result(model: Any, states: torch.Tensor) -> Any:
    """Return hidden states [batch, source, width] as a model takes them from its encoder.

    Some encoders give a mask of them, too; it is None here.
    """
    from transformers.modeling_outputs import BaseModelOutput

    result: Any = BaseModelOutput(states.to(model.dtype))
    result.attention_mask = None
    return result
