"""Attention in fp32 as one function in C (`nc/kernels/c_code/float_attention.c`), on CPUs with AVX-512.

It reads queries, keys and values where a linear wrote them, and writes its result as the next one reads it.
torch's kernel does what the function can't.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.native.operators.int8_attention import parts_of_rows
from nc.backends.native.operators.matmul import strides_of
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels import caches
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.c_code.isas import ISAS
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.process.unavailable import Unavailable

_aten = torch.ops.aten
_sdpa = _aten.scaled_dot_product_attention.default
_ISA = "avx512"
_MASKS = {torch.bool: "bool", torch.float32: "float"}


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function in C, or why there is none."""
    return c_functions.with_isa("float_attention", "float_attention", _ISA)


def why_unavailable() -> str:
    """Why there is no such function here; "" when there is one."""
    if missing := cpu.lacks(ISAS[_ISA]):
        return f"the CPU has no {', '.join(missing)}"
    found = _function()
    return found.reason if isinstance(found, Unavailable) else ""


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` in C, and `nc_native::bf16_attention`."""
    function, missing = _function(), why_unavailable()
    if isinstance(function, Unavailable) or missing:
        raise Refused(missing)
    need(not a["dropout_p"], "it drops values")
    sides = tuple(recorder.read(a[name]) for name in ("query", "key", "value"))
    mask = recorder.optional(a["attn_mask"])
    given = (*sides, *((mask,) if mask is not None else ()))
    need(all(x.tensor.dtype is torch.float32 for x in sides), "one of its tensors is not fp32")
    need(all(x.tensor.dim() == 4 for x in sides), "its tensors have other than four dimensions")
    need(not any(x.tensor.is_neg() for x in given), "a view negates a tensor, which memory does not show")
    query, key, value = (x.tensor for x in sides)
    batch, heads, rows, width = query.shape
    (_, of_key, keys, _), wide = key.shape, value.shape[3]
    check_sizes(key.shape[3] == width and value.shape[2] == keys, node, query.shape, key.shape, value.shape)
    need(batch * heads * rows * keys * width * wide, "one of its tensors is empty")
    need(key.shape[:2] == value.shape[:2] == (batch, of_key), "its tensors have other batches or heads")
    need(not heads % of_key, "heads can't share keys evenly")
    need(of_key == heads or a["enable_gqa"], "heads share keys without `enable_gqa`")
    need(
        all(x.stride(3) == 1 or x.shape[3] == 1 for x in (query, key, value)), "rows of its tensors have gaps"
    )
    bytes_of_thread = _room(keys, width, wide)
    need(bytes_of_thread <= caches.second(), "keys and values of a head don't fit into the second cache")
    sizes = (batch, heads, rows, wide)
    strides = strides_of(node, sizes)
    result = recorder.new(sizes, strides if strides[-1] == 1 else contiguous_strides(sizes), torch.float32)
    threads = recorder.threads
    room = recorder.new((threads, bytes_of_thread), (bytes_of_thread, 1), torch.uint8)
    fields = {
        **fields_of_mask(mask, (batch, heads, rows, keys)),
        "batch": batch,
        "heads": heads,
        "group": heads // of_key,
        "rows": rows,
        "keys": keys,
        "width": width,
        "wide": wide,
        "causal": a["is_causal"],
        "bf16": node.target is not _sdpa,
        "q_strides": query.stride()[:3],
        "k_strides": key.stride()[:3],
        "v_strides": value.stride()[:3],
        "y_strides": result.tensor.stride()[:3],
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
        "parts": parts_of_rows(batch * heads, rows, threads),
        "bytes": bytes_of_thread,
        "threads": threads,
    }
    recorder.call_function(function, fields, [result, *sides, room, *given[3:]], node)
    return result


def fields_of_mask(mask: PlanTensor | None, sizes: tuple[int, int, int, int]) -> dict[str, abi.Value]:
    """Fields of a mask, or of none."""
    if mask is None:
        return {"mask": abi.MASK.number("none"), "mask_strides": (0, 0, 0, 0)}
    need(mask.tensor.dtype in _MASKS, f"its mask is {mask.tensor.dtype}")
    need(mask.tensor.dim() <= len(sizes), "its mask has more than four dimensions")
    spread = mask.tensor.expand(sizes).stride()
    need(spread[3] in (0, 1), "rows of its mask have gaps")
    return {"mask": abi.MASK.number(_MASKS[mask.tensor.dtype]), "mask_strides": spread}


def _room(keys: int, width: int, wide: int) -> int:
    """Bytes of memory for a thread: keys, values, and some rows of scores and queries."""
    padded, depth, columns = (math.ceil(size / 16) * 16 for size in (keys, width, wide))
    rows = abi.CONSTANTS.float_rows
    return aligned((padded * (width + columns + rows) + depth * rows) * 4)


OPERATORS = (PlannedOperator((_sdpa,), {"C": attention}),)
