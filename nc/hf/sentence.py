"""Quantized encoders inside sentence-transformers."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.quantized import QuantizedModel
from nc.api.workflow import quantize
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactSchemaError, ConfigError, InputError
from nc.hf.model import ARTEFACT, QuantizedTransformer, load_model
from nc.storage.atomic import staging_path
from nc.storage.folder import alone_in, publish
from nc.storage.json_file import json_list, json_object

#: Texts of a calibration batch.
BATCH = 16
#: File that names sentence-transformers' modules.
MODULES = "modules.json"


def quantize_sentence_transformer(
    model: Any, texts: Sequence[str], out: str | os.PathLike[str], config: Any = "auto", **options: Any
) -> Any:
    """Quantize the encoder of a SentenceTransformer, and save all as a folder.

    Args:
        model: a `SentenceTransformer` over texts; it stays as it is.
        texts: as users send them, 100 or more; a part of them is held out.
        out: the folder.
        config: as for `nc.quantize`.
        options: of `nc.quantize`.

    Returns:
        The quantized SentenceTransformer, loaded from the folder.

    Raises:
        InputError: no texts, or the first module of the model is no encoder of transformers.
        ConfigError: a configuration for weights alone.
        ArtefactError: something else than an earlier result lies at `out`.
    """
    if isinstance(texts, str) or not texts:
        msg = "texts: give a list of sentences, as users send them; 100 or more."
        raise InputError(msg)
    target = _replaceable(Path(out).resolve())
    encoder, attribute = _encoder(model)
    batches = [_features(model, encoder, part) for part in _parts(texts)]

    def run(prepared: torch.nn.Module) -> None:
        for batch in batches:
            prepared(**batch)

    # the batch of middle length is what times are measured with
    quantized = quantize(encoder, config, run, example_inputs=batches[len(batches) // 2], **options)
    if not isinstance(quantized, QuantizedModel):
        msg = (
            f"{config!r} quantizes weights alone. For these give SentenceTransformer "
            'model_kwargs={"quantization_config": nc.hf.QuantizationConfig("int8")}, without calibration.'
        )
        raise ConfigError(msg)
    _save(model, attribute, QuantizedTransformer(quantized, encoder.config), target)
    return load_sentence_transformer(target)


def load_sentence_transformer(folder: str | os.PathLike[str]) -> Any:
    """Return the SentenceTransformer of a folder that `quantize_sentence_transformer` wrote.

    Raises:
        ArtefactError: it is no such folder, a file is damaged, or a module is not of sentence-transformers.
    """
    from sentence_transformers import SentenceTransformer

    place = Path(folder)
    if not _is_ours(place):
        msg = (
            f"{place} is no folder of quantize_sentence_transformer: it has no {MODULES}, or no folder "
            f"{ARTEFACT!r}. SentenceTransformer loads other folders."
        )
        raise ArtefactError(msg)
    modules: list[Any] = []
    for entry in json_list(place / MODULES):
        kind, where = _kind(entry, place), str(place / entry["path"])
        modules.append(_quantized(kind).load(where) if not modules else kind.load(where))
    settings = json_object(place / "config_sentence_transformers.json")
    names = ("prompts", "default_prompt_name", "similarity_fn_name")
    return SentenceTransformer(
        modules=modules, device="cpu", **{name: settings[name] for name in names if name in settings}
    )


def _kind(entry: Any, folder: Path) -> Any:
    """Return the class of a module of a folder; only sentence-transformers' own are imported."""
    name = entry.get("type") if isinstance(entry, dict) and isinstance(entry.get("path"), str) else None
    if not isinstance(name, str) or not name.startswith("sentence_transformers."):
        msg = (
            f"{folder / MODULES} names {entry!r}, which is no module of sentence-transformers. No other code "
            "is loaded."
        )
        raise ArtefactCorruptError(msg)
    package, _, kind = name.rpartition(".")
    try:
        return getattr(importlib.import_module(package), kind)
    except (ImportError, AttributeError) as error:
        msg = f"{folder / MODULES} names {name}, which the installed sentence-transformers lacks."
        raise ArtefactSchemaError(msg) from error


def _replaceable(target: Path) -> Path:
    """Return a folder that may be written."""
    if target.exists() and not _is_ours(target) and not (target.is_dir() and not any(target.iterdir())):
        msg = (
            f"{str(target)!r} exists and is no earlier result. Choose another folder: float weights beside "
            "quantized ones would be loaded in their place."
        )
        raise ArtefactError(msg)
    return target


def _is_ours(folder: Path) -> bool:
    return (folder / MODULES).is_file() and (folder / ARTEFACT).is_dir()


def _save(model: Any, attribute: str, quantized: QuantizedTransformer, target: Path) -> None:
    """Write a SentenceTransformer with another encoder; the folder is there as a whole or not at all."""
    first, encoder = model[0], getattr(model[0], attribute)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = staging_path(target)
    setattr(first, attribute, quantized)
    try:
        model.save_pretrained(str(staged), create_model_card=False)
        with alone_in(target.parent):
            publish(staged, _replaceable(target))
    finally:
        setattr(first, attribute, encoder)
        shutil.rmtree(staged, ignore_errors=True)


def _quantized(kind: type) -> Any:
    """Return sentence-transformers' class of encoders with the artefact in the place of the weights."""

    def load_quantized(self: Any, model_name_or_path: str, *_: Any, **__: Any) -> QuantizedTransformer:
        return load_model(model_name_or_path)

    return type(kind.__name__, (kind,), {"_load_model": load_quantized, "__module__": kind.__module__})


def _encoder(model: Any) -> tuple[torch.nn.Module, str]:
    """Return the transformers model in the first module, and the attribute that holds it."""
    first = model[0]
    for name in ("model", "auto_model"):  # of versions 6 and 5
        found = vars(first).get("_modules", {}).get(name)
        if found is not None and hasattr(found, "config"):
            return found, name
    msg = f"The first module, {type(first).__name__}, has no encoder of transformers to quantize."
    raise InputError(msg)


def _features(model: Any, encoder: torch.nn.Module, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of texts that the encoder's forward takes."""
    tokenize = model.preprocess if hasattr(model, "preprocess") else model.tokenize  # of version 5
    parameters = inspect.signature(encoder.forward).parameters
    found = tokenize(list(texts)).items()
    return {name: value for name, value in found if name in parameters and isinstance(value, torch.Tensor)}


def _parts(texts: Sequence[str]) -> list[list[str]]:
    """Return batches of texts of like lengths."""
    ordered = sorted(texts, key=len)
    return [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
