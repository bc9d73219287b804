"""Attention of few queries per head, in graphs of few tokens; keys that heads share are read in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.move import reshape_in_c
from nc.backends.native.plans.c_functions import DTYPES, FLOATS, function, new
from nc.backends.native.plans.operands import Later, PlanTensor, check_sizes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.graph.catalogue import first_input, op_name
from nc.kernels.c_code import abi

_aten = torch.ops.aten
#: Queries of a head: keys are read again for each of them.
MOST_TOKENS = 16
#: The widest head.
_WIDEST = abi.CONSTANTS.row


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` in C."""
    query, mask = recorder.read(a["query"]), recorder.optional(a["attn_mask"])
    need(not a["dropout_p"] and not a["is_causal"], "it drops values, or is causal")
    need(query.tensor.dim() == 4 and query.tensor.shape[2] <= MOST_TOKENS, "it has many queries")
    key, value = (_shared(recorder, a[name]) for name in ("key", "value"))
    need(key.tensor.dim() == value.tensor.dim() == 4, "its keys have other than four dimensions")
    batch, heads, rows, width = query.tensor.shape
    (_, of_key, keys, _), wide = key.tensor.shape, value.tensor.shape[3]
    check_sizes(key.tensor.shape[3] == width, node, query.tensor.shape, key.tensor.shape)
    sides = query, key, value
    given = (*sides, *((mask,) if mask is not None else ()))
    need(
        not any(v.tensor.is_neg() for v in given),
        "a view negates one of its tensors, which memory does not show",
    )
    need(all(v.tensor.dtype in FLOATS for v in sides), "one of its tensors is neither fp32 nor bf16")
    need(max(width, wide) <= _WIDEST, f"a head is wider than {_WIDEST}")
    need(keys and not heads % of_key, "it has no keys, or heads that can't share them evenly")
    need(
        all(v.tensor.shape[:2] == (batch, of_key) for v in (key, value)),
        "keys and values have other sizes than the query",
    )
    need(all(v.tensor.stride(3) == 1 for v in sides), "rows of its tensors have gaps")
    shares = a["enable_gqa"] or isinstance(a["key"], Later)
    need(of_key == heads or shares, "heads share keys without `enable_gqa`")
    need(value.tensor.shape[2] == keys, "it has other numbers of keys and values")
    result = new(recorder, (batch, heads, rows, wide), query.tensor.dtype)
    fields = _mask(mask, (batch, heads, rows, keys)) | {
        "batch": batch,
        "heads": heads,
        "rows": rows,
        "group": heads // of_key,
        "keys": keys,
        "width": width,
        "value_width": wide,
        "q_dtype": FLOATS[query.tensor.dtype],
        "k_dtype": FLOATS[key.tensor.dtype],
        "v_dtype": FLOATS[value.tensor.dtype],
        "y_dtype": FLOATS[result.tensor.dtype],
        "q_strides": query.tensor.stride()[:3],
        "k_strides": key.tensor.stride()[:3],
        "v_strides": value.tensor.stride()[:3],
        "y_strides": result.tensor.stride()[:3],
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
        "threads": recorder.threads,
    }
    recorder.call_function(function("attention"), fields, [result, *given], node)
    return result


def _mask(mask: PlanTensor | None, sizes: tuple[int, int, int, int]) -> dict[str, abi.Value]:
    """Fields of a mask, or of none."""
    if mask is None:
        no_dtype = FLOATS[torch.float32]
        return {"mask": abi.MASK.number("none"), "mask_dtype": no_dtype, "mask_strides": (0, 0, 0, 0)}
    need(mask.tensor.dtype in (torch.bool, *FLOATS), f"its mask is {mask.tensor.dtype}")
    need(mask.tensor.dim() <= len(sizes), "its mask has more than four dimensions")
    return {
        "mask": abi.MASK.number("bool" if mask.tensor.dtype is torch.bool else "float"),
        "mask_dtype": DTYPES[mask.tensor.dtype],
        "mask_strides": mask.tensor.expand(sizes).stride(),
    }


def is_repeated(node: fx.Node) -> bool:
    """Return whether a reshape only repeats heads for attention.

    It waits, because a kernel can read the same head twice.
    """
    source, readers = first_input(node), list(node.users)
    only_attention = all(reader.target is _aten.scaled_dot_product_attention.default for reader in readers)
    return source is not None and op_name(source) == "expand" and bool(readers) and only_attention


def _shared(recorder: Recorder, value: Any) -> PlanTensor:
    """Return keys or values; if they were repeated for heads, the tensor before that."""
    if isinstance(value, Later) and value.node.target is _aten.reshape.default:
        x, sizes = recorder.optional(value.named["self"]), value.named["shape"]
        if (
            x is not None
            and x.tensor.dim() == 5
            and x.tensor.stride(2) == 0
            and sizes[1] == x.tensor.shape[1] * x.tensor.shape[2]
        ):
            return PlanTensor(x.tensor[:, :, 0], x.root)
    return recorder.read(value)


OPERATORS = (
    PlannedOperator((_aten.scaled_dot_product_attention.default,), {"C": attention}, of_one_token=True),
    PlannedOperator((_aten.reshape.default,), {"C": reshape_in_c}, waits=is_repeated, of_one_token=True),
)
