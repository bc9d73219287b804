"""Attention in int8 with ranges of each call as one function in C, on CPUs with AVX512-VNNI.

The code is `nc/kernels/c_code/dynamic_attention.c`. It reads queries, keys and values in fp32 where a linear
wrote them, rounds each of their rows once, and writes its result in fp32 as the next one reads it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.attention import call_attention, define_attention, sides_of
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need, why_refused
from nc.backends.rewrites.attention import Attention, attention_of
from nc.graph.catalogue import kind_of_node, op_name
from nc.graph.fx_utils import give_values_of, take_over
from nc.graph.placement import works_in_place
from nc.graph.views import Binary, DynamicQDQ
from nc.kernels import cpu
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.c_code.isas import ISAS
from nc.numerics.attention import probabilities
from nc.numerics.dynamic import quantize_dequantize_dynamic as rounded
from nc.ops import quantize_dequantize_dynamic
from nc.process.unavailable import Unavailable

#: In profiles.
NAME = "dynamic_attention"
_ISA = "avx512_vnni"
_ROUNDED_TOGETHER = 16
_UINT8, _INT8 = (0, 255), (-127, 127)
_OTHER_ATTENTION = (
    "its attention has other than four dimensions, or something else reads its scores, or only one of its "
    "products has ranges of each call"
)


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function in C, or why there is none."""
    return c_functions.with_isa(NAME, NAME, _ISA)


def why_unavailable() -> str:
    """Why there is no such function here; "" when there is one."""
    if missing := cpu.code_lacks(ISAS[_ISA]):
        return f"the CPU has no {', '.join(missing)}"
    found = _function()
    return found.reason if isinstance(found, Unavailable) else ""


@functools.cache
def dynamic_attention() -> torch._ops.OpOverload:
    """Return attention with ranges of each call: arguments as of torch's own, in fp32."""
    return define_attention("dynamic_attention", _computed)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *_: Any,
    scale: float,
    **__: Any,
) -> torch.Tensor:
    """Compute it by torch's operators in fp32, for what the function in C does not take."""
    q, k = rounded(query, True, *_UINT8, False), rounded(key, True, *_INT8, True)
    weights = probabilities(q @ k.mT * scale, mask)
    return rounded(weights, True, *_UINT8, False, right=value) @ rounded(value, True, *_INT8, True)


# ---- how it is found in a graph ----


def replace_dynamic_attention(module: fx.GraphModule) -> None:
    """Replace every attention whose products have ranges of each call by one call, where there is C code."""
    for node in list(module.graph.nodes):
        if not _weighs_values(node) or why_not_dynamic_attention(node):
            continue
        found = attention_of(node, rounded="dynamic")
        assert found is not None, "it was asked for"
        with module.graph.inserting_before(node):
            call = found.call(module.graph, dynamic_attention())
        take_over(call, node)
        give_values_of(call, node)
        named = [n for n in (node, *found.inner) if "operator" in n.meta]
        call.meta["operators"] = [n.meta["operator"] for n in named]
        node.replace_all_uses_with(call)
        for old in (node, *found.inner):
            if not old.users:  # codes may have other readers
                module.graph.erase_node(old)


def why_not_dynamic_attention(node: fx.Node) -> str:
    """Why a product with ranges of each call is in no attention in C; "" where it is, and for other nodes."""
    return why_refused(_check, node) if _is_dynamic(node) else ""


def _is_dynamic(node: fx.Node) -> bool:
    """Return whether a node is a product one of whose sides has ranges of each call."""
    return kind_of_node(node) == "matmul" and any(map(_is_rounded, Binary.of(node).sides))


def _is_rounded(side: object) -> bool:
    return isinstance(side, fx.Node) and side.target is quantize_dequantize_dynamic


def _weighs_values(node: fx.Node) -> bool:
    """Return whether a node is such a product of probabilities and values."""
    if not _is_dynamic(node):
        return False
    left = Binary.of(node).left
    return _is_rounded(left) and op_name(DynamicQDQ.of(left).input) in ("softmax", "_softmax")


def _check(node: fx.Node) -> None:
    """Raise `Refused` for a product that the function does not compute, as far as the graph tells that."""
    missing = why_unavailable()
    need(not missing, missing)
    module = node.graph.owning_module
    assert module is not None, "passes run on modules"
    need(not works_in_place(module), "operators of this graph work in place")
    need(
        _weighs_values(node), "it is not part of an attention both of whose products have ranges of each call"
    )
    found = attention_of(node, rounded="dynamic")
    if found is None:
        raise Refused(_OTHER_ATTENTION)
    _check_rounding(node, found)


def _check_rounding(node: fx.Node, found: Attention) -> None:
    """Raise `Refused` where sides are rounded in another way than the function does."""
    scores = next(n for n in found.inner if kind_of_node(n) == "matmul")
    views = [DynamicQDQ.of(side) for product in (node, scores) for side in Binary.of(product).sides]
    weights, values, queries, keys = views
    need(all(view.per_token for view in views), "its sides have a range per tensor")
    for view in (weights, queries):
        levels = view.quant_max - view.quant_min
        need(levels == _UINT8[1] and not view.symmetric, "its left sides have no affine codes of 8 bits")
    for view in (values, keys):
        need((view.quant_min, view.quant_max) == _INT8 and view.symmetric, "its right sides have other codes")
    rows = (weights.dim, values.dim, queries.dim, keys.dim) == (-1, -1, -1, -2)
    need(rows and weights.right is found.value, "its ranges are of other rows")
    need(
        queries.right is None and keys.right is None and values.right is None, "its ranges are of other rows"
    )


# ---- how plans compute it ----


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::dynamic_attention` in C."""
    try:
        return _at_once(recorder, node, a)
    except Refused as refused:  # torch computes it in fp32, and nothing else would say why
        recorder.pass_over(node, f"c:{NAME}", str(refused))
        raise


def _at_once(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    function, missing = _function(), why_unavailable()
    if isinstance(function, Unavailable) or missing:
        raise Refused(missing)
    sides = sides_of(recorder, node, a)
    query, key, value = (side.tensor for side in sides.tensors)
    keys, width, wide = *key.shape[2:], value.shape[3]
    keys = keys if sides.texts is None else sides.texts.longest
    need(key.shape[1] == query.shape[1], "its tensors have other batches or heads")
    need(width <= abi.CONSTANTS.widest_head, f"its heads have more than {abi.CONSTANTS.widest_head} elements")
    need(keys <= abi.CONSTANTS.most_inputs, f"it has more than {abi.CONSTANTS.most_inputs} keys")
    fields = {"factor": a["scale"], "texts": sides.texts is not None}
    return call_attention(recorder, node, function, sides, fields, _room(keys, width, wide), factors=3)


def _room(keys: int, width: int, wide: int) -> int:
    """Bytes of memory for a thread: codes of keys and values, and some rows of scores and of queries."""
    padded, columns = math.ceil(keys / 16) * 16, math.ceil(wide / 16) * 16
    of_key = math.ceil(width / 4) * 4 + columns + 4 * 4 + abi.CONSTANTS.score_rows * (4 + 1)
    return aligned(padded * of_key + _ROUNDED_TOGETHER * math.ceil(width / 16) * 16)


OPERATORS = (PlannedOperator((dynamic_attention(),), {"C": attention}, only_here=True),)
