"""What calibration saves: one safetensors file, whose metadata is JSON with a schema version and a checksum.

Loading unpickles nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch

from nc._version import __version__
from nc.errors import ArtefactCorruptError, ArtefactMissingError, ArtefactSchemaError, NCError
from nc.formats.checks import checked_path
from nc.storage.atomic import replaced
from nc.storage.json_values import check_letters
from nc.text.json_text import parsed

#: Name and version of a kind of file.
Kind = tuple[str, int]
FileContent = TypeVar("FileContent")


def encode(kind: Kind, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of a file."""
    return safetensors.torch.save(tensors, _metadata(kind, document, tensors))


def write(
    path: str | os.PathLike[str], kind: Kind, document: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write a file. If that fails, an earlier file stays as it was.

    Raises:
        ArtefactError: something else than an earlier file of this kind is there, or it cannot be written.
        InputError: a name in it can't be read again.
    """
    check_letters(document, tensors)
    with replaced(path, functools.partial(_is_of, kind)) as staged:
        safetensors.torch.save_file(tensors, staged, _metadata(kind, document, tensors))


def _is_of(kind: Kind, path: Path) -> bool:
    """Return whether a file is of a kind, and no newer one."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            document = parsed((file.metadata() or {}).get("nc", ""))
    except (safetensors.SafetensorError, ValueError):
        return False
    version = document.get("schema_version") if isinstance(document, dict) else None
    return type(version) is int and version <= kind[1] and document.get("format") == kind[0]


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file; ArtefactMissingError if there is none."""
    if not checked_path("path", path).is_file():
        msg = f"{path}: there is no such file; `prepared.statistics.save(path)` writes one."
        raise ArtefactMissingError(msg)
    return Path(path).read_bytes()


def decode(
    kind: Kind,
    data: bytes,
    where: str,
    parse: Callable[[dict[str, Any], dict[str, torch.Tensor]], FileContent],
) -> FileContent:
    """Return what a file holds.

    Args:
        kind: that it should have.
        data: its bytes.
        where: its name, for messages.
        parse: JSON and tensors → content; whatever it raises means that the file is damaged.

    Raises:
        ArtefactCorruptError, ArtefactSchemaError.
    """
    try:
        metadata = parsed(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        # a copy in torch's own memory is aligned: kernels round differently on other memory
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(data).items()}
        text = metadata["nc"]
        if metadata["sha256"] != checksum(text, tensors):
            msg = (
                f"{where}: the content is not what was written: its checksum differs. Save the statistics "
                "again."
            )
            raise ArtefactCorruptError(msg)
        document = parsed(text)
        found = document.get("format"), document.get("schema_version")
        if found != kind:
            msg = (
                f"{where}: expected {kind[0]} of schema version {kind[1]}, but got {found[0]!r} of version "
                f"{found[1]!r}. A newer nc wrote it, or it is something else."
            )
            raise ArtefactSchemaError(msg)
        return parse(document, tensors)
    except NCError:
        raise
    except Exception as error:
        msg = f"{where}: not what nc writes ({type(error).__name__}: {error}). Save the statistics again."
        raise ArtefactCorruptError(msg) from error


def checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a text and of named tensors, in hex."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(
            t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""
        )
    return digest.hexdigest()


def _metadata(kind: Kind, document: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    text = json.dumps(
        {"format": kind[0], "schema_version": kind[1], "nc": __version__, **document}, allow_nan=False
    )
    return {"nc": text, "sha256": checksum(text, tensors)}
