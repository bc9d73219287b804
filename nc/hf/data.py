"""Batches for a transformers model, made from what users have: texts, pictures, sounds, rows of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nc.errors import InputError

#: Texts, pictures or sounds of a batch.
BATCH = 16
#: Tokens of a text where neither tokenizer nor model has a limit.
_LONGEST = 512
#: Argument of forward → what a model reads.
_TEXT, _PICTURE, _SOUND = "texts", "pictures", "sounds"
_READS = {"input_ids": _TEXT, "pixel_values": _PICTURE, "input_values": _SOUND, "input_features": _SOUND}

Batch = dict[str, torch.Tensor]


def batches_of(model: torch.nn.Module, processor: Any, data: Iterable[Any]) -> list[Batch]:
    """Return inputs of a model, those of like lengths together.

    Args:
        model: of transformers.
        processor: its tokenizer, image processor, feature extractor, or what joins these.
        data: texts, pairs of texts, pictures, sounds, rows with one of these, or batches of tensors by name.

    Raises:
        InputError: there is nothing, or something that this model does not read.
    """
    items = [] if isinstance(data, (str, bytes)) else list(data)
    if not items:
        msg = "data: give a list of what users send, such as texts; 100 or more."
        raise InputError(msg)
    if all(_is_batch(item) for item in items):
        return [dict(item) for item in items]
    reads = _READS.get(str(getattr(model, "main_input_name", "")))
    if reads is None:
        msg = (
            f"{type(model).__name__} reads {getattr(model, 'main_input_name', 'something unknown')!r}, for "
            "which no batches can be made: give data as batches, a list of dicts of tensors."
        )
        raise InputError(msg)
    read = _READERS[reads]
    found = [_item(item, reads) for item in items]
    ordered = found if reads is _PICTURE else sorted(found, key=length_of)
    parts = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    names = inspect.signature(model.forward).parameters
    return [
        {name: value for name, value in read(model, processor, part).items() if name in names}
        for part in parts
    ]


def _is_batch(item: object) -> bool:
    return (
        isinstance(item, Mapping)
        and bool(item)
        and all(isinstance(value, torch.Tensor) for value in item.values())
    )


def _item(item: Any, reads: str) -> Any:
    """Return the text, pair, picture or sound in an item."""
    if _IS[reads](item):
        return item
    if not isinstance(item, Mapping):
        msg = f"data has a {type(item).__name__}, and the model reads {reads}."
        raise InputError(msg)
    found = {name: value for name, value in item.items() if _IS[reads](value)}
    if len(found) == 1:
        return next(iter(found.values()))
    if len(found) == 2 and reads is _TEXT:
        return tuple(found.values())
    names = f" ({', '.join(found)})" if found else ""
    msg = (
        f"The rows of data have {len(found) or 'no'} columns of {reads}{names}; give what the model reads: "
        '[row["text"] for row in data], or of pairs.'
    )
    raise InputError(msg)


def _is_text(item: object) -> bool:
    pair = isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(each, str) for each in item)
    return isinstance(item, str) or pair


def _is_picture(item: object) -> bool:
    return hasattr(item, "convert") or (hasattr(item, "shape") and len(item.shape) == 3)


def _is_sound(item: object) -> bool:
    if isinstance(item, Mapping):
        return {"array", "sampling_rate"} <= set(item)
    return hasattr(item, "shape") and len(item.shape) == 1


_IS: dict[str, Callable[[object], bool]] = {_TEXT: _is_text, _PICTURE: _is_picture, _SOUND: _is_sound}


def length_of(item: Any) -> int:
    """Return the characters of a text, or of a pair, or the values of a sound."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Mapping):
        return len(item["array"])
    return sum(map(len, item)) if isinstance(item, (tuple, list)) else len(item)


def _texts(model: torch.nn.Module, processor: Any, part: Sequence[Any]) -> Mapping[str, torch.Tensor]:
    most = [
        getattr(processor, "model_max_length", None),
        getattr(model.config, "max_position_embeddings", None),
    ]
    known = [size for size in most if isinstance(size, int)]
    texts = [list(each) if isinstance(each, (tuple, list)) else each for each in part]
    if any(isinstance(each, list) for each in texts) and not all(isinstance(each, list) for each in texts):
        msg = "data has texts and pairs of texts: give one kind."
        raise InputError(msg)
    found = processor(
        texts, padding=True, truncation=True, max_length=min(known, default=512), return_tensors="pt"
    )
    return dict(found)


def _pictures(_: torch.nn.Module, processor: Any, part: Sequence[Any]) -> Mapping[str, torch.Tensor]:
    pictures = [each.convert("RGB") if hasattr(each, "convert") else each for each in part]
    return dict(processor(images=pictures, return_tensors="pt"))


def _sounds(_: torch.nn.Module, processor: Any, part: Sequence[Any]) -> Mapping[str, torch.Tensor]:
    rates = {each["sampling_rate"] for each in part if isinstance(each, Mapping)}
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    if rates and rate is not None and rates != {rate}:
        msg = f"data has sounds of {sorted(rates)} Hz, and the model reads {rate} Hz: resample them."
        raise InputError(msg)
    arrays = [each["array"] if isinstance(each, Mapping) else each for each in part]
    arrays = [each.numpy() if isinstance(each, torch.Tensor) else each for each in arrays]
    return dict(processor(arrays, sampling_rate=rate, padding=True, return_tensors="pt"))


_READERS: dict[str, Callable[[torch.nn.Module, Any, Sequence[Any]], Mapping[str, torch.Tensor]]] = {
    _TEXT: _texts,
    _PICTURE: _pictures,
    _SOUND: _sounds,
}
