"""Functions in C (`nc/kernels/c_code/steps.c`) that plans call between products.

The call of those that treat each element is here too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels import tuning
from nc.kernels.c_code import abi
from nc.kernels.c_code.build import load_on_threads, loaded
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import compiled
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.process.unavailable import Unavailable

#: Numbers of the dtypes in the C code: those it computes with, all that it reads, and all that there are.
FLOATS = {torch.float32: abi.DTYPE.number("f32"), torch.bfloat16: abi.DTYPE.number("bf16")}
DTYPES = {**FLOATS, torch.bool: abi.DTYPE.number("bool"), torch.int64: abi.DTYPE.number("i64")}
NUMBERS = {**DTYPES, torch.uint8: abi.DTYPE.number("u8"), torch.int8: abi.DTYPE.number("s8")}
#: Of larger tensors oneDNN and torch divide the work among threads.
MOST_ELEMENTS = tuning.MOST_ELEMENTS.value
#: Dimensions that the C code can count through.
MOST_DIMS = abi.CONSTANTS.most_dims


@functools.cache
def _functions() -> Mapping[str, Function] | Unavailable:
    """Return the functions in C by name, or why there are none."""
    library = load_on_threads("steps")
    if isinstance(library, Unavailable):
        return library
    return {name: function_of(library, name) for name, row in abi.FUNCTIONS.items() if row.source == "steps"}


def why_unavailable() -> str:
    """Why there are no such functions here; "" when there are."""
    found = _functions()
    return found.reason if isinstance(found, Unavailable) else ""


def with_isa(source: str, name: str, isa: str) -> Function | Unavailable:
    """Return a function of a source that has code for one instruction set alone, or why there is none."""
    library = load_on_threads(source)
    if isinstance(library, Unavailable):
        return library
    if isa not in compiled(library):
        return Unavailable(f"its C code was compiled without {isa}")
    return function_of(library, name)


def available() -> None:
    """Raise `Refused` if these C functions are not available."""
    why = why_unavailable()
    need(not why, why)


def remark() -> str:
    """Return what a report says where these functions are missing, or slower than they can be; "" else."""
    if why := why_unavailable():
        return f"operators between products by torch: {why}"
    found = loaded("steps")
    return (
        ""
        if found.isas
        else (
            f"operators between products without AVX2 or AVX-512, for which {found.compiler} makes no code "
            "here"
        )
    )


def function(name: str) -> Function:
    """One of the functions of the C code."""
    found = _functions()
    assert not isinstance(found, Unavailable), "callers ask `why_unavailable` before"
    return found[name]


def apply(
    recorder: Recorder, node: fx.Node, operation: str, result: PlanTensor, *operands: PlanTensor
) -> None:
    """Append `result = operation(*operands)`, elementwise.

    Operands are repeated to the sizes of the result.
    """
    given = (result, *operands)
    sizes = tuple(result.tensor.shape)
    sizes, strides = merged(sizes, [value.tensor.expand(sizes).stride() for value in given])
    dtypes = [DTYPES[value.tensor.dtype] for value in given]
    recorder.call_function(function("map"), map_fields(operation, sizes, dtypes, strides), given, node)


def map_fields(
    operation: str,
    sizes: Sequence[int],
    dtypes: Sequence[int],
    strides: Sequence[Sequence[int]],
) -> dict[str, abi.Value]:
    """Return what `map` takes.

    Args:
        operation: a member of `abi.OPERATOR`.
        sizes: of all tensors.
        dtypes: numbers of `DTYPES`, of the result and what is read.
        strides: likewise, as many as there are sizes.
    """
    dims, operands = abi.CONSTANTS.most_dims, abi.CONSTANTS.most_operands
    return {
        "operator": abi.OPERATOR.number(operation),
        "dims": len(sizes),
        "sizes": abi.padded(sizes, dims),
        "dtypes": abi.padded(dtypes, operands),
        "strides": abi.padded([abi.padded(steps, dims) for steps in strides], operands, [0] * dims),
    }


def as_fp32(recorder: Recorder, node: fx.Node, x: PlanTensor) -> PlanTensor:
    """Return the tensor in fp32, without gaps."""
    return (
        x
        if x.tensor.dtype is torch.float32 and x.tensor.is_contiguous()
        else converted(recorder, node, x, torch.float32)
    )


def converted(recorder: Recorder, node: fx.Node, x: PlanTensor, dtype: torch.dtype) -> PlanTensor:
    """Return a copy in another dtype, without gaps."""
    result = new(recorder, x.tensor.shape, dtype)
    apply(recorder, node, "copy", result, x)
    return result


def to_codes(
    recorder: Recorder,
    node: fx.Node,
    result: PlanTensor,
    x: PlanTensor,
    scale: float,
    zero_point: int,
    sizes: tuple[int, int, int] | None = None,
) -> None:
    """Append the rounding of fp32 to codes.

    Args:
        recorder: of the plan.
        node: of the graph.
        result: uint8 or int8.
        x: fp32.
        scale: of the codes.
        zero_point: of the codes.
        sizes: images, channels and pixels of `x`, which has channels last in `result`; None: both have the
            same layout without gaps.
    """
    images, channels, pixels = sizes or (1, 1, x.tensor.numel())
    fields = {
        "to": NUMBERS[result.tensor.dtype],
        "images": images,
        "channels": channels,
        "pixels": pixels,
        "inverse": 1.0 / scale,
        "zero_point": zero_point,
        "threads": recorder.threads,
    }
    recorder.call_function(function("codes"), fields, [result, x], node)


def new(recorder: Recorder, sizes: Sequence[int], dtype: torch.dtype) -> PlanTensor:
    """Memory for a result without gaps."""
    return recorder.new(tuple(sizes), contiguous_strides(sizes), dtype)


def merged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the same elements with as few dimensions as possible.

    Dimensions that are contiguous with each other in all tensors become one.
    """
    kept: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if kept and all(outer == inner * size for outer, inner in zip(kept[-1][1], steps, strict=True)):
            kept[-1] = kept[-1][0] * size, tuple(steps)
        else:
            kept.append((size, tuple(steps)))
    kept = kept or [(1, (1,) * len(strides))]
    return tuple(size for size, _ in kept), [
        tuple(steps[i] for _, steps in kept) for i in range(len(strides))
    ]
