"""Tables as text: columns that fit a width, and blocks of rows that repeat as one block."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from nc.text.plain import plain

Row = tuple[str, ...]
_Merge = Mapping[int, Callable[[Sequence[str]], str]]
#: How wide tables are that nobody gave another width.
WIDTH = 100
#: Columns are not made narrower than this; the first one has names.
_NARROWEST, _NAMES = 8, 20
#: A number that is a separate part of a name: "layer.11.fc", "cell@2".
_INDEX = re.compile(r"(?<![^._@])\d+(?![^._@])")
#: A range of indices, with the text before it.
_SPAN = re.compile(r"(.*?)\{(\d+)\.\.(\d+)\}")
#: Where a cell may be broken into lines: after a space or a sign, and after a single dot that is not within
#: a number.
_BREAKS = re.compile(r"(?<=[ /_,:;@])|(?<=[^.]\.)(?=[^.])(?<!\d\.(?=\d))")


def format_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return a table with left-aligned columns; the first row is the header.

    Args:
        rows: of equal length, or of one cell: a heading for the rows below it.
        width: of the table. If it is too narrow for texts of the last column, these are below the table, each
            once, and the column has their numbers; other cells that are too long are broken into lines.
            None: as wide as the cells are.
    """
    rows = [tuple(plain(cell) for cell in row) for row in rows]
    rows, notes = (rows, []) if width is None else _noted(rows, width)
    widths = _widths(rows)
    if width is not None:
        widths = _narrowed(widths, _whole(rows), width)
    room = width or sum(map(len, itertools.chain(*rows)))
    head, *body = (
        wrapped(row[0], room) if len(row) == 1 < len(widths) else _lines(row, widths) for row in rows
    )
    rule = "-" * min(sum(widths) + 2 * len(widths), width or 160)
    return "\n".join([*head, rule, *itertools.chain(*body), *notes])


def columns(rows: Sequence[Row]) -> list[str]:
    """Return rows of equal length as lines with aligned columns, without a rule below the header."""
    widths = _widths(rows) if rows else []
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _widths(rows: Sequence[Row]) -> list[int]:
    columns = zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)
    return [max(map(len, column)) for column in columns]


def _whole(rows: Sequence[Row]) -> list[int]:
    """For each column the length of its header, or of its longest part that is not broken."""
    columns = zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)
    return [
        max(len(part.rstrip()) for part in (head, *(part for cell in cells for part in _BREAKS.split(cell))))
        for head, *cells in columns
    ]


def _noted(rows: Sequence[Row], width: int) -> tuple[Sequence[Row], list[str]]:
    """Return the rows with numbers for texts too long for the last column, and the texts.

    The texts are broken into lines.
    """
    room = max(width - sum(w + 2 for w in _widths(rows)[:-1]), _NARROWEST)
    long = dict.fromkeys(row[-1] for row in rows[1:] if len(row) > 1 and len(row[-1]) > room)
    numbers = {text: f"({i})" for i, text in enumerate(long, 1)}
    if not numbers:
        return rows, []
    notes = [part for text, number in numbers.items() for part in flowing(f"{number} {text}", width)]
    return [(*row[:-1], numbers.get(row[-1], row[-1])) if len(row) > 1 else row for row in rows], ["", *notes]


def _narrowed(widths: Sequence[int], whole: Sequence[int], width: int) -> list[int]:
    """Return the widths that fit, the widest columns made narrower first.

    None is narrower than `_NARROWEST`, and none than `whole`, see `_whole`, unless that is more than `_NAMES`
    and nothing else fits.
    """
    found = list(widths)
    least = [
        min(w, max(each, _NARROWEST if i else _NAMES))
        for i, (w, each) in enumerate(zip(widths, whole, strict=True))
    ]
    while sum(found) + 2 * (len(found) - 1) > width:
        wide = [i for i in range(len(found)) if found[i] > least[i]]
        if not wide:
            break
        found[max(wide, key=found.__getitem__)] -= 1
    while sum(found) + 2 * (len(found) - 1) > width and max(found) > _NAMES:
        found[found.index(max(found))] -= 1
    return found


def _lines(row: Row, widths: Sequence[int]) -> list[str]:
    """Return the lines of one row."""
    cells = [wrapped(cell, w) for cell, w in zip(row, widths, strict=True)]
    lines = itertools.zip_longest(*cells, fillvalue="")
    return ["  ".join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters.

    It is broken after spaces, dots and other signs if it has any.
    """
    lines = [""]
    for piece in _BREAKS.split(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def flowing(text: str, width: int) -> list[str]:
    """Break each line of a text at spaces into lines of at most `width` characters; indent continuations.

    Words stay whole, even if they are longer than `width`.
    """
    words = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [part for line in text.splitlines() for part in words.wrap(line) or [""]]


def listed(title: str, lines: Sequence[str]) -> str:
    """Return lines as items below a title; "" without lines."""
    return "\n".join([title, *(f"- {line}" for line in lines)]) if lines else ""


#: In front of the largest of several numbers.
_AT_MOST = "<="


def largest(cells: Sequence[str]) -> str:
    """Return the largest of numbers as text, with "<=" where they differ; "-" stands for none."""
    differ = any(cell.startswith(_AT_MOST) for cell in cells)  # those of blocks that were made one
    numbers = sorted((cell.removeprefix(_AT_MOST) for cell in cells if cell != "-"), key=float)
    return "-" if not numbers else _AT_MOST * (differ or numbers[0] != numbers[-1]) + numbers[-1]


def folded(rows: Sequence[Row], merge: _Merge | None = None) -> list[Row]:
    """Return a table's rows with equal blocks as one.

    Those of "layer.0", "layer.1", … come once, below "layer.{0..11} (12 times)".

    Blocks are consecutive rows whose names are alike up to an index. They are equal if they have the same
    names after the index and the same cells; an index that a cell repeats with the name before it does not
    count. A block of one row has no heading.

    Args:
        rows: the first one is the header; the first cell of the others is a name.
        merge: by column what makes one cell of several that may differ.
    """
    head, *body = rows
    return [head, *_headed(_fold(body, merge or {}), "")]


def _headed(rows: Sequence[Row], indent: str) -> list[Row]:
    """Return the rows of folded blocks below headings, with the rest of their names."""
    found: list[Row] = []
    for key, group in itertools.groupby(rows, _span):
        block = list(group)
        if not key:
            found += [(f"{indent}{name}", *cells) for name, *cells in block]
            continue
        first, *others = ((name[len(key) :], *cells) for name, *cells in block)
        heading = f"{indent}{key} ({_times(key)} times)"
        if others or _span(first):
            rest = [(name.lstrip(".@") or "itself", *cells) for name, *cells in (first, *others)]
            found += [(heading,), *_headed(rest, f"{indent}  ")]
        else:
            found.append((f"{indent}{key}{first[0]} ({_times(key)} times)", *first[1:]))
    return found


def _span(row: Row) -> str:
    """Return the name of a row up to its first span; "" where it has none."""
    span = _SPAN.match(row[0])
    return span[0] if span else ""


def _times(key: str) -> int:
    """How many indices a span stands for."""
    span = _SPAN.match(key)
    assert span is not None
    return int(span[3]) - int(span[2]) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Repeated:
    """Equal blocks of consecutive rows.

    Attributes:
        prefix: what all names begin with.
        start: the index after the prefix in the first block.
        blocks: the rows of each.
    """

    prefix: str
    start: int
    blocks: Sequence[Sequence[Row]]

    def joined(self, merge: _Merge) -> list[Row]:
        """Return the rows of one block that stands for all."""
        span = f"{{{self.start}..{self.start + len(self.blocks) - 1}}}"
        found = []
        for same in zip(*self.blocks, strict=True):
            first = _without(same[0], self.prefix, self.start, span)
            found.append(
                tuple(
                    merge[i]([row[i] for row in same]) if i in merge else cell for i, cell in enumerate(first)
                )
            )
        return found


def _fold(rows: Sequence[Row], merge: _Merge) -> list[Row]:
    found: list[Row] = []
    at = 0
    while at < len(rows):
        repeated = _repeated(rows, at, merge)
        if repeated is None:
            found.append(rows[at])
            at += 1
        else:
            found += _fold(repeated.joined(merge), merge)
            at += sum(map(len, repeated.blocks))
    return found


def _repeated(rows: Sequence[Row], at: int, merge: _Merge) -> _Repeated | None:
    """Return the equal blocks that begin with a row, or None if there are none.

    They are those by the first index in its name of which there are several.
    """
    name = rows[at][0]
    for index in _INDEX.finditer(name):
        prefix, start, behind = name[: index.start()], int(index[0]), at
        blocks: list[Sequence[Row]] = []
        while block := _block(rows, behind, f"{prefix}{start + len(blocks)}"):
            if blocks and not _alike(blocks[0], block, prefix, start, start + len(blocks), merge):
                break
            blocks.append(block)
            behind += len(block)
        if len(blocks) > 1:
            return _Repeated(prefix, start, blocks)
    return None


def _block(rows: Sequence[Row], at: int, prefix: str) -> Sequence[Row]:
    """Return the rows from `at` on whose names begin so."""
    end = at
    while end < len(rows) and re.match(f"{re.escape(prefix)}(?![^._@])", rows[end][0]):
        end += 1
    return rows[at:end]


def _alike(
    one: Sequence[Row], other: Sequence[Row], prefix: str, first: int, second: int, merge: _Merge
) -> bool:
    """Return whether two blocks differ by their index alone."""

    def bare(block: Sequence[Row], number: int) -> list[list[str]]:
        plain = [_without(row, prefix, number, "{}") for row in block]
        return [[cell for i, cell in enumerate(row) if i not in merge] for row in plain]

    return len(one) == len(other) and bare(one, first) == bare(other, second)


def _without(row: Row, prefix: str, number: int, span: str) -> Row:
    """Return a row with another text instead of an index."""
    name, *cells = row
    if prefix:  # a number alone can mean anything in a text
        pattern = re.compile(rf"(?<![\w.@]){re.escape(prefix)}{number}(?!\w)")
        cells = [pattern.sub(lambda _: f"{prefix}{span}", cell) for cell in cells]
    return f"{prefix}{span}{name[len(f'{prefix}{number}') :]}", *cells
