"""Example inputs as users give them → values by parameter name, and the same in other batch sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.errors import InputError


def bind_examples(model: torch.nn.Module, example_inputs: Any) -> tuple[dict[str, Any], int]:
    """Return example inputs by parameter name of `forward`, in order, and how many are positional.

    Those that are None are left out.
    """
    if example_inputs is None:
        msg = (
            "example_inputs is missing: the model is captured by running it once. Give one batch as a "
            "tensor, a tuple (positional) or a dict (keywords)."
        )
        raise InputError(msg)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    elif isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    else:
        msg = (
            "Expected example_inputs to be a tensor, a tuple, a list or a dict, but got "
            f"{type(example_inputs).__name__}.{_hint_of_kind(example_inputs)}"
        )
        raise InputError(msg)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        msg = (
            f"example_inputs do not fit {type(model).__name__}.forward{inspect.signature(model.forward)}: "
            f"{error}.{_hint_of_arguments(model, args)}"
        )
        raise InputError(msg) from error
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            values.update(value)
        elif value is not None:
            values[name] = value
    _check_examples(values)
    positional = next((i for i, value in enumerate(args) if value is None), len(args))
    return {name: value for name, value in values.items() if value is not None}, min(
        positional, len(bound.arguments)
    )


def _hint_of_kind(example_inputs: object) -> str:
    """Return what to do with what is not a batch."""
    if type(example_inputs).__module__.partition(".")[0] == "numpy":
        return " Call torch.from_numpy() on it."
    return " For one of its batches: next(iter(...))." if isinstance(example_inputs, Iterable) else ""


def _hint_of_arguments(model: torch.nn.Module, args: tuple[Any, ...]) -> str:
    """Return what a tuple or list of more arguments than `forward` takes may have been meant to be."""
    kinds = inspect.Parameter
    positional = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if len(args) <= len(positional):
        return ""
    if all(type(value) is int for value in args):
        return f" If that is a shape, give a tensor: torch.randn{args}."
    return (
        f" A tuple or list holds the arguments of one call: {len(args)} were given, and forward takes "
        f"{len(positional)} ({', '.join(positional)}). Give one batch, without labels: "
        "example_inputs=batches[0]."
    )


def _check_examples(values: dict[str, Any]) -> None:
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    unknown = next((type(v) for v in pytree.tree_leaves(values) if dataclasses.is_dataclass(v)), None)
    if unknown is not None:
        name = unknown.__name__
        msg = (
            f"example_inputs hold a {name}, whose members torch does not know: call "
            f"torch.export.register_dataclass({name})."
        )
        raise InputError(msg)
    for name, value in values.items():
        other = next((type(v) for v in pytree.tree_leaves(value) if holds_tensors(v)), None)
        if other is not None:
            msg = (
                f"Argument {name!r} of example_inputs holds a {other.__name__}, and torch.export does not "
                "know its members: give its tensors as a tuple, list or dict, or call "
                "torch.utils._pytree.register_pytree_node with the class."
            )
            raise InputError(msg)
    if not tensors:
        first = next(iter(pytree.tree_leaves(values)), None)
        msg = f"example_inputs hold no tensor; give one batch of real inputs.{_hint_of_kind(first)}"
        raise InputError(msg)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            msg = (
                f"example_inputs hold a tensor on device {tensor.device}; this is quantization for CPUs, "
                "call .cpu() on it."
            )
            raise InputError(msg)
        if not tensor.numel():
            msg = (
                f"example_inputs hold an empty tensor, of shape {tuple(tensor.shape)}: nothing could be "
                "verified on it."
            )
            raise InputError(msg)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            msg = (
                f"example_inputs hold NaN, in a tensor of shape {tuple(tensor.shape)}: nothing could be "
                "verified on them."
            )
            raise InputError(msg)


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Return whether a leaf is an object with tensors that pytree does not see.

    They may also be in objects in it, as in a `StaticCache` with its layers.
    """
    if isinstance(value, (torch.Tensor, torch.nn.Module)) or not hasattr(value, "__dict__") or not depth:
        return False
    members = pytree.tree_leaves(dict(vars(value)))
    return any(isinstance(member, torch.Tensor) or holds_tensors(member, depth - 1) for member in members)


def with_batch(values: dict[str, Any], size: int) -> dict[str, Any] | None:
    """Return the arguments repeated to another batch size.

    None is returned when the tensors do not share a first dimension.
    """
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    sizes = {t.shape[0] if t.dim() else 0 for t in tensors}
    if len(sizes) != 1 or 0 in sizes:
        return None
    copies = -(-size // sizes.pop())

    def repeat(leaf: Any) -> Any:
        return (
            _in_order(torch.cat([leaf] * copies)[:size].contiguous(), leaf)
            if isinstance(leaf, torch.Tensor)
            else leaf
        )

    repeated: dict[str, Any] = pytree.tree_map(repeat, values)
    return repeated


def with_second(values: dict[str, Any], size: int) -> dict[str, Any] | None:
    """Return the arguments with another size where the second dimension of rows or sequences has size 1.

    It is the batch of recurrent models whose steps come first. None where no tensor has such a dimension.
    """
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    if not any(map(_has_single_second, tensors)):
        return None
    wide: dict[str, Any] = pytree.tree_map(
        lambda leaf: leaf.repeat_interleave(size, 1) if _has_single_second(leaf) else leaf, values
    )
    return wide


def _has_single_second(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() in (2, 3) and leaf.shape[1] == 1


def another_batch(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments in another batch size than the example's: 3, or 5 where it has 3.

    None where there is no first dimension.

    If the tensors have different first dimensions, each becomes twice as long. Every second copy is flipped.
    Otherwise all parts of the batch would be equal, and mixing them up would not show.
    """
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    if not all(t.dim() and t.shape[0] for t in tensors):
        return None
    sizes = {t.shape[0] for t in tensors}
    size = None if len(sizes) > 1 else 5 if sizes == {3} else 3

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        length = 2 * leaf.shape[0] if size is None else size
        return _in_order(torch.cat([leaf, leaf.flip(0)] * length)[:length].contiguous(), leaf)

    others: dict[str, Any] = pytree.tree_map(resized, values)
    return _within(others, values)


def _in_order(resized: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Put a row of integers in order again where the original was in order.

    Offsets, numbers of segments and lengths are valid only so.
    """
    if (
        original.dim() != 1
        or original.is_floating_point()
        or original.is_complex()
        or original.dtype == torch.bool
    ):
        return resized
    steps = original.diff()
    if bool((steps >= 0).all()):
        return resized.sort().values
    return resized.sort(descending=True).values if bool((steps <= 0).all()) else resized


def _within(resized: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """Keep rows of integers in order, such as offsets.

    They stay within the first dimensions of other tensors that hold them in the original. Not all operators
    check what they are given: `embedding_bag` of torch 2.8 ends the process with offsets beyond the ids.
    """
    flat, spec = pytree.tree_flatten(resized)
    leaves = pytree.tree_leaves(original)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    for i in tensors:
        if not _is_row_in_order(leaves[i]) or not leaves[i].numel():
            continue
        highest = int(leaves[i].max())
        limits = [flat[j].shape[0] for j in tensors if j != i and leaves[j].shape[0] >= highest]
        if limits:
            flat[i] = flat[i].clamp(max=min(limits))
    kept: dict[str, Any] = pytree.tree_unflatten(flat, spec)
    return kept


def _is_row_in_order(tensor: torch.Tensor) -> bool:
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    return bool((tensor.diff() >= 0).all())


def with_sizes(values: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments in other sizes: cut, or repeated and cut.

    Args:
        values: the arguments.
        sizes: by the names `in<i>_<d>` of `nc.graph.size_conditions`; other dimensions stay.
    """
    flat, spec = pytree.tree_flatten(values)
    for i, leaf in enumerate(flat):
        for d in range(leaf.dim() if isinstance(leaf, torch.Tensor) else 0):
            wanted = sizes.get(f"in{i}_{d}", leaf.shape[d])
            if wanted != leaf.shape[d]:
                flat[i] = _in_order(flat[i].index_select(d, torch.arange(wanted) % leaf.shape[d]), leaf)
    resized: dict[str, Any] = pytree.tree_unflatten(flat, spec)
    return _within(resized, values)
