"""Low-bit linears as calls of nc's kernels in C."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.low_bit import compiled, compiled_blocks
from nc.backends.low_bit.choose import computed_as
from nc.backends.low_bit.graph import operator
from nc.backends.low_bit.kernel import LowBitKernel
from nc.backends.native.plans import functions
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Traced, check_sizes
from nc.kernels.c_code import openmp
from nc.kernels.onednn.descriptions import contiguous_strides

_NOTHING = torch.empty(0, dtype=torch.float32)


def linear(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`nc_low_bit::linear`."""
    if functions.why_unavailable():
        return None
    x, bias = recorder.read(a["x"]), recorder.constant(a["bias"])
    if x is None or x.tensor.is_neg() or x.tensor.dtype not in (torch.float32, torch.bfloat16) or (a["bias"] is not None and bias is None):
        return None
    if x.tensor.dim() > functions.MOST_DIMS:
        return None
    *before, inputs = x.tensor.shape
    check_sizes(inputs == a["in_features"], node, x.tensor.shape, (a["codes"].tensor.shape[0], a["in_features"]))
    rows, activations = math.prod(before), computed_as(a["act_dtype"], x.tensor.dtype)
    found = _kernel(recorder, a, rows)
    if not rows or found is None or activations not in ("fp32", "bf16", *found[0].activations):
        return None
    kernel, (codes, scale, offset, table, sizes) = found
    block = compiled.block_of(kernel)
    block = compiled.BF16 if not block and activations == "bf16" else block
    if kernel in compiled.KERNELS and block in (0, compiled.BF16) and inputs % compiled.STEP:
        return None  # its rows would have to be padded
    outputs, dtype = a["codes"].tensor.shape[0], x.tensor.dtype
    if activations == "bf16" and x.tensor.dtype is not torch.bfloat16:
        x = functions.converted(recorder, node, x, torch.bfloat16)  # the kernel takes values that are rounded
    x = functions.as_fp32(recorder, node, x)
    result = recorder.new((*before, outputs), contiguous_strides((*before, outputs)), torch.float32)
    added = _NOTHING if bias is None else functions.as_fp32(recorder, node, Traced(bias, None))
    tensors: list[Traced | torch.Tensor] = [result, x, sizes, codes, scale, offset, table, added]
    address = compiled.address() if kernel in compiled.KERNELS else compiled_blocks.address()
    recorder.call_function(functions.of_address(kernel.name, address), [rows, inputs, block, openmp.threads()], tensors, node)
    return result if dtype is torch.float32 else functions.converted(recorder, node, result, dtype)


def _kernel(recorder: Recorder, a: Mapping[str, Any], rows: int) -> tuple[LowBitKernel, list[torch.Tensor]] | None:
    """Return the kernel for this number of rows, if it is one in C, and what it packed."""
    start = 0
    for name, count in zip(a["kernels"], a["counts"], strict=True):
        kernel = next((each for each in (*compiled.KERNELS, *compiled_blocks.KERNELS) if each.name == name), None)
        if kernel is None:
            return None
        if rows <= kernel.max_rows:
            packed = (recorder.constant(value) for value in a["layouts"][start : start + count])
            return kernel, [_NOTHING if tensor is None else tensor for tensor in packed]
        start += count
    return None


HANDLERS: Mapping[Any, Handler] = {operator(): linear}
