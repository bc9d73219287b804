"""Texts of a few lines: sections share the lines, and whole items are left out where they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from nc.text.table import flowing

#: Lines of a text at most, and characters of a line that has more than one word.
LINES, COLUMNS = 25, 80
#: `Section.most` of the section that gets the lines that the others leave; so many are kept for it.
REST, _KEPT = 0, 4
#: Lines of one item, and of the head.
_OF_ITEM, _OF_HEAD = 4, 18


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of the text.

    Attributes:
        title: above the items; "" for none.
        items: each may take several lines.
        most: lines at most, with the title; `REST`: as many as the other sections leave.
    """

    title: str
    items: Sequence[str]
    most: int


def fitted(head: Iterable[str], sections: Sequence[Section], foot: str) -> str:
    """Return lines and sections as a text of at most `LINES` lines, from which whole items are left out.

    Args:
        head: what comes first; what does not fit into `_OF_HEAD` lines is cut.
        sections: in the order of the text.
        foot: the last line.
    """
    lines = [part for line in head for part in _wrapped(line)][:_OF_HEAD]
    room = LINES - len(lines) - 1
    parts: dict[int, list[str]] = {}
    for i, section in enumerate(sections):
        if section.most != REST:
            parts[i] = _shown(section, min(section.most, room - _KEPT))
            room -= len(parts[i])
    for i, section in enumerate(sections):
        if i not in parts:
            parts[i] = _shown(section, room)
            room -= len(parts[i])
    body = [line for i in range(len(sections)) for line in parts[i]]
    return "\n".join([*lines, *body, foot])


def _wrapped(text: str) -> list[str]:
    """Return a text in lines, of which a long one ends with an ellipsis."""
    lines = flowing(text, COLUMNS)
    return lines if len(lines) <= _OF_ITEM else [*lines[: _OF_ITEM - 1], f"{lines[_OF_ITEM - 1]} …"]


def _shown(section: Section, room: int) -> list[str]:
    """Return the items of a section that its lines have room for, and how many others there are."""
    items = [_wrapped(item) for item in section.items]
    title = _wrapped(section.title)
    if not items:
        return []
    if len(title) + sum(map(len, items)) <= room:
        return [*title, *(line for item in items for line in item)]
    found, left = list(title), len(items)
    for item in items:
        if len(found) + len(item) + 1 > room:
            break
        found += item
        left -= 1
    return [*found, f"- … {left} more"] if left < len(items) else []
