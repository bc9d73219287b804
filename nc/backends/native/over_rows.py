"""Models of padded texts that compute the rows of real tokens only."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport, PaddedTexts
from nc.backends.native.plans.any_sizes import SampleInputs
from nc.backends.rewrites.ragged.padding import Rows, rows_of
from nc.backends.rewrites.ragged.rewrite import Ragged
from nc.backends.verify import reference_outputs, verify_outputs
from nc.errors import BackendError, InputError
from nc.graph.qdq import QDQGraph
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import DEQUANTIZE, QUANTIZE, from_bf16, quantize_dequantize_dynamic, to_bf16
from nc.profiling.profile import EngineCall, Profile

#: What the report says of padding, by this name.
DETAIL = "padding"
#: Tokens of the texts, and how well two graphs agree on them, in dB, where both compute the same in Python.
_LENGTH, _SAME_DB = 11, 60.0
#: Operators that round values, and that make values of what these give.
_ROUND = QUANTIZE | {quantize_dequantize_dynamic, to_bf16}
_RESTORE = DEQUANTIZE | {from_bf16}
#: The most rows of the example of a graph over rows: its reference adds a mask with their square.
_MOST_ROWS = 512


def example_of(form: Ragged, example: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return an example of the graph over rows: some texts of the example.

    Raises:
        BackendError: none of them can be taken.
    """
    try:
        return _example_of(form, example)
    except InputError as error:
        raise BackendError(str(error)) from None


def _example_of(form: Ragged, example: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    texts = range(int(example[0].shape[0]))
    taken: list[int] = []
    count = 0
    for text in texts:
        rows = rows_of(form, [tensor[text : text + 1] for tensor in example])
        if rows is not None and (not taken or count + rows.count <= _MOST_ROWS):
            taken.append(text)
            count += rows.count
    rows = rows_of(form, [tensor[taken] for tensor in example]) if taken else None
    if rows is None:
        msg = "none of the texts of example_inputs has the real tokens that the graph needs"
        raise BackendError(msg)
    return rows.inputs


def samples_of(form: Ragged, example: Sequence[torch.Tensor]) -> SampleInputs:
    """Return inputs of other sizes, with the tokens of an example; the texts are as long as each other."""

    def make(rows: int, texts: int) -> tuple[torch.Tensor, ...]:
        counts = torch.full((texts,), rows // texts, dtype=torch.int64)
        counts[: rows % texts] += 1
        starts = torch.zeros(texts + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
        firsts = starts[:-1].long()
        places = (torch.arange(rows) - firsts.repeat_interleave(counts)) % form.longest
        count = len(example) - 3 - form.picked
        tokens = [tensor[:, torch.arange(rows) % tensor.shape[1]] for tensor in example[:count]]
        return *tokens, *[firsts] * form.picked, places, starts, firsts

    def first(inputs: Sequence[torch.Tensor], texts: int) -> tuple[torch.Tensor, ...]:
        *tokens, places, starts, firsts = inputs
        rows, count = int(starts[texts]), len(tokens) - form.picked
        given = [tensor[:, :rows].contiguous() for tensor in tokens[:count]]
        picked = [each[:texts] for each in tokens[count:]]
        return *given, *picked, places[:rows], starts[: texts + 1], firsts[:texts]

    return SampleInputs(
        lambda inputs: (int(inputs[-3].shape[0]), int(inputs[-1].shape[0])), make, first, form.longest
    )


def check(graph: QDQGraph, form: Ragged, example: Sequence[torch.Tensor]) -> None:
    """Compare the graph over rows with the one over padded texts, both in Python, for texts of some lengths.

    Both compute the same numbers but for the order of sums in attention, if nothing is rounded to codes: deep
    models make much of a code that is another one.

    Args:
        graph: the one over padded texts.
        form: the one over rows.
        example: of that one, whose tokens are taken.

    Raises:
        BackendError: they give other values for real tokens.
    """
    for real in _real_tokens(min(_LENGTH, form.longest), form):
        if _agreement_db(graph, form, example, real) < _SAME_DB:
            msg = "the graph over rows of tokens computes something else than the one over padded texts"
            raise BackendError(msg)


def _agreement_db(
    graph: QDQGraph, form: Ragged, example: Sequence[torch.Tensor], real: torch.Tensor
) -> float:
    """Return how well both graphs agree for texts with these real tokens, in dB."""
    picked = torch.arange(real.numel()) % example[0].shape[1]
    inputs = [
        real.to(value.dtype) if i == form.mask else each[0, picked].view(real.shape).to(value.dtype)
        for i, (each, value) in enumerate(zip(example, graph.example, strict=False))
    ]
    rows = rows_of(form, inputs)
    if rows is None:  # it does not take them
        return math.inf
    with torch.no_grad():
        got = rows.outputs(form, _WithoutRounding(form.module).run(*rows.inputs))
        expected = _WithoutRounding(graph.module).run(*inputs)
        return worst_sqnr_db(_without_padding(form, inputs, expected), got)


class _WithoutRounding(fx.Interpreter):
    """Runs a graph whose activations stay as they are where it rounds them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input of what rounds, or of what makes values of codes that are none."""
        if target in _ROUND or (target in _RESTORE and args[0].dtype is torch.float32):
            return args[0]
        return super().call_function(target, args, kwargs)


def _real_tokens(length: int, form: Ragged) -> list[torch.Tensor]:
    """Return masks of texts: shorter ones, ones with holes, and one text alone."""
    lengths = torch.tensor([length, 1, (length + 1) // 2], dtype=torch.int64)
    shorter = torch.arange(length)[None, :] < lengths[:, None]
    if form.mask is None:
        return [torch.ones_like(shorter)]
    holes = torch.arange(length)[None, :] % torch.tensor([2, 3, 4], dtype=torch.int64)[:, None] == 0
    return [shorter, holes, torch.ones(1, length, dtype=torch.bool)]


def over_rows(
    graph: QDQGraph,
    form: Ragged,
    inner: EngineModel,
    padded: Callable[[], EngineModel],
    verify: str,
) -> EngineModel:
    """Return a model of padded texts.

    Args:
        graph: the one over padded texts.
        form: the one over rows of it.
        inner: runs that one; its outputs are overwritten by the next call.
        padded: makes what runs texts that the graph over rows does not take.
        verify: see `nc.backends.verify`.

    Raises:
        VerificationError: its outputs for the example are not those of the graph over padded texts.
        BackendError: the example has no text that it takes.
    """
    padded = functools.cache(padded)
    paths = [leaf.path for leaf in graph.signature.leaves if leaf.used]

    def rows(inputs: Sequence[torch.Tensor]) -> Rows | None:
        return rows_of(form, inputs, paths)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        found = rows(inputs)
        return padded().run(inputs) if found is None else found.outputs(form, inner.run(found.inputs))

    sqnr = _verified(graph, form, run, verify)

    def report() -> EngineReport:
        found = inner.report()
        details = {**found.details, DETAIL: "not computed: rows of real tokens, one plan for all sizes"}
        return dataclasses.replace(found, sqnr_db=sqnr, details=details)

    def profile(inputs: Sequence[torch.Tensor]) -> Profile:
        found = rows(inputs)
        model, given = (padded(), inputs) if found is None else (inner, found.inputs)
        assert model.profile is not None
        return model.profile(given)

    def steps(inputs: Sequence[torch.Tensor]) -> Sequence[EngineCall]:
        found = rows(inputs)
        model, given = (padded(), inputs) if found is None else (inner, found.inputs)
        assert model.steps is not None
        return model.steps(given)

    return dataclasses.replace(
        inner,
        run=run,
        report=report,
        profile=profile,
        steps=steps,
        texts=PaddedTexts(form.mask, form.of_tokens, functools.partial(_without_padding, form)),
    )


def _without_padding(form: Ragged, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> list[Any]:
    """Return outputs for padded texts with zeros where these models give zeros."""
    rows = rows_of(form, inputs)
    if rows is None or rows.flat is None:
        return list(outputs)
    flat = rows.flat
    return [
        rows.padded(value.flatten(0, 1)[flat][None]) if of_tokens else value
        for value, of_tokens in zip(outputs, form.of_tokens, strict=True)
    ]


def _verified(
    graph: QDQGraph, form: Ragged, run: Callable[[Sequence[torch.Tensor]], Sequence[Any]], verify: str
) -> float | None:
    """Compare the outputs for the example with those of the graph over padded texts; see `verify_outputs`."""
    if verify == "off":
        return None
    with torch.no_grad():
        outputs = run(graph.example)
    if form.padded is not None:
        graph = dataclasses.replace(graph, module=form.padded, expected=None)
    real = functools.partial(_without_padding, form, graph.example)
    known = None if graph.expected is None else tuple(real(graph.expected))
    compared = dataclasses.replace(graph, expected=known)
    return verify_outputs(
        compared, outputs, verify, "The native backend", None, lambda: real(reference_outputs(graph))
    )
