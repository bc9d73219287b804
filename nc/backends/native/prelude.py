"""Integers of tokens as steps that numpy does too: positions that a model computes from ids, as RoBERTa does.

A graph over rows computes such integers by operators of torch, from tokens and from what was computed of
padded texts before. Here all of them become steps on padded texts, and what the rest of the graph reads of
them become its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.rewrites.ragged.rewrite import Ragged
from nc.errors import UnsupportedError
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import copy_module
from nc.graph.tensor_meta import TENSORS
from nc.graph.views import returned

_aten = torch.ops.aten
_OF_TWO: Mapping[Any, str] = {
    getattr(getattr(_aten, name), overload): name
    for name in ("add", "sub", "mul", "ne", "eq")
    for overload in ("Tensor", "Scalar")
}
_CONVERSIONS = (_aten.to.dtype, _aten.type_as.default, _aten._to_copy.default)
_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "ne", "eq")},
    "to": lambda x: x,
    "cumsum": functools.partial(torch.cumsum, dim=1),
}
_INTEGERS = (torch.bool, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class IntegerStep:
    """One operator.

    Attributes:
        op: "add", "sub", "mul", "ne", "eq", "to" or "cumsum", which sums along each text.
        values: numbers of the values that it takes: inputs come first, then results of steps.
        number: its last argument where that is not a value.
        dtype: of its result.
    """

    op: str
    values: tuple[int, ...]
    number: int | None
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Prelude:
    """Steps on padded texts, and the numbers of the values that are inputs of the graph over rows."""

    steps: tuple[IntegerStep, ...]
    results: tuple[int, ...]

    def compute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results, int64 [texts, length] each."""
        values = list(inputs)
        for step in self.steps:
            numbers = [] if step.number is None else [step.number]
            found = _FUNCTIONS[step.op](*(values[i] for i in step.values), *numbers)
            values.append(found.to(step.dtype))
        return [values[i] for i in self.results]


def with_prelude(form: Ragged) -> tuple[Ragged, Prelude]:
    """Return a form whose graph computes no integers of tokens, and what computes them.

    Raises:
        UnsupportedError: something is computed with padding that steps do not compute.
    """
    if form.apart is None:
        return form, Prelude((), ())
    module, _ = copy_module(form.module, lazy=True)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    given = [node for node in form.apart.graph.nodes if node.op == "placeholder"]
    steps: list[IntegerStep] = []
    found = _translated(form.apart, dict(zip(given, range(len(given)), strict=True)), steps, len(given))
    leaves: Sequence[Any] = returned(form.apart)
    missing = [leaf for leaf in leaves if leaf not in found]
    if missing or form.picked:
        names = ", ".join(map(str, missing))
        why = "it picks tokens by their values" if form.picked else f"no step of nc-run computes {names}"
        msg = f"nc-run can't take this model: {why}."
        raise UnsupportedError(msg)
    extras = placeholders[len(given) : len(placeholders) - 3]
    known = dict(zip(placeholders, range(len(given)), strict=False))
    known |= {node: found[leaf] for node, leaf in zip(extras, leaves, strict=True)}
    known = _translated(module, known, steps, len(given))
    read = [
        node
        for node in known
        if node not in placeholders[: len(given)] and any(user not in known for user in node.users)
    ]
    for node in read:
        _read_as_input(module, node, placeholders[-3], known)
    for node in reversed(known):  # none is read any more, but tokens
        if node not in placeholders[: len(given)]:
            module.graph.erase_node(node)
    module.recompile()
    prelude = Prelude(tuple(steps), tuple(known[node] for node in read))
    return dataclasses.replace(form, module=module, beforehand=prelude.compute), prelude


def _read_as_input(
    module: fx.GraphModule, node: fx.Node, place: fx.Node, known: Mapping[fx.Node, int]
) -> None:
    """Let what is not `known` read a node as a new input, before that at a place."""
    if node.meta["val"].dtype is not torch.int64:
        msg = f"nc-run can't take this model: {node} is {node.meta['val'].dtype}, and not int64."
        raise UnsupportedError(msg)
    with module.graph.inserting_before(place):
        new = module.graph.placeholder(f"{node.name}_of_tokens")
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in known)


def _translated(
    module: fx.GraphModule, known: Mapping[fx.Node, int], steps: list[IntegerStep], inputs: int
) -> dict[fx.Node, int]:
    """Append steps for all nodes of a graph that are some; return numbers of their values, and `known`."""
    found = dict(known)
    for node in module.graph.nodes:
        step = _step(node, found)
        if step is not None:
            steps.append(step)
            found[node] = inputs + len(steps) - 1
    return found


def _step(node: fx.Node, known: Mapping[fx.Node, int]) -> IntegerStep | None:
    """Return what a node does as a step; None if steps do not compute it."""
    value = node.meta.get("val")
    sources = node.all_input_nodes
    is_of_tokens = bool(sources) and all(source in known for source in sources)
    if not is_of_tokens or not isinstance(value, TENSORS) or value.dtype not in _INTEGERS:
        return None
    a = schema_arguments(node)
    if node.target in _CONVERSIONS:
        return IntegerStep("to", (known[a["self"]],), None, value.dtype)
    if node.target is _aten.cumsum.default and a["dim"] in (1, -1):
        return IntegerStep("cumsum", (known[a["self"]],), None, value.dtype)
    other: Any = a.get("other")
    number = other if type(other) is int else None
    if node.target not in _OF_TWO or a.get("alpha", 1) != 1 or not isinstance(a["self"], fx.Node):
        return None
    if number is None and not isinstance(other, fx.Node):
        return None
    values = (known[a["self"]],) if number is not None else (known[a["self"]], known[other])
    return IntegerStep(_OF_TWO[node.target], values, number, value.dtype)
