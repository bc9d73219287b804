"""What `autoquant` chose, for models and machines, in one JSON file.

An entry has the hash of all that determines it as its name, and that itself beside it. Files are written by
rename. Two processes that write at the same time can lose an entry, which is then measured again.
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
from nc.storage.atomic import check_no_directory, replaced

_SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A choice.

    Attributes:
        config: gives the model; None: it stays as it is.
        why: one sentence, with what was measured.
    """

    config: AnyConfig | None
    why: str


class Choices:
    """A file of choices; without one nothing is kept.

    Raises:
        ArtefactError: a directory has its name.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            check_no_directory(path)
        self._path = path

    def find(self, key: Mapping[str, Any]) -> Taken | None:
        """Return what was chosen; None where nothing is known, with an `NCWarning` where it is damaged."""
        entry = self._entries().get(_name(key))
        if entry is None:
            return None
        try:
            if entry["key"] != json.loads(json.dumps(key)):
                msg = "it is of something else"
                raise ValueError(msg)
            config = entry["config"]
            return Taken(None if config is None else config_from(config), str(entry["why"]))
        except (KeyError, TypeError, ValueError) as error:  # a ConfigError is a ValueError
            warn(f"An entry of {self._path} is damaged, and is measured again: {error}")
            return None

    def keep(self, key: Mapping[str, Any], taken: Taken) -> None:
        """Write a choice.

        Raises:
            ArtefactError: the file can't be written.
        """
        if self._path is None:
            return
        config = None if taken.config is None else taken.config.to_dict()
        entry = {"key": dict(key), "config": config, "why": taken.why}
        document = {"schema": _SCHEMA, "choices": {**self._entries(), _name(key): entry}}
        try:
            with replaced(self._path) as staged:
                staged.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            msg = f"cache={str(self._path)!r} could not be written: {error}"
            raise ArtefactError(msg) from error

    def _entries(self) -> dict[str, Any]:
        """Return the entries; none where there is no file, or it is damaged."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["schema"] != _SCHEMA:
                msg = f"its schema is {document['schema']!r}, and not {_SCHEMA}"
                raise ValueError(msg)
            return dict(document["choices"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            warn(f"cache={str(self._path)!r} is damaged, and all is measured again: {error}")
            return {}


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
