"""Copy a model so that the copy shares its tensors, and give such a copy its own tensors."""

from __future__ import annotations

import collections
import copy
import types
from typing import Any

import torch

#: Containers that are copied item by item; objects of other classes are copied whole, or shared.
_LISTS: tuple[type, ...] = (list, tuple, set, frozenset, collections.deque)
_DICTS: tuple[type, ...] = (dict, collections.OrderedDict)


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """Copy the modules of a model.

    Parameters, buffers and the weights that hooks compute stay those of the model.

    What a module holds beside that is copied too, except what can't be: locks, open files, generators,
    connections. The copy has the same ones.
    """
    computed = [
        v
        for module in model.modules()
        for v in vars(module).values()
        if isinstance(v, torch.Tensor) and not v.is_leaf
    ]
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers(), *computed)}
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # any object can refuse, with any error; what refuses is shared
        copied: torch.nn.Module = _copied(model, memo)
        return copied


def own_tensors(model: torch.nn.Module) -> None:
    """Give a copy its own parameters and buffers, in place of those that it shares.

    Ties inside the copy stay.
    """
    copies: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue  # it has its own since it was copied
        for name, parameter in part._parameters.items():  # named_parameters leaves out ties
            if parameter is not None:
                fresh = copies.setdefault(
                    id(parameter), torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                )
                part._parameters[name] = fresh
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of anything. `memo` has the copies so far by the id of the original."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
        return _module(value, memo)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copied(value.__self__, memo))
    if type(value) in _LISTS:
        return type(value)(_copied(item, memo) for item in value)
    if type(value) in _DICTS:
        made = memo[id(value)] = type(value)()
        made.update((key, _copied(item, memo)) for key, item in value.items())
        return made
    trial = dict(memo)
    try:
        whole = copy.deepcopy(value, trial)
    except Exception:  # as in `sharing`
        whole = _taken_apart(value, memo)
    else:
        memo.update(trial)
    return whole


def _module(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    try:
        made = copy.copy(module)
    except Exception:  # parametrized modules refuse
        made = type(module).__new__(type(module))
        made.__dict__.update(vars(module))
    memo[id(module)] = made
    for name, value in list(vars(made).items()):
        made.__dict__[name] = _copied(value, memo)
    return made


def _taken_apart(value: Any, memo: dict[int, Any]) -> Any:
    """Return an object that can't be deep-copied: itself, or a shallow copy if an attribute is a module.

    Attributes of the shallow copy are copied.
    """
    memo[id(value)] = value
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or not any(
        isinstance(v, torch.nn.Module) for v in attributes.values()
    ):
        return value
    try:
        made = memo[id(value)] = copy.copy(value)
        for name, item in attributes.items():
            made.__dict__[name] = _copied(item, memo)
    except Exception:  # as in `sharing`
        memo[id(value)] = made = value
    return made
