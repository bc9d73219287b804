"""What a model keeps beside parameters and buffers from call to call, such as `self.last = x`.

A graph keeps nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: What forward may change without a new value for the name that it has.
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.deque)
#: What a class or a file may hold that a call changes.
_CHANGEABLE = (torch.Tensor, bool, int, float, *_CONTAINERS)
#: How deep objects are looked into: `self.a.b.c`.
_DEPTH = 2

#: For each name, as messages write it, all that would be another object, or of another version, if a call
#: changed it.
State = Mapping[str, list[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Something that holds values by name.

    Attributes:
        prefix: of the names, for messages.
        owner: a module, another object, a class, or the globals of a file.
        values: those that count.
    """

    prefix: str
    owner: Any
    values: dict[str, Any]


def holders(model: torch.nn.Module) -> Iterator[Holder]:
    """Yield what can hold state of a model beside its tensors.

    These are its modules, objects in their attributes, their classes, and the globals that their forwards
    name.
    """
    seen: set[int] = set()
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        prefix = f"self.{path}." if path else "self."
        yield Holder(prefix, module, own)
        yield from _objects(prefix, own, _DEPTH, seen)
        classes.update(dict.fromkeys(type(module).__mro__))
    for cls in classes:
        if f"{cls.__module__}.".startswith(("torch.", "builtins.")):
            continue
        held = {
            name: v
            for name, v in vars(cls).items()
            if isinstance(v, _CHANGEABLE) and not name.startswith("__")
        }
        yield Holder(f"{cls.__name__}.", cls, held)
        yield from _globals(vars(cls).get("forward"))


def state_of(model: torch.nn.Module) -> State:
    """Return what all of them hold."""
    return {
        f"{holder.prefix}{name}": _parts(value)
        for holder in holders(model)
        for name, value in holder.values.items()
    }


def changed(before: State, after: State) -> list[str]:
    """Return the names that two states do not have in common."""
    names = [
        name for name, parts in after.items() if name not in before or not _are_same(before[name], parts)
    ]
    return [*names, *(name for name in before if name not in after)]


def computed_by_hooks(model: torch.nn.Module, before: State, after: State) -> set[str]:
    """Return the attributes that are weights computed by hooks, not states.

    Their modules have forward pre-hooks, and `after` has other tensors for them with the same values.
    `weight_norm`, `spectral_norm` and pruning compute a weight of parameters in each call.
    """
    hooked = {
        f"self.{path}".rstrip(".") for path, module in model.named_modules() if module._forward_pre_hooks
    }
    return {
        name
        for name in before.keys() & after.keys()
        if name.rpartition(".")[0] in hooked and _are_equal(before[name][0], after[name][0])
    }


def kept_in(model: torch.nn.Module) -> State:
    """As `state_of`, with buffers."""
    return {**state_of(model), **{f"self.{name}": _parts(buffer) for name, buffer in model.named_buffers()}}


def changes_of(model: torch.nn.Module, before: State, after: State) -> list[str]:
    """Return what changed, beside weights that hooks compute in each call."""
    computed = computed_by_hooks(model, before, after)
    return [name for name in changed(before, after) if name not in computed]


@contextlib.contextmanager
def put_back(model: torch.nn.Module) -> Iterator[None]:
    """Put back afterwards what modules, objects, classes and globals held.

    They hold the same values, whatever calls have changed inside.
    """
    held = list(holders(model))
    attributes = [
        (holder, dict(vars(holder.owner))) for holder in held if isinstance(holder.owner, torch.nn.Module)
    ]
    values = [value for holder in held for value in holder.values.values()]
    inside = [
        *values,
        *(value for _, own in attributes for value in own.values()),
    ]  # also torch's own dicts of buffers and parameters
    contents = [(value, value.copy()) for value in inside if type(value) in _CONTAINERS]
    tensors = {id(t): (t, t.detach().clone()) for value in values for t in _tensors(value)}
    try:
        yield
    finally:
        for holder, own in attributes:  # the mode too; forward may put others in the place of buffers
            for name in set(vars(holder.owner)) - set(own):
                del vars(holder.owner)[name]
            vars(holder.owner).update(own)
        for holder in held:
            _put_values_back(holder)
        for container, content in contents:
            _put_content_back(container, content)
        with torch.no_grad():
            for tensor, before in tensors.values():
                if not torch.equal(tensor, before):
                    tensor.detach().copy_(before)


def _put_values_back(holder: Holder) -> None:
    """Only what was changed: a class calls its metaclass where one of its attributes is set."""
    owner = holder.owner
    if isinstance(owner, torch.nn.Module):
        return
    now = owner if isinstance(owner, dict) else vars(owner)
    for name, value in holder.values.items():
        if now.get(name) is value:
            continue
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


def _put_content_back(value: Any, content: Any) -> None:
    """Give a container the content that it had."""
    if type(value) is list:
        value[:] = content
        return
    value.clear()
    if isinstance(value, collections.deque):
        value.extend(content)
    else:
        value.update(content)


def _objects(prefix: str, values: Mapping[str, Any], depth: int, seen: set[int]) -> Iterator[Holder]:
    """Plain objects among values, and in their attributes."""
    if not depth:
        return
    for name, value in values.items():
        own = getattr(value, "__dict__", None)
        if (
            not isinstance(own, dict)
            or id(value) in seen
            or isinstance(value, (torch.Tensor, torch.nn.Module, type, types.ModuleType))
        ):
            continue
        if callable(value):
            continue
        seen.add(id(value))
        yield Holder(f"{prefix}{name}.", value, dict(own))
        yield from _objects(f"{prefix}{name}.", own, depth - 1, seen)


def _globals(forward: Any) -> Iterator[Holder]:
    """Yield the globals that a function names."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return
    names = {name: forward.__globals__.get(name) for name in code.co_names}
    yield Holder(
        "the global ",
        forward.__globals__,
        {name: value for name, value in names.items() if isinstance(value, _CHANGEABLE)},
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a value whose content can be kept."""
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple, set, collections.deque))
        else (value,)
    )
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [
        t
        for t in items
        if type(t) in kinds
        and t.layout is torch.strided
        and not t.is_meta
        and not t.is_inference()
        and not t.is_nested
    ]


def _are_equal(a: object, b: object) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype is b.dtype
        and torch.equal(a, b)
    )


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
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y) for x, y in zip(a, b, strict=True)
    )
