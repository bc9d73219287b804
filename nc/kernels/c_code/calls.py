"""Functions of the table `abi.FUNCTIONS` in a loaded library, and their call."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from nc.errors import BackendError
from nc.kernels.c_code import abi

#: A status: indices of a caller are out of range. Other failures are faults of this package.
INDEX = abi.STATUS.number("other_index")
#: The form of functions in C: see `abi.FunctionRow`, and `dnnl_primitive_execute`.
EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function in C.

    Attributes:
        row: what it takes.
        name: in profiles.
        address: of the function.
        set: address of a function that writes an address into the list of tensors.
        in_turn: address of one that runs it part by part on one thread; it takes `abi.IN_TURN`.
    """

    row: abi.FunctionRow
    name: str
    address: int
    set: int
    in_turn: int

    def packed(self, fields: Mapping[str, abi.Value]) -> bytes:
        """Return its first argument.

        Raises:
            TypeError: the fields are not those of its row.
        """
        return self.row.packed(**fields)


@functools.cache
def function_of(library: ctypes.CDLL, name: str, shown: str = "") -> Function:
    """Return a function of a library.

    Args:
        library: of the source that its row names.
        name: a key of `abi.FUNCTIONS`.
        shown: its name in profiles, if that is another.
    """
    row = abi.FUNCTIONS[name]
    others = (_address(library, symbol) for symbol in ("nc_set", "nc_run_in_turn"))
    return Function(row, shown or name, _address(library, row.symbol), *others)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    found = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    assert found is not None
    return found


def call_once(function: Function, fields: Mapping[str, abi.Value], tensors: Sequence[torch.Tensor]) -> None:
    """Call a function once; addresses are read from the tensors.

    Raises:
        BackendError: the call failed.
        IndexError: it failed for what `index` of its row says.
        TypeError: the fields are not those of its row.
    """
    call_packed(function, function.packed(fields), tensors)


def call_packed(function: Function, packed: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Call a function once with its first argument as `Function.packed` returns it; raises as `call_once`."""
    addresses = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    status = _callable(function.address)(packed, None, len(tensors), addresses)
    if status:
        raise function_error(function, status)


@functools.cache
def _callable(address: int) -> Callable[..., int]:
    """Return a function at an address; making it takes longer than a small call."""
    return EXECUTE(address)


def in_memory(packed: bytes) -> ctypes.Array[ctypes.c_int64]:
    """Return a copy aligned for 64-bit numbers."""
    return (ctypes.c_int64 * (len(packed) // 8)).from_buffer_copy(packed)


def function_error(function: Function, status: int, operator: str = "") -> Exception:
    """Return what to raise where a function in C returned a status.

    Args:
        function: which.
        status: not 0.
        operator: of the model, that it computes.
    """
    where = f"{operator}: " if operator else ""
    if status == INDEX and function.row.index:
        return IndexError(where + function.row.index)
    return BackendError(f"{where}nc's C function {function.name!r} failed: {words(status)}")


def words(status: int) -> str:
    """Return what a status means."""
    meanings = tuple(abi.STATUSES.values())
    return meanings[status] if 0 <= status < len(meanings) else f"status {status}"
