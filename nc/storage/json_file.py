"""JSON files that other tools wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nc.errors import ArtefactCorruptError


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; raises ArtefactCorruptError if it holds none."""
    found: dict[str, Any] = _value(path, dict, "object")
    return found


def json_list(path: Path) -> list[Any]:
    """Return the array in a file; raises ArtefactCorruptError if it holds none."""
    found: list[Any] = _value(path, list, "array")
    return found


def _value(path: Path, kind: type, called: str) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        msg = f"{str(path)!r} is no JSON ({error}). Get it again."
        raise ArtefactCorruptError(msg) from error
    if not isinstance(found, kind):
        msg = f"{str(path)!r} is no JSON {called}, but a {type(found).__name__}. Get it again."
        raise ArtefactCorruptError(msg)
    return found
