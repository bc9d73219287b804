"""Functions in C (`nc/kernels/c_code/steps.c`) that plans call between products, and the call of those that treat each element."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.values import PlanTensor
from nc.backends.native.plans.ways import need
from nc.kernels.c_code.build import load_on_threads, loaded
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.kernels.onednn.runner import Function
from nc.process.unavailable import Unavailable

#: Numbers of the dtypes in the C code: those it computes with, all that it reads, and all that there are.
FLOATS = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = {**FLOATS, torch.bool: 2, torch.int64: 3}
NUMBERS = {**DTYPES, torch.uint8: 4, torch.int8: 5}
#: Numbers of the operators in the C code.
_OPERATORS = (
    *("copy", "add", "sub", "mul", "div", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "square", "relu", "exp", "sigmoid", "silu", "tanh"),
    *("gelu_tanh", "gelu_erf", "cos", "sin", "not", "select"),
)
_NAMES = ("map", "mean", "norm", "place", "attention", "rotary", "image")
_FAILURES = {"place": "an index is out of range"}
#: Of larger tensors oneDNN and torch divide the work among threads.
MOST_ELEMENTS = 2**16
#: Dimensions that the C code can count through.
MOST_DIMS = 8


@functools.cache
def _functions() -> Mapping[str, Function] | Unavailable:
    """Return the functions in C by name, or why there are none."""
    library = load_on_threads("steps")
    if isinstance(library, Unavailable):
        return library
    place = _address(library, "nc_step_set")
    return {name: Function(name, _address(library, f"nc_step_{name}"), place, _FAILURES.get(name, "")) for name in _NAMES}


def _address(library: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found


def why_unavailable() -> str:
    """Why there are no such functions here; "" when there are."""
    found = _functions()
    return found.reason if isinstance(found, Unavailable) else ""


def available() -> None:
    """Raise `Refused` where there are no such c_functions."""
    why = why_unavailable()
    need(not why, why)


def remark() -> str:
    """Return what a report says where these functions are missing, or slower than they can be; "" else."""
    if why := why_unavailable():
        return f"operators between products by torch: {why}"
    found = loaded("steps")
    return "" if found.isas else f"operators between products without AVX2 or AVX-512, for which {found.compiler} makes no code here"


def function(name: str) -> Function:
    """One of the functions of the C code."""
    found = _functions()
    assert not isinstance(found, Unavailable), "callers ask `why_unavailable` before"
    return found[name]


def of_address(name: str, address: int) -> Function:
    """Another function of the same form."""
    return Function(name, address, function("map").set)


def bits(number: float) -> int:
    """Return the bits of a number in fp32, as functions in C take it."""
    (found,) = struct.unpack("<i", struct.pack("<f", number))
    return int(found)


def apply(recorder: Recorder, node: fx.Node, operation: str, result: PlanTensor, *operands: PlanTensor) -> None:
    """Append `result = operation(*operands)`, elementwise; operands are repeated to the sizes of the result."""
    given = (result, *operands)
    sizes = tuple(result.tensor.shape)
    sizes, strides = merged(sizes, [value.tensor.expand(sizes).stride() for value in given])
    numbers = [_OPERATORS.index(operation), len(sizes), *sizes]
    for value, steps in zip(given, strides, strict=True):
        numbers += [DTYPES[value.tensor.dtype], *steps]
    recorder.call_function(function("map"), numbers, given, node)


def as_fp32(recorder: Recorder, node: fx.Node, x: PlanTensor) -> PlanTensor:
    """Return the tensor in fp32, without gaps."""
    return x if x.tensor.dtype is torch.float32 and x.tensor.is_contiguous() else converted(recorder, node, x, torch.float32)


def converted(recorder: Recorder, node: fx.Node, x: PlanTensor, dtype: torch.dtype) -> PlanTensor:
    """Return a copy in another dtype, without gaps."""
    result = new(recorder, x.tensor.shape, dtype)
    apply(recorder, node, "copy", result, x)
    return result


def new(recorder: Recorder, sizes: Sequence[int], dtype: torch.dtype) -> PlanTensor:
    """Memory for a result without gaps."""
    return recorder.new(tuple(sizes), contiguous_strides(sizes), dtype)


def merged(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the same elements with as few dimensions as can be: those that lie one behind the other in all tensors become one."""
    kept: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if kept and all(outer == inner * size for outer, inner in zip(kept[-1][1], steps, strict=True)):
            kept[-1] = kept[-1][0] * size, tuple(steps)
        else:
            kept.append((size, tuple(steps)))
    kept = kept or [(1, (1,) * len(strides))]
    return tuple(size for size, _ in kept), [tuple(steps[i] for _, steps in kept) for i in range(len(strides))]
