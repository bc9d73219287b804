"""Calls of the user's model and of its graph, with what they leave in their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc.capture.export_guards import other_forward
from nc.capture.precautions import Precautions
from nc.capture.same_outputs import LostEffectError, OtherOutputError, same_outputs
from nc.errors import InputError
from nc.graph.effects import Path, containers, same_objects
from nc.graph.fx_utils import call_graph
from nc.graph.signature import Parameter, Signature


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """What the arguments of a call are after it, where it replaced entries of containers.

    Attributes:
        after: their structure.
        sources: for each leaf, its index among the leaves before the call; None for a new leaf.
    """

    after: pytree.TreeSpec
    sources: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """A call of a model, or of its graph.

    Attributes:
        outputs: what it gave.
        arguments: its arguments by name, as they are after it.
        replaced: see `Replaced`; None where it replaced nothing.
        objects: see `nc.graph.effects.Effects`.
    """

    outputs: Any
    arguments: dict[str, Any]
    replaced: Replaced | None = None
    objects: tuple[tuple[Path, Path], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Calls a model as the user does.

    Attributes:
        model: the model.
        parameters: those of its `forward`.
        positional: how many arguments are given by position, which hooks of the model see.
        precautions: what is around each call.
    """

    model: torch.nn.Module
    parameters: tuple[Parameter, ...]
    positional: int
    precautions: Precautions

    def __call__(self, values: Mapping[str, Any]) -> Ran:
        """Return the model's own call, with copies of the arguments."""
        arguments: dict[str, Any] = pytree.tree_map(copied, dict(values))
        args, kwargs = self.split(arguments)
        known = containers(arguments)
        before = pytree.tree_flatten(arguments)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"torch\.")  # what torch says about its prototypes
            for around in self.precautions.around:
                stack.enter_context(around(self.model))
            outputs = self.model(*args, **kwargs)
        objects = tuple(same_objects(outputs, known))
        outputs = pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs
        )
        return Ran(outputs, arguments, _replaced(*before, arguments), objects)

    def split(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, by position and by name."""
        last = max((i for i, p in enumerate(self.parameters) if p.captured and not p.keyword), default=-1)
        args: list[Any] = []
        given = self.parameters[: max(last + 1, self.positional)]
        for parameter in given:
            value = values.get(parameter.name)
            args += value or () if parameter.variadic else (value,)
        named = {p.name for p in given}
        return tuple(args), {k: v for k, v in values.items() if k not in named}


def copied(leaf: Any) -> Any:
    """Return a leaf of arguments, so that a model that works in place leaves the original as it is."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def run_graph(module: fx.GraphModule, signature: Signature, values: Mapping[str, Any]) -> Ran:
    """Return a call of a graph, with copies of the arguments."""
    arguments: dict[str, Any] = pytree.tree_map(copied, dict(values))
    outputs = call_graph(module, signature.bind((), arguments))
    signature.unflatten(outputs)  # what it raises is about other things
    try:
        return Ran(signature.result(outputs, (), arguments), arguments)
    except InputError as error:
        names = dict.fromkeys(
            signature.effects.names(list(arguments), [leaf.path for leaf in signature.leaves])
        )
        raise LostEffectError(*names) from error


def check_same(expected: Ran, got: Ran, picks: Sequence[str]) -> None:
    """Raise RuntimeError where two calls gave something else, or left something else in their arguments."""
    same_outputs(expected.outputs, got.outputs, picks)
    for name, argument in expected.arguments.items():
        if not _is_same(argument, got.arguments[name]):
            raise LostEffectError(name)


@contextlib.contextmanager
def giving_entries(model: torch.nn.Module, names: Sequence[str], replaced: Replaced | None) -> Iterator[None]:
    """Let the model return (its output, the new entries of containers), within this context.

    If `replaced` is None, the model is left as it is.

    Args:
        model: the model; its `forward` is replaced within the context.
        names: names of the arguments.
        replaced: the entries that a call of the model was seen to replace.

    Raises:
        LostEffectError: a call within the context replaces other entries.
    """
    if replaced is None:
        yield
        return
    original, signature = model.forward, inspect.signature(model.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = _by_name(signature, args, kwargs, names)
        before = pytree.tree_flatten(arguments)
        output = original(*args, **kwargs)
        if _replaced(*before, arguments) != replaced:
            raise LostEffectError(*names)
        leaves = pytree.tree_leaves(arguments)
        return output, tuple(
            leaf for leaf, source in zip(leaves, replaced.sources, strict=True) if source is None
        )

    with other_forward(model, forward, signature):
        yield


def _by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of a call with these names, in this order."""
    given: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        given.update(
            value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        )
    return {name: given[name] for name in names}


def _replaced(before: Sequence[Any], spec: pytree.TreeSpec, arguments: Mapping[str, Any]) -> Replaced | None:
    """Return what a call replaced in containers.

    The leaves and the structure of its arguments before the call are given.
    """
    after, now = pytree.tree_flatten(arguments)
    place = {id(leaf): i for i, leaf in reversed([*enumerate(before)])}
    if now == spec and all(a is b or _is_equal(a, b) for a, b in zip(before, after, strict=True)):
        return None
    return Replaced(
        now, tuple(place.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None for leaf in after)
    )


def _is_equal(a: object, b: object) -> bool:
    """Return whether two leaves are equal plain values."""
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)


def _is_same(expected: Any, got: Any) -> bool:
    if pytree.tree_structure(expected) != pytree.tree_structure(got):
        return False
    try:
        same_outputs(expected, got, ())
    except OtherOutputError:
        return False
    return all(
        _is_equal(a, b)
        for a, b in zip(*map(pytree.tree_leaves, (expected, got)), strict=True)
        if not isinstance(a, torch.Tensor)
    )
