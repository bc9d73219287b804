"""QDQ graph ↔ a directory of safetensors, JSON and checksums: written atomically, checked before it is built.

docs/artefact.md describes the format. Checksums find accidents, not attackers, who can write new checksums.
Untrusted files are safe because of what is never done with them, see `nc.storage.graph_json`,
`nc.storage.allowlist` and `nc.storage.pytree_json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from nc._version import __version__
from nc.errors import (
    ArtefactCorruptError,
    ArtefactError,
    ArtefactMissingError,
    ArtefactSchemaError,
)
from nc.graph.qdq import QDQGraph
from nc.plan import Plan
from nc.storage import graph_json, schema_1
from nc.storage.atomic import staging_path

FORMAT = "nc-model"
#: Goes up when a reader of the number before would misread the files; docs/artefact.md has the policy.
SCHEMA = 2

MODEL, WEIGHTS, CHECKSUMS = "model.json", "weights.safetensors", "checksums.json"
_FILES = (MODEL, WEIGHTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """An artefact with complete, unaltered files and listed operators only; nothing of it is built yet.

    Attributes:
        directory: where it lies.
        document: the content of model.json.
        weights: the bytes of weights.safetensors.
    """

    directory: Path
    document: dict[str, Any]
    weights: bytes

    @property
    def plan(self) -> Plan:
        """The plan, without building the graph; raises ArtefactCorruptError like `graph`."""
        with malformed(self.directory / MODEL):
            return Plan.from_dict(self.document["plan"])

    def graph(self) -> QDQGraph:
        """Build the graph.

        Raises:
            ArtefactCorruptError: the files agree with their checksums, but are not what `write` writes.
            ArtefactOperatorError: this version of torch lacks an operator.
        """
        with malformed(self.directory / WEIGHTS):
            tensors = safetensors.torch.load(self.weights)
            for name, tensor in tensors.items():
                # into torch's own, aligned memory: matrix kernels round differently where it isn't
                tensors[name] = tensor.clone()
        with malformed(self.directory / MODEL):
            return graph_json.decode(self.document, tensors)


def write(graph: QDQGraph, backend: str, directory: str | os.PathLike[str]) -> None:
    """Write a graph as an artefact; the same graph gives the same bytes.

    Args:
        graph: the quantized model.
        backend: name of the backend that it ran on, as information.
        directory: created with its parents; an artefact that is there is replaced as a whole.

    Raises:
        ArtefactError: something else is there, or the graph holds something that an artefact can't; the
            message names it.
        ArtefactOperatorError: an operator is not on the allow-list.
    """
    target = Path(directory).resolve()  # a link to a directory stays a link
    if target.exists():
        with _alone_in(target.parent):
            _check_replaceable(target)  # before the work, and again before it is put there
    document, tensors = graph_json.encode(graph)
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "versions": _versions(document),
        "backend": backend,
        **document,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = staging_path(target)
    staged.mkdir()
    try:
        (staged / MODEL).write_text(_model_json(document), encoding="ascii")
        safetensors.torch.save_file(tensors, staged / WEIGHTS)
        shutil.copymode(staged / MODEL, staged / WEIGHTS)  # safetensors lets nobody else read it
        sums = {name: _checksum((staged / name).read_bytes()) for name in _FILES}
        (staged / CHECKSUMS).write_text(_checksums_json(sums), encoding="ascii")
        for path in (*staged.iterdir(), staged):
            _flush(path)
        with _alone_in(target.parent):
            _check_replaceable(target)
            _publish(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def read(directory: str | os.PathLike[str]) -> Stored:
    """Read and check an artefact.

    Raises:
        ArtefactMissingError: the directory or a file of it is not there.
        ArtefactCorruptError: a file is truncated or altered.
        ArtefactSchemaError: a newer version wrote it, or it is not an artefact.
        ArtefactOperatorError: its graph holds an operator that is not on the allow-list.
    """
    folder = Path(directory)
    if not folder.is_dir():
        msg = f"There is no directory {str(folder)!r}; give the directory that save() wrote."
        raise ArtefactMissingError(msg)
    path = folder / CHECKSUMS
    raw = _bytes(path)
    with malformed(path):
        sums = json.loads(raw)
        # every byte counts here: nothing else would notice a change of white space, or of a name
        if MODEL not in sums or _checksums_json(sums).encode() != raw:
            msg = "it is not as it was written"
            raise ValueError(msg)
    document = _document(folder, sums)
    if sorted(sums) != sorted(_FILES):
        found = ", ".join(sums)
        msg = f"{path}: expected the checksums of {', '.join(_FILES)}, but got those of {found}. {_ADVICE}"
        raise ArtefactCorruptError(msg)
    weights = _checked(folder, WEIGHTS, sums)
    with malformed(folder / MODEL):
        graph_json.check_operators(document)
    return Stored(folder, document, weights)


_ADVICE = "Copy the artefact again from where it was made, or save the model again."


def _document(folder: Path, sums: dict[str, Any]) -> dict[str, Any]:
    """model.json, once its checksum and its schema are known to be right."""
    raw = _checked(folder, MODEL, sums)
    with malformed(folder / MODEL):
        document: dict[str, Any] = json.loads(raw)
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        msg = (
            f"{folder / MODEL}: expected the format {FORMAT!r}, but got {found!r}: nc.save() wrote none of "
            "this. Give the directory that it wrote."
        )
        raise ArtefactSchemaError(msg)
    schema = document.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        versions = document.get("versions")
        writer = versions.get("nc") if isinstance(versions, dict) else None
        msg = (
            f"{folder / MODEL} has schema {schema!r} and is from nc {writer}; this is nc {__version__}, "
            f"which reads schemas up to {SCHEMA}. Upgrade nc to read it."
        )
        raise ArtefactSchemaError(msg)
    if schema == 1:
        with malformed(folder / MODEL):
            document = schema_1.upgrade(document)
    return document


def _checked(folder: Path, name: str, sums: dict[str, Any]) -> bytes:
    """A file's bytes, read once: what was checked is what is used."""
    raw = _bytes(folder / name)
    expected, got = sums[name], _checksum(raw)
    if expected != got:
        size = expected.get("size") if isinstance(expected, dict) else None
        what = "its SHA-256 differs" if size == got["size"] else f"it has {got['size']} bytes instead of {size}"
        msg = f"{folder / name}: damaged, or {CHECKSUMS} beside it is: {what}. {_ADVICE}"
        raise ArtefactCorruptError(msg)
    return raw


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        msg = f"{path} is missing; an artefact consists of {', '.join((*_FILES, CHECKSUMS))}. {_ADVICE}"
        raise ArtefactMissingError(msg)
    return path.read_bytes()


@contextlib.contextmanager
def malformed(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a file's content is taken apart means that the content is wrong."""
    try:
        yield
    except ArtefactError:
        raise
    except Exception as error:
        msg = f"{path}: not what nc writes ({type(error).__name__}: {error}). {_ADVICE}"
        raise ArtefactCorruptError(msg) from error


def _checksum(raw: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}


def _checksums_json(sums: dict[str, Any]) -> str:
    return json.dumps(sums, indent=2, sort_keys=True) + "\n"


def _model_json(document: dict[str, Any]) -> str:
    """One line per node, and per entry of other lists and tables: artefacts can be compared with diff."""

    def lines(value: object, depth: int) -> str:
        pad = "\n" + "  " * depth
        if depth < 3 and isinstance(value, dict) and value:
            items = (f"{json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items())
            return "{" + ",".join(pad + item for item in items) + pad[:-2] + "}"
        if depth < 4 and isinstance(value, list) and any(isinstance(v, dict) for v in value):
            return "[" + ",".join(pad + json.dumps(v, allow_nan=False) for v in value) + pad[:-2] + "]"
        return json.dumps(value, allow_nan=False)

    return lines(document, 1) + "\n"


def _versions(document: dict[str, Any]) -> dict[str, str]:
    versions = {"nc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if '"transformers.' in json.dumps(document["signature"]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a loaded model is saved again where there is none
            versions["transformers"] = importlib.metadata.version("transformers")
    return versions


def _flush(path: Path) -> None:
    """Hand a file, or a directory's entries, to the disk before the artefact gets its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_replaceable(target: Path) -> None:
    """Only an artefact, or nothing, is ever replaced."""
    if not target.exists():
        return
    names = sorted(p.name for p in target.iterdir()) if target.is_dir() else None
    if names == [] or (names is not None and set(names) <= {*_FILES, CHECKSUMS} and _is_ours(target)):
        return
    what = "is a file" if names is None else f"holds other files ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
    msg = f"{str(target)!r} exists and {what}; save() replaces only an earlier artefact. Choose another directory, or remove this one."
    raise ArtefactError(msg)


def _is_ours(folder: Path) -> bool:
    """Whether one of the two JSON files, the other of which may be damaged, says that nc wrote them."""
    marks: dict[str, Callable[[dict[str, Any]], bool]] = {
        MODEL: lambda data: data.get("format") == FORMAT,
        CHECKSUMS: lambda data: MODEL in data,
    }
    for name, is_marked in marks.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if is_marked(json.loads((folder / name).read_bytes())):
                return True
    return False


def _publish(staged: Path, target: Path) -> None:
    """Give a complete directory its name; what was there survives until then, and a failure."""
    aside = staged.with_suffix(".old")
    try:
        if target.exists():  # a full directory can't be renamed over another
            target.rename(aside)
        staged.rename(target)
    finally:
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(target)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other savers, in threads and processes, out of a directory while its entries are renamed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # there are file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
