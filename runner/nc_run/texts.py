"""Padded texts to rows of their real tokens, and back, as nc/backends/rewrites/ragged/padding.py does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nc_run.document import Texts
from nc_run.errors import InputError

Arrays = Sequence[npt.NDArray[Any]]
_FUNCTIONS: Mapping[str, Callable[..., npt.NDArray[Any]]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "ne": np.not_equal,
    "eq": np.equal,
    "to": np.asarray,
    "cumsum": lambda x: np.cumsum(x, axis=1),
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Texts as rows.

    Attributes:
        inputs: of a plan: each input of the model, and each result of its steps, [1, rows], in 64 bits where
            these have integers; `places`,
            int64 [rows], the place of each row in its text; `starts`, int32 [texts + 1], where each text
            begins; `firsts`, int64 [texts], the same without the last.
        flat: where each row is in [texts * length]; None: all are, in order.
        texts, length: sizes of the padded texts.
    """

    inputs: Arrays
    flat: npt.NDArray[np.int64] | None
    texts: int
    length: int

    def padded(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return [1, rows, ...] as [texts, length, ...], with zeros for padding."""
        shape = self.texts, self.length, *value.shape[2:]
        if self.flat is None:
            return value.reshape(shape).copy()
        result = np.zeros((self.texts * self.length, *value.shape[2:]), value.dtype)
        result[self.flat] = value[0]
        return result.reshape(shape)


def rows_of(form: Texts, names: Sequence[str], inputs: Arrays) -> Rows:
    """Return the rows of padded texts.

    Args:
        form: what the model takes.
        names: of its inputs, for messages.
        inputs: all [texts, length].

    Raises:
        InputError: the model does not take them; says why.
    """
    tokens = next(x for i, x in enumerate(inputs) if i != form.mask or len(inputs) == 1)
    _need(tokens.ndim == 2, f"{names[0]} has the sizes {tokens.shape}, and not [texts, length]")
    texts, length = tokens.shape
    for name, each in zip(names, inputs, strict=True):
        _need(each.shape == tokens.shape, f"{name} has the sizes {each.shape}, and the tokens {tokens.shape}")
    most = min(form.longest, form.positions or form.longest)
    _need(0 < length <= most and texts, f"{texts} texts of {length} tokens; the model takes 1 to {most}")
    extra = _results(form, inputs)
    if form.mask is None:
        return _whole([*inputs, *extra], texts, length)
    mask = inputs[form.mask]
    _need(((mask == 0) | (mask == 1)).all(), f"{names[form.mask]} has values other than 0 and 1")
    seen = mask != 0
    counts = seen.sum(1)
    if counts.min() == length:
        return _whole([*inputs, *extra], texts, length)
    _need(counts.all(), f"{names[form.mask]}: a text has no token")
    _need(not form.firsts or seen[:, 0].all(), f"{names[form.mask]} hides the first token of a text")
    flat = np.flatnonzero(seen)
    places = flat % length
    starts = np.zeros(texts + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    firsts = starts[:-1].astype(np.int64)
    if form.together:
        first, last = places[firsts], places[starts[1:] - 1]
        together = (last - first + 1 == counts).all() and not (form.from_begin and first.any())
        _need(
            together, f"{names[form.mask]}: real tokens of a text don't follow each other from its begin on"
        )
    given = [_in_64_bits(each).reshape(-1)[flat][None] for each in (*inputs, *extra)]
    return Rows((*given, places, starts, firsts), flat, texts, length)


def _results(form: Texts, inputs: Arrays) -> Arrays:
    """Return the results of the steps, [texts, length] each."""
    values = list(inputs)
    for step in form.steps:
        numbers = [] if step.number is None else [np.int64(step.number)]
        given = [_in_64_bits(values[i]) for i in step.values]
        values.append(_FUNCTIONS[step.op](*given, *numbers).astype(step.dtype))
    return [values[i] for i in form.results]


def _need(condition: object, why: str) -> None:
    if not condition:
        msg = f"{why}."
        raise InputError(msg)


def _whole(inputs: Arrays, texts: int, length: int) -> Rows:
    """Return the rows of texts without padding."""
    starts = np.arange(0, texts * length + 1, length, dtype=np.int32)
    places = np.tile(np.arange(length, dtype=np.int64), texts)
    given = [_in_64_bits(each).reshape(1, -1) for each in inputs]
    return Rows((*given, places, starts, starts[:-1].astype(np.int64)), None, texts, length)


def _in_64_bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(np.int64, copy=False) if array.dtype.kind in "iu" else array
