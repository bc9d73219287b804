"""Which kernels of plans have been compared with the quantized graph, so that a new plan's need not be again.

A kernel is compared once for each class of sizes, whatever operator it computes; and for each operator once
with the numbers and constants that it is given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
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

#: What blocks of kernels divide: rows of 4, 6, 12 and 16, columns of 32 and 64. Larger sizes with the same
#: rest and the same magnitude, which decides about pieces and unrolled loops, are alike to them.
_BLOCKS = 192
#: Sizes up to it are different ones.
_SMALL = 64
#: Values after a kernel that may be computed from what it gives.
_FOLLOWING = 2
#: Kernels that are remembered at a time.
_MOST_KERNELS = 50_000
#: Primitives that are made anew for each size: how they divide it into blocks depends on all of it.
_OF_EACH_SIZE = frozenset({"convolution", "deconvolution", "matmul", "inner_product"})
#: Fields of functions in C that follow the sizes of the inputs; the others are numbers of an operator.
_FOLLOWS_SIZES = frozenset(
    {
        *("rows", "sizes", "stride", "strides", "images", "pixels", "batch", "keys", "image", "result"),
        *("bytes", "places", "elements", "steps", "x_step", "x_row", "y_step", "y_row", "width"),
        *("y_stride", "x_stride", "place_stride", "follower_strides"),
        *(f"{name}_strides" for name in ("q", "k", "v", "y", "x", "mask", "cosine", "sine")),
    }
)
#: Fields that say into how many parts work is divided: one, or several.
_DIVIDES = frozenset({"parts"})
#: Bytes of a constant that count; of larger ones also their address.
_MOST_BYTES = 2**14


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What decides whether an entry of a plan has to be compared.

    Attributes:
        of_sizes: the kernel, the code that it takes, and the classes of its sizes and layouts.
        of_operator: the operators, the kernel, and all that it is given besides sizes.
    """

    of_sizes: Hashable
    of_operator: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Showing:
    """What shows whether a kernel is right; nothing but all outputs where neither is there.

    Attributes:
        operators: that it computes.
        names: of the values that are known next after it.
    """

    operators: frozenset[str]
    names: frozenset[str]


class Proven:
    """Kernels that were compared."""

    def __init__(self) -> None:
        self._of_sizes: set[Hashable] = set()
        self._of_operator: set[Hashable] = set()

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Note that these are right."""
        if len(self._of_sizes) + len(self._of_operator) > _MOST_KERNELS:
            self._of_sizes.clear()
            self._of_operator.clear()
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


def kernel_of(entry: Entry, threads: int) -> Kernel:
    """Return what decides whether an entry, made for a number of threads, has to be compared."""
    operators, refs = entry.step.operators, references(entry)
    constants = tuple(_content(ref.tensor) for ref in refs if isinstance(ref, Constant))
    layouts = tuple(_layout(desc_of(ref)) for ref in refs)
    if isinstance(entry, FunctionCall):
        code, numbers = _numbers(entry)
        name = entry.step.kernel
    elif isinstance(entry, PrimitiveCall):
        name, code, numbers = f"{entry.primitive.kind} {entry.step.kernel}", (), ()
        if entry.primitive.kind in _OF_EACH_SIZE:
            layouts = tuple(map(desc_of, refs))
    else:
        name, code, numbers = str(entry.target), (), ()
    # hashes: thousands are kept
    return Kernel(hash((name, threads, code, layouts)), hash((operators, name, code, numbers, constants)))


def shown_by(entries: Sequence[Entry], indices: Iterable[int], watched: Sequence[Watched]) -> list[Showing]:
    """Return for each of some entries what shows whether it is right.

    Args:
        entries: of a plan.
        indices: which of them.
        watched: values that can be compared.
    """
    in_order = sorted(watched, key=lambda each: each.behind)
    found = []
    for index in indices:
        following = [each.names for each in in_order if each.behind > index][:_FOLLOWING]
        names = frozenset(name for names in following for name in names)
        found.append(Showing(frozenset(entries[index].step.operators), names))
    return found


def _layout(desc: Desc) -> Hashable:
    """Return the classes of sizes, and what else of a layout decides about the code that reads it."""
    order = tuple(sorted(range(len(desc.strides)), key=desc.strides.__getitem__))
    return desc.dtype, tuple(map(_class_of, desc.sizes)), order, 1 in desc.strides


def _class_of(size: int) -> Hashable:
    return size if size <= _SMALL else (size % _BLOCKS, size.bit_length())


def desc_of(ref: Ref) -> Desc:
    """Return sizes, strides and dtype of a tensor."""
    return Desc.of(ref.tensor) if isinstance(ref, Constant) else ref.desc


def _numbers(call: FunctionCall) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Return the fields of a function that do not follow the sizes of inputs.

    Those that decide which code it takes come first, then scales and zero points.
    """
    structure = call.function.row.takes
    _, *numbers = struct.unpack(structure.format, call.packed)
    code: list[Hashable] = []
    others: list[Hashable] = []
    left = iter(numbers)
    for field in structure.fields:
        values = tuple(next(left) for _ in range(math.prod(field.shape)))
        if field.name in _DIVIDES:
            code.append((field.name, max(values) > 1))
        elif field.name not in _FOLLOWS_SIZES:
            is_number = field.kind == "double" or "zero_point" in field.name
            (others if is_number else code).append((field.name, values))
    return tuple(code), tuple(others)


def _content(tensor: torch.Tensor) -> Hashable:
    """Return what a constant holds; of much also where it is. Of what is expanded its memory counts."""
    memory = tensor.untyped_storage()
    size = min(memory.nbytes(), _MOST_BYTES)
    held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory, 0, (size,), (1,))
    where = memory.data_ptr() if memory.nbytes() > _MOST_BYTES else 0
    digest = hashlib.blake2b(held.numpy().tobytes(), digest_size=16).digest()
    return tensor.dtype, tensor.storage_offset(), memory.nbytes(), where, digest
