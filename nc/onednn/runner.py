"""Run lists of prepared calls: by a few lines of C where there is a compiler, else call by call through ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nc.c_code.build import load
from nc.errors import BackendUnavailableError
from nc.onednn.api import Handle, Library
from nc.onednn.execute import Argument, arguments

#: Addresses of the tensors that are known at each call only → 0, or which call failed.
Run = Callable[[Sequence[int]], int]


class CallList:
    """Calls, in order, and the memory objects whose address is set before each run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Handle, ctypes.Array[Argument]]] = []
        self.places: list[tuple[Handle, int, int]] = []
        self.bases: list[int] = []
        self._keep: list[Mapping[int, Handle]] = []

    def add(self, primitive: Handle, memories: Mapping[int, Handle]) -> None:
        """Append a call."""
        self._keep.append(memories)
        self.calls.append((primitive, arguments(memories)))

    def place(self, memory: Handle, base: int, offset: int) -> None:
        """Let a memory object lie `offset` bytes behind the begin of the tensor with number `base`."""
        if base not in self.bases:
            self.bases.append(base)
        self.places.append((memory, self.bases.index(base), offset))


class Runner(Protocol):
    """What runs lists."""

    @property
    def name(self) -> str:
        """How the report calls it."""

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """What runs a list on a stream; it may be called by one thread at a time."""


class _Call(ctypes.Structure):
    _fields_ = [("primitive", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", ctypes.c_long)]  # noqa: RUF012


class _Place(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("base", ctypes.c_long), ("offset", ctypes.c_long)]  # noqa: RUF012


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRunner:
    """One call from Python for the whole list; Python's lock is free while it runs."""

    library: Library
    function: Callable[..., int]
    name: str = "C"

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """See `Runner.bind`."""
        table = (_Call * len(calls.calls))(*(_Call(p.pointer, ctypes.addressof(a), len(a)) for p, a in calls.calls))
        places = (_Place * len(calls.places))(*(_Place(memory.pointer, base, offset) for memory, base, offset in calls.places))
        bases = (ctypes.c_void_p * len(calls.bases))()
        addresses = self.library.addresses
        functions = addresses["dnnl_primitive_execute"], addresses["dnnl_memory_set_data_handle"]
        fixed = *functions, stream.pointer, ctypes.byref(places), len(places), bases, ctypes.byref(table), len(table)
        function, keep = self.function, (calls, stream)

        def run(given: Sequence[int]) -> int:
            bases[:] = list(given)
            return function(*fixed) if keep else 0

        return run


@dataclasses.dataclass(frozen=True, slots=True)
class PythonRunner:
    """Call by call."""

    library: Library
    name: str = "ctypes"

    def bind(self, calls: CallList, stream: Handle) -> Run:
        """See `Runner.bind`."""
        execute, place = self.library.function("primitive_execute"), self.library.function("memory_set_data_handle")
        prepared = [(primitive, stream, len(a), a) for primitive, a in calls.calls]

        def run(given: Sequence[int]) -> int:
            for index, (memory, base, offset) in enumerate(calls.places):  # which also keeps all memory objects
                if place(memory, given[base] + offset):
                    return -1 - index
            for index, call in enumerate(prepared):
                if execute(*call):
                    return 1 + index
            return 0

        return run


def runner(library: Library) -> tuple[Runner, str]:
    """The fastest runner that there is here, and why it is not the compiled one ("" when it is)."""
    try:
        function = load("runner").nc_run
    except BackendUnavailableError as error:
        return PythonRunner(library), str(error)
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.restype, function.argtypes = number, (pointer, pointer, pointer, pointer, number, pointer, pointer, number)
    return CompiledRunner(library, function), ""
