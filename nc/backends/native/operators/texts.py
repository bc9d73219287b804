"""Values of texts whose rows follow each other: what keeps them apart in attention, sums, chosen rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.embedding import rows_of_table
from nc.backends.native.plans.c_functions import available, function, new
from nc.backends.native.plans.operands import PlanTensor, operator_name
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.errors import BackendError
from nc.ops import segment_bias, segment_sum


def refuse(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Raise BackendError: something reads `nc::segment_bias` that is not an attention in C.

    Nothing computes it as a tensor, which has the square of all rows.
    """
    readers = ", ".join(dict.fromkeys(operator_name(user) for user in node.users))
    msg = f"no kernel here computes {readers} for texts whose rows follow each other{recorder.last_refusal()}"
    raise BackendError(msg)


def sums(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc::segment_sum` in C."""
    available()
    x, starts = recorder.read(a["x"]), recorder.read(a["starts"])
    need(x.tensor.dtype is torch.float32 and x.tensor.dim() > 2, f"it sums {x.tensor.dtype}")
    _, rows, *rest = x.tensor.shape
    width, texts = math.prod(rest), starts.tensor.shape[0] - 1
    strides = x.tensor.stride()[2:]
    is_dense = x.tensor[0, :1].is_contiguous() if rows else True
    need(is_dense or not any(strides), "its rows have gaps")
    need(width and rows, "it has no element")
    result = new(recorder, (texts, *((1,) if a["keepdim"] else ()), *rest), torch.float32)
    fields = {
        "texts": texts,
        "rows": rows,
        "width": width,
        "stride": x.tensor.stride(1),
        "step": int(is_dense),
        "threads": recorder.threads,
    }
    recorder.call_function(function("text_sums"), fields, [result, x, starts], node)
    return result


def chosen(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::index_select` of contiguous rows."""
    x, index = recorder.read(a["self"]), recorder.read(a["index"])
    dim = a["dim"] % x.tensor.dim()
    sizes = x.tensor.shape
    need(math.prod(sizes[:dim]) == 1 and x.tensor.is_contiguous(), "its rows have gaps")
    need(index.tensor.dtype is torch.int64 and index.tensor.dim() == 1, "its indices are not int64")
    size = math.prod(sizes[dim + 1 :]) * x.tensor.element_size()
    shape = (*sizes[:dim], index.tensor.shape[0], *sizes[dim + 1 :])
    return rows_of_table(recorder, node, x, index, size, sizes[dim], shape)


def gathered(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::gather` along the only dimension that has a size."""
    x, index = recorder.read(a["self"]), recorder.read(a["index"])
    shape, size = index.tensor.shape, x.tensor.element_size()
    places = x.tensor.numel()
    is_row = shape and places == x.tensor.shape[a["dim"]] and index.tensor.numel() == shape[a["dim"]]
    need(is_row and x.tensor.is_contiguous(), "it gathers from several rows")
    return rows_of_table(recorder, node, x, index, size, places, shape)


OPERATORS = (
    PlannedOperator((segment_bias,), {"C": refuse}, waits=lambda node: True),
    PlannedOperator((segment_sum,), {"C": sums}),
    PlannedOperator((torch.ops.aten.index_select.default,), {"C": chosen}),
    PlannedOperator((torch.ops.aten.gather.default,), {"C": gathered}),
)
