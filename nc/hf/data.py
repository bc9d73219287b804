"""Batches for a transformers model, made from what users have: texts, pictures, sounds, rows of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from nc.errors import InputError
from nc.hf.model import QuantizedTransformer

#: Texts, pictures or sounds of a batch.
BATCH = 16
#: Tokens of a text where the model has no limit.
_LONGEST = 512
#: What batches for training have beside inputs.
_LABELS = frozenset({"labels", "label", "start_positions", "end_positions"})
#: Argument of forward → what a model reads.
_TEXT, _PICTURE, _SOUND = "texts", "pictures", "sounds"
_READS = {"input_ids": _TEXT, "pixel_values": _PICTURE, "input_values": _SOUND, "input_features": _SOUND}

Batch = dict[str, torch.Tensor]


def batches_of(
    model: torch.nn.Module, processor: Any, data: Iterable[Any], why_none: str = ""
) -> list[Batch]:
    """Return inputs of a model, those of like lengths together.

    Args:
        model: of transformers.
        processor: its tokenizer, image processor, feature extractor, or what joins these; None: there is
            none.
        data: texts, pairs of texts, pictures, sounds, rows with one of these, or batches of tensors by name;
            labels of batches are left out: what is calibrated gives outputs alone.
        why_none: why there is no processor.

    Raises:
        InputError: there is nothing, or something that this model or its processor does not read.
    """
    items = [] if isinstance(data, (str, bytes)) else list(data)
    if not items:
        msg = "data: give a list of what users send, such as texts; 100 or more."
        raise InputError(msg)
    main = str(getattr(model, "main_input_name", ""))
    surface = inspect.signature(QuantizedTransformer.forward).parameters
    names = (set(inspect.signature(model.forward).parameters) & set(surface)) - _LABELS
    if all(_is_batch(item, main) for item in items):
        return [_batch(item, main, names) for item in items]
    reads = _READS.get(main)
    if reads is None:
        msg = (
            f"{type(model).__name__} reads {main or 'something unknown'}, for which no batches can be made: "
            "give data as batches, a list of dicts of tensors."
        )
        raise InputError(msg)
    found = [_item(item, reads) for item in items]
    if processor is None:
        msg = f"{type(model).__name__} has nothing that reads {reads}{why_none}. Give processor=."
        raise InputError(msg)
    ordered = found if reads is _PICTURE else sorted(found, key=length_of)
    parts = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    try:
        read = [_READERS[reads](model, processor, part) for part in parts]
    except (ValueError, TypeError) as error:
        msg = f"{type(processor).__name__} could not read the {reads} of data: {error}"
        raise InputError(msg) from error
    return [{name: value for name, value in part.items() if name in names} for part in read]


def _is_batch(item: object, main: str) -> bool:
    """Return whether an item has the tensor that a model reads."""
    return isinstance(item, Mapping) and isinstance(item.get(main), torch.Tensor)


def _batch(item: Mapping[str, Any], main: str, names: Collection[str]) -> Batch:
    """Return a batch without labels."""
    others = [name for name in item if name not in names and name not in _LABELS]
    if others:
        msg = f"A batch of data has {', '.join(others)}, which a quantized model has no place for."
        raise InputError(msg)
    if item[main].dim() < 2:
        msg = f"{main} of a batch has {item[main].dim()} dimensions: the first one is that of the batch."
        raise InputError(msg)
    return {name: value for name, value in item.items() if name in names}


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
    names = f" ({', '.join(found)})" if found else ""
    msg = (
        f"The rows of data have {len(found) or 'no'} columns of {reads}{names}; give what the model reads: "
        '[row["text"] for row in data], or pairs such as [(row["question"], row["context"]) for row in data].'
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
    texts = [list(each) if isinstance(each, (tuple, list)) else each for each in part]
    if len({type(each) for each in texts}) > 1:
        msg = "data has texts and pairs of texts: give one kind."
        raise InputError(msg)
    most = min(_positions(model), getattr(processor, "model_max_length", _LONGEST))
    return dict(processor(texts, padding=True, truncation=True, max_length=most, return_tensors="pt"))


def _positions(model: torch.nn.Module) -> int:
    """Return how many tokens a model has positions for."""
    most = getattr(model.config, "max_position_embeddings", None)
    # RoBERTa and related models count from the position after the padding token's
    taken = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return most - max(taken, default=0) if isinstance(most, int) else _LONGEST


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
    # Whisper's encoder takes sounds of one length alone
    whole = hasattr(getattr(processor, "feature_extractor", processor), "nb_max_frames")
    padding = "max_length" if whole else True
    return dict(processor(arrays, sampling_rate=rate, padding=padding, return_tensors="pt"))


_READERS: dict[str, Callable[[torch.nn.Module, Any, Sequence[Any]], Mapping[str, torch.Tensor]]] = {
    _TEXT: _texts,
    _PICTURE: _pictures,
    _SOUND: _sounds,
}
