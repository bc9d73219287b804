"""One token of a language model, or a few, as a graph.

The key-value cache is an input that the graph changes in place.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from nc.capture import rewrites
from nc.capture.export_guards import exportable
from nc.capture.flatten import flatten_program
from nc.errors import CaptureError
from nc.generation.example import encoder_result, source_width
from nc.generation.memory import Memory
from nc.generation.names import cache_argument, step_names
from nc.process.lock import LOCK

#: Sizes of the example: none of them is a size of models, so the graph can't mistake one for the other.
_BATCH, _LENGTH, _SOURCE, _TOKENS = 3, 233, 151, 5

#: Inputs of a step, in order. A graph has those that the model reads.
INPUTS = (
    *("ids", "positions", "place", "mask", "keys", "values"),
    *("source_keys", "source_values", "source_mask"),
)


def captured(model: torch.nn.Module, memory: Memory, masked: bool, several: bool) -> fx.GraphModule:
    """Return the graph of a decoding step, for any batch and any length of the cache.

    Its inputs: token ids [batch, tokens] and their positions, likewise; their places [tokens] in the cache;
    with `masked` a mask [batch, length] of the places that hold tokens, in int64; keys and values [layers,
    batch, heads, length, width]; keys and values of what an encoder has read, likewise, and a mask of it
    [batch, source]. It writes the tokens' keys and values to those places, and gives the logits [batch,
    tokens, vocabulary]. The names of its placeholders are those of `INPUTS`.

    Args:
        model: a language model of transformers.
        memory: of a cache of this model; only sizes and dtype are read.
        masked: whether there is a mask of the tokens.
        several: whether the graph is for any number of tokens from 2 on, or for one.

    Raises:
        CaptureError: torch.export can't express the step.
    """
    source = memory.source
    cache = [_example(t, _LENGTH) for t in (memory.keys, memory.values)]
    read = [None, None] if source is None else [_example(t, _SOURCE) for t in (source.keys, source.values)]
    source_mask = None if source is None else torch.ones(_BATCH, _SOURCE, dtype=torch.int64)
    count = _TOKENS if several else 1
    ids, place = torch.zeros(_BATCH, count, dtype=torch.int64), torch.arange(1, count + 1, dtype=torch.int64)
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64) if masked else None
    batch = length = torch.export.Dim.AUTO
    of_tokens = {0: batch, 1: length} if several else {0: batch}
    of_cache = {1: batch, 3: length}
    of_source = None if source is None else of_cache
    shapes = {
        "ids": of_tokens,
        "positions": of_tokens,
        "place": {0: length} if several else None,
        "mask": {0: batch, 1: length} if masked else None,
        **{"keys": of_cache, "values": of_cache, "source_keys": of_source, "source_values": of_source},
        "source_mask": None if source is None else {0: batch, 1: length},
    }
    try:
        with LOCK, torch.no_grad(), exportable(False):
            step = _Step(model).eval()
            arguments = (ids, place.repeat(_BATCH, 1), place, mask, *cache, *read, source_mask)
            program = torch.export.export(step, arguments, dynamic_shapes=shapes, strict=False)
        module, placeholders = flatten_program(program)
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises dozens of types
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        msg = f"The decoding step of {type(model).__name__} can't be captured: {line}"
        raise CaptureError(msg) from error
    for rewrite in (
        *(rewrites.drop_checks, rewrites.views, rewrites.drop_identities),
        rewrites.share_equal,
    ):
        rewrite(module)
    module.graph.eliminate_dead_code()
    for node, name in zip(placeholders, INPUTS, strict=True):
        if isinstance(node, fx.Node):
            node.target = name
    module.recompile()
    return module


class _Step(torch.nn.Module):
    """What is captured."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        self._cache = cache_argument(model)
        self._names = step_names(model)
        self._takes = inspect.signature(model.forward).parameters

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        place: torch.Tensor,
        mask: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        source_keys: torch.Tensor | None,
        source_values: torch.Tensor | None,
        source_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        cache, more = _cache(keys, values, place), {}
        if source_keys is not None and source_values is not None:
            cache = _with_source(cache, source_keys, source_values)
            # keys and values are read in place of these states, of which only the sizes are
            unread = source_keys.new_zeros(
                source_keys.shape[1], source_keys.shape[3], source_width(self.model)
            )
            more = {
                "encoder_outputs": encoder_result(self.model, unread),
                self._names.source_mask: source_mask,
            }
            more = {name: value for name, value in more.items() if name in self._takes}
        else:
            more = {"position_ids": positions}
        if "cache_position" in self._takes:
            more["cache_position"] = place
        given = {self._names.ids: ids, self._names.mask: mask, self._cache: cache, "use_cache": True}
        result: torch.Tensor = self.model(**given, **more).logits
        return result


def _example(like: torch.Tensor, length: int) -> torch.Tensor:
    """Return keys or values as a memory has them, of other sizes."""
    layers, _, heads, _, width = like.shape
    return like.new_zeros((layers, _BATCH, heads, length, width))


def _with_source(cache: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
    """Return a cache that has, besides, what an encoder has read."""
    from transformers import cache_utils

    kind: Any = cache_utils.DynamicLayer  # its attributes have other types in each version
    source: Any = cache_utils.DynamicCache()
    source.layers = [kind() for _ in keys]
    for layer, k, v in zip(source.layers, keys.unbind(0), values.unbind(0), strict=True):
        layer.keys, layer.values, layer.is_initialized = k, v, True
    both = cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), source)
    both.self_attention_cache = cache
    both.is_updated = dict.fromkeys(range(len(keys)), True)
    return both


def _cache(keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> Any:
    """Return a cache of transformers whose layers write to given memory."""
    from transformers import cache_utils

    base: Any = cache_utils.CacheLayerMixin  # its methods have other arguments in each version

    class Layer(base):  # type: ignore[misc]
        """All places exist from the start; the mask hides those that hold nothing yet."""

        is_compileable, is_sliding = True, False

        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.dtype, self.device, self.is_initialized = (
                keys,
                values,
                keys.dtype,
                keys.device,
                True,
            )

        def lazy_initialization(self, *_: Any) -> None:
            """There is memory already."""

        def update(
            self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys.index_copy_(2, place, keys)
            self.values.index_copy_(2, place, values)
            result: tuple[torch.Tensor, torch.Tensor] = self.keys, self.values
            return result

        def get_seq_length(self, *_: Any) -> torch.Tensor:
            return place[0]

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return self.get_max_length(), 0

        def get_max_length(self) -> int:
            length: int = self.keys.shape[2]
            return length

        get_max_cache_shape = get_max_length  # its name in transformers 4

    cache = cache_utils.DynamicCache()
    cache.layers = [Layer(k, v) for k, v in zip(keys.unbind(0), values.unbind(0), strict=True)]
    return cache
