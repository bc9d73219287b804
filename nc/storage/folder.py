"""A directory of model.json, weights.safetensors and checksums.json.

It is written atomically, and checked when it is read.

What the document says is the business of the format: `store` for graphs, `nc.weights.files.artefact` for
models with low-bit weights. Checksums find accidents, not attackers, who can write new checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import mmap
import os
import platform
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nc._version import __version__
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError, ArtefactSchemaError
from nc.process.warn import said_after
from nc.storage import tensor_file
from nc.storage.atomic import check_first, replaced_folder, resolved
from nc.storage.json_values import check_letters
from nc.storage.mapped import MappedFile
from nc.storage.marks import is_of, json_like, signed, unedited
from nc.storage.tensor_file import Source
from nc.text.json_text import parsed

#: The formats, each with the newest schema that this version reads. A number goes up when a reader of the
#: number before would misread the files; docs/contribute/extending.md has the policy.
FORMATS = {"nc-model": 1, "nc-weights": 1}

MODEL, WEIGHTS, CHECKSUMS = "model.json", "weights.safetensors", "checksums.json"
_FILES = (MODEL, WEIGHTS)
#: For people and for model hubs. It may be edited, so it has no checksum, and is no longer replaced.
CARD = "README.md"
_ADVICE = "Copy the artefact again from where it was made, or save the model again."


@dataclasses.dataclass(frozen=True, slots=True)
class FolderContent:
    """Complete, unaltered files; nothing of them is built yet.

    Attributes:
        directory: the folder of the files.
        document: the content of model.json.
        weights: the bytes of weights.safetensors.
        check: raises ArtefactCorruptError when these bytes are not those that were written; waits until that
            is known.
    """

    directory: Path
    document: dict[str, Any]
    weights: MappedFile
    check: Callable[[], None]

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Check the weights at the end of a block.

        If they are damaged, that is the cause of whatever fails in it, or is warned of.
        """
        with said_after(self.check):
            yield

    @property
    def format(self) -> str:
        """Which of `FORMATS` it is."""
        return str(self.document["format"])

    def tensors(
        self, in_file: Callable[[str, torch.Tensor], bool] = lambda name, tensor: False
    ) -> dict[str, torch.Tensor]:
        """Return the tensors by name.

        Args:
            in_file: (name, tensor) → whether it may stay in the memory of the file; see `nc.storage.mapped`
                for what that means.

        Raises:
            ArtefactCorruptError: the file is not what it should be.
        """
        with malformed(self.directory / WEIGHTS):
            # into torch's own, aligned memory: matrix kernels round differently where it isn't
            return {
                n: t if in_file(n, t) else tensor_file.copy(t)
                for n, t in tensor_file.views(self.weights.buffer).items()
            }


def replaceable(directory: str | os.PathLike[str]) -> Path:
    """Return the directory to write, before any work is done for it.

    Raises:
        ArtefactError: something else than an artefact is there.
    """
    target = resolved(directory)  # a link to a directory stays a link
    check_first(target, is_replaceable)
    return target


def write(
    target: Path, document: dict[str, Any], tensors: Mapping[str, torch.Tensor | Source], card: str = ""
) -> None:
    """Write an artefact; the same content gives the same bytes.

    Args:
        target: the result of `replaceable`; created with its parents. An artefact that is there is replaced
            as a whole.
        document: with the keys "format" and "schema".
        tensors: contiguous ones that share no memory, or ones in files, which are copied from there piece by
            piece.
        card: the text of README.md; "": no such file.

    Raises:
        ArtefactError: something else is there by now, or it cannot be written.
        InputError: a name in it can't be read again.
    """
    check_letters(document, tensors)
    with replaced_folder(target, is_replaceable) as staged:
        staged.mkdir()
        (staged / MODEL).write_text(_model_json(document), encoding="ascii")
        hashed = hashlib.sha256()
        tensor_file.write(staged / WEIGHTS, tensors, hashed.update)
        weights = {"sha256": hashed.hexdigest(), "size": (staged / WEIGHTS).stat().st_size}
        sums = {MODEL: _checksum((staged / MODEL).read_bytes()), WEIGHTS: weights}
        (staged / CHECKSUMS).write_text(_checksums_json(sums), encoding="ascii")
        if card:
            (staged / CARD).write_text(signed(card), encoding="utf-8")


def read(
    directory: str | os.PathLike[str], formats: Collection[str] = tuple(FORMATS), *, wait: bool = True
) -> FolderContent:
    """Read and check an artefact.

    Args:
        directory: the folder of the artefact.
        formats: those that are expected, out of `FORMATS`.
        wait: until the weights are checked. False: the caller works on them meanwhile, and calls
            `FolderContent.check`.

    Raises:
        ArtefactMissingError: the directory or a file of it is not there.
        ArtefactCorruptError: a file is truncated or altered.
        ArtefactSchemaError: a newer version wrote it, or it has none of these formats.
    """
    folder = Path(directory)
    if not folder.is_dir():
        msg = f"There is no directory {str(folder)!r}; give the directory that save() wrote."
        raise ArtefactMissingError(msg)
    path = folder / CHECKSUMS
    raw = _bytes(path)
    with malformed(path):
        sums = parsed(raw)
        # every byte counts here: nothing else would notice a change of white space, or of a name
        if MODEL not in sums or _checksums_json(sums).encode() != raw:
            msg = "it is not as it was written"
            raise ValueError(msg)
    document = _document(folder, sums, formats)
    if sorted(sums) != sorted(_FILES):
        found = ", ".join(sums)
        msg = f"{path}: expected the checksums of {', '.join(_FILES)}, but got those of {found}. {_ADVICE}"
        raise ArtefactCorruptError(msg)
    content = FolderContent(folder, document, *_weights(folder, sums))
    if wait:
        content.check()
    return content


def _weights(folder: Path, sums: dict[str, Any]) -> tuple[MappedFile, Callable[[], None]]:
    """Return the weights, and what raises ArtefactCorruptError when they are altered.

    A thread computes their checksum.
    """
    path = folder / WEIGHTS
    _check_is_there(path)
    weights = MappedFile.of(path)
    got: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: got.append(_checksum(weights.buffer)), daemon=True)
    worker.start()

    def check() -> None:
        worker.join()
        _compare(path, sums[WEIGHTS], got[0])

    return weights, check


def _document(folder: Path, sums: dict[str, Any], formats: Collection[str]) -> dict[str, Any]:
    """model.json, once its checksum and its schema are known to be right."""
    raw = _checked(folder, MODEL, sums)
    with malformed(folder / MODEL):
        document: dict[str, Any] = parsed(raw)
    found: Any = document.get("format") if isinstance(document, dict) else None
    if found not in formats:
        ours = found in tuple(FORMATS)
        what = (
            "that is another kind of model; use nc.load()."
            if ours
            else "nc.save() wrote none of this. Give the directory that it wrote."
        )
        msg = (
            f"{folder / MODEL}: expected the format {' or '.join(map(repr, formats))}, but got {found!r}: "
            f"{what}"
        )
        raise ArtefactSchemaError(msg)
    schema = document.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= FORMATS[found]:
        versions = document.get("versions")
        writer = versions.get("nc") if isinstance(versions, dict) else None
        msg = (
            f"{folder / MODEL} has schema {schema!r} and is from nc {writer}; this is nc {__version__}, "
            f"which reads schemas up to {FORMATS[found]}. Upgrade nc to read it."
        )
        raise ArtefactSchemaError(msg)
    return document


def _checked(folder: Path, name: str, sums: dict[str, Any]) -> bytes:
    """Return a file's bytes, read once: what was checked is what is used."""
    raw = _bytes(folder / name)
    _compare(folder / name, sums[name], _checksum(raw))
    return raw


def _compare(path: Path, expected: Any, got: dict[str, Any]) -> None:
    if expected != got:
        size = expected.get("size") if isinstance(expected, dict) else None
        what = (
            "its SHA-256 differs" if size == got["size"] else f"it has {got['size']} bytes instead of {size}"
        )
        msg = f"{path}: damaged, or {CHECKSUMS} beside it is: {what}. {_ADVICE}"
        raise ArtefactCorruptError(msg)


def _bytes(path: Path) -> bytes:
    _check_is_there(path)
    return path.read_bytes()


def _check_is_there(path: Path) -> None:
    if not path.is_file():
        advice = _ADVICE
        if path.name == CHECKSUMS and (path.parent / "config.json").is_file():
            advice = (
                "If it is the folder of a float model, load it with transformers, and quantize it. What "
                "nc.hf.quantize wrote, nc.hf.load loads."
            )
        msg = f"{path} is missing; an artefact consists of {', '.join((*_FILES, CHECKSUMS))}. {advice}"
        raise ArtefactMissingError(msg)


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


def _checksum(raw: bytes | bytearray | mmap.mmap) -> dict[str, Any]:
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


def versions(*, transformers: bool) -> dict[str, str]:
    """Of nc, torch and Python, and if asked of transformers."""
    found = {"nc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if transformers:
        with contextlib.suppress(
            importlib.metadata.PackageNotFoundError
        ):  # a loaded model is saved again where there is none
            found["transformers"] = importlib.metadata.version("transformers")
    return found


def is_replaceable(target: Path) -> bool:
    """Return whether an artefact, or nothing, is at a path.

    Raises:
        ArtefactError: something else is; says what.
    """
    names = sorted(p.name for p in target.iterdir()) if target.is_dir() else None
    known = {*_FILES, CHECKSUMS, *([CARD] if unedited(target / CARD) else [])}
    if names == [] or (names is not None and set(names) <= known and is_artefact(target)):
        return True
    what = (
        "is a file"
        if names is None
        else f"holds other files ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
    )
    msg = (
        f"{str(target)!r} exists and {what}; save() replaces only an earlier artefact. Choose another "
        "directory, or remove this one."
    )
    raise ArtefactError(msg)


def is_artefact(folder: Path) -> bool:
    """Return whether one of the two JSON files, the other of which may be damaged, says that nc wrote them.

    Raises:
        ArtefactSchemaError: a newer nc wrote them.
    """
    model = folder / MODEL
    if any(
        json_like(lambda data, name=name, newest=newest: is_of(data, name, newest, model))(model)  # type: ignore[misc]
        for name, newest in FORMATS.items()
    ):
        return True
    return not json_like(lambda _: True)(model) and json_like(lambda data: MODEL in data)(folder / CHECKSUMS)
