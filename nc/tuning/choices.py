"""What `autoquant` chose, for models and machines, in one JSON file.

An entry has the hash of all that determines it as its name, and that itself beside it. A file that can't be
read, damaged or of a newer nc, is never written: entries of other models may be in it. Two processes that
write at the same time can lose an entry, which is then measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nc.config import AnyConfig, config_from
from nc.errors import ArtefactError
from nc.process.warn import warn
from nc.storage.atomic import check_no_directory, resolved, write_text
from nc.storage.json_file import json_value
from nc.storage.marks import json_like
from nc.text.json_text import built, parsed

_SCHEMA = 1
_FIELDS = ("schema", "choices")
_KEPT = "It stays as it is, and nothing is kept: remove it, or give another file."


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A choice.

    Attributes:
        config: gives the model; None: it stays as it is.
        why: one sentence, with what was measured.
    """

    config: AnyConfig | None
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Document:
    """What a file holds."""

    schema: int
    choices: dict[str, Any]


class Choices:
    """Stores choices in a JSON file.

    Args:
        path: the file; None: nothing is stored.

    Raises:
        ArtefactError: the path is a directory, or a JSON file that nc did not write.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else resolved(path)
        if path is not None:
            check_no_directory(path)
            if path.exists() and json_like(lambda data: not set(_FIELDS) & set(data))(path):
                msg = (
                    f"cache={str(path)!r} is another JSON file, which nc did not write. Choose another name."
                )
                raise ArtefactError(msg)

    def find(self, key: Mapping[str, Any]) -> Taken | None:
        """Return the stored choice; None if there is none or, with an `NCWarning`, if it is damaged."""
        try:
            entry = self._entries().get(_name(key))
        except ValueError as error:
            why = str(error).rstrip(".")
            warn(f"cache={str(self._path)!r} is damaged, and all is measured again: {why}. {_KEPT}")
            return None
        if entry is None:
            return None
        try:
            if entry["key"] != parsed(json.dumps(key)):
                msg = "it is of something else"
                raise ValueError(msg)
            config = entry["config"]
            return Taken(None if config is None else config_from(config), str(entry["why"]))
        except (KeyError, TypeError, ValueError) as error:  # a ConfigError is a ValueError
            warn(f"An entry of {self._path} is damaged, and is measured again: {error}")
            return None

    def keep(self, key: Mapping[str, Any], taken: Taken) -> None:
        """Store a choice, unless the file is damaged, which `find` warns about.

        Raises:
            ArtefactError: the file can't be written.
        """
        if self._path is None:
            return
        config = None if taken.config is None else taken.config.to_dict()
        entry = {"key": dict(key), "config": config, "why": taken.why}
        try:
            choices = {**self._entries(), _name(key): entry}
        except ValueError:
            return
        document = {"schema": _SCHEMA, "choices": choices}
        write_text(self._path, json.dumps(document, indent=1, sort_keys=True) + "\n", lambda _: True)

    def _entries(self) -> dict[str, Any]:
        """Return the entries, none if there is no file; raise ValueError if the file is damaged."""
        if self._path is None or not self._path.exists():
            return {}
        document = built(_Document, json_value(self._path), "the file")
        if document.schema != _SCHEMA:
            msg = f"its schema is {document.schema}, and not {_SCHEMA}"
            raise ValueError(msg)
        return document.choices


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
