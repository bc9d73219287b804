"""A table of checksums over the files of a folder that nc.hf wrote, checked before one of them is used.

Artefacts have their own checksums: the table has that of their `checksums.json`. Files that are not in it,
such as a README that was added later, are not looked at. Folders of versions that wrote no table are loaded
with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from nc.errors import ArtefactCorruptError, ArtefactMissingError, ArtefactSchemaError
from nc.process.warn import warn
from nc.storage import folder as artefact
from nc.storage.atomic import replaced
from nc.storage.json_file import json_object
from nc.text.json_text import built

TABLE = "nc_checksums.json"
_SCHEMA = 1
#: Bytes that are read at a time.
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    schema: int
    files: dict[str, _File]


def write(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Write the table of a folder.

    Args:
        folder: of the files.
        files: those that were written, in the folder; what a table lists besides stays. None: all.

    Raises:
        ArtefactError: what is there is no table, or one of a newer version.
    """
    listed = folder.rglob("*") if files is None else files
    earlier = {} if files is None or not (folder / TABLE).is_file() else _read(folder / TABLE)
    found = earlier | {
        path.relative_to(folder).as_posix(): _checksum(path)
        for path in listed
        if path.is_file() and path != folder / TABLE and not _is_covered(path)
    }
    with replaced(folder / TABLE, is_table) as staged:
        text = json.dumps(dataclasses.asdict(_Table(_SCHEMA, found)), indent=1, sort_keys=True)
        staged.write_text(text + "\n", encoding="ascii")


def is_table(path: Path) -> bool:
    """Return whether a file is a table of this version.

    Raises:
        ArtefactSchemaError: a newer version wrote it.
    """
    try:
        _read(path)
    except (ArtefactCorruptError, ArtefactMissingError):
        return False
    return True


def check(folder: Path) -> None:
    """Compare the files of a folder with its table; it warns where there is none.

    Raises:
        ArtefactMissingError: a file is missing.
        ArtefactCorruptError: a file, or the table, was altered.
        ArtefactSchemaError: a newer version wrote the table.
    """
    path = folder / TABLE
    if not path.is_file():
        warn(
            f"{folder} has no {TABLE}, like folders of older versions of nc: files beside the artefact, "
            "e.g. the tokenizer, are not checked. To get one, quantize again."
        )
        return
    files = _read(path)
    for name, expected in files.items():
        if not (folder / name).is_file():
            msg = f"{folder / name} is missing. Copy the folder again, or quantize again."
            raise ArtefactMissingError(msg)
        if _checksum(folder / name) != expected:
            msg = (
                f"{folder / name} is not the file that was saved. Copy the folder again, or quantize again. "
                f"If you changed it on purpose, remove {path}: then only the artefact is checked."
            )
            raise ArtefactCorruptError(msg)


def _read(path: Path) -> dict[str, _File]:
    """Return name → checksum and size, of a table.

    Raises:
        ArtefactMissingError, ArtefactCorruptError: there is no table, or it was altered.
        ArtefactSchemaError: a newer version wrote it.
    """
    table = json_object(path)
    if isinstance(table.get("schema"), int) and table["schema"] > _SCHEMA:
        msg = f"{path} was written by a newer version of nc. Install a newer version of nc."
        raise ArtefactSchemaError(msg)
    with artefact.malformed(path):
        files = built(_Table, table, "the table").files
        if not all(map(_is_inside, files)):
            msg = "it names a file outside of the folder"
            raise ValueError(msg)
    return files


def is_ours(folder: Path) -> bool:
    """Tell whether a folder has a table, and no file that is neither in it nor covered by an artefact's own.

    Raises:
        ArtefactSchemaError: a newer version wrote the table.
    """
    try:
        known = _read(folder / TABLE)
    except (ArtefactCorruptError, ArtefactMissingError):
        return False
    found = (
        path
        for path in folder.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and path != folder / TABLE
    )
    return all(path.relative_to(folder).as_posix() in known or _is_covered(path) for path in found)


def identity(folder: Path) -> str:
    """Return what tells an artefact from others; "" where there is none."""
    path = folder / artefact.CHECKSUMS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _is_covered(path: Path) -> bool:
    """Return whether a file is one of an artefact, whose own checksums cover it."""
    names = (artefact.MODEL, artefact.WEIGHTS)
    return path.name in names and (path.parent / artefact.CHECKSUMS).is_file()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _checksum(path: Path) -> _File:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return _File(digest.hexdigest(), path.stat().st_size)
