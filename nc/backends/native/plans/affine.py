"""Numbers of plans as functions of the number of rows and of texts, fitted to plans that were recorded.

All that sizes decide about in a plan of rows is a number plus some for each row and some for each text:
sizes, strides, offsets. Three recordings give these numbers, more of them show whether they are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nc.kernels.c_code.calls import Function
from nc.kernels.onednn.primitives import Layout


class Unfit(Exception):
    """A plan depends on sizes otherwise; the text says where."""


@dataclasses.dataclass(frozen=True, slots=True)
class Affine:
    """`base + rows * of_row + texts * of_text`."""

    base: int
    of_row: int
    of_text: int

    def at(self, rows: int, texts: int) -> int:
        """Return the number for these sizes."""
        return self.base + rows * self.of_row + texts * self.of_text


#: Rows and texts of each recording; the first three differ in one of them.
Sizes = tuple[int, int]
#: Values that are the same thing or not, and have no parts.
_WHOLE = (str, bytes, bool, float, type(None), torch.dtype, Layout, Function)


def fitted(values: Sequence[Any], sizes: Sequence[Sizes], where: str = "") -> Any:
    """Fit a function of the sizes to values that were recorded for some sizes.

    Integers that differ become `Affine`; a value that never differs stays itself. Sequences, mappings and
    dataclasses are fitted part by part.

    Args:
        values: one value for each recording.
        sizes: rows and texts of each recording.
        where: name of the value, for messages.

    Raises:
        Unfit: no affine function gives all values.
    """
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        msg = f"{where} is {' or '.join(sorted({type(v).__name__ for v in values}))}"
        raise Unfit(msg)
    if isinstance(first, (torch.Tensor, *_WHOLE)) or callable(first):
        return _same(values, where)
    if isinstance(first, int):
        return _fitted_number(values, sizes, where)
    apart = [_apart(value) for value in values]
    keys, parts, together = apart[0]
    if any(other[0] != keys for other in apart):
        msg = f"{where} has other parts"
        raise Unfit(msg)
    each = zip(*(part for _, part, __ in apart), strict=True)
    return together([fitted(some, sizes, where) for some in each] if parts else [])


def _apart(value: Any) -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """Return what names the parts of a value, the parts, and what makes such a value of others.

    Raises:
        Unfit: it has no parts.
    """
    if isinstance(value, (list, tuple)):
        return len(value), list(value), type(value)
    if isinstance(value, Mapping):
        keys = tuple(value)
        return keys, list(value.values()), lambda parts: dict(zip(keys, parts, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        instance: Any = value
        names = tuple(field.name for field in dataclasses.fields(instance))
        return (
            names,
            [getattr(instance, name) for name in names],
            lambda parts: dataclasses.replace(instance, **dict(zip(names, parts, strict=True))),
        )
    msg = f"nothing is known of {type(value).__name__}"
    raise Unfit(msg)


def _same(values: Sequence[Any], where: str) -> Any:
    """Return a value that has no numbers of sizes; raises `Unfit` where it is another one for other sizes."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        if all(_equal(first, value) for value in values[1:]):
            return first
        msg = f"{where}: a constant is another one for other sizes"
        raise Unfit(msg)
    other = next((value for value in values if value != first), first)
    if other != first:
        msg = f"{where} is {first} or {other}"
        raise Unfit(msg)
    return first


def _fitted_number(values: Sequence[int], sizes: Sequence[Sizes], where: str) -> int | Affine:
    (rows, texts), (more_rows, _), (_, more_texts), *__ = sizes
    first, second, third, *_rest = values
    of_row, left = divmod(second - first, more_rows - rows)
    of_text, left_too = divmod(third - first, more_texts - texts)
    found = Affine(first - rows * of_row - texts * of_text, of_row, of_text)
    if left or left_too or any(found.at(*s) != value for s, value in zip(sizes, values, strict=True)):
        msg = f"{where} is {', '.join(map(str, values))} for {', '.join(map(str, sizes))} rows and texts"
        raise Unfit(msg)
    return found if of_row or of_text else found.base


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def placed(value: Any, rows: int, texts: int) -> Any:
    """Return a fitted value for these sizes."""
    return changed(value, lambda each: each.at(rows, texts))


def depends(value: Any) -> tuple[bool, bool]:
    """Return whether a fitted value depends on the number of rows, and on that of texts."""
    found = [False, False]

    def note(each: Affine) -> Affine:
        found[0] |= each.of_row != 0
        found[1] |= each.of_text != 0
        return each

    changed(value, note)
    return found[0], found[1]


def changed(value: Any, change: Callable[[Affine], Any]) -> Any:
    """Return a fitted value with each `Affine` changed."""
    if isinstance(value, Affine):
        return change(value)
    if isinstance(value, (int, torch.Tensor, *_WHOLE)) or callable(value):
        return value
    _, parts, together = _apart(value)
    return together([changed(part, change) for part in parts])
