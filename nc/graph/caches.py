"""Key-value caches of transformers as structures of tensors, in which they can be captured and stored.

transformers 4 registers `DynamicCache` as a pytree node when it is imported, transformers 5 does not, and
neither registers `EncoderDecoderCache`. What is registered here flattens as in transformers 4.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from nc.errors import UnsupportedError

_MODULE = "transformers.cache_utils"
#: Members of each class, by its qualified name.
MEMBERS: Mapping[str, tuple[str, str]] = {
    f"{_MODULE}.DynamicCache": ("key_cache", "value_cache"),
    f"{_MODULE}.EncoderDecoderCache": ("self_attention_cache", "cross_attention_cache"),
}
#: Layers of a cache that hold keys and values, and nothing else that a caller could miss.
_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})


def register() -> None:
    """Let pytree see the tensors of caches, if the process has imported transformers.

    Nothing is left to do if somebody has done so.
    """
    for name in MEMBERS:
        cls = vars(sys.modules.get(_MODULE, object)).get(name.rpartition(".")[2])
        if cls is not None and cls not in pytree.SUPPORTED_NODES:
            _register(cls, name)


def class_of(name: str) -> type | None:
    """Return the registered class of that qualified name; None where transformers is not installed."""
    try:
        module = importlib.import_module(_MODULE)
    except Exception:  # not installed, or it does not import here
        return None
    register()
    return vars(module).get(name.rpartition(".")[2])


def build(name: str, members: Iterable[Any], keys: Iterable[str]) -> Any:
    """Return a cache of that qualified name.

    Windows are not kept: each layer holds the keys and values that it is given.
    """
    import transformers.cache_utils as caches

    parts = dict(zip(keys, members, strict=True))
    if name.endswith(".EncoderDecoderCache"):
        return caches.EncoderDecoderCache(*(parts[key] for key in MEMBERS[name]))
    cache = caches.DynamicCache()
    for index, pair in enumerate(zip(parts["key_cache"], parts["value_cache"], strict=True)):
        cache.update(*pair, index)
    return cache


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache that a model may change."""
    return f"{type(value).__module__}.{type(value).__qualname__}" in MEMBERS


def become(cache: Any, members: Sequence[Any]) -> None:
    """Give a cache the keys and values that it has after a call.

    Args:
        cache: changed in place.
        members: by position in `MEMBERS`: keys and values of each layer; of an `EncoderDecoderCache` its two
            caches, changed already.
    """
    if hasattr(cache, "is_updated"):
        cross = members[1]
        cache.is_updated.update({i: True for i in range(len(cross)) if cross.get_seq_length(i)})
        return
    full = [layer for layer in cache.layers if layer.keys is not None]
    for index, (keys, values) in enumerate(zip(*members, strict=True)):
        if index < len(full):
            _give(full[index], keys, values)
        else:
            cache.update(keys, values, index)


def _give(layer: Any, keys: Any, values: Any) -> None:
    """Give a layer all keys and values.

    One with a window keeps the last of them, and counts all, as it does in `update`.
    """
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += keys.shape[-2] - layer.keys.shape[-2]
        if not getattr(layer, "record_past", False):
            keys, values = (side[:, :, -layer.sliding_window + 1 :] for side in (keys, values))
    layer.keys, layer.values = keys, values


def _register(cls: type, name: str) -> None:
    keys = list(MEMBERS[name])

    def flatten(cache: Any) -> tuple[list[Any], list[str]]:
        if keys == ["key_cache", "value_cache"]:
            layers = _layers(cache)
            return [[layer.keys for layer in layers], [layer.values for layer in layers]], keys
        return [getattr(cache, key) for key in keys], keys

    def flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        return [
            (pytree.MappingKey(key), member) for key, member in zip(keys, flatten(cache)[0], strict=True)
        ], keys

    def unflatten(members: Iterable[Any], keys: Any) -> Any:
        return build(name, members, keys)

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys
    )


def _layers(cache: Any) -> list[Any]:
    for layer in cache.layers:
        if type(layer).__name__ not in _LAYERS:
            msg = (
                f"A key-value cache holds a {type(layer).__name__}, which is not a known type.\n"
                "nc reads caches with nothing but keys and values: call the model with use_cache=False, and "
                "without a cache."
            )
            raise UnsupportedError(msg)
    return [layer for layer in cache.layers if layer.keys is not None]
