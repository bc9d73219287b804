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
from nc.backends.native.plans.attention import call_attention, sides_of
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.c_code.isas import ISAS
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


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` in C, and `nc_native::bf16_attention`."""
    function, missing = _function(), why_unavailable()
    if isinstance(function, Unavailable) or missing:
        raise Refused(missing)
    need(not a["dropout_p"], "it drops values")
    sides = sides_of(recorder, node, a)
    need(sides.texts is None, "its rows are of several texts")
    _, heads, __, width = sides.query.tensor.shape
    of_key, keys = sides.key.tensor.shape[1:3]
    need(not heads % of_key, "heads can't share keys evenly")
    need(of_key == heads or a["enable_gqa"], "heads share keys without `enable_gqa`")
    fields = {
        "group": heads // of_key,
        "causal": a["is_causal"],
        "bf16": node.target is not _sdpa,
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
    }
    memory = _room(keys, width, sides.value.tensor.shape[3])
    return call_attention(recorder, node, function, sides, fields, memory)


def _room(keys: int, width: int, wide: int) -> int:
    """Bytes of memory for a thread: keys, values, and some rows of scores and queries."""
    padded, depth, columns = (math.ceil(size / 16) * 16 for size in (keys, width, wide))
    rows = abi.CONSTANTS.float_rows
    return aligned((padded * (width + columns + rows) + depth * rows) * 4)


OPERATORS = (PlannedOperator((_sdpa,), {"C": attention}),)
