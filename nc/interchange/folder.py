"""Folders of safetensors with a config.json, as transformers has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError, ArtefactSchemaError
from nc.storage import marks
from nc.storage.atomic import check_ours, replaced, resolved, write_text
from nc.storage.json_file import check_is_file, json_object

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KEY = "quantization_config"


def write(folder: Path, tensors: Mapping[str, torch.Tensor], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write tensors as one file and dictionaries as JSON files; config.json is the last of them.

    Raises:
        ArtefactError: the folder has weights that are not replaced by these, so that readers would mix them;
            or one of the files is there and not from an earlier export.
    """
    folder = alone(resolved(folder), WEIGHTS, *files)
    earlier = (folder / WEIGHTS).is_file() and marks.program(folder / WEIGHTS)
    for name in (WEIGHTS, *files):  # before the first is written
        check_ours(folder / name, lambda _: earlier)
    with replaced(folder / WEIGHTS, lambda _: earlier) as staged:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            staged,
            metadata={"format": "pt", "nc": marks.MARK},
        )
    for name in sorted(files, key=CONFIG.__eq__):
        write_text(folder / name, json.dumps(files[name], indent=2) + "\n", lambda _: earlier)


def alone(folder: Path, *names: str) -> Path:
    """Return the folder, if it has no weights but the files of these names, nor settings of such."""
    kinds = ("*.safetensors*", "*.gguf", "quantize_config.json")
    other = sorted(p.name for kind in kinds for p in folder.glob(kind) if p.name not in names)
    if other:
        msg = f"{str(folder)!r} has other weights ({', '.join(other[:3])}). Choose an empty folder."
        raise ArtefactError(msg)
    return folder


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors of all safetensors files in a folder, and how they are quantized; unpickle nothing.

    Returns:
        Tensors by name; and the `quantization_config` of config.json, or quantize_config.json.

    Raises:
        ArtefactMissingError: the folder does not exist, or has no safetensors file.
        ArtefactCorruptError: a file is truncated or altered, two files have the same tensor, or a tensor of
            the index is missing.
        ArtefactSchemaError: no file says how the weights are quantized.
    """
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        msg = (
            f"There are no safetensors files in {str(folder)!r}. Other files of weights (.bin, .pt) are not "
            "read: they can run code."
        )
        raise ArtefactMissingError(msg)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        check_is_file(file)
        try:
            found = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            msg = f"{str(file)!r} is truncated or altered ({error}). Get it again."
            raise ArtefactCorruptError(msg) from error
        twice = found.keys() & tensors.keys()
        if twice:
            msg = (
                f"{str(file)!r} has tensor {min(twice)!r} a second time. Two models are mixed in this folder."
            )
            raise ArtefactCorruptError(msg)
        tensors |= found
    _complete(folder, tensors)
    return tensors, _settings(folder)


def _complete(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every tensor that the index of several files lists must be there."""
    index = folder / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return
    listed = json_object(index).get("weight_map")
    missing = sorted(set(listed if isinstance(listed, dict) else ()) - tensors.keys())
    if missing:
        msg = (
            f"{str(index)!r} lists tensor {missing[0]!r}, which no file has. The files are incomplete; get "
            "them again."
        )
        raise ArtefactCorruptError(msg)


def _settings(folder: Path) -> dict[str, Any]:
    if (folder / CONFIG).is_file():
        found = json_object(folder / CONFIG).get(KEY)
        if isinstance(found, dict):
            return found
    old = folder / "quantize_config.json"  # AutoGPTQ's
    if old.is_file():
        return {"quant_method": "gptq", **json_object(old)}
    msg = f"No file in {str(folder)!r} says how its weights are quantized: config.json has no {KEY}."
    raise ArtefactSchemaError(msg)
