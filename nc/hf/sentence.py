"""Quantized encoders inside sentence-transformers."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.quantized import QuantizedModel
from nc.api.workflow import quantize
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactSchemaError, ConfigError, InputError
from nc.hf.data import BATCH, length_of
from nc.hf.folder import ARTEFACT, is_result, replaceable, written
from nc.hf.model import QuantizedTransformer, load_model
from nc.storage.atomic import resolved
from nc.storage.json_file import json_list, json_object

#: File that names sentence-transformers' modules, and the one with what they are used for.
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
#: Classes of models, the first one where the file does not say.
_KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
#: Settings that the classes take as arguments.
_GIVEN = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "max_active_dims")


def quantize_sentence_transformer(
    model: Any, texts: Sequence[Any], out: str | os.PathLike[str], config: Any = "auto", **options: Any
) -> Any:
    """Quantize the encoder of a SentenceTransformer, and save all as a folder.

    Args:
        model: a `SentenceTransformer`, `CrossEncoder`, `SparseEncoder` or `MultiVectorEncoder` over texts; it
            stays as it is.
        texts: as users send them, 100 or more, pairs for a CrossEncoder; a part of them is held out.
        out: the folder.
        config: as for `nc.quantize`.
        options: of `nc.quantize`.

    Returns:
        The quantized model, of the same class, loaded from the folder.

    Raises:
        InputError: no texts, or the first module of the model is no encoder of transformers.
        ConfigError: a configuration for weights alone.
        ArtefactError: something else than an earlier result lies at `out`.
    """
    if isinstance(texts, str) or not texts:
        msg = "texts: give a list of sentences, as users send them; 100 or more."
        raise InputError(msg)
    target = replaceable(resolved(out), MODULES, ARTEFACT)
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


def load_sentence_transformer(
    folder: str | os.PathLike[str], *, warm: Sequence[Any] = (), lengths: Sequence[int] = ()
) -> Any:
    """Return the model of a folder that `quantize_sentence_transformer` wrote.

    Args:
        folder: of it.
        warm: as for `nc.load`: sizes for which kernels are made now, e.g. `[(1, 128), (32, 64)]`.
        lengths: texts are filled up to the next one of these numbers of tokens, so that those of any length
            have sizes that are warm; longer ones, and all without it, to a multiple of 16.

    Raises:
        ArtefactError: it is no such folder, a file is damaged, or a module is not of sentence-transformers.
        InputError: an entry of `warm` does not fit the model.
    """
    place = Path(folder)
    if not is_result(place, MODULES, ARTEFACT):
        msg = (
            f"{place} is no folder of quantize_sentence_transformer: it has no {MODULES}, or no folder "
            f"{ARTEFACT!r}. SentenceTransformer loads other folders."
        )
        raise ArtefactError(msg)
    modules: list[Any] = []
    for entry in json_list(place / MODULES):
        kind, where = _kind(entry, place), str(place / entry["path"])
        modules.append(kind.load(where) if modules else _with_artefact(kind, where, warm, lengths))
    settings = json_object(place / SETTINGS)
    model = _model_kind(settings, place)
    known = inspect.signature(model.__init__).parameters
    given = {name: settings[name] for name in _GIVEN if name in settings and name in known}
    if "activation_fn" in settings:
        given["activation_fn"] = _activation(settings["activation_fn"], place)
    return model(modules=modules, device="cpu", **given)


def _model_kind(settings: dict[str, Any], folder: Path) -> Any:
    """Return the class of the model in a folder."""
    name = settings.get("model_type", _KINDS[0])
    kind = getattr(importlib.import_module("sentence_transformers"), str(name), None)
    if name not in _KINDS or kind is None:
        msg = f"{folder / SETTINGS} names {name!r}, which the installed sentence-transformers lacks."
        raise ArtefactSchemaError(msg)
    return kind


def _activation(name: Any, folder: Path) -> torch.nn.Module:
    """Return the function of a cross encoder's scores; only torch's own are loaded."""
    package, _, kind = str(name).rpartition(".")
    found = getattr(torch.nn, kind, None) if package.startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        msg = f"{folder / SETTINGS} names {name!r}, which is no module of torch.nn. No other code is loaded."
        raise ArtefactCorruptError(msg)
    return found()


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


def _save(model: Any, attribute: str, quantized: QuantizedTransformer, target: Path) -> None:
    """Write a SentenceTransformer with another encoder; the folder is there as a whole or not at all."""
    first, encoder = model[0], getattr(model[0], attribute)
    setattr(first, attribute, quantized)
    try:
        with written(target, MODULES, ARTEFACT) as staged:
            model.save_pretrained(str(staged), create_model_card=False)
    finally:
        setattr(first, attribute, encoder)


def _with_artefact(kind: Any, folder: str, warm: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return a module of sentence-transformers with the artefact in the place of the weights."""

    def load_quantized(self: Any, model_name_or_path: str, *_: Any, **__: Any) -> QuantizedTransformer:
        return load_model(model_name_or_path, warm, lengths)

    special: Any = type(kind.__name__, (kind,), {"_load_model": load_quantized})
    module = special.load(folder)
    module.__class__ = kind  # other processes import it by its name
    return module


def _encoder(model: Any) -> tuple[torch.nn.Module, str]:
    """Return the transformers model in the first module, and the attribute that holds it."""
    if not isinstance(model, torch.nn.Sequential):
        msg = (
            f"{type(model).__name__} does not consist of modules, as models of the newest "
            "sentence-transformers do, and every SentenceTransformer."
        )
        raise InputError(msg)
    first = model[0]
    for name in ("model", "auto_model"):  # of versions 6 and 5
        found = vars(first).get("_modules", {}).get(name)
        if found is not None and hasattr(found, "config"):
            return found, name
    msg = f"The first module, {type(first).__name__}, has no encoder of transformers to quantize."
    raise InputError(msg)


def _features(model: Any, encoder: torch.nn.Module, texts: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of texts that the encoder's forward takes."""
    tokenize = model.preprocess if hasattr(model, "preprocess") else model.tokenize  # of version 5
    parameters = inspect.signature(encoder.forward).parameters
    found = tokenize(list(texts)).items()
    return {name: value for name, value in found if name in parameters and isinstance(value, torch.Tensor)}


def _parts(texts: Sequence[Any]) -> list[list[Any]]:
    """Return batches of texts, or pairs of them, of like lengths."""
    ordered = sorted(texts, key=length_of)
    return [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
