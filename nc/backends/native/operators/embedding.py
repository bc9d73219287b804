"""Rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    need(
        table.tensor.dtype in FLOATS and table.tensor.dim() == 2, "its table is not a matrix in fp32 or bf16"
    )
    need(
        table.tensor.is_contiguous() and indices.tensor.is_contiguous(), "its table or its indices have gaps"
    )
    need(
        indices.tensor.dtype is torch.int64 and indices.tensor.numel(),
        "its indices are not int64, or there is none",
    )
    places, width = table.tensor.shape
    size, shape = width * table.tensor.element_size(), (*indices.tensor.shape, width)
    return rows_of_table(recorder, node, table, indices, size, places, shape)


def rows_of_table(
    recorder: Recorder,
    node: fx.Node,
    table: PlanTensor,
    indices: PlanTensor,
    size: int,
    places: int,
    shape: Sequence[int],
) -> PlanTensor:
    """Append the copy of rows of a table; return them.

    Args:
        recorder: of the plan.
        node: of the graph.
        table: contiguous rows.
        indices: int64, without gaps.
        size: bytes of a row.
        places: number of rows.
        shape: of the result.
    """
    available()
    need(indices.tensor.is_contiguous() and indices.tensor.numel(), "its indices have gaps, or there is none")
    result = new(recorder, shape, table.tensor.dtype)
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
