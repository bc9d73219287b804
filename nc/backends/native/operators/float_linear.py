"""Linears in fp32 of plans for any number of rows: results of torch have no room for more rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.linear import as_rows
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import bias_of, named_codes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.graph.catalogue import schema_arguments
from nc.kernels.onednn.descriptions import BIAS, DST, SRC, WEIGHTS, Attributes, Desc, contiguous_strides
from nc.kernels.onednn.primitives import Layout, Primitive


def linear(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::linear` by oneDNN."""
    need(recorder.any_rows, "torch computes it for sizes that are known")
    x, weight, bias = recorder.read(a["input"]), recorder.constant(a["weight"]), bias_of(recorder, a["bias"])
    tensors = x.tensor, weight
    need(all(tensor.dtype is torch.float32 for tensor in tensors), "it is not fp32")
    need(x.tensor.numel() and x.tensor.dim() > 1, "its input has no rows")
    need(weight.dim() == 2, "its weight is a vector")
    check_sizes(x.tensor.shape[-1] == weight.shape[1], node, x.tensor.shape, weight.shape)
    outputs, inputs = weight.shape
    sizes = *x.tensor.shape[:-1], outputs
    rows = as_rows(recorder, x, node)
    result = recorder.new(sizes, contiguous_strides(sizes), torch.float32)
    flat = PlanTensor(result.tensor.view(-1, outputs), result.root)
    given: dict[int, Any] = {SRC: rows, DST: flat} | ({} if bias is None else {BIAS: bias})
    of_bias = None if bias is None else Desc.dense((1, outputs), torch.float32)

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.maker.matmul(rows.desc, weights, of_bias, flat.desc, Attributes())

    named = named_codes(schema_arguments(node)["weight"], weight.contiguous())
    primitive, given[WEIGHTS] = recorder.packed(
        make, named, Desc((inputs, outputs), (1, inputs), torch.float32)
    )
    recorder.call(primitive, given, node)
    return result


OPERATORS = (PlannedOperator((torch.ops.aten.linear.default,), {"oneDNN": linear}),)
