"""What ends the pooling of sentence encoders, in plans of C alone: bounds from below, and lengths of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.elementwise import in_c
from nc.backends.native.operators.pool import mean_of_rows
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need

_aten = torch.ops.aten


def at_least(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::clamp` with a least value alone: `relu(x - least) + least`, which is `x` but for rounding."""
    x, least = in_c(recorder, a["self"]), a["min"]
    need(isinstance(least, (int, float)) and a.get("max") is None, "it is bounded from above, or by a tensor")
    need(x.tensor.dtype is torch.float32 and x.tensor.dim(), f"its input is {x.tensor.dtype}")
    number = PlanTensor(torch.tensor(float(least), dtype=torch.float32), None)
    result = c_functions.new(recorder, x.tensor.shape, torch.float32)
    c_functions.apply(recorder, node, "sub", result, x, number)
    c_functions.apply(recorder, node, "relu", result, result)
    c_functions.apply(recorder, node, "add", result, result, number)
    return result


def length(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::linalg_vector_norm` of order 2: the root of the mean square times the columns."""
    x = in_c(recorder, a["self"])
    need(a["ord"] == 2 and a["dtype"] is None, "it is not the norm of order 2")
    square = c_functions.new(recorder, x.tensor.shape, x.tensor.dtype)
    c_functions.apply(recorder, node, "square", square, x)
    mean = mean_of_rows(recorder, node, {**a, "self": square})
    count = PlanTensor(torch.tensor(float(x.tensor.shape[-1]), dtype=torch.float32), None)
    result = c_functions.new(recorder, mean.tensor.shape, mean.tensor.dtype)
    c_functions.apply(recorder, node, "mul", result, mean, count)
    c_functions.apply(recorder, node, "sqrt", result, result)
    return result


OPERATORS = (
    PlannedOperator((_aten.clamp.default, _aten.clamp_min.default), {"C": at_least}, only_c=True),
    PlannedOperator((_aten.linalg_vector_norm.default,), {"C": length}, only_c=True),
)
