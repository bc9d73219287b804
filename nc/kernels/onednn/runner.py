"""Run lists of prepared calls.

They run by a few lines of C where there is a compiler, else call by call through ctypes.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nc.errors import BackendUnavailableError
from nc.kernels.c_code.build import load
from nc.kernels.c_code.calls import EXECUTE, Function, in_memory
from nc.kernels.onednn.api import Handle, Library
from nc.kernels.onednn.call_lists import arguments

#: Addresses of the tensors that are known at each call only → 0, or which call failed.
Run = Callable[[Sequence[int]], int]
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class CallList:
    """Calls, in order, and the memory whose address is set before each run."""

    def __init__(self) -> None:
        #: Address of the function (None: of oneDNN's), of what it executes, and of its arguments; their
        #: number.
        self.calls: list[tuple[int | None, int, int, int]] = []
        #: Address of the function that sets (None: oneDNN's), of what is set; number of the tensor, and the
        #: offset in it.
        self.places: list[tuple[int | None, int, int, int]] = []
        self.bases: list[int] = []
        self._keep: list[object] = []

    def add(self, primitive: Handle, memories: Mapping[int, Handle]) -> None:
        """Append a call of a primitive."""
        given = arguments(memories)
        self._keep.append((primitive, memories, given))
        self.calls.append((None, primitive.pointer, ctypes.addressof(given), len(given)))

    def place(self, memory: Handle, base: int, offset: int) -> None:
        """Place a memory object `offset` bytes after the start of the tensor with number `base`."""
        self.places.append((None, memory.pointer, self._base(base), offset))

    def add_function(
        self,
        function: Function,
        packed: bytes,
        tensors: Sequence[tuple[int | None, int]],
    ) -> None:
        """Append a call of a function.

        Args:
            function: what is called.
            packed: its first argument.
            tensors: for each tensor None and its address, or the number of the tensor that it is a part of,
                and the offset in bytes.
        """
        how = in_memory(packed)
        addresses = (ctypes.c_void_p * len(tensors))(*(at if base is None else None for base, at in tensors))
        self._keep.append((how, addresses))
        self.calls.append(
            (function.address, ctypes.addressof(how), ctypes.addressof(addresses), len(tensors))
        )
        for index, (base, offset) in enumerate(tensors):
            if base is not None:
                where = ctypes.addressof(addresses) + index * ctypes.sizeof(ctypes.c_void_p)
                self.places.append((function.set, where, self._base(base), offset))

    def _base(self, number: int) -> int:
        if number not in self.bases:
            self.bases.append(number)
        return self.bases.index(number)


class Runner(Protocol):
    """What runs lists."""

    @property
    def name(self) -> str:
        """How the report calls it."""

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """Return what runs a list on a stream; it may be called by one thread at a time."""


class _Call(ctypes.Structure):
    _fields_ = [
        ("execute", ctypes.c_void_p),
        ("what", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("count", ctypes.c_long),
    ]


class _Place(ctypes.Structure):
    _fields_ = [
        ("set", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("base", ctypes.c_long),
        ("offset", ctypes.c_long),
    ]


class CallTable:
    """A table of calls in C, whose entries may change between runs.

    Args:
        runner: what runs it.
        calls: see `CallList.calls`; what they point to must live as long as the table.
        places: number of the tensors whose address is set before each run.
        bases: number of the addresses that a run is given.
        stream: of oneDNN.
    """

    def __init__(
        self,
        runner: CompiledRunner,
        calls: Sequence[tuple[int | None, int, int, int]],
        places: int,
        bases: int,
        stream: Handle,
    ) -> None:
        addresses = runner.library.addresses
        execute, self._set = addresses["dnnl_primitive_execute"], addresses["dnnl_memory_set_data_handle"]
        self._calls = (_Call * len(calls))(*(_Call(function or execute, *rest) for function, *rest in calls))
        self._places = (_Place * places)()
        self._bases = (ctypes.c_void_p * bases)()
        self._function, self._stream = runner.function, stream
        self._fixed = (
            *(stream.pointer, ctypes.byref(self._places), places, self._bases),
            *(ctypes.byref(self._calls), len(calls)),
        )

    def set(self, index: int, what: int, arguments: int, count: int) -> None:
        """Let a call of a primitive be one of another, with other arguments."""
        call = self._calls[index]
        call.what, call.arguments, call.count = what, arguments, count

    def place(self, index: int, function: int | None, memory: int, base: int, offset: int) -> None:
        """Say which address is set before each run; see `CallList.places`."""
        self._places[index] = _Place(function or self._set, memory, base, offset)

    def run(self, given: Sequence[int]) -> int:
        """Run all calls; see `Run`."""
        self._bases[:] = list(given)
        return self._function(*self._fixed)


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRunner:
    """One call from Python for the whole list; Python's lock is free while it runs."""

    library: Library
    function: Callable[..., int]
    name: str = "C"

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """See `Runner.bind`."""
        table = CallTable(self, calls.calls, len(calls.places), len(calls.bases), stream)
        for index, place in enumerate(calls.places):
            table.place(index, *place)
        keep = calls

        def run(given: Sequence[int]) -> int:
            return table.run(given) if keep else 0

        return run


@dataclasses.dataclass(frozen=True, slots=True)
class PythonRunner:
    """Call by call. `name` says why, where it does not run by choice."""

    library: Library
    name: str = "ctypes"

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """See `Runner.bind`."""
        execute = _typed(self.library, "primitive_execute", EXECUTE)
        place = _typed(self.library, "memory_set_data_handle", _SET)
        to = stream.pointer
        prepared = [
            (EXECUTE(f) if f else execute, what, to, count, given) for f, what, given, count in calls.calls
        ]
        places = [(_SET(f) if f else place, memory, base, offset) for f, memory, base, offset in calls.places]

        def run(given: Sequence[int]) -> int:
            for index, (put, memory, base, offset) in enumerate(places):
                if put(memory, given[base] + offset):
                    return -1 - index
            for index, (call, *given_to) in enumerate(prepared):
                if status := call(*given_to):
                    return failure(index, status)
            return 0 if calls else 1  # which also keeps all that the addresses point to

        return run


def _typed(library: Library, name: str, kind: Callable[[int], Callable[..., int]]) -> Callable[..., int]:
    return kind(library.addresses[f"dnnl_{name}"])


def failure(index: int, status: int) -> int:
    """Return what a run returns where the call with this index returned a status: see runner.c."""
    return status << 32 | 1 + index


def failed_call(failed: int) -> tuple[int, int]:
    """Index and status of the call that failed, out of what a run returned."""
    return (failed & 0xFFFFFFFF) - 1, failed >> 32


def runner(library: Library) -> tuple[Runner, str]:
    """Return the fastest runner that there is here, and why it is not the compiled one ("" when it is)."""
    try:
        function = load("runner").nc_run
    except BackendUnavailableError as error:
        return PythonRunner(library, f"ctypes ({error})"), str(error)
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.restype, function.argtypes = number, (pointer, pointer, number, pointer, pointer, number)
    return CompiledRunner(library, function), ""
