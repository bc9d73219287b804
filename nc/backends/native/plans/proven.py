"""Which kernels of plans have been compared with the quantized graph, so that a new plan's need not be again.

A kernel is compared once for each class of sizes, whatever operator it computes; and for each operator once
with the numbers and constants that it is given.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable, Iterable, Sequence

import torch

from nc.backends.native.plans.execution_plan import (
    Constant,
    Entry,
    FunctionCall,
    PrimitiveCall,
    Ref,
    Watched,
    references,
)
from nc.kernels.onednn.descriptions import Desc

#: Blocks of kernels have at most so many rows, columns or pixels: sizes with the same rest are alike to them.
_BLOCK = 32
#: Primitives that are made anew for each size: how they divide it into blocks depends on all of it.
_OF_EACH_SIZE = frozenset({"convolution", "deconvolution", "matmul", "inner_product"})
#: Fields of functions in C that follow the sizes of the inputs; the others are numbers of an operator.
_FOLLOWS_SIZES = frozenset(
    {
        *("rows", "sizes", "stride", "strides", "images", "pixels", "batch", "keys", "image", "result"),
        *("parts", "bytes", "places", "elements", "steps", "x_step", "x_row", "y_step", "y_row", "width"),
        *("y_stride", "x_stride", "place_stride", "follower_strides"),
        *(f"{name}_strides" for name in ("q", "k", "v", "y", "x", "mask", "cosine", "sine")),
    }
)
#: Bytes of a constant up to which its content counts; of larger ones it is their address.
_MOST_BYTES = 2**14


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What decides whether an entry of a plan has to be compared.

    Attributes:
        of_sizes: the kernel and the class of its sizes.
        of_operator: the operators, the kernel, and all that it is given besides sizes.
    """

    of_sizes: Hashable
    of_operator: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Showing:
    """What shows whether kernels are right.

    Attributes:
        operators: that they compute.
        names: of the values that are known next after them.
        outputs: whether nothing but outputs follows one of them.
    """

    operators: frozenset[str]
    names: frozenset[str]
    outputs: bool


class Proven:
    """Kernels that were compared."""

    def __init__(self) -> None:
        self._of_sizes: set[Hashable] = set()
        self._of_operator: set[Hashable] = set()

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Note that these are right."""
        for kernel in kernels:
            self._of_sizes.add(kernel.of_sizes)
            self._of_operator.add(kernel.of_operator)

    def new(self, kernels: Sequence[Kernel]) -> list[int]:
        """Return the indices of those to compare: one of each new class, and operators given new numbers."""
        classes = set(self._of_sizes)
        found = []
        for index, kernel in enumerate(kernels):
            if kernel.of_sizes not in classes or kernel.of_operator not in self._of_operator:
                found.append(index)
                classes.add(kernel.of_sizes)
        return found


def kernel_of(entry: Entry) -> Kernel:
    """Return what decides whether an entry has to be compared."""
    operators, refs = entry.step.operators, references(entry)
    constants = tuple(_content(ref.tensor) for ref in refs if isinstance(ref, Constant))
    sizes: Hashable = tuple(_class_of(_sizes(ref)) for ref in refs)
    if isinstance(entry, FunctionCall):
        numbers = _numbers(entry)
        name = entry.step.kernel
    elif isinstance(entry, PrimitiveCall):
        name, numbers = f"{entry.primitive.kind} {entry.step.kernel}", ()
        if entry.primitive.kind in _OF_EACH_SIZE:
            sizes = tuple(map(_sizes, refs))
    else:
        name, numbers = str(entry.target), ()
    return Kernel((name, sizes), (operators, name, numbers, constants))


def shown_by(entries: Sequence[Entry], indices: Iterable[int], watched: Sequence[Watched]) -> Showing:
    """Return what shows whether some entries are right.

    Args:
        entries: of a plan.
        indices: which of them.
        watched: values that are known.
    """
    operators, names, outputs = set[str](), set[str](), False
    in_order = sorted(watched, key=lambda each: each.behind)
    for index in indices:
        operators.update(entries[index].step.operators)
        following = next((each.names for each in in_order if each.behind > index), ())
        names.update(following)
        outputs |= not following
    return Showing(frozenset(operators), frozenset(names), outputs)


def _class_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return small sizes as they are, larger ones by what is left of the last block."""
    return tuple(size if size <= _BLOCK else _BLOCK + size % _BLOCK for size in sizes)


def desc_of(ref: Ref) -> Desc:
    """Return sizes, strides and dtype of a tensor."""
    return Desc.of(ref.tensor) if isinstance(ref, Constant) else ref.desc


def _sizes(ref: Ref) -> tuple[int, ...]:
    return desc_of(ref).sizes


def _numbers(call: FunctionCall) -> tuple[Hashable, ...]:
    """Return the fields of a function that do not follow the sizes of inputs."""
    structure = call.function.row.takes
    _, *numbers = struct.unpack(structure.format, call.packed)
    left, found = iter(numbers), []
    for field in structure.fields:
        count = 1
        for size in field.shape:
            count *= size
        values = tuple(next(left) for _ in range(count))
        if field.name not in _FOLLOWS_SIZES:
            found.append(values)
    return tuple(found)


def _content(tensor: torch.Tensor) -> Hashable:
    """Return what a constant holds, or where it is if that is much; of what is expanded the memory counts."""
    memory = tensor.untyped_storage()
    if memory.nbytes() > _MOST_BYTES:
        return tensor.dtype, memory.data_ptr(), tensor.storage_offset()
    held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)
    return tensor.dtype, tensor.storage_offset(), held.numpy().tobytes()
