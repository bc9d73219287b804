"""One plan for any number of rows and texts: what sizes decide about in it is a function of both.

A plan is recorded for a few sizes. What differs between the recordings has to be a number plus some for each
row and each text, see `affine`. Memory is laid out for a capacity, and grows when a call needs more.
Functions in C get their numbers before each call. Products of oneDNN are told their rows then too, where its
kernel allows that. Other primitives know their sizes when they are made: they are made for few of them. All
primitives compute some rows more than there are.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nc.backends.native.plans.affine import Affine, Sizes, Unfit, changed, depends, fitted, placed
from nc.backends.native.plans.arena import aligned, solve
from nc.backends.native.plans.execution_plan import (
    Block,
    Constant,
    Entry,
    ExecutionPlan,
    FunctionCall,
    MemoryPart,
    PrimitiveCall,
    Slot,
)
from nc.errors import BackendError
from nc.kernels.c_code.calls import Function, function_error
from nc.kernels.onednn.api import Handle
from nc.kernels.onednn.call_lists import arguments
from nc.kernels.onednn.descriptions import ANY_SIZE, DST, SCRATCHPAD, SRC, Desc
from nc.kernels.onednn.primitives import Layout, Maker, Primitive
from nc.kernels.onednn.runner import CallTable, CompiledRunner, failed_call

#: The fewest rows for which a primitive is made; fewer are as many.
_FEWEST = 16
#: Into how many parts numbers of rows divide what is between two powers of two: for primitives that know
#: their rows, and for those that are told them, which need other arguments only.
_PARTS, _PARTS_OF_ANY = 4, 8
#: Rows and texts for which primitives are made before a call needs them.
_PREPARED = 4096
#: Sizes of memory are fitted to numbers of rows that are multiples of it.
MULTIPLE = 16


def on_line(count: int, parts: int = _PARTS) -> int:
    """Return the next number of rows for which primitives are made.

    These are powers of two, times 1, 1.25, 1.5 and 1.75 for four parts; `parts` is a power of two up to 16.
    """
    if count <= _FEWEST:
        return _FEWEST
    part = (1 << (count - 1).bit_length() - 1) // parts
    return -(-count // part) * part


def _line(most: int) -> list[int]:
    """Return all numbers of rows for which primitives are made, up to one of them."""
    found = [_FEWEST]
    while found[-1] < most:
        found.append(on_line(found[-1] + 1))
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Root:
    """Memory of a block by its number, or a tensor that is known at each call only, by its slot."""

    block: int | None
    slot: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FamilyTensor:
    """A tensor in such memory; numbers of `desc` and `offset` may be `Affine`."""

    root: Root
    offset: Any
    desc: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FamilyCall:
    """A call of a function in C: its structure as numbers of 8 bytes, and its tensors."""

    function: Function
    base: np.ndarray[Any, Any]
    of_row: np.ndarray[Any, Any]
    of_text: np.ndarray[Any, Any]
    tensors: Sequence[FamilyTensor | torch.Tensor]
    where: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Primitive:
    """A call of a primitive.

    Attributes:
        made_by: how it is made.
        tensors: for each argument its tensor, and the layout of constants.
        of_rows, of_texts: whether it depends on their number.
        kernel: oneDNN's name of it, for many rows: other kernels round in another order.
        where: the operator, for messages.
        kind: number of what it is made by: layers have the same.
    """

    made_by: Any
    tensors: Mapping[int, tuple[Layout | None, FamilyTensor | torch.Tensor]]
    of_rows: bool
    of_texts: bool
    kernel: str
    where: str
    kind: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Aten:
    """A call of an operator of torch."""

    target: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]


_Entry = FamilyCall | _Primitive | _Aten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlanFamily:
    """What is known of plans for all sizes.

    Attributes:
        entries: the calls, in order.
        blocks: bytes of each piece of memory, by the first and the last entry that need it.
        outputs: what is returned.
        inputs: slots of the inputs.
        slots: how many there are.
        room: the fewest rows and texts that there is memory for: kernels of so many were recorded.
    """

    entries: Sequence[_Entry]
    blocks: Sequence[tuple[int | Affine, int, int]]
    outputs: Sequence[FamilyTensor]
    inputs: Sequence[int]
    slots: int
    room: Sizes


def family_of(plans: Sequence[ExecutionPlan], sizes: Sequence[Sizes]) -> PlanFamily:
    """Return what gives several plans of one graph.

    Args:
        plans: recordings.
        sizes: for which; of the first three, the second has more rows and the third more texts. All of them
            are multiples of 16: memory is rounded up to as many rows.

    Raises:
        Unfit: they differ in more than numbers that sizes give.
    """
    normal = [_Normal(plan) for plan in plans]
    counts = {len(each.entries) for each in normal}
    if any(count % MULTIPLE for each in sizes for count in each):
        msg = f"{sizes} are not multiples of {MULTIPLE}"
        raise ValueError(msg)
    if len(counts) != 1:
        msg = f"there are {' or '.join(map(str, sorted(counts)))} calls"
        raise Unfit(msg)
    entries = [
        _entry([each.entries[i] for each in normal], sizes, plans[0].entries[i]) for i in range(counts.pop())
    ]
    return PlanFamily(
        _with_kinds(entries),
        fitted([each.blocks for each in normal], sizes, "memory"),
        fitted([each.outputs for each in normal], sizes, "an output"),
        fitted([each.inputs for each in normal], sizes, "an input"),
        fitted([plan.slots for plan in plans], sizes, "slots"),
        (max(rows for rows, _ in sizes), max(texts for _, texts in sizes)),
    )


def _with_kinds(entries: Sequence[_Entry]) -> list[_Entry]:
    """Let primitives that are made by the same say so."""
    different: list[Any] = []
    found: list[_Entry] = []
    for entry in entries:
        if isinstance(entry, _Primitive):
            made = entry.made_by, entry.kernel
            if made not in different:
                different.append(made)
            entry = dataclasses.replace(entry, kind=different.index(made))
        found.append(entry)
    return found


class _Normal:
    """A plan with blocks by their numbers."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._blocks: dict[Block, int] = {}
        self.entries = [self._entry(entry) for entry in plan.entries]
        self.outputs = [self._ref(ref) for ref in plan.outputs]
        if not all(isinstance(ref, FamilyTensor) for ref in self.outputs):
            msg = "an output is not computed"
            raise Unfit(msg)
        self.inputs = [slot.index for slot in plan.inputs]
        last = len(plan.entries)
        self.blocks = [
            (block.size, block.first, last if block.returned else block.last) for block in self._blocks
        ]

    def _entry(self, entry: Entry) -> Any:
        if isinstance(entry, FunctionCall):
            return entry.function, entry.packed, [self._ref(ref) for ref in entry.tensors]
        if isinstance(entry, PrimitiveCall):
            return entry.primitive, {
                key: (layout, self._ref(ref)) for key, (layout, ref) in entry.tensors.items()
            }
        return entry.target, self._refs(entry.args), self._refs(dict(entry.kwargs)), entry.results

    def _refs(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._refs(v) for v in value]
        if isinstance(value, dict):
            return {key: self._refs(v) for key, v in value.items()}
        return self._ref(value)

    def _ref(self, ref: Any) -> Any:
        if isinstance(ref, Constant):
            return ref.tensor
        if isinstance(ref, Slot):
            return FamilyTensor(Root(None, ref.index), 0, ref.desc)
        if not isinstance(ref, MemoryPart):
            return ref
        if isinstance(ref.root, Slot):
            return FamilyTensor(Root(None, ref.root.index), ref.offset, ref.desc)
        return FamilyTensor(
            Root(self._blocks.setdefault(ref.root, len(self._blocks)), None), ref.offset, ref.desc
        )


def _entry(found: Sequence[Any], sizes: Sequence[Sizes], shown: Entry) -> _Entry:
    """Return what gives one entry of several plans."""
    where = f"{', '.join(shown.step.operators) or shown.step.name} ({shown.step.kernel})"
    if len({type(each[0]) for each in found}) != 1 or len({len(each) for each in found}) != 1:
        msg = f"{where} is computed in several ways"
        raise Unfit(msg)
    if isinstance(shown, FunctionCall):
        if len({each[0].address for each in found}) != 1:
            msg = f"{where} is computed by several functions"
            raise Unfit(msg)
        numbers = [np.frombuffer(each[1], dtype=np.int64) for each in found]
        base, of_row, of_text = _fitted_words(numbers, sizes, where)
        tensors = fitted([each[2] for each in found], sizes, where)
        return FamilyCall(found[0][0], base, of_row, of_text, tensors, where)
    if isinstance(shown, PrimitiveCall):
        return _fitted_primitive(found, sizes, where)
    target, args, kwargs, results = fitted([tuple(each) for each in found], sizes, where)
    return _Aten(target, args, kwargs, results)


def _fitted_words(
    numbers: Sequence[np.ndarray[Any, Any]], sizes: Sequence[Sizes], where: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return numbers of a structure as three: what they begin with, and more for each row and text."""
    (rows, texts), (more_rows, _), (_, more_texts), *__ = sizes
    first, second, third, *_rest = numbers
    of_row, left = np.divmod(second - first, more_rows - rows)
    of_text, left_too = np.divmod(third - first, more_texts - texts)
    base = first - rows * of_row - texts * of_text
    fits = not left.any() and not left_too.any()
    for (n, m), each in zip(sizes, numbers, strict=True):
        fits = fits and bool((base + n * of_row + m * of_text == each).all())
    if not fits:
        msg = f"{where} is told more of the sizes than numbers of rows and texts"
        raise Unfit(msg)
    return base, of_row, of_text


def _fitted_primitive(found: Sequence[Any], sizes: Sequence[Sizes], where: str) -> _Primitive:
    primitives = [each[0] for each in found]
    if len({(p.kind, p.made_by[0]) for p in primitives}) != 1 or not primitives[0].made_by[0]:
        msg = f"{where} is computed by several kinds of primitives"
        raise Unfit(msg)
    _check_reduced(primitives, where)
    made_by = fitted([_described(p.made_by) for p in primitives], sizes, where)
    _check_strides(made_by, where)
    tensors: dict[int, tuple[Layout | None, Any]] = {}
    for key, (layout, _) in found[0][1].items():
        ref = fitted([each[1][key][1] for each in found], sizes, where)
        if isinstance(ref, FamilyTensor):
            if ref.root.slot is not None:
                msg = f"{where} reads memory of torch, which has no room for more rows"
                raise Unfit(msg)
            tensors[key] = None, ref
        else:
            tensors[key] = layout, ref
    of_rows, of_texts = depends(
        (made_by, [ref.desc for _, ref in tensors.values() if isinstance(ref, FamilyTensor)])
    )
    return _Primitive(made_by, tensors, of_rows, of_texts, primitives[-1].kernel, where)


def _check_reduced(primitives: Sequence[Primitive], where: str) -> None:
    """Raise `Unfit` where a primitive sums over rows or texts, of which it computes more than there are."""
    reduced: set[object] = set()
    for primitive in primitives:
        name, (source, *others), _ = primitive.made_by
        if name in ("matmul", "layer_norm"):
            reduced.add(source.sizes[-1])
        elif name == "softmax":
            reduced.add(source.sizes[others[1]])
        elif name == "concat":
            reduced.add(tuple(each.sizes[others[1]] for each in source))
    if len(reduced) > 1:
        msg = f"{where} sums over rows or texts"
        raise Unfit(msg)


def _check_strides(value: Any, where: str) -> None:
    """Raise `Unfit` where rows decide where other values are: they differ for more rows than there are."""
    if isinstance(value, _Described):
        value = value.desc
    if isinstance(value, Desc):
        if any(
            isinstance(stride, Affine) and size != 1
            for size, stride in zip(value.sizes, value.strides, strict=True)
        ):
            msg = f"{where} has strides that depend on sizes"
            raise Unfit(msg)
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            _check_strides(each, where)


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """A layout that strides describe, of any sizes."""

    desc: Desc


def _described(value: Any) -> Any:
    """Return arguments with layouts that strides describe as descriptions."""
    if isinstance(value, Layout) and value.desc is not None:
        return _Described(value.desc)
    if isinstance(value, (list, tuple)):
        return type(value)([_described(each) for each in value])
    return {key: _described(each) for key, each in value.items()} if isinstance(value, dict) else value


def _laid_out(value: Any, maker: Maker) -> Any:
    """Return arguments with descriptions as layouts."""
    if isinstance(value, _Described):
        return maker.layout(value.desc)
    if isinstance(value, (list, tuple)):
        return type(value)([_laid_out(each, maker) for each in value])
    return {key: _laid_out(each, maker) for key, each in value.items()} if isinstance(value, dict) else value


class FamilyKernels:
    """The primitives of a family, for all threads that run it.

    Args:
        maker: of the oneDNN library.
    """

    def __init__(self, maker: Maker) -> None:
        self.maker = maker.keeping()
        self._of_any: dict[int, Primitive | None] = {}
        self._of_sizes: dict[tuple[int, int, int], tuple[Primitive, int, int]] = {}

    def prepare(self, family: PlanFamily) -> None:
        """Make what would be made by calls of up to `_PREPARED` rows and texts."""
        for entry in {each.kind: each for each in family.entries if isinstance(each, _Primitive)}.values():
            if entry.of_rows and entry.of_texts:
                continue  # one for each number of rows and each of texts
            for count in _line(_PREPARED):
                self.primitive(entry, count * entry.of_rows, count * entry.of_texts, (_PREPARED, _PREPARED))

    def primitive(self, entry: _Primitive, rows: int, texts: int, most: Sizes) -> tuple[Primitive, int, int]:
        """Return a primitive, and for how many rows and texts it is called.

        These are the fewest from the given ones on for which the kernel is that of many rows: a text then has
        the same bits in batches of all sizes. Memory ends at those of the recordings or after them. Only if
        oneDNN takes another kernel for even more rows, it may end before, and they are the given ones.

        Args:
            entry: its call.
            rows: on the line of sizes; 0 where they do not matter.
            texts: the same.
            most: rows and texts that there is memory for.
        """
        of_any = self.of_any(entry)
        if of_any is not None:
            return of_any, rows, texts
        found = self._of_sizes.get((entry.kind, rows, texts))
        if found is None:
            name, args, kwargs = _laid_out(placed(entry.made_by, rows, texts), self.maker)
            found = getattr(self.maker, name)(*args, **kwargs), rows, texts
            if found[0].kernel != entry.kernel:
                n = min(on_line(rows + 1), most[0]) if rows else 0
                m = min(on_line(texts + 1), most[1]) if texts else 0
                more = found if (n, m) == (rows, texts) else self.primitive(entry, n, m, most)
                found = more if more[0].kernel == entry.kernel else found
            self._of_sizes[entry.kind, rows, texts] = found
        return found

    def of_any(self, entry: _Primitive) -> Primitive | None:
        """Return the primitive that is told its size at each call, if there is one."""
        if entry.kind not in self._of_any:
            self._of_any[entry.kind] = _of_any_size(entry, self.maker)
        return self._of_any[entry.kind]


def _of_any_size(entry: _Primitive, maker: Maker) -> Primitive | None:
    """Return a primitive that is told its rows, or its texts, at each call.

    None is returned where oneDNN has none with the kernel of many rows.
    """
    name, args, kwargs = entry.made_by
    if name != "matmul" or not _is_one_size(entry.made_by):
        return None
    try:
        made = maker.matmul(*_laid_out(changed(args, lambda _: ANY_SIZE), maker), **kwargs)
    except BackendError:  # what it adds has rows, say
        return None
    if made.kernel != entry.kernel:
        return None
    layouts = {key: layout for key, layout in made.layouts.items() if key not in (SRC, DST)}
    return dataclasses.replace(made, layouts=layouts)


def _is_one_size(value: Any) -> bool:
    """Return whether all that depends on sizes is the number of rows itself, or the number of texts."""
    found: set[Affine] = set()
    changed(value, lambda each: found.add(each))
    return found in ({Affine(0, 1, 0)}, {Affine(0, 0, 1)})


class FamilyInstance:
    """A family with its own memory, for one thread at a time and up to a capacity.

    Args:
        family: what to run.
        kernels: its primitives.
        runner: runs tables of calls.
        rows, texts: the most of both; memory is for somewhat more.
    """

    def __init__(
        self, family: PlanFamily, kernels: FamilyKernels, runner: CompiledRunner, rows: int, texts: int
    ) -> None:
        rows, texts = (
            _whole(max(on_line(count), room)) for count, room in zip((rows, texts), family.room, strict=True)
        )
        self.rows, self.texts = rows, texts
        self._family, self._kernels, self._maker = family, kernels, kernels.maker
        self._stream = self._maker.stream()
        blocks = [Block(_bytes(size, rows, texts), first, last) for size, first, last in family.blocks]
        offsets, size = solve(blocks)
        self._arena = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
        begin = aligned(self._arena.data_ptr())
        self._skipped = begin - self._arena.data_ptr()
        self._begins = [self._skipped + offsets[block] for block in blocks]
        self._keep: list[object] = []
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._variants: dict[tuple[int, int, int], tuple[int, Any, int]] = {}
        self._memories: dict[tuple[Layout, int], Handle] = {}
        self._layouts: dict[tuple[Desc, int, int], Layout] = {}
        self._given: dict[int, tuple[Mapping[int, Handle], Sequence[tuple[int, Desc, Affine]]]] = {}
        self._words(family)
        self._steps = self._built(family, runner)
        self._at: Sizes | None = None

    # ---- numbers of the functions in C, and addresses of their tensors ----

    def _words(self, family: PlanFamily) -> None:
        """Put numbers and addresses of all functions in C into one piece of memory."""
        base: list[np.ndarray[Any, Any]] = []
        of_row: list[np.ndarray[Any, Any]] = []
        of_text: list[np.ndarray[Any, Any]] = []
        self._where: dict[int, tuple[int, int]] = {}
        count = 0
        for index, entry in enumerate(family.entries):
            if not isinstance(entry, FamilyCall):
                continue
            addresses = [self._address(ref) for ref in entry.tensors]
            self._where[index] = count, count + len(entry.base)
            base += [entry.base, np.array([a.base for a in addresses], dtype=np.int64)]
            of_row += [entry.of_row, np.array([a.of_row for a in addresses], dtype=np.int64)]
            of_text += [entry.of_text, np.array([a.of_text for a in addresses], dtype=np.int64)]
            count += len(entry.base) + len(addresses)
        empty = np.zeros(0, dtype=np.int64)
        self._memory = np.concatenate([*base, empty])
        rows, texts = np.concatenate([*of_row, empty]), np.concatenate([*of_text, empty])
        (changing,) = np.nonzero((rows != 0) | (texts != 0))
        self._changing = changing, self._memory[changing], rows[changing], texts[changing]

    def _address(self, ref: FamilyTensor | torch.Tensor) -> Affine:
        """Return where a tensor is; 0 for one that is known at each call only."""
        if isinstance(ref, torch.Tensor):
            self._keep.append(ref.untyped_storage())
            return Affine(ref.data_ptr(), 0, 0)
        if ref.root.block is None:
            return Affine(0, 0, 0)
        offset = ref.offset if isinstance(ref.offset, Affine) else Affine(ref.offset, 0, 0)
        begin = self._arena.data_ptr() + self._begins[ref.root.block]
        return Affine(begin + offset.base, offset.of_row, offset.of_text)

    # ---- the list of calls ----

    def _built(self, family: PlanFamily, runner: CompiledRunner) -> list[_Run | _AtenStep]:
        """Return the calls as lists that run in C, and operators of torch between them."""
        steps: list[_Run | _AtenStep] = []
        together: list[int] = []
        for index, entry in enumerate([*family.entries, None]):
            if entry is not None and not isinstance(entry, _Aten):
                together.append(index)
                continue
            if together:
                steps.append(self._run_of(together, runner))
                together = []
            if entry is not None:
                steps.append(_AtenStep(entry, self))
        return steps

    def _run_of(self, indices: Sequence[int], runner: CompiledRunner) -> _Run:
        """Return calls of functions and primitives consecutively."""
        calls: list[tuple[int | None, int, int, int]] = []
        places: list[_Place] = []
        begin = self._memory.ctypes.data
        for index in indices:
            entry = self._family.entries[index]
            if isinstance(entry, _Primitive):
                calls.append((None, 0, 0, 0))
                continue
            assert isinstance(entry, FamilyCall)
            how, addresses = (begin + 8 * word for word in self._where[index])
            calls.append((entry.function.address, how, addresses, len(entry.tensors)))
            for i, ref in enumerate(entry.tensors):
                if isinstance(ref, FamilyTensor) and ref.root.slot is not None:
                    places.append(_Place(entry.function.set, addresses + 8 * i, ref.root.slot, ref.offset))
        slots = list(dict.fromkeys(place.slot for place in places))
        table = CallTable(runner, calls, len(places), len(slots), self._stream)
        return _Run(self, table, indices, places, slots)

    def error(self, indices: Sequence[int], failed: int) -> Exception:
        """Return what to raise for what a run of these calls returned, see runner.c."""
        if failed < 0:
            return BackendError(f"a kernel failed: setting address {-failed}")
        index, status = failed_call(failed)
        entry = self._family.entries[indices[index]]
        if isinstance(entry, FamilyCall):
            return function_error(entry.function, status, entry.where)
        return BackendError(f"a kernel failed: {getattr(entry, 'where', '')}, with oneDNN's status {status}")

    def variant(self, index: int, rows: int, texts: int) -> tuple[int, int, int] | None:
        """Return what runs a primitive for these sizes: addresses of it and its arguments, and their number.

        None is returned for functions in C.
        """
        entry = self._family.entries[index]
        if not isinstance(entry, _Primitive):
            return None
        parts = _PARTS if self._kernels.of_any(entry) is None else _PARTS_OF_ANY
        n = min(on_line(rows, parts), self.rows) if entry.of_rows else 0
        m = min(on_line(texts, parts), self.texts) if entry.of_texts else 0
        found = self._variants.get((index, n, m))
        if found is None:
            made = self._kernels.primitive(entry, n, m, (self.rows, self.texts))
            found = self._variants[index, n, m] = self._made(index, *made)
        handle, given, count = found
        return handle, ctypes.addressof(given), count

    def _memory_at(self, layout: Layout, address: int) -> Any:
        """Return a tensor argument; weights have the same one for all sizes."""
        found = self._memories.get((layout, address))
        if found is None:
            found = self._memories[layout, address] = self._maker.memory(layout, address)
        return found

    def _made(self, index: int, primitive: Primitive, rows: int, texts: int) -> tuple[int, Any, int]:
        """Return what runs a primitive of an entry, as `variant` does."""
        constants, parts = self._tensors(index)
        memories = dict(constants)
        for key, desc, address in parts:
            layout = primitive.layouts.get(key) or self._layout(desc, rows, texts)
            memories[key] = self._memory_at(layout, address.at(rows, texts))
        scratchpad = primitive.layouts.get(SCRATCHPAD)
        if scratchpad is not None:
            memories[SCRATCHPAD] = self._memory_at(scratchpad, self._scratch_of(scratchpad.size))
        given = arguments(memories)
        self._keep.append((primitive, memories, given))
        return primitive.handle.pointer, given, len(given)

    def _tensors(self, index: int) -> tuple[Mapping[int, Handle], Sequence[tuple[int, Desc, Affine]]]:
        """Return the arguments of a primitive that are the same for all sizes, and where the others are."""
        found = self._given.get(index)
        if found is None:
            entry = self._family.entries[index]
            assert isinstance(entry, _Primitive)
            constants, parts = {}, []
            for key, (layout, ref) in entry.tensors.items():
                if isinstance(ref, FamilyTensor):
                    parts.append((key, ref.desc, self._address(ref)))
                else:
                    assert layout is not None, "constants have one"
                    constants[key] = self._memory_at(layout, self._address(ref).base)
            found = self._given[index] = constants, parts
        return found

    def _layout(self, desc: Desc, rows: int, texts: int) -> Layout:
        """Return the memory layout of a tensor for these sizes."""
        found = self._layouts.get((desc, rows, texts))
        if found is None:
            found = self._layouts[desc, rows, texts] = self._maker.layout(placed(desc, rows, texts))
        return found

    def _scratch_of(self, size: int) -> int:
        """Return the address of that many bytes that each kernel may use."""
        if size > self._scratch.numel() - 64:
            self._keep.append(self._scratch)
            self._scratch = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
        return aligned(self._scratch.data_ptr())

    # ---- calls ----

    def run(self, inputs: Sequence[torch.Tensor], rows: int, texts: int) -> list[torch.Tensor]:
        """Return the outputs, which the next call of this instance overwrites.

        Raises:
            BackendError: a kernel failed.
            IndexError: an index among the inputs is out of range.
        """
        if self._at != (rows, texts):
            self._resize(rows, texts)
        tensors: list[Any] = [None] * self._family.slots
        for slot, tensor in zip(self._family.inputs, inputs, strict=True):
            tensors[slot] = tensor
        for step in self._steps:
            step(tensors)
        return [self.tensor(ref, tensors) for ref in self._family.outputs]

    def _resize(self, rows: int, texts: int) -> None:
        changing, base, of_row, of_text = self._changing
        self._memory[changing] = base + rows * of_row + texts * of_text
        self._at = None  # until all of it is done
        for step in self._steps:
            step.resize(rows, texts)
        self._at = rows, texts

    def tensor(self, ref: Any, tensors: Sequence[Any]) -> Any:
        """Return a tensor of this call."""
        if not isinstance(ref, FamilyTensor):
            return ref
        assert self._at is not None
        desc, offset = placed(ref.desc, *self._at), placed(ref.offset, *self._at)
        if ref.root.slot is not None:
            whole: torch.Tensor = tensors[ref.root.slot]
            begin = whole.storage_offset() * whole.element_size() + offset
            storage = whole.untyped_storage()
        else:
            assert ref.root.block is not None
            begin, storage = self._begins[ref.root.block] + offset, self._arena.untyped_storage()
        typed = torch.empty(0, dtype=desc.dtype, device="cpu")
        return typed.set_(storage, begin // desc.dtype.itemsize, desc.sizes, desc.strides)


class _AtenStep:
    """A call of an operator of torch."""

    def __init__(self, entry: _Aten, instance: FamilyInstance) -> None:
        self._entry, self._instance = entry, instance
        self._sized: tuple[Any, Any] = ((), {})

    def resize(self, rows: int, texts: int) -> None:
        """Take other sizes."""
        self._sized = placed((self._entry.args, self._entry.kwargs), rows, texts)

    def __call__(self, tensors: list[Any]) -> None:
        """Call it."""
        args, kwargs = (_filled(value, self._instance, tensors) for value in self._sized)
        made = self._entry.target(*args, **kwargs)
        results = self._entry.results
        if len(results) == 1 and isinstance(made, torch.Tensor):
            tensors[results[0]] = made
        elif results:
            for index, tensor in zip(results, made, strict=True):
                tensors[index] = tensor


def _filled(value: Any, instance: FamilyInstance, tensors: Sequence[Any]) -> Any:
    if isinstance(value, FamilyTensor):
        return instance.tensor(value, tensors)
    if isinstance(value, (list, tuple)):
        return [_filled(v, instance, tensors) for v in value]
    if isinstance(value, dict):
        return {key: _filled(v, instance, tensors) for key, v in value.items()}
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """An address that is set before each run.

    Attributes:
        set: function that does it.
        word: where.
        slot: of the tensor.
        offset: bytes from its begin; a number or `Affine`.
    """

    set: int
    word: int
    slot: int
    offset: Any


class _Run:
    """Calls of functions and primitives consecutively."""

    def __init__(
        self,
        instance: FamilyInstance,
        table: CallTable,
        indices: Sequence[int],
        places: Sequence[_Place],
        slots: Sequence[int],
    ) -> None:
        self._instance, self._table, self._indices = instance, table, indices
        self._places, self._slots = places, slots

    def resize(self, rows: int, texts: int) -> None:
        """Take other sizes."""
        for i, index in enumerate(self._indices):
            variant = self._instance.variant(index, rows, texts)
            if variant is not None:
                self._table.set(i, *variant)
        for i, each in enumerate(self._places):
            offset = placed(each.offset, rows, texts)
            self._table.place(i, each.set, each.word, self._slots.index(each.slot), offset)

    def __call__(self, tensors: list[Any]) -> None:
        """Run them; raises as `FamilyInstance.run`."""
        failed = self._table.run([tensors[slot].data_ptr() for slot in self._slots])
        if failed:
            raise self._instance.error(self._indices, failed)


def _whole(count: int) -> int:
    """Return the next multiple of `MULTIPLE`, to which functions in C round up the rows that they keep."""
    return -(-count // MULTIPLE) * MULTIPLE


def _bytes(size: int | Affine, rows: int, texts: int) -> int:
    return size.at(rows, texts) if isinstance(size, Affine) else size
