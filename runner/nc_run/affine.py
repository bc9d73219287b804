"""Numbers of plans: some for no row and no text, and more for each row and each text."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Sizes, strides and offsets are smaller: products of two of them fit 64 bits.
MOST = 1 << 40


class Affine(NamedTuple):
    """`base + rows * of_row + texts * of_text`."""

    base: int
    of_row: int = 0
    of_text: int = 0

    def at(self, rows: int, texts: int) -> int:
        """Return the number for these sizes."""
        return self.base + rows * self.of_row + texts * self.of_text

    def times(self, factor: int) -> Affine:
        """Return a multiple of it."""
        return Affine(*(factor * part for part in self))


def number(value: Any, where: str) -> Affine:
    """Return a size, stride or offset out of JSON: an integer, or three.

    None of its parts is negative, so that it grows with rows and texts.

    Raises:
        ValueError: it is something else.
    """
    parts = value if isinstance(value, list) and len(value) == 3 else [value]
    if not all(type(part) is int and 0 <= part < MOST for part in parts):
        msg = f"{where} is {str(value)[:60]}, and not a size"
        raise ValueError(msg)
    return Affine(*parts)
