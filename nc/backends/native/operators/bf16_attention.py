"""Attention whose products are in bf16, as the function in C of attention in fp32 (`float_attention.py`).

Its sides hold numbers of bf16 in fp32. What each product gives is rounded as the graph rounds it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import float_attention
from nc.backends.native.plans.attention import define_attention
from nc.backends.native.plans.ways import PlannedOperator
from nc.backends.native.regions import only_user
from nc.backends.rewrites.attention import attention_of
from nc.graph.fx_utils import give_values_of, take_over
from nc.graph.placement import works_in_place
from nc.numerics.attention import probabilities
from nc.ops import from_bf16, to_bf16

_aten = torch.ops.aten


@functools.cache
def bf16_attention() -> torch._ops.OpOverload:
    """Return attention with roundings to bf16: arguments of `aten::scaled_dot_product_attention`, in fp32."""
    return define_attention("bf16_attention", _computed)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *_: Any,
    scale: float,
    **__: Any,
) -> torch.Tensor:
    """Compute it by torch's operators, for what the function in C does not take."""
    q, k, v = (_rounded(side) for side in (query, key, value))
    return _rounded(_rounded(probabilities(_rounded(q @ k.mT) * scale, mask)) @ v)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def replace_bf16_attention(module: fx.GraphModule) -> None:
    """Replace every attention of four dimensions with products in bf16 by one call, where there is C code.

    Not where operators work in place: there a value depends on when it is read.
    """
    if float_attention.why_unavailable() or works_in_place(module):
        return
    for node in list(module.graph.nodes):
        found, low = attention_of(node, rounded="bf16"), only_user(node)
        result = only_user(low) if low is not None and low.target is to_bf16 else None
        if found is None or low is None or result is None or result.target is not from_bf16:
            continue
        with module.graph.inserting_before(result):
            call = found.call(module.graph, bf16_attention())
        take_over(call, result)
        give_values_of(call, result)
        named = [n for n in (node, *found.inner) if "operator" in n.meta]
        call.meta["operators"] = [n.meta["operator"] for n in named]
        call.meta["bf16_operators"] = [n.meta["operator"] for n in named if n.target is node.target]
        result.replace_all_uses_with(call)
        for old in (result, low, node, *found.inner):
            if not old.users:  # roundings may have other readers
                module.graph.erase_node(old)


OPERATORS = (PlannedOperator((bf16_attention(),), {"C": float_attention.attention}),)
