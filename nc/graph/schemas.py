"""The arguments that operators take, each operator's read once.

Torch makes new objects of a schema at every look.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operator.

    Attributes:
        name: of the argument.
        kwarg_only: whether it is given by name only.
        has_default: whether it may be left out.
        default_value: what it is then; a list that can't be changed.
        type: as torch writes it, e.g. "Optional[List[int]]".
        length: of a list that may be given as one number; else None.
        written: whether the operator changes it.
    """

    name: str
    kwarg_only: bool
    has_default: bool
    default_value: Any
    type: str
    length: int | None
    written: bool


def schema_of(target: object) -> tuple[Argument, ...]:
    """Return the arguments of an operator in their order; none for Python functions, which have no schema."""
    return _arguments(target) if isinstance(target, torch._ops.OpOverload) else ()


@functools.cache
def returns_of(target: torch._ops.OpOverload) -> tuple[str, ...]:
    """Return the types of what an operator returns, as torch writes them."""
    return tuple(str(each.type) for each in target._schema.returns)


@functools.cache
def writes_into(target: object) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the overload of an operator that writes into memory it is given; None for none.

    The names of those arguments are returned too.

    One that torch generates from the operator itself does not count: it makes new memory and copies.
    """
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    taken = [(a.name, a.type) for a in _arguments(target)]
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        written = [a.name for a in overload._schema.arguments if a.is_out]
        others = [(a.name, a.type) for a in _arguments(overload) if a.name not in written]
        if others == taken and len(written) == len(target._schema.returns) and _has_cpu_kernel(overload):
            return overload, tuple(written)
    return None


def _has_cpu_kernel(overload: torch._ops.OpOverload) -> bool:
    name, kind = overload._schema.name, overload._schema.overload_name
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{name}.{kind}" if kind else name, "CPU")


@functools.cache
def _arguments(target: torch._ops.OpOverload) -> tuple[Argument, ...]:
    return tuple(
        Argument(
            a.name,
            a.kwarg_only,
            a.has_default_value(),
            _frozen(a.default_value),
            str(a.real_type),
            a.N,  # type: ignore[attr-defined]
            _is_written(a),
        )
        for a in target._schema.arguments
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _frozen(value: Any) -> Any:
    return immutable_list(value) if isinstance(value, list) else value
