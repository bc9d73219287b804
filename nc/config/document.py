"""JSON text and files of configurations, and checks of their content."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nc.errors import ArtefactMissingError, ConfigError
from nc.formats.checks import checked_path
from nc.formats.rule_key import ParsedKey, check_pattern
from nc.storage.atomic import write_text
from nc.storage.json_file import text_of
from nc.storage.marks import json_like
from nc.text.json_text import parsed

SCHEMA_VERSION = 1


class Document(abc.ABC):
    """JSON of a class that has `to_dict` and `from_dict`."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values."""

    @classmethod
    @abc.abstractmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Return the inverse of `to_dict`."""

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Any:
        """Return the inverse of `to_json`.

        Raises:
            ConfigError: not JSON, or not a configuration of this class.
        """
        try:
            found = parsed(text)
        except ValueError as error:
            msg = f"The configuration is not valid JSON: {error}."
            raise ConfigError(msg) from error
        try:
            return cls.from_dict(found)
        except TypeError as error:  # a list or an object where a name is expected
            if isinstance(error, ConfigError):
                raise
            msg = f"The configuration has a value of another type than it may have: {error}."
            raise ConfigError(msg) from error

    def to_json_file(self, path: str | Path) -> None:
        """Write `to_json` to a file.

        Raises:
            InputError: it is not a path.
            ArtefactError: something else than a configuration is there, or one of a newer nc; or it cannot be
                written.
        """
        write_text(checked_path("path", path), self.to_json() + "\n", json_like(_is_config))

    @classmethod
    def from_json_file(cls, path: str | Path) -> Any:
        """Read a file from `to_json_file`.

        Raises:
            ArtefactMissingError: the file does not exist.
            ConfigError: as `from_json`.
        """
        if not checked_path("path", path).is_file():
            msg = f"{path}: the file does not exist; `config.to_json_file(path)` writes one."
            raise ArtefactMissingError(msg)
        return cls.from_json(text_of(Path(path)))


def _is_config(data: Mapping[str, Any]) -> bool:
    """Return whether a document is what `to_dict` of a configuration, or of an `AutoConfig`, gives."""
    if set(data) == {"auto"}:
        return isinstance(data["auto"], dict)
    version = data.get("schema_version")
    return type(version) is int and 1 <= version <= SCHEMA_VERSION and isinstance(data.get("algorithm"), str)


def key_from(entry: Mapping[str, Any]) -> ParsedKey:
    """Return a key from its form in a rule or a white list."""
    text, is_type = entry.get("text", entry.get("key")), bool(entry.get("is_type", False))
    if not is_type:
        check_pattern(text)
    return ParsedKey(text, is_type)


def keys_from(entries: object) -> tuple[ParsedKey, ...]:
    """Return the keys of a white list; raises ConfigError."""
    listed = list(as_list(entries, "white_list"))
    for entry in listed:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("text"), str)
            or not set(entry) <= {"text", "is_type"}
        ):
            msg = f"Expected a key of the white list as {{text, is_type}}, but got {entry!r}."
            raise ConfigError(msg)
    return tuple(key_from(entry) for entry in listed)


def as_list(value: object, name: str) -> Iterator[Any]:
    """Yield a list's entries; raises ConfigError for anything else."""
    if not isinstance(value, (list, tuple)):
        msg = f"Expected {name} to be a list, but got {type(value).__name__}."
        raise ConfigError(msg)
    return iter(value)


def check_is_dict(data: object) -> None:
    """Raise ConfigError unless `data` is a dict that is not empty."""
    if not isinstance(data, dict):
        msg = f"Expected a configuration as a dict, but got {type(data).__name__}."
        raise ConfigError(msg)
    if not data:
        msg = "Expected a configuration as a dict, but got an empty one."
        raise ConfigError(msg)


def check_keys(data: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise ConfigError for missing and unknown keys."""
    if not required <= set(data) <= required | optional:
        msg = f"Expected the keys {', '.join(sorted(required | optional))}, but got {sorted(map(str, data))}."
        raise ConfigError(msg)


def check_schema(data: Mapping[str, Any], algorithm: str) -> None:
    """Raise ConfigError if `data` names another schema or another strategy."""
    version, name = data.get("schema_version", SCHEMA_VERSION), data.get("algorithm", algorithm)
    if version != SCHEMA_VERSION or name != algorithm:
        msg = (
            f"Expected schema_version {SCHEMA_VERSION} and algorithm {algorithm!r}, but got {version!r} and "
            f"{name!r}. Read it with the class of that algorithm."
        )
        raise ConfigError(msg)


def fields_of(data: object) -> dict[str, Any]:
    """Return the fields of a configuration by name; raises ConfigError."""
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        msg = f"Expected the fields of a configuration as a dict by name, but got {data!r}."
        raise ConfigError(msg)
    return data


def plain_values(config: Any) -> dict[str, Any] | None:
    """Return `to_dict` as JSON has it; None for a configuration with objects of the user's own.

    Args:
        config: what has `to_dict`.
    """
    try:
        found: dict[str, Any] = parsed(json.dumps(config.to_dict()))
    except (TypeError, ValueError):  # what json says of values that it can't write
        return None
    return found
