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
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.attention import Sides, call_attention, sides_of
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.readers import strides_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.texts import texts_of
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels import flash
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.c_code.isas import ISAS
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.process.unavailable import Unavailable

_aten = torch.ops.aten
_sdpa = _aten.scaled_dot_product_attention.default
_ISA = "avx512"


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function in C, or why there is none."""
    return c_functions.with_isa("float_attention", "float_attention", _ISA)


def why_unavailable() -> str:
    """Why there is no such function here; "" when there is one."""
    if missing := cpu.code_lacks(ISAS[_ISA]):
        return f"the CPU has no {', '.join(missing)}"
    found = _function()
    return found.reason if isinstance(found, Unavailable) else ""


def of_texts(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` of texts whose rows follow each other (`flash.c`)."""
    code, sides = flash.code(), _checked_sides(recorder, node, a)
    if isinstance(code, Unavailable):
        raise Refused(code.reason)
    texts = sides.texts
    assert texts is not None, "callers ask before"
    query, key, value = (side.tensor for side in sides.tensors)
    batch, heads, rows, width = query.shape
    wide = value.shape[3]
    need(batch == 1, "its rows are of several texts, and it has a batch besides")
    need(max(width, wide) <= flash.WIDEST, f"its heads have more than {flash.WIDEST} elements")
    sizes = (*query.shape[:3], wide)
    strides = strides_of(node, sizes)
    result = recorder.new(sizes, strides if strides[-1] == 1 else contiguous_strides(sizes), torch.float32)
    size = flash.room(width, wide)
    room = recorder.new((recorder.threads, size), (size, 1), torch.uint8)
    table = texts.table
    added = None if table is None else table.tensor.expand(1, heads, *table.tensor.shape[2:])
    named = {"q": query, "k": key, "v": value, "y": result.tensor}
    fields: dict[str, abi.Value] = {
        "texts": texts.count,
        "heads": heads,
        "group": heads // key.shape[1],
        "rows": rows,
        "keys": key.shape[2],
        "width": width,
        "wide": wide,
        "dtype": flash.DTYPES[torch.float32],
        "causal": False,
        "left": -1,
        "right": -1,
        **{f"{name}_strides": (tensor.stride(2), tensor.stride(1)) for name, tensor in named.items()},
        "softcap": 0.0,
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
        "block_size": 0,
        "most_blocks": 0,
        "block_strides": (0, 0),
        "added_places": 0 if added is None else added.shape[3],
        "added_strides": (0, 0) if added is None else (added.stride(1), added.stride(2)),
        "bytes": size,
        "threads": recorder.threads,
        "isa": code.isas[torch.float32],
    }
    tensors = [result, *sides.tensors, texts.starts, texts.starts, room, *([] if table is None else [table])]
    recorder.call_function(code.function, fields, tensors, node, factors=3)
    return result


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` in C, and `nc_native::bf16_attention`."""
    if texts_of(recorder, a["attn_mask"]) is not None:
        try:
            return of_texts(recorder, node, a)
        except Refused as refused:  # nothing else computes it, and says why
            recorder.pass_over(node, "c:flash", str(refused))
            raise
    function, missing = _function(), why_unavailable()
    if isinstance(function, Unavailable) or missing:
        raise Refused(missing)
    sides = _checked_sides(recorder, node, a)
    _, heads, __, width = sides.query.tensor.shape
    of_key, keys = sides.key.tensor.shape[1:3]
    fields = {
        "group": heads // of_key,
        "causal": a["is_causal"],
        "bf16": node.target is not _sdpa,
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
    }
    memory = _room(keys, width, sides.value.tensor.shape[3])
    return call_attention(recorder, node, function, sides, fields, memory)


def _checked_sides(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Sides:
    """Return what an attention reads; raises `Refused` for what no function computes."""
    need(not a["dropout_p"], "it drops values")
    sides = sides_of(recorder, node, a)
    heads, of_key = sides.query.tensor.shape[1], sides.key.tensor.shape[1]
    need(not heads % of_key, "heads can't share keys evenly")
    need(of_key == heads or a["enable_gqa"], "heads share keys without `enable_gqa`")
    return sides


def _room(keys: int, width: int, wide: int) -> int:
    """Bytes of memory for a thread: keys, values, and some rows of scores and queries."""
    padded, depth, columns = (math.ceil(size / 16) * 16 for size in (keys, width, wide))
    rows = abi.CONSTANTS.float_rows
    return aligned((padded * (width + columns + rows) + depth * rows) * 4)


OPERATORS = (PlannedOperator((_sdpa,), {"C": attention}),)
