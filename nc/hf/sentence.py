"""Quantized encoders inside sentence-transformers."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.quantized import QuantizedModel
from nc.api.workflow import quantize
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactSchemaError, ConfigError, InputError
from nc.formats.checks import checked_path, kind_of
from nc.hf import checksums
from nc.hf.data import BATCH, length_of
from nc.hf.folder import ARTEFACT, is_result, read_by_others, replaceable, written
from nc.hf.model import QuantizedTransformer, load_model, sorted_lengths
from nc.storage.atomic import resolved
from nc.storage.json_file import json_list, json_object

#: File that names sentence-transformers' modules, and the one with what they are used for.
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
#: Classes of models, the first one where the file does not say.
_KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
#: Settings that the classes take as arguments.
_NO_OTHER = "No other code is loaded; if you trust who wrote the folder, give trust_remote_code=True."
_GIVEN = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "max_active_dims")


def quantize_sentence_transformer(
    model: Any,
    texts: Sequence[Any],
    out: str | os.PathLike[str],
    config: Any = "auto",
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Quantize the encoder of a SentenceTransformer, and save all as a folder.

    Args:
        model: a `SentenceTransformer`, `CrossEncoder`, `SparseEncoder` or `MultiVectorEncoder` over texts; it
            stays as it is.
        texts: as users send them, 100 or more, pairs for a CrossEncoder; a part of them is held out.
        out: the folder.
        config: as for `nc.quantize`.
        trust_remote_code: see `load_sentence_transformer`.
        options: of `nc.quantize`.

    Returns:
        The quantized model, of the same class, loaded from the folder.

    Raises:
        InputError: no texts, or the first module of the model is not an encoder of transformers.
        ConfigError: a configuration for weights alone.
        ArtefactError: `out` exists and is not an earlier result.
    """
    if isinstance(texts, str) or not texts:
        msg = "texts: give a list of sentences, as users send them; 100 or more."
        raise InputError(msg)
    target = replaceable(resolved(checked_path("out", out)), MODULES, ARTEFACT)
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
    return load_sentence_transformer(target, trust_remote_code=trust_remote_code)


def load_sentence_transformer(
    folder: str | os.PathLike[str],
    *,
    warm: Sequence[Any] = (),
    lengths: Sequence[int] = (),
    verify: str = "raise",
    verify_sizes: bool = True,
    padding: str = "skipped",
    trust_remote_code: bool = False,
) -> Any:
    """Return the model of a folder that `quantize_sentence_transformer` wrote.

    All files are compared with the checksums in `nc_checksums.json` first; other files, and folders without
    it, are not.

    Args:
        folder: the folder that was written.
        warm: as for `nc.load`: sizes for which kernels are made now, e.g. `[(1, 128), (32, 64)]`.
        lengths: where padding is computed, texts are filled up to the next one of these numbers of tokens, so
            that those of any length have sizes that are warm; longer ones, and all without it, to a multiple
            of 16.
        verify: as for `nc.load`.
        verify_sizes: as for `nc.load`.
        padding: as for `nc.load`.
        trust_remote_code: take modules and functions that are not of sentence-transformers or torch.nn, and
            run Python code in the folder.

    Raises:
        ArtefactError: it is not such a folder, a file is damaged or missing, or it needs code that is not
            trusted.
        InputError: an entry of `warm` does not fit the model, or `lengths` are not numbers of tokens.
        VerificationError, BackendError: as for `nc.load`.
    """
    place = checked_path("folder", folder)
    if not is_result(place, MODULES, ARTEFACT):
        msg = (
            f"{place} is not a folder of quantize_sentence_transformer: it has no {MODULES}, or no folder "
            f"{ARTEFACT!r}. SentenceTransformer loads other folders."
        )
        raise ArtefactError(msg)
    checksums.check(place)
    trust = {"trust_remote_code": trust_remote_code}
    if not trust_remote_code:
        _check_names(place)
    options = {"verify": verify, "verify_sizes": verify_sizes, "padding": padding, **trust}
    modules: list[Any] = []
    for entry in json_list(place / MODULES):
        kind, where = _kind(entry, place, trust_remote_code), str(_inside(place, entry["path"]))
        if not modules:
            kind = _with_artefact(kind, warm, sorted_lengths(lengths), options)
        with read_by_others(Path(where), trust_remote_code):
            modules.append(kind.load(where, **trust))
    if not modules:
        msg = f"{place / MODULES} names no modules. Copy the folder again."
        raise ArtefactCorruptError(msg)
    modules[0].__class__ = type(modules[0]).__bases__[0]  # other processes import it by its name
    settings = json_object(place / SETTINGS)
    model = _model_kind(settings, place)
    known = inspect.signature(model.__init__).parameters
    given = {name: settings[name] for name in _GIVEN if name in settings and name in known}
    if "activation_fn" in settings:
        given["activation_fn"] = _activation(settings["activation_fn"], place / SETTINGS, trust_remote_code)
    with read_by_others(place, trust_remote_code):
        return model(modules=modules, device="cpu", **given)


def _inside(folder: Path, name: str) -> Path:
    """Return a path in a folder.

    Raises:
        ArtefactCorruptError: it is not in it.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        msg = f"{folder / MODULES} names {name!r}, which is outside of the folder."
        raise ArtefactCorruptError(msg)
    return path


def _check_names(folder: Path) -> None:
    """Check the classes and functions that modules of sentence-transformers import by names in their files.

    Raises:
        ArtefactCorruptError: one is not of sentence-transformers or torch.nn, or a file is malformed.
    """
    for file in sorted(folder.rglob("*config*.json")):
        settings = json_object(file)
        types = settings.get("types")  # of a Router: modules by their folders
        for name, kind in types.items() if isinstance(types, dict) else ():
            _inside(file.parent, name)
            _kind({"type": kind, "path": name}, file.parent, False)
        function = settings.get("activation_function")  # of Dense; those of transformers have no dots
        if isinstance(function, str) and "." in function:
            _activation(function, file, False)


def _model_kind(settings: dict[str, Any], folder: Path) -> Any:
    """Return the class of the model in a folder."""
    name = settings.get("model_type", _KINDS[0])
    kind = getattr(importlib.import_module("sentence_transformers"), str(name), None)
    if name not in _KINDS or kind is None:
        msg = f"{folder / SETTINGS} names {name!r}, which the installed sentence-transformers lacks."
        raise ArtefactSchemaError(msg)
    return kind


def _activation(name: Any, file: Path, trust_remote_code: bool) -> torch.nn.Module:
    """Return the function of a cross encoder's scores; only torch's own are loaded, or trusted ones."""
    package, _, kind = str(name).rpartition(".")
    found = getattr(torch.nn, kind, None) if f"{package}.".startswith("torch.nn.") else None
    if found is None and trust_remote_code:
        with read_by_others(file, trust_remote_code):
            found = getattr(importlib.import_module(package), kind)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        msg = f"{file} names {name!r}, which is not a module of torch.nn. {_NO_OTHER}"
        raise ArtefactCorruptError(msg)
    return found()


def _kind(entry: Any, folder: Path, trust_remote_code: bool) -> Any:
    """Return the class of a module of a folder; only sentence-transformers' own are imported, or trusted."""
    name = entry.get("type") if isinstance(entry, dict) and isinstance(entry.get("path"), str) else None
    is_own = isinstance(name, str) and name.startswith("sentence_transformers.")
    if isinstance(name, str) and not is_own and trust_remote_code:
        of: Any = importlib.import_module("sentence_transformers.util")
        with read_by_others(folder / MODULES, trust_remote_code):
            return of.import_module_class(name, str(folder), trust_remote_code=True)
    package, _, kind = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(package), kind) if is_own else None
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"{folder / MODULES} names {name}, which the installed sentence-transformers lacks."
        raise ArtefactSchemaError(msg) from error
    ours = isinstance(found, type) and issubclass(found, torch.nn.Module)
    if not ours or not found.__module__.startswith("sentence_transformers."):
        msg = (
            f"{folder / MODULES} names {entry!r}, which is not a module of sentence-transformers. {_NO_OTHER}"
        )
        raise ArtefactCorruptError(msg)
    return found


def _save(model: Any, attribute: str, quantized: QuantizedTransformer, target: Path) -> None:
    """Write a SentenceTransformer with another encoder; the folder is there as a whole or not at all."""
    first, encoder = model[0], getattr(model[0], attribute)
    setattr(first, attribute, quantized)
    try:
        with written(target, MODULES, ARTEFACT) as staged:
            model.save_pretrained(str(staged), create_model_card=False)
    finally:
        setattr(first, attribute, encoder)


def _with_artefact(kind: Any, warm: Sequence[Any], lengths: Sequence[int], options: Mapping[str, Any]) -> Any:
    """Return a class of sentence-transformers that loads the artefact in the place of the weights."""

    def load_quantized(self: Any, model_name_or_path: str, *_: Any, **__: Any) -> QuantizedTransformer:
        return load_model(model_name_or_path, warm, lengths, **options)

    return type(kind.__name__, (kind,), {"_load_model": load_quantized})


def _encoder(model: Any) -> tuple[torch.nn.Module, str]:
    """Return the transformers model in the first module, and the attribute that holds it."""
    if not isinstance(model, torch.nn.Sequential):
        msg = (
            f"Expected a SentenceTransformer, but got {kind_of(model)}, which does not consist of modules. "
            "For a model of transformers call nc.hf.quantize."
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
