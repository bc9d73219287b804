"""Example inputs as users give them → values by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.errors import InputError


def bind_examples(model: torch.nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Example inputs by parameter name of `forward`, in its order; arguments that are None are left out."""
    if example_inputs is None:
        msg = (
            "example_inputs is missing: the model is captured by running it once. Give one batch as a tensor, a tuple (positional) or a "
            "dict (keywords)."
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
        msg = f"Expected example_inputs to be a tensor, a tuple, a list or a dict, but got {type(example_inputs).__name__}."
        raise InputError(msg)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        msg = f"example_inputs do not fit {type(model).__name__}.forward{inspect.signature(model.forward)}: {error}."
        raise InputError(msg) from error
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            values.update(value)
        elif value is not None:
            values[name] = value
    _check_examples(values)
    return {name: value for name, value in values.items() if value is not None}


def _check_examples(values: dict[str, Any]) -> None:
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    if not tensors:
        msg = "example_inputs hold no tensor; give one batch of real inputs."
        raise InputError(msg)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            msg = f"example_inputs hold a tensor on device {tensor.device}; this is quantization for CPUs, call .cpu() on it."
            raise InputError(msg)
        if not tensor.numel():
            msg = f"example_inputs hold an empty tensor, of shape {tuple(tensor.shape)}: nothing could be verified on it."
            raise InputError(msg)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            msg = f"example_inputs hold NaN, in a tensor of shape {tuple(tensor.shape)}: nothing could be verified on them."
            raise InputError(msg)
