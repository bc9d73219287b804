"""Low-bit linears as calls of nc's kernels in C."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.low_bit.choose import computed_as
from nc.backends.low_bit.graph import operator
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import FLOATS, MOST_DIMS
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels.low_bit import compiled, compiled_blocks
from nc.kernels.low_bit.kernel import LowBitKernel
from nc.kernels.onednn.descriptions import contiguous_strides

_NOTHING = torch.empty(0, dtype=torch.float32)


def linear(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_low_bit::linear` in C."""
    c_functions.available()
    x, bias = recorder.read(a["x"]), recorder.optional_constant(a["bias"])
    need(
        x.tensor.dtype in FLOATS and not x.tensor.is_neg(),
        "its input is neither fp32 nor bf16, or a view negates it",
    )
    need(x.tensor.dim() <= MOST_DIMS, f"its input has more than {MOST_DIMS} dimensions")
    *before, inputs = x.tensor.shape
    check_sizes(
        inputs == a["in_features"], node, x.tensor.shape, (a["codes"].tensor.shape[0], a["in_features"])
    )
    rows, activations = math.prod(before), computed_as(a["act_dtype"], x.tensor.dtype)
    need(rows, "its input has no row")
    kernel, (codes, scale, offset, table, sizes) = _kernel(recorder, a, rows)
    need(
        activations in ("fp32", "bf16", *kernel.activations),
        f"{kernel.name} takes no {activations} activations",
    )
    block = compiled.block_of(kernel)
    block = compiled.BF16 if not block and activations == "bf16" else block
    pads = kernel in compiled.KERNELS and block in (0, compiled.BF16) and inputs % compiled.STEP
    need(not pads, f"its rows would have to be padded to a multiple of {compiled.STEP}")
    outputs, dtype = a["codes"].tensor.shape[0], x.tensor.dtype
    if activations == "bf16" and x.tensor.dtype is not torch.bfloat16:
        x = c_functions.converted(
            recorder, node, x, torch.bfloat16
        )  # the kernel takes values that are rounded
    x = c_functions.as_fp32(recorder, node, x)
    result = recorder.new((*before, outputs), contiguous_strides((*before, outputs)), torch.float32)
    added = _NOTHING if bias is None else c_functions.as_fp32(recorder, node, PlanTensor(bias, None))
    tensors: list[PlanTensor | torch.Tensor] = [result, x, sizes, codes, scale, offset, table, added]
    function = compiled.function() if kernel in compiled.KERNELS else compiled_blocks.function()
    fields = {"rows": rows, "stride": inputs, "block": block, "threads": recorder.threads}
    recorder.call_function(dataclasses.replace(function, name=kernel.name), fields, tensors, node)
    return result if dtype is torch.float32 else c_functions.converted(recorder, node, result, dtype)


def _kernel(recorder: Recorder, a: Mapping[str, Any], rows: int) -> tuple[LowBitKernel, list[torch.Tensor]]:
    """Return the kernel for this number of rows, and the tensors that it packed.

    Raises:
        Refused: the kernel is not in C, or the operator has none for so many rows.
    """
    start = 0
    for name, count in zip(a["kernels"], a["counts"], strict=True):
        kernel = next(
            (each for each in (*compiled.KERNELS, *compiled_blocks.KERNELS) if each.name == name), None
        )
        if kernel is None:
            msg = f"{name} is not a kernel in C"
            raise Refused(msg)
        if rows <= kernel.max_rows:
            packed = (recorder.optional_constant(value) for value in a["layouts"][start : start + count])
            return kernel, [_NOTHING if tensor is None else tensor for tensor in packed]
        start += count
    msg = f"it has no kernel for {rows} rows"
    raise Refused(msg)


OPERATORS = (PlannedOperator((operator(),), {"C": linear}),)
