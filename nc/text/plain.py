"""Texts of users, models and files, made safe for a terminal and a page: escaped, and shortened."""

from __future__ import annotations

import re

#: Most characters of a run without spaces; nobody reads longer names.
MOST = 300
#: What steers a terminal, changes the order or hides characters, or can't be encoded; not tab and newline.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\ufff0-\ufffb\U000e0000-\U000e0fff\ud800-\udfff]"
)
_LONG = re.compile(rf"\S{{{MOST + 1},}}")


def plain(text: object) -> str:
    """Return a text whose control characters, directions and lone surrogates are escapes, as `repr` has them.

    Runs of more than `MOST` characters without a space are shortened in their middle.
    """
    found = _UNSAFE.sub(lambda match: _escape(match[0]), str(text))
    return _LONG.sub(lambda match: _shortened(match[0]), found)


def shown(value: object, most: int = 120) -> str:
    """Return `repr` of a value of the user's, in one safe line of at most about `most` characters.

    It never raises: a value that can't be shown is named by its type.
    """
    try:
        text = plain(repr(value)).replace("\n", " ")
    except Exception:  # the user's code can raise anything
        text = ""
    if not text:
        return f"a value of type {plain(type(value).__name__)}"
    return text if len(text) <= most else f"{text[:most]}…"


def said(error: BaseException) -> str:
    """Return the type and the text of an exception of the user's code, safe; it never raises."""
    try:
        text = plain(error)
    except Exception:  # the user's code can raise anything
        text = ""
    name = plain(type(error).__name__)
    return f"{name}: {text}" if text else name


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shortened(run: str) -> str:
    return f"{run[: MOST // 2]}…({len(run)} characters)…{run[-MOST // 4 :]}"
