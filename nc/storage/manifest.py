"""A folder's record of all its files, by which nc knows that it wrote them, and that they are unchanged."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from nc.errors import ArtefactCorruptError, ArtefactMissingError
from nc.storage.json_file import json_value
from nc.storage.marks import described, is_of
from nc.text.json_text import built

NAME = "nc_files.json"
_FORMAT, _SCHEMA = "nc-folder", 1
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    format: str
    schema: int
    files: dict[str, _File]


def write(folder: Path) -> None:
    """Write the record of a complete folder into it."""
    files = {name: dataclasses.asdict(_measured(folder / name)) for name in _names(folder)}
    (folder / NAME).write_text(described(_FORMAT, _SCHEMA, {"files": files}), encoding="utf-8")


def is_ours(folder: Path) -> bool:
    """Whether a folder has a record, and no file that is not in it.

    Raises:
        ArtefactSchemaError: a newer nc wrote it.
    """
    try:
        known = _read(folder).files
    except (ArtefactCorruptError, ArtefactMissingError):
        return False
    return set(_names(folder)) <= set(known)


def check(folder: Path) -> None:
    """Check that all files are there as they were written; others may be there too.

    Raises:
        ArtefactMissingError: the record, or a file of it, is not there.
        ArtefactCorruptError: a file is altered, or the record is damaged.
        ArtefactSchemaError: a newer nc wrote it.
    """
    for name, expected in _read(folder).files.items():
        path = folder / name
        if not path.is_file():
            msg = f"{path} is missing. Copy the folder again from where it was made."
            raise ArtefactMissingError(msg)
        if _measured(path) != expected:
            msg = f"{path} is not as it was written. Copy the folder again from where it was made."
            raise ArtefactCorruptError(msg)


def _read(folder: Path) -> _Record:
    path = folder / NAME
    document = json_value(path)
    if not isinstance(document, dict) or not is_of(document, _FORMAT, _SCHEMA, path):
        msg = f"{path} is not what nc writes. Copy the folder again from where it was made."
        raise ArtefactCorruptError(msg)
    try:
        return built(_Record, document, str(path))
    except ValueError as error:
        msg = f"{path} is not what nc writes: {error}. Copy the folder again from where it was made."
        raise ArtefactCorruptError(msg) from error


def _names(folder: Path) -> list[str]:
    """Return what is in a folder and its folders, but for the record itself."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name != NAME)


def _measured(path: Path) -> _File:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return _File(digest.hexdigest(), path.stat().st_size)
