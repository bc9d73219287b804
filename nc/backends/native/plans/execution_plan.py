"""What a plan consists of.

It has pieces of memory, references to tensors in them, and the calls to make, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.kernels.c_code.calls import Function
from nc.kernels.onednn.descriptions import Desc
from nc.kernels.onednn.primitives import Layout, Primitive
from nc.profiling.profile import EngineCall


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A piece of memory that calls write and read.

    Attributes:
        size: bytes.
        first: index of the entry that writes it first.
        last: index of the last entry that reads it.
        returned: the caller gets it, so it is allocated at each call; the others are in the arena.
    """

    size: int
    first: int
    last: int = -1
    returned: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor that is the same in all calls."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that another memory manager made: an input, or the result of an ATen operator.

    Attributes:
        index: its number.
        desc: sizes, strides and dtype, which are the same in all calls of a plan.
    """

    index: int
    desc: Desc


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MemoryPart:
    """A tensor in other memory.

    Attributes:
        root: that memory, or the tensor that this one is a view of.
        offset: bytes from its begin.
        desc: sizes, strides and dtype.
    """

    root: Block | Slot
    offset: int
    desc: Desc


Ref = Constant | Slot | MemoryPart


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PrimitiveCall:
    """A call of a primitive.

    Attributes:
        primitive: what is called.
        tensors: for each argument, its memory layout and its place.
        step: what a profile says of it.
    """

    primitive: Primitive
    tensors: Mapping[int, tuple[Layout, Ref]]
    step: EngineCall


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FunctionCall:
    """A call of a function in C.

    Attributes:
        function: what is called.
        packed: its first argument.
        tensors: those that it reads and writes.
        step: what a profile says of it.
        shown: its first argument where results that nothing reads are kept too, for who compares them; None
            where that is the same.
    """

    function: Function
    packed: bytes
    tensors: Sequence[Ref]
    step: EngineCall
    shown: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AtenCall:
    """A call of an operator of torch's.

    Attributes:
        target: the operator.
        args: its arguments, with references for tensors, also inside lists.
        kwargs: those by name.
        results: numbers of the slots that get its results; () where it changes an argument only.
        step: what a profile says of it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    step: EngineCall


Entry = PrimitiveCall | FunctionCall | AtenCall


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An operator of a plan that one of our kernels refuses, though the kernel is for such operators.

    Attributes:
        operator: of the user's model.
        why: the reason of the kernel, or those of all ways if torch computes the operator.
        kernel: its name if another of our kernels computes the operator; "" if torch does.
    """

    operator: str
    why: str
    kernel: str = ""


@dataclasses.dataclass(frozen=True, eq=False)  # no slots: contexts refer to plans weakly
class ExecutionPlan:
    """All that is known before a call.

    Attributes:
        entries: the calls, in order.
        inputs: slots of the inputs.
        outputs: what is returned: references, or values that are not tensors.
        slots: how many there are.
        arena: bytes that calls share.
        offsets: of each block in the arena.
        scratchpad: bytes after the blocks that every kernel may use.
        wrong: for each operator, kernels that were passed over because their sums are wrong.
        refusals: operators that torch computes though we have ways for them, or that lack our best way.
    """

    entries: Sequence[Entry]
    inputs: Sequence[Slot]
    outputs: Sequence[Any]
    slots: int
    arena: int
    offsets: Mapping[Block, int]
    scratchpad: int
    wrong: Mapping[str, tuple[str, ...]]
    refusals: tuple[Refusal, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A tensor of a plan that stands for values of the graph that was lowered.

    Attributes:
        names: nodes of that graph.
        behind: number of entries after which the tensor holds the values; later entries may overwrite them.
        ref: the tensor.
    """

    names: tuple[str, ...]
    behind: int
    ref: Ref


def references(entry: Entry) -> list[Ref]:
    """All references of an entry, in any order."""
    if isinstance(entry, PrimitiveCall):
        return [ref for _, ref in entry.tensors.values()]
    if isinstance(entry, FunctionCall):
        return list(entry.tensors)
    found: list[Ref] = []
    map_refs((entry.args, list(entry.kwargs.values())), found.append)
    return found


def map_refs(value: Any, change: Any) -> Any:
    """Return a nested argument with every reference changed."""
    if isinstance(value, (Constant, Slot, MemoryPart)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_refs(v, change) for v in value]
    return value


def shown(plan: ExecutionPlan) -> ExecutionPlan:
    """Return a plan whose functions keep all results, those that nothing reads too."""
    entries = [
        dataclasses.replace(entry, packed=entry.shown)
        if isinstance(entry, FunctionCall) and entry.shown is not None
        else entry
        for entry in plan.entries
    ]
    return dataclasses.replace(plan, entries=entries)
