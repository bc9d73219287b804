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
    """Return what gives values for all sizes: the value itself where it is always the same.

    Numbers become `Affine`; sequences, mappings and dataclasses are fitted part by part.

    Args:
        values: one for each recording.
        sizes: of the recordings.
        where: what it is, for messages.

    Raises:
        Unfit: no function of this kind gives all values.
    """
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        msg = f"{where} is {' or '.join(sorted({type(v).__name__ for v in values}))}"
        raise Unfit(msg)
    if isinstance(first, torch.Tensor):
        if not all(_equal(first, value) for value in values[1:]):
            msg = f"{where}: a constant is another one for other sizes"
            raise Unfit(msg)
        return first
    if isinstance(first, _WHOLE) or callable(first):
        if any(value != first for value in values):
            msg = f"{where} is {first} or {next(v for v in values if v != first)}"
            raise Unfit(msg)
        return first
    if isinstance(first, int):
        return _fitted_number(values, sizes, where)
    if isinstance(first, (list, tuple)):
        if any(len(value) != len(first) for value in values):
            msg = f"{where} has other numbers of parts"
            raise Unfit(msg)
        parts = [fitted(each, sizes, where) for each in zip(*values, strict=True)]
        return type(first)(parts)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            msg = f"{where} has other parts"
            raise Unfit(msg)
        return {key: fitted([value[key] for value in values], sizes, where) for key in first}
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        fields = {n: fitted([getattr(v, n) for v in values], sizes, where) for n in names}
        return dataclasses.replace(first, **fields)  # type: ignore[type-var] # an instance, not a class
    msg = f"{where} is {type(first).__name__}, of which nothing is known"
    raise Unfit(msg)


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
    if isinstance(value, (list, tuple)):
        return type(value)([changed(each, change) for each in value])
    if isinstance(value, Mapping):
        return {key: changed(each, change) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{n: changed(getattr(value, n), change) for n in names})  # type: ignore[type-var] # an instance
    return value
