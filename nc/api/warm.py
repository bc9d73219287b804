"""Calls with declared sizes, which make the kernels of a loaded model before anybody waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.api.quantized import QuantizedModel, as_call
from nc.errors import InputError
from nc.graph.qdq import QDQGraph
from nc.graph.signature import Leaf

#: Calls of each size: the first makes plans, the next ones settle which kernels are taken.
CALLS = 3


def warm_up(model: torch.nn.Module, entries: Iterable[Any], graph: QDQGraph | None = None) -> None:
    """Call a model with inputs of some sizes.

    Args:
        model: what is called.
        entries: for each size inputs as in a call (a tensor, a tuple or a dict of them); or a shape, that of
            the first input and of all that have its shape in the example inputs; or shapes by name of the
            input.
        graph: what the model was captured as; None: the model's own.

    Raises:
        InputError: there is no list, an entry is none of these, shapes do not say the sizes of all inputs, or
            the model can't have them.
    """
    if graph is None and isinstance(model, QuantizedModel):
        graph = model.graph
    if not isinstance(entries, Iterable):
        msg = f"warm: expected a list of sizes, such as [(1, 128)], but got {entries!r}."
        raise InputError(msg)
    for entry in entries:
        args, kwargs = _call_of(entry, graph)
        with torch.no_grad():
            for _ in range(CALLS):
                model(*args, **kwargs)


def _call_of(entry: Any, graph: QDQGraph | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shapes = _shapes(entry)
    if shapes is None:
        if not isinstance(entry, (torch.Tensor, Mapping, tuple, list)):
            msg = (
                f"warm: expected a list of inputs, shapes, or shapes by name of the input, such as "
                f"[(1, 128), (8, 64)], but one of them is {entry!r}."
            )
            raise InputError(msg)
        return as_call(entry)
    if graph is None:
        msg = "warm: shapes are for captured models; for one with low-bit weights give inputs, as in a call."
        raise InputError(msg)
    return _arguments(graph, _of_all(graph, shapes))


def inputs_of(graph: QDQGraph, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call whose first input has some shape; values are those of the example, repeated.

    Raises:
        InputError: it does not say the sizes of all inputs.
    """
    return _arguments(graph, _of_all(graph, {"": shape}))


def example_call(graph: QDQGraph) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with the example inputs."""
    return _arguments(graph, {path: tuple(tensor.shape) for path, tensor in _examples(graph).items()})


def _shapes(entry: Any) -> dict[str, tuple[int, ...]] | None:
    """Return shapes by name of the input, "" for the first; None where an entry is inputs."""
    named = entry if isinstance(entry, Mapping) else {"": entry}
    found = {
        str(name): tuple(shape)
        for name, shape in named.items()
        if isinstance(shape, (tuple, list)) and shape and all(type(size) is int for size in shape)
    }
    return found if found and len(found) == len(named) else None


def _of_all(graph: QDQGraph, given: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input that is a tensor."""
    leaves = [leaf for leaf in graph.signature.leaves if leaf.dtype is not None]
    examples = _examples(graph)
    unknown = sorted(set(given) - {"", *(leaf.path for leaf in leaves)})
    if unknown or not leaves:
        msg = f"warm: the model has no input {', '.join(unknown)}; it has {', '.join(examples)}."
        raise InputError(msg)
    named = {**given, leaves[0].path: given[""]} if "" in given else dict(given)
    sizes = {
        dim: size
        for leaf in leaves
        if leaf.path in named
        for dim, size in zip(leaf.dims, named[leaf.path], strict=False)
        if isinstance(dim, str)
    }
    first = next(leaf for leaf in leaves if leaf.path in named)
    return {leaf.path: _shape(leaf, named, sizes, first, examples) for leaf in leaves}


def _shape(
    leaf: Leaf,
    named: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    first: Leaf,
    examples: Mapping[str, torch.Tensor],
) -> tuple[int, ...]:
    if leaf.path in named:
        return named[leaf.path]
    if examples[leaf.path].shape == examples[first.path].shape:
        return named[first.path]
    known = [dim if isinstance(dim, int) else sizes.get(dim) for dim in leaf.dims]
    if any(size is None for size in known):
        msg = (
            f"warm: the shape of {first.path!r} does not say that of {leaf.path!r}; give both, "
            f"{{{first.path!r}: …, {leaf.path!r}: …}}."
        )
        raise InputError(msg)
    return tuple(size for size in known if size is not None)


def _examples(graph: QDQGraph) -> dict[str, torch.Tensor]:
    """Return an example of each input that is a tensor; zeros for those that the graph does not read."""
    used = iter(graph.example)
    return {
        leaf.path: next(used)
        if leaf.used
        else torch.zeros([dim if isinstance(dim, int) else 1 for dim in leaf.dims], dtype=leaf.dtype)
        for leaf in graph.signature.leaves
        if leaf.dtype is not None or leaf.used
    }


def _arguments(
    graph: QDQGraph, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call with inputs of some shapes, whose values are those of the example, repeated."""
    examples = _examples(graph)
    flat = [
        leaf.value if leaf.dtype is None else _repeated(examples[leaf.path], shapes[leaf.path], leaf.path)
        for leaf in graph.signature.leaves
    ]
    given = pytree.tree_unflatten(flat, graph.signature.in_spec)
    by_position: list[Any] = []
    for parameter in graph.signature.parameters:
        if parameter.name in given and not parameter.keyword:
            value = given.pop(parameter.name)
            by_position += list(value) if parameter.variadic else [value]
    return tuple(by_position), given


def _repeated(x: torch.Tensor, shape: Sequence[int], path: str) -> torch.Tensor:
    if len(shape) != x.dim() or min(shape, default=1) < 1:
        msg = (
            f"warm: input {path!r} has {x.dim()} dimensions of 1 or more, as {tuple(x.shape)}, not "
            f"{tuple(shape)}."
        )
        raise InputError(msg)
    for dim, size in enumerate(shape):
        x = x.index_select(dim, torch.arange(size) % x.shape[dim])
    return x.contiguous()
