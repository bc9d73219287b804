"""Rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.c_functions import FLOATS, available, function, new
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need


def embedding(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::embedding` in C."""
    available()
    table, indices = recorder.read(a["weight"]), recorder.read(a["indices"])
    need(table.tensor.dtype in FLOATS and table.tensor.dim() == 2, "its table is no matrix in fp32 or bf16")
    need(
        table.tensor.is_contiguous() and indices.tensor.is_contiguous(), "its table or its indices have gaps"
    )
    need(
        indices.tensor.dtype is torch.int64 and indices.tensor.numel(),
        "its indices are not int64, or there is none",
    )
    places, width = table.tensor.shape
    size = width * table.tensor.element_size()
    result = new(recorder, (*indices.tensor.shape, width), table.tensor.dtype)
    fields = {
        "bytes": size,
        "rows": indices.tensor.numel(),
        "y_stride": size,
        "x_stride": 0,
        "place_stride": size,
        "places": places,
        "scatters": False,
        "one_index": False,
        "threads": recorder.threads,
    }
    recorder.call_function(function("place"), fields, [result, table, indices], node)
    return result


OPERATORS = (PlannedOperator((torch.ops.aten.embedding.default,), {"C": embedding}),)
