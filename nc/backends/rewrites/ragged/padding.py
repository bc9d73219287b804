"""Padded texts to rows of their real tokens, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nc.backends.rewrites.ragged.rewrite import Ragged
from nc.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Texts as rows.

    Attributes:
        inputs: those of the graph over rows.
        flat: int64, where each row is in [texts * length]; None: all are, in order.
        texts, length: sizes of the padded texts.
    """

    inputs: tuple[torch.Tensor, ...]
    flat: torch.Tensor | None
    texts: int
    length: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.inputs[-3].shape[0])

    def padded(self, value: torch.Tensor) -> torch.Tensor:
        """Return [1, rows, ...] as [texts, length, ...], with zeros for padding."""
        rest = value.shape[2:]
        if self.flat is None:
            return value.reshape(self.texts, self.length, *rest).clone()
        result = value.new_zeros((self.texts * self.length, *rest))
        result.index_copy_(0, self.flat, value[0])
        return result.view(self.texts, self.length, *rest)

    def outputs(self, form: Ragged, values: Sequence[Any]) -> list[Any]:
        """Return what the graph over padded texts gives, of what the one over rows gives; in new memory."""
        return [
            self.padded(value) if of_tokens else value.clone()
            for value, of_tokens in zip(values, form.of_tokens, strict=True)
        ]


def rows_of(form: Ragged, inputs: Sequence[torch.Tensor], paths: Sequence[str] = ()) -> Rows | None:
    """Return the rows of padded texts; None for those that the graph over rows does not take.

    Those are texts without real tokens, longer ones than it knows places of, texts of which the model picks
    padding, and with models that add to scores by places, texts whose real tokens do not follow each other.

    Args:
        form: the graph over rows.
        inputs: flat inputs of the graph over padded texts.
        paths: how messages call them.

    Raises:
        InputError: the mask has another shape, or other values than 0 and 1, or a text has more tokens than
            the model has positions for.
    """
    tokens = _checked(form, inputs, paths)
    texts, length = tokens.shape
    if not texts or not length or length > form.longest or any(x.shape != tokens.shape for x in inputs):
        return None
    if form.mask is None:
        return _whole(form, inputs, texts, length)
    seen = inputs[form.mask].bool()
    counts = seen.sum(1)
    lengths = counts.tolist()
    if min(lengths) == length:
        return _whole(form, inputs, texts, length)
    if not all(lengths) or (form.firsts and not bool(seen[:, 0].all())):
        return None
    extra, picked = _extra(form, inputs)
    flat = seen.flatten().nonzero().flatten()
    if not all(bool(seen.flatten()[each].all()) for each in picked):
        return None
    places = flat % length
    starts = torch.zeros(texts + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    firsts = starts[:-1].long()
    if form.together:
        first, last = places[firsts], places[starts[1:].long() - 1]
        if not torch.equal(last - first + 1, counts) or (form.from_begin and bool(first.any())):
            return None
    given = [_integers(tensor).flatten()[flat][None] for tensor in (*inputs, *extra)]
    picked = [torch.searchsorted(flat, each) for each in picked]
    return Rows((*given, *picked, places, starts, firsts), flat, texts, length)


def _extra(
    form: Ragged, inputs: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return integers of tokens computed with padding, and where in [texts * length] picked tokens are."""
    found = form.beforehand(inputs)
    count = len(found) - form.picked
    texts, length = inputs[0].shape
    return found[:count], [places + torch.arange(texts) * length for places in found[count:]]


def _checked(form: Ragged, inputs: Sequence[torch.Tensor], paths: Sequence[str]) -> torch.Tensor:
    """Return an input that holds tokens; raises InputError, see `rows_of`."""
    number = next(i for i in range(len(inputs)) if i != form.mask or len(inputs) == 1)
    tokens = inputs[number]
    length = tokens.shape[1]
    if form.positions is not None and length > form.positions:
        name = paths[number] if paths else "the tokens"
        msg = f"{name}: texts of {length} tokens; the model has positions for {form.positions}."
        raise InputError(msg)
    if form.mask is None:
        return tokens
    mask, name = inputs[form.mask], paths[form.mask] if paths else "the mask"
    if mask.shape != tokens.shape:
        msg = f"{name} has the sizes {tuple(mask.shape)}, and the tokens {tuple(tokens.shape)}."
        raise InputError(msg)
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        msg = f"{name} has values other than 0 and 1, as {other.flatten()[0].item()}."
        raise InputError(msg)
    return tokens


def _whole(form: Ragged, inputs: Sequence[torch.Tensor], texts: int, length: int) -> Rows:
    """Return the rows of texts without padding."""
    extra, picked = _extra(form, inputs)
    given = [_integers(each).contiguous().view(1, -1) for each in (*inputs, *extra)]
    starts = torch.arange(0, texts * length + 1, length, dtype=torch.int32)
    places = torch.arange(length).repeat(texts)
    return Rows((*given, *picked, places, starts, starts[:-1].long()), None, texts, length)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers as kernels read them, in 64 bits; other values as they are."""
    is_integer = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    return tensor.long() if is_integer else tensor
