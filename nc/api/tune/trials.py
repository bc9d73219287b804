"""What was measured, one JSON file for each trial, named by the hash of all that determines it.

Files are written by rename, so a folder can be shared by several processes and machines, and a search that
was ended goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nc.errors import ArtefactError
from nc.process.warn import warn
from nc.storage.atomic import replaced

SCHEMA = 2
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a trial gave.

    Attributes:
        metric: what the user's function says of the model, larger is better; without one, the part of the
            power of the outputs that is right on data that was held out.
        sqnr_db: of the outputs on that data, in dB; None where it is infinite.
        fp32_ratio: how many times as fast as the user's model it is.
        ms: milliseconds of a call.
        spread: quartiles of the rounds' ratios.
        weight_bytes: of the constants.
        note: what is to be said of it; "" for nothing.
        bits: of the weights with low-bit candidates, as they are stored, on average; None for other searches.
    """

    metric: float
    sqnr_db: float | None
    fp32_ratio: float
    ms: float
    spread: tuple[float, float]
    weight_bytes: int
    note: str = ""
    bits: float | None = None


class Trials:
    """A folder of trials; without one nothing is kept.

    Raises:
        ArtefactError: the folder can't be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                msg = f"trials={str(self.folder)!r} is no folder that can be written: {error}"
                raise ArtefactError(msg) from error

    def find(self, key: Mapping[str, Any]) -> Result | None:
        """Return the result of a trial; None where there is none, or its file is damaged."""
        return self.read(key, lambda result: Result(**{**result, "spread": tuple(result["spread"])}))

    def keep(self, key: Mapping[str, Any], result: Result) -> None:
        """Write a trial.

        Raises:
            ArtefactError: it can't be written.
        """
        self.write(key, dataclasses.asdict(result))

    def read(self, key: Mapping[str, Any], made: Callable[[Any], Found]) -> Found | None:
        """Return what was kept; None where there is nothing, or its file is damaged.

        Args:
            key: all that determines it.
            made: takes the plain values; TypeError, ValueError, KeyError and AttributeError mean damage.
        """
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if {**document["key"], "schema": SCHEMA} != json.loads(_text(key)):
                msg = "it is of another trial"
                raise ValueError(msg)
            return made(document["result"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn(f"The trial {path} is damaged, and is measured again: {error}")
            return None

    def write(self, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Keep plain values.

        Raises:
            ArtefactError: they can't be written.
        """
        path = self._path(key)
        if path is None:
            return
        document = {"schema": SCHEMA, "key": dict(key), "result": values}
        try:
            with replaced(path) as staged:
                text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
                staged.write_text(text, encoding="utf-8")
        except OSError as error:
            msg = f"The trial {path} could not be written: {error}"
            raise ArtefactError(msg) from error

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps({**key, "schema": SCHEMA}, sort_keys=True)
