"""Keys and values of one text, or batch of texts, in memory that has room for more tokens."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

_LEAST_LENGTH = 256


@dataclasses.dataclass(slots=True)
class Memory:
    """What plans read and write. The user's cache shows the part of it that is filled.

    Attributes:
        keys: [layers, batch, heads, places, width].
        values: likewise.
        shown: keys and values of each layer as the user's cache has them; other ones there mean that somebody
            changed the cache.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shown: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def places(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[3]

    def is_of(self, layers: list[Any]) -> bool:
        """Tell whether the user's cache shows this memory.

        Layers with a window must not have been asked to keep more of it.
        """
        if any(getattr(layer, "record_past", False) for layer in layers):
            return False
        return all(
            layer.keys is k and layer.values is v for layer, (k, v) in zip(layers, self.shown, strict=True)
        )

    def show(self, layers: list[Any], count: int) -> None:
        """Let the user's cache hold that many tokens."""
        self.shown = list(
            zip(self.keys[:, :, :, :count].unbind(0), self.values[:, :, :, :count].unbind(0), strict=True)
        )
        for index, layer in enumerate(layers):
            window = getattr(layer, "sliding_window", None)
            if window is not None:
                keys, values = self.shown[index]
                self.shown[index] = (
                    keys[:, :, max(count - window + 1, 0) :],
                    values[:, :, max(count - window + 1, 0) :],
                )
                layer.cumulative_length = count
            layer.keys, layer.values = self.shown[index]


def why_unknown(cache: Any) -> str:
    """Why a cache can't be kept in such memory; "" when it can."""
    from transformers import cache_utils

    layers: list[Any] = getattr(cache, "layers", [])
    known = [
        cache_utils.DynamicLayer,
        getattr(cache_utils, "DynamicSlidingWindowLayer", None),
    ]  # transformers 4 has no layers of that kind
    if type(cache) is not cache_utils.DynamicCache:
        return f"its cache is a {type(cache).__name__}, not a DynamicCache"
    other = next(
        (layer for layer in layers if type(layer) not in known or getattr(layer, "record_past", False)), None
    )
    if other is not None:
        return f"its cache has a {type(other).__name__}, not keys and values of tokens"
    if any(t is None for side in _sides(cache) for t in side):
        return "its cache stays empty"
    if len({layer.get_seq_length() for layer in layers}) > 1:
        return "its layers hold different numbers of tokens"
    if any(len({(*t.shape[:2], t.shape[3], t.dtype) for t in side}) > 1 for side in _sides(cache)):
        return "its layers have keys or values of different sizes"
    return ""


def memory_of(cache: Any) -> Memory:
    """Return a copy of the tokens of a cache, in memory with room for more.

    Args:
        cache: the user's, of a kind that is known, see `why_unknown`.
    """
    count = cache.get_seq_length()
    places = max(_LEAST_LENGTH, 1 << count.bit_length())
    keys, values = (_copied(side, count, places) for side in _sides(cache))
    return Memory(keys, values, [])


def _copied(side: list[torch.Tensor], count: int, places: int) -> torch.Tensor:
    batch, heads, _, width = side[0].shape
    result = side[0].new_zeros(len(side), batch, heads, places, width)
    for own, tensor in zip(result, side, strict=True):
        own[:, :, count - tensor.shape[2] : count] = (
            tensor  # layers with a window have the last tokens only; nothing reads those before
        )
    return result


def _sides(cache: Any) -> list[list[torch.Tensor]]:
    """Return the keys of all layers, and the values."""
    return [[layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]]


def empty_cache(model: Any) -> Any:
    """Return a cache as `generate` makes it."""
    from transformers.cache_utils import DynamicCache

    takes_config = "config" in inspect.signature(DynamicCache.__init__).parameters
    return DynamicCache(config=model.config) if takes_config else DynamicCache()
