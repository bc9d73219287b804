"""What one thread needs to run a plan: memory, argument lists with addresses in them, and a stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nc.backends.native.plans.execution_plan import (
    AtenCall,
    Block,
    Constant,
    Entry,
    ExecutionPlan,
    FunctionCall,
    MemoryPart,
    PrimitiveCall,
    Ref,
    Slot,
    Watched,
    map_refs,
    references,
)
from nc.errors import BackendError
from nc.kernels.c_code.calls import function_error
from nc.kernels.onednn.api import Handle
from nc.kernels.onednn.descriptions import SCRATCHPAD, Desc
from nc.kernels.onednn.primitives import Maker
from nc.kernels.onednn.runner import CallList, Runner, failed_call


@dataclasses.dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor argument that is known at each call only: the one with this number, or a part of it."""

    index: int
    part: Desc | None = None
    offset: int = 0


#: Is shown a tensor, and the names of the values that it holds.
See = Callable[[tuple[str, ...], torch.Tensor], None]
#: A part of a plan: it reads and writes tensors by their number.
_Run = Callable[[list[Any]], None]


class PlanInstance:
    """A plan with its own memory; for one thread at a time.

    Args:
        plan: what to run.
        maker: of the oneDNN library.
        runner: calls primitives.
        arena: memory for all blocks and the scratchpad, which other contexts of this thread may use too.
        together: hand calls of primitives over as lists; else one by one, which a clock can tell apart.
    """

    def __init__(
        self, plan: ExecutionPlan, maker: Maker, runner: Runner, arena: torch.Tensor, *, together: bool = True
    ) -> None:
        # not the plan: it lives as long as the model keeps it, and ends the life of its contexts
        self._offsets, self._end, self._count, self._maker, self._arena = (
            plan.offsets,
            plan.arena,
            plan.slots,
            maker,
            arena,
        )
        self._runner, self._stream = runner, maker.stream()
        returned = {
            ref.root: ref
            for ref in _refs(plan)
            if isinstance(ref, MemoryPart) and isinstance(ref.root, Block) and ref.root.returned
        }
        returned |= {
            ref.root: ref
            for ref in plan.outputs
            if isinstance(ref, MemoryPart) and ref.root in returned and _is_whole(ref)
        }
        #: Blocks whose memory is allocated at each call; their numbers follow those of the slots.
        self._returned = {block: plan.slots + i for i, block in enumerate(returned)}
        #: Layout of a tensor that is all of that memory, so that it can be returned as it is; else bytes.
        self._whole = [
            ref.desc if _is_whole(ref) else Desc.dense((block.size,), torch.uint8)
            for block, ref in returned.items()
        ]
        self._keep: list[torch.UntypedStorage] = []
        self._parts: list[_Run] = [
            self._operator(part) if isinstance(part, AtenCall) else self._calls(part)
            for part in _parts(plan.entries, together=together)
        ]
        self._outputs = [self._bound(value) for value in plan.outputs]
        self._own = [isinstance(value, Constant) for value in plan.outputs]
        self._slots = [slot.index for slot in plan.inputs]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Return the outputs for inputs of the plan's sizes.

        Raises:
            BackendError: a kernel failed.
            IndexError: an index among the inputs is out of range.
        """
        tensors = self._given(inputs)
        for part in self._parts:
            part(tensors)
        return self._results(tensors)

    def _results(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the outputs, once all parts have run."""
        # a caller may change what it gets, but not the plan
        return [
            v.clone() if own else _filled(v, tensors) for v, own in zip(self._outputs, self._own, strict=True)
        ]

    def clocked(
        self, inputs: Sequence[torch.Tensor], announce: Callable[[int], None] = lambda _: None
    ) -> list[float]:
        """Milliseconds of each part in one run: of each entry, unless calls go `together`.

        `announce` gets its number before.
        """
        tensors = self._given(inputs)
        times: list[float] = []
        for index, part in enumerate(self._parts):
            announce(index)
            start = time.perf_counter()
            part(tensors)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def watch(self, inputs: Sequence[torch.Tensor], watched: Iterable[Watched], see: See) -> list[Any]:
        """Run once and return the outputs; calls must not go `together`.

        `see` gets each tensor that is watched, and the names that it stands for, while it holds their values.
        """
        tensors = self._given(inputs)
        done = 0
        for each in sorted(watched, key=lambda w: w.behind):
            for part in self._parts[done : each.behind]:
                part(tensors)
            done = max(done, each.behind)
            see(each.names, _filled(self._tensor(each.ref), tensors))
        for part in self._parts[done:]:
            part(tensors)
        return self._results(tensors)

    def _given(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """All tensors of a call by their number; those that operators will make are None yet."""
        tensors: list[Any] = [None] * (self._count + len(self._returned))
        for index, tensor in zip(self._slots, inputs, strict=True):
            tensors[index] = tensor
        for index, desc in enumerate(self._whole, self._count):
            tensors[index] = torch.empty_strided(desc.sizes, desc.strides, dtype=desc.dtype, device="cpu")
        return tensors

    def _calls(self, entries: Sequence[PrimitiveCall | FunctionCall]) -> _Run:
        """Return what calls primitives and functions consecutively."""
        calls = CallList()
        for entry in entries:
            if isinstance(entry, FunctionCall):
                tensors = [self._address(ref) for ref in entry.tensors]
                calls.add_function(entry.function, entry.packed, tensors)
                continue
            memories: dict[int, Handle] = {}
            for key, (layout, ref) in entry.tensors.items():
                base, address = self._address(ref)
                memories[key] = self._maker.memory(layout, address if base is None else 0)
                if base is not None:
                    calls.place(memories[key], base, address)
            scratchpad = entry.primitive.layouts.get(SCRATCHPAD)
            if scratchpad is not None:
                memories[SCRATCHPAD] = self._maker.memory(scratchpad, self._arena.data_ptr() + self._end)
            calls.add(entry.primitive.handle, memories)
        bases = calls.bases
        run = self._runner.bind(calls, self._stream)

        def execute(tensors: list[Any]) -> None:
            failed = run([tensors[index].data_ptr() for index in bases])
            if failed:
                raise _error(entries, failed)

        return execute

    def _address(self, ref: Ref) -> tuple[int | None, int]:
        """Return where a tensor is in memory.

        Returns:
            None and its address, or the number of the tensor that it is a part of and the offset in bytes.
        """
        if isinstance(ref, Constant):
            self._keep.append(ref.tensor.untyped_storage())  # another one may be set to the tensor
            return None, ref.tensor.data_ptr()
        if isinstance(ref, Slot):
            return ref.index, 0
        if isinstance(ref.root, Slot):
            return ref.root.index, ref.offset
        if ref.root in self._returned:
            return self._returned[ref.root], ref.offset
        return None, self._arena.data_ptr() + self._offsets[ref.root] + ref.offset

    def _operator(self, entry: AtenCall) -> _Run:
        """Return a call of an operator of torch's."""
        target, results = entry.target, entry.results
        args = [self._bound(value) for value in entry.args]
        kwargs = {key: self._bound(value) for key, value in entry.kwargs.items()}

        def execute(tensors: list[Any]) -> None:
            made = target(
                *(_filled(a, tensors) for a in args),
                **{key: _filled(value, tensors) for key, value in kwargs.items()},
            )
            if len(results) == 1 and isinstance(made, torch.Tensor):
                tensors[results[0]] = made
            elif results:
                for index, tensor in zip(results, made, strict=True):
                    tensors[index] = tensor

        return execute

    def _bound(self, value: Any) -> Any:
        """Return an argument with all tensors that are known now."""
        return map_refs(value, self._tensor)

    def _tensor(self, ref: Ref) -> Any:
        if isinstance(ref, Constant):
            return ref.tensor
        if isinstance(ref, Slot):
            return _Fill(ref.index)
        if isinstance(ref.root, Slot):
            return _Fill(ref.root.index, ref.desc, ref.offset)
        if ref.root in self._returned:
            index = self._returned[ref.root]
            whole = ref.desc == self._whole[index - self._count] and not ref.offset
            return _Fill(index) if whole else _Fill(index, ref.desc, ref.offset)
        return _part(self._arena, ref.desc, self._offsets[ref.root] + ref.offset)


def _parts(
    entries: Sequence[Entry], *, together: bool
) -> list[AtenCall | list[PrimitiveCall | FunctionCall]]:
    """Return entries in order.

    They are operators of torch's, and lists of other calls, as long as can be or of one each.
    """
    found: list[AtenCall | list[PrimitiveCall | FunctionCall]] = []
    for entry in entries:
        last = found[-1] if found else None
        if isinstance(entry, AtenCall):
            found.append(entry)
        elif together and isinstance(last, list):
            last.append(entry)
        else:
            found.append([entry])
    return found


def _error(entries: Sequence[PrimitiveCall | FunctionCall], failed: int) -> Exception:
    """Return what to raise for what a run returned, see runner.c."""
    if failed < 0:
        return BackendError(f"a kernel failed: setting address {-failed}")
    index, status = failed_call(failed)
    entry = entries[index]
    if isinstance(entry, FunctionCall):
        return function_error(entry.function, status, next(iter(entry.step.operators), entry.step.name))
    return BackendError(
        f"a kernel failed: {entry.step.name}, call {index + 1} of {len(entries)}, with oneDNN's status "
        f"{status}"
    )


def _refs(plan: ExecutionPlan) -> list[Ref]:
    """All references of a plan."""
    found = [ref for entry in plan.entries for ref in references(entry)]
    map_refs(plan.outputs, found.append)
    return found


def _is_whole(ref: MemoryPart) -> bool:
    """Return whether a tensor is all of its memory."""
    last = sum((n - 1) * stride for n, stride in zip(ref.desc.sizes, ref.desc.strides, strict=True))
    return (
        isinstance(ref.root, Block)
        and not ref.offset
        and (last + 1) * ref.desc.dtype.itemsize == ref.root.size
    )


def _part(memory: torch.Tensor, desc: Desc, offset: int) -> torch.Tensor:
    """Return a tensor that begins `offset` bytes after the begin of another."""
    typed = torch.empty(0, dtype=desc.dtype, device="cpu")
    begin = memory.storage_offset() * memory.element_size() + offset
    return typed.set_(memory.untyped_storage(), begin // desc.dtype.itemsize, desc.sizes, desc.strides)


def _filled(value: Any, tensors: Sequence[Any]) -> Any:
    """Return an argument with the tensors of this call."""
    if isinstance(value, _Fill):
        found = tensors[value.index]
        return found if value.part is None else _part(found, value.part, value.offset)
    if isinstance(value, list):
        return [_filled(v, tensors) for v in value]
    return value
