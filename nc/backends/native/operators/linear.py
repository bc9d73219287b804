"""Linears of codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.code_products import Product, multiply
from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import PREPACKS, bias_of, codes_of, post_ops_of, product_attributes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    BinaryOp,
    Desc,
    Eltwise,
    PostOp,
    Sum,
    contiguous_strides,
)
from nc.kernels.onednn.primitives import Layout, Primitive

_onednn = torch.ops.onednn
_NO_SUM = "what it adds to is a constant, or has gaps"


def linear(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`onednn::qlinear_pointwise`, with or without a sum."""
    x, weight = recorder.read(a["qx"]), codes_of(recorder, a["qw"])
    scales, bias = recorder.constant(a["w_scale"]), bias_of(recorder, a["bias"])
    post = post_ops_of(a, "post_op_name", "unary_post_op")
    need(x.tensor.dim(), "its input has no dimension")
    outputs, inputs = weight.tensor.shape
    check_sizes(x.tensor.shape[-1] == inputs, node, x.tensor.shape, weight.tensor.shape)
    sizes = *x.tensor.shape[:-1], outputs
    if not x.tensor.numel():
        return recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"] or torch.uint8)
    rows = as_rows(recorder, x, node)
    other, binary = recorder.optional(a.get("other")), a.get("binary_post_op", "none")
    if binary == "sum":  # into the memory of the other side, which the graph has made free
        if other is None or other.root is None or not other.tensor.is_contiguous():
            raise Refused(_NO_SUM)
        check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
        result = other
    else:
        result = recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"] or torch.uint8)
    flat = PlanTensor(result.tensor.view(-1, outputs), result.root)
    tensors: dict[int, Any] = {SRC: rows, DST: flat}
    post_ops: tuple[PostOp, ...] = post
    if binary == "sum":
        post_ops = (Sum(a["other_scale"], a["other_zp"], result.tensor.dtype), *post)
    elif binary == "add":
        added = as_rows(recorder, recorder.read(other), node)
        need(added.tensor.shape == flat.tensor.shape, "what it adds has another shape than its result")
        post_ops = (BinaryOp("add", added.desc), *post)
        tensors[POST_OP | SRC_1] = added
    product = Product(rows, flat, weight, scales, bias, post_ops, tensors.get(POST_OP | SRC_1))

    is_tanh = post == (Eltwise("tanh"),)

    def in_rows_of_codes() -> PlanTensor:
        if not recorder.only_c or not is_tanh:
            multiply(recorder, node, a, product)
            return result
        need(binary == "none", "a sum precedes its tanh")
        values = c_functions.new(recorder, flat.tensor.shape, torch.float32)
        multiply(recorder, node, a, dataclasses.replace(product, result=values, post_ops=()))
        if result.tensor.dtype is torch.float32:
            c_functions.apply(recorder, node, "tanh", flat, values)
        else:
            c_functions.apply(recorder, node, "tanh", values, values)
            c_functions.to_codes(recorder, node, flat, values, a["output_scale"], a["output_zero_point"])
        return result

    def by_onednn() -> PlanTensor:
        attributes = product_attributes(a, tensors, scales, 1 << 1, result.tensor.dtype, post_ops)
        bias_desc = None if bias is None else Desc.dense((1, outputs), torch.float32)
        if bias is not None:
            tensors[BIAS] = bias

        def make(weights: Desc | Layout) -> Primitive:
            return recorder.maker.matmul(rows.desc, weights, bias_desc, flat.desc, attributes)

        primitive, tensors[WEIGHTS] = recorder.packed(
            make, weight, Desc((inputs, outputs), (1, inputs), torch.int8)
        )
        recorder.call(primitive, tensors, node)
        return result

    return recorder.first_possible({"C": in_rows_of_codes, "oneDNN": by_onednn})


def as_rows(recorder: Recorder, x: PlanTensor, node: fx.Node) -> PlanTensor:
    """Return a tensor [..., K] as rows, copied where need be."""
    rows = _rows(x)
    if rows is not None:
        return rows
    whole = in_rows(recorder, x, node)
    return PlanTensor(whole.tensor.view(-1, whole.tensor.shape[-1]), whole.root)


def _rows(x: PlanTensor) -> PlanTensor | None:
    """Return a tensor [..., K] as rows, where that needs no copy."""
    if x.tensor.dim() == 2 and x.tensor.stride(1) == 1:
        return x
    if x.tensor.shape[-1] == 1 and x.tensor.is_contiguous():  # a stride of one element says nothing
        return PlanTensor(x.tensor.as_strided((x.tensor.numel(), 1), (1, 1)), x.root)
    try:
        return PlanTensor(x.tensor.view(-1, x.tensor.shape[-1]), x.root) if x.tensor.stride(-1) == 1 else None
    except RuntimeError:  # rows with gaps that no stride describes
        return None


OPERATORS = (
    PlannedOperator(
        (_onednn.qlinear_pointwise.default, _onednn.qlinear_pointwise.binary), {"C or oneDNN": linear}
    ),
    PlannedOperator(tuple(PREPACKS), waits=lambda _: True),  # a product packs its weight
)
