"""Keys and values of one text, or batch of texts, in memory that has room for more tokens."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from nc.generation.names import own_part, source_part, step_names

_LEAST_LENGTH = 256
#: Sizes of what an encoder has read are filled up to, so that few plans serve all texts.
_LEAST_SOURCE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class SourceMemory:
    """Keys and values of what an encoder has read: constants of a text.

    Attributes:
        keys: [layers, batch, heads, places, width].
        values: likewise.
        shown: keys and values of each layer as the user's cache has them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shown: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def places(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[3]

    def is_of(self, cache: Any) -> bool:
        """Tell whether the user's cache still has what this was copied from."""
        return _show(source_part(cache).layers, self.shown)


@dataclasses.dataclass(slots=True)
class Memory:
    """What plans read and write. The user's cache shows the part of it that is filled.

    Attributes:
        keys: [layers, batch, heads, places, width].
        values: likewise.
        shown: keys and values of each layer as the user's cache has them; other ones there mean that somebody
            changed the cache. Where one is gone, nobody kept it.
        uses: how many tensors share the memory of keys, and of values, while these are shown.
        source: what an encoder has read, where there is one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shown: list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]]
    uses: tuple[int, int] = (0, 0)
    source: SourceMemory | None = None

    @property
    def places(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[3]

    def is_of(self, cache: Any) -> bool:
        """Tell whether the user's cache shows this memory, or the first tokens of it and nobody the others.

        Layers with a window must not have been asked to keep more of it, nor less.
        """
        layers = own_part(cache).layers
        if self.source is not None and not self.source.is_of(cache):
            return False
        if any(getattr(layer, "record_past", False) for layer in layers):
            return False
        shown = [(keys(), values()) for keys, values in self.shown]
        return _show(layers, shown) or (all(t is None for t in chain(*shown)) and self._begins_with(layers))

    def _begins_with(self, layers: list[Any]) -> bool:
        """Tell whether layers have the first tokens of this memory, and no other tensor is a part of it."""
        count = layers[0].get_seq_length()
        sides = zip(chain(self.keys, self.values), chain(*zip(*map(_pair, layers), strict=True)), strict=True)
        return (
            (_uses(self.keys), _uses(self.values)) == self.uses
            and all(getattr(layer, "sliding_window", None) is None for layer in layers)
            and all(_is_same(own[:, :, :count], side) for own, side in sides)
        )

    def show(self, cache: Any, count: int) -> None:
        """Let the user's cache hold that many tokens."""
        layers = own_part(cache).layers
        sides = (side[:, :, :, :count].unbind(0) for side in (self.keys, self.values))
        for layer, keys, values in zip(layers, *sides, strict=True):
            layer.keys, layer.values = keys, values
            window = getattr(layer, "sliding_window", None)
            if window is not None:
                first = max(count - window + 1, 0)
                layer.keys, layer.values = keys[:, :, first:], values[:, :, first:]
                layer.cumulative_length = count
        self.shown = [(weakref.ref(layer.keys), weakref.ref(layer.values)) for layer in layers]
        self.uses = _uses(self.keys), _uses(self.values)


def _uses(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether tensors are the same elements of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _pair(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values


def _show(layers: list[Any], shown: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
    """Tell whether layers of a cache have these keys and values, and no others."""
    return all(layer.keys is k and layer.values is v for layer, (k, v) in zip(layers, shown, strict=True))


def why_unknown(cache: Any) -> str:
    """Why a cache can't be kept in such memory; "" when it can."""
    from transformers import cache_utils

    source = source_part(cache)
    if source is not None:
        return _why_unread(cache, source) or why_unknown(own_part(cache))
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


def _why_unread(cache: Any, source: Any) -> str:
    """Why what an encoder has read can't be kept; "" when it can."""
    if not all(cache.is_updated.get(index) for index in range(len(source.layers))) or not source.layers:
        return "its cache has no keys of what the encoder has read"
    if any(len({(t.shape, t.dtype) for t in side}) > 1 for side in _sides(source)):
        return "its layers have keys or values of different sizes"
    return ""


def memory_of(cache: Any, tokens: int = 1, *, fills: bool = False) -> Memory:
    """Return a copy of the tokens of a cache, in memory with room for more.

    Args:
        cache: the user's, of a kind that is known, see `why_unknown`.
        tokens: those that come next.
        fills: whether a mask hides places after what an encoder has read, which may have more places then.
    """
    count, own, source = cache.get_seq_length(), own_part(cache), source_part(cache)
    places = max(_LEAST_LENGTH, 1 << (count + tokens - 1).bit_length())
    keys, values = (_copied(side, count, places) for side in _sides(own))
    return Memory(keys, values, [], source=None if source is None else _source_of(source, fills))


def _source_of(cache: Any, fills: bool) -> SourceMemory:
    """Return a copy of what an encoder has read; `fills` as in `memory_of`."""
    sides = _sides(cache)
    count = sides[0][0].shape[2]
    places = -(-count // _LEAST_SOURCE) * _LEAST_SOURCE if fills else count
    keys, values = (_copied(side, count, places) for side in sides)
    return SourceMemory(keys, values, tuple(zip(*sides, strict=True)))


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
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    takes_config = "config" in inspect.signature(DynamicCache.__init__).parameters

    def empty() -> Any:
        return DynamicCache(config=model.config) if takes_config else DynamicCache()

    return EncoderDecoderCache(empty(), empty()) if step_names(model).source_mask else empty()
