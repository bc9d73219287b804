"""By what nc knows the files that it wrote, so that it replaces no others."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nc._version import __version__
from nc.errors import ArtefactError, ArtefactSchemaError
from nc.storage.atomic import Ours
from nc.storage.json_file import json_value

#: What programs of other runtimes have at their end.
MARK = "written by nc"
#: Bytes at either end of a file in which a mark is looked for.
_NEAR = 4096
#: The end of a zip archive: a signature, 16 bytes, and the length of the comment after it.
_ZIP_END = b"PK\5\6"


def has(text: str) -> Ours:
    """Return what knows files with a text near their start or end."""

    def known(path: Path) -> bool:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(_NEAR)
            file.seek(max(size - _NEAR, 0))
            return text.encode() in start or text.encode() in file.read(_NEAR)

    return lambda path: path.is_file() and known(path)


#: Knows pages of `nc.text.html_page`.
page = has("<meta name=generator content=nc>")
#: Knows files that `mark` marked.
program = has(MARK)


def mark(path: Path) -> None:
    """Put a mark at the end of a program, where its runtime does not read it, or as data of the user's.

    Args:
        path: of a graph in XML, a model of ONNX, or a zip archive, as torch's are. Others stay as they are.
    """
    text = f"{MARK} {__version__}".encode()
    content = path.read_bytes()[-_NEAR:] if path.suffix not in (".xml", ".onnx") else b""
    end = content.rfind(_ZIP_END)
    with path.open("r+b") as file:
        file.seek(0, 2)
        if path.suffix == ".xml":
            file.write(b"<!-- " + text + b" -->\n")
        elif path.suffix == ".onnx":  # an entry of metadata_props: fields may come in any order
            entry = b"\x0a" + bytes([2]) + b"nc" + b"\x12" + bytes([len(text)]) + text
            file.write(b"\x72" + bytes([len(entry)]) + entry)
        elif end >= 0 and content[end + 20 :] == b"\0\0":  # an archive without a comment
            file.seek(-2, 2)
            file.write(struct.pack("<H", len(text)) + text)


def signed(text: str) -> str:
    """Return a text for people with a last line by which `unedited` knows whether they changed it."""
    return f"{text}\n<!-- {MARK} {__version__}; SHA-256 of the text above: {_sha256(text)} -->\n"


def unedited(path: Path) -> bool:
    """Return whether a file has a text of `signed`, as it was written."""
    try:
        text, _, last = path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")
    except (OSError, UnicodeDecodeError):
        return False
    return MARK in last and _sha256(text) in last


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def json_like(known: Callable[[dict[str, Any]], bool]) -> Ours:
    """Return what knows JSON files by the object that they hold; damaged ones are not known."""

    def ours(path: Path) -> bool:
        try:
            document = json_value(path)
        except ArtefactError:
            return False
        return isinstance(document, dict) and known(document)

    return ours


def of_format(name: str, newest: int) -> Ours:
    """Return what knows JSON documents with "format" and "schema".

    Args:
        name: the format.
        newest: the newest schema that is known. For a newer one it raises ArtefactSchemaError.
    """

    def ours(path: Path) -> bool:
        return json_like(lambda document: is_of(document, name, newest, path))(path)

    return ours


def is_of(document: dict[str, Any], name: str, newest: int, path: Path) -> bool:
    """Tell whether a document says that it is of a format; raises ArtefactSchemaError for a newer schema."""
    schema = document.get("schema")
    if document.get("format") != name or type(schema) is not int or schema < 1:
        return False
    if schema > newest:
        msg = (
            f"{str(path)!r} has schema {schema} of {name}, and nc {__version__} knows those up to {newest}: "
            "a newer nc wrote it. Upgrade nc, or choose another name."
        )
        raise ArtefactSchemaError(msg)
    return True


def described(name: str, schema: int, values: dict[str, Any]) -> str:
    """Return the text of a JSON document that `of_format` knows; raises ValueError for NaN and Infinity."""
    document = {"format": name, "schema": schema, **values}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
