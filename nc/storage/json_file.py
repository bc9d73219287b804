"""JSON files, read within limits: of the user, of other tools, and of nc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nc.errors import ArtefactCorruptError, ArtefactMissingError
from nc.text.json_text import MOST_BYTES, parsed


def check_is_file(path: Path) -> None:
    """Raise ArtefactMissingError if there is no file of this name; reading a pipe could block forever."""
    if not path.is_file():
        msg = f"{str(path)!r} does not exist, or is not a file."
        raise ArtefactMissingError(msg)


def text_of(path: Path) -> bytes:
    """Return the bytes of a file, if there is one and it is not too large for JSON.

    Raises:
        ArtefactMissingError: there is no file of this name.
        ArtefactCorruptError: it can't be read, or is too large.
    """
    check_is_file(path)
    try:
        with path.open("rb") as file:
            found = file.read(MOST_BYTES + 1)
    except OSError as error:
        msg = f"{str(path)!r} can't be read: {error.strerror or error}."
        raise ArtefactCorruptError(msg) from error
    if len(found) > MOST_BYTES:
        msg = f"{str(path)!r} has more than {MOST_BYTES} bytes, which no file of this kind has."
        raise ArtefactCorruptError(msg)
    return found


def json_value(path: Path, *, finite: bool = True) -> Any:
    """Return what a file holds; `finite` as in `nc.text.json_text.parsed`.

    Raises:
        ArtefactMissingError, ArtefactCorruptError: as `text_of`; it is not JSON, or beyond the limits.
    """
    try:
        return parsed(text_of(path), finite=finite)
    except ArtefactCorruptError:
        raise
    except ValueError as error:
        if isinstance(error, ArtefactMissingError):
            raise
        msg = f"{str(path)!r} is not JSON ({error}). Get it again."
        raise ArtefactCorruptError(msg) from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in another tool's file; raises as `json_value`, and if it holds none."""
    found: dict[str, Any] = _of_kind(path, dict, "object")
    return found


def json_list(path: Path) -> list[Any]:
    """Return the array in another tool's file; raises as `json_value`, and if it holds none."""
    found: list[Any] = _of_kind(path, list, "array")
    return found


def _of_kind(path: Path, kind: type, called: str) -> Any:
    found = json_value(path, finite=False)
    if not isinstance(found, kind):
        msg = f"{str(path)!r} is not a JSON {called}, but a {type(found).__name__}. Get it again."
        raise ArtefactCorruptError(msg)
    return found
