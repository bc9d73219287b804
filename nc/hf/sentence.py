"""Quantized encoders inside sentence-transformers."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.workflow import quantize
from nc.errors import ArtefactError, InputError
from nc.hf.model import ARTEFACT, QuantizedTransformer, load_model

#: Texts of a calibration batch.
BATCH = 16


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
    """
    if isinstance(texts, str) or not texts:
        msg = "texts: give a list of sentences, as users send them; 100 or more."
        raise InputError(msg)
    encoder, attribute = _encoder(model)
    batches = [_features(model, part) for part in _parts(texts)]
    batches = [{name: batch[name] for name in _known(encoder, batch)} for batch in batches]

    def run(prepared: torch.nn.Module) -> None:
        for batch in batches:
            prepared(**batch)

    quantized = quantize(encoder, config, run, example_inputs=batches[0], **options)
    first = model[0]
    setattr(first, attribute, QuantizedTransformer(quantized, encoder.config))
    try:
        model.save_pretrained(str(out), create_model_card=False)
    finally:
        setattr(first, attribute, encoder)
    return load_sentence_transformer(out)


def load_sentence_transformer(folder: str | os.PathLike[str]) -> Any:
    """Return the SentenceTransformer of a folder that `quantize_sentence_transformer` wrote.

    Raises:
        ArtefactError: it is no such folder.
    """
    from sentence_transformers import SentenceTransformer

    place = Path(folder)
    listed = place / "modules.json"
    if not listed.is_file() or not (place / ARTEFACT).is_dir():
        msg = (
            f"{place} is no folder of quantize_sentence_transformer: it has no modules.json, or no folder "
            f"{ARTEFACT!r}. SentenceTransformer loads other folders."
        )
        raise ArtefactError(msg)
    modules: list[Any] = []
    for entry in json.loads(listed.read_text(encoding="utf-8")):
        package, _, name = entry["type"].rpartition(".")
        kind = getattr(importlib.import_module(package), name)
        where = place / entry["path"]
        modules.append(_quantized(kind).load(str(where)) if not modules else kind.load(str(where)))
    settings = json.loads((place / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    names = ("prompts", "default_prompt_name", "similarity_fn_name")
    return SentenceTransformer(
        modules=modules, device="cpu", **{name: settings[name] for name in names if name in settings}
    )


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


def _features(model: Any, texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = (model.preprocess if hasattr(model, "preprocess") else model.tokenize)(
        list(texts)
    )
    return found


def _known(encoder: torch.nn.Module, batch: dict[str, Any]) -> list[str]:
    """Return which features the encoder's forward takes."""
    parameters = inspect.signature(encoder.forward).parameters
    return [name for name, value in batch.items() if name in parameters and isinstance(value, torch.Tensor)]


def _parts(texts: Sequence[str]) -> list[list[str]]:
    """Return batches of texts of like lengths."""
    ordered = sorted(texts, key=len)
    return [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
