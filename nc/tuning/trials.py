"""What was measured, one JSON file for each trial, named by the hash of all that determines it.

Files are written by rename, so a folder can be shared by several processes and machines, and a search that
was ended goes on where it was. A file that can't be used is kept under another name, `….damaged`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nc.errors import ArtefactError
from nc.process.warn import warn
from nc.storage.atomic import write_text
from nc.storage.json_file import json_value
from nc.text.json_text import built, parsed

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Document:
    """What a file holds."""

    schema: int
    key: dict[str, Any]
    result: Any


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
                msg = f"trials={str(self.folder)!r} is not a folder that can be written: {error}"
                raise ArtefactError(msg) from error

    def find(self, key: Mapping[str, Any]) -> Result | None:
        """Return the result of a trial; None where there is none, or its file is damaged."""
        return self.read(key, result_of)

    def keep(self, key: Mapping[str, Any], result: Result) -> None:
        """Write a trial.

        Raises:
            ArtefactError: it can't be written.
        """
        self.write(key, dataclasses.asdict(result))

    def read(self, key: Mapping[str, Any], made: Callable[[Any], Found]) -> Found | None:
        """Return the stored result of a trial; None if there is none or, with an `NCWarning`, it is damaged.

        Args:
            key: everything that determines the result.
            made: builds the result from plain values; it raises TypeError, ValueError, KeyError or
                AttributeError if they are damaged.
        """
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            return made(_kept(path, key).result)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
        write_text(path, text, lambda path: _is_free(path, key))

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"


def _kept(path: Path, key: Mapping[str, Any]) -> _Document:
    """Return the document of a trial; raises ValueError for any other, and for a file that can't be read."""
    document = built(_Document, json_value(path), "the document")
    if {**document.key, "schema": document.schema} != parsed(_text(key)):
        msg = "it is of another trial"
        raise ValueError(msg)
    return document


def _is_free(path: Path, key: Mapping[str, Any]) -> bool:
    """Whether a file may be written: one of the same trial is there, or one that just got another name."""
    try:
        _kept(path, key)
    except ValueError:
        path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.damaged"))
    return True


def result_of(values: object) -> Result:
    """Return a result of its plain values; ValueError where they are none."""
    result = built(Result, values, "the result")
    for name in ("fp32_ratio", "ms", "weight_bytes", "bits"):
        value = getattr(result, name)
        if value is not None and value < 0:
            msg = f"{name!r} is {value}"
            raise ValueError(msg)
    if not 0 <= result.spread[0] <= result.spread[1]:
        msg = f"'spread' is {result.spread}"
        raise ValueError(msg)
    return result


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps({**key, "schema": SCHEMA}, sort_keys=True)
