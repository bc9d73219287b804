"""What a model keeps in plain attributes from call to call, such as `self.last = x`: a graph keeps nothing."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

#: For each attribute, by its path in the model, all that would be another object, or of another version, if a call changed it.
State = Mapping[str, list[Any]]


def state_of(model: torch.nn.Module) -> State:
    """The plain attributes of all modules."""
    return {
        f"{path}.{name}".lstrip("."): _parts(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def changed(before: State, after: State) -> list[str]:
    """The attributes that two states do not have in common."""
    names = [name for name, parts in after.items() if name not in before or not _are_same(before[name], parts)]
    return [*names, *(name for name in before if name not in after)]


def computed_by_hooks(model: torch.nn.Module, before: State, after: State) -> set[str]:
    """The attributes of modules with hooks in front of their call that are other tensors with the same values: weights, not states.

    `weight_norm`, `spectral_norm` and pruning compute a weight of parameters in each call.
    """
    hooked = {path for path, module in model.named_modules() if module._forward_pre_hooks}
    return {
        name for name in before.keys() & after.keys() if name.rpartition(".")[0] in hooked and _are_equal(before[name][0], after[name][0])
    }


def _are_equal(a: object, b: object) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a, b)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value, 0 if value.is_inference() else value._version]
    if isinstance(value, dict):
        return [value, *value, *(part for item in value.values() for part in _parts_inside(item))]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [value, *(part for item in value for part in _parts_inside(item))]
    return [value]


def _parts_inside(item: Any) -> list[Any]:
    return _parts(item) if isinstance(item, torch.Tensor) else [item]


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y) for x, y in zip(a, b, strict=True))
