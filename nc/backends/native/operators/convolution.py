"""Convolutions of codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import avx2
from nc.backends.native.plans.code_products import Product, multiply
from nc.backends.native.plans.layouts import channels_last, is_channels_last
from nc.backends.native.plans.operands import Later, PlanTensor, check_sizes
from nc.backends.native.plans.products import bias_of, codes_of, output_sizes, post_ops_of, product_attributes
from nc.backends.native.plans.readers import PADS
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.kernels.onednn.descriptions import BIAS, DST, SRC, WEIGHTS, Desc, Geometry, Sum, channels_last_strides
from nc.kernels.onednn.primitives import Layout, Primitive
from nc.kernels.onednn.trials import Convolution

_onednn = torch.ops.onednn


def convolution(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`onednn::qconv*_pointwise`, with or without a sum."""
    x, before, after = _unpadded(recorder, a["qx"], a["x_zero_point"])
    weight, scales, bias = (
        codes_of(recorder, a["qw"]),
        recorder.constant(a["w_scale"]),
        bias_of(recorder, a["bias"]),
    )
    post = post_ops_of(a, "attr", "unary_attr")
    dims = weight.tensor.dim() - 2
    need(x.tensor.dim() == weight.tensor.dim(), "its input has no batch dimension")
    x = channels_last(recorder, x, node)
    pads = _each(a["padding"], dims)
    geometry = Geometry(
        _each(a["stride"], dims),
        tuple(p + q for p, q in zip(pads, before or [0] * dims, strict=True)),
        tuple(p + q for p, q in zip(pads, after or [0] * dims, strict=True)),
        _each(a["dilation"], dims),
        window=tuple(weight.tensor.shape[2:]),
        channels=weight.tensor.shape[1],
    )
    sizes = (
        x.tensor.shape[0],
        weight.tensor.shape[0],
        *output_sizes(x.tensor.shape[2:], weight.tensor.shape[2:], geometry),
    )
    fit = x.tensor.shape[1] == weight.tensor.shape[1] * a["groups"] and min(sizes[2:]) > 0
    check_sizes(fit, node, x.tensor.shape, weight.tensor.shape)
    dtype = a["output_dtype"] or torch.uint8
    accumulator = recorder.optional(a.get("qaccum"))
    if accumulator is not None:
        check_sizes(tuple(accumulator.tensor.shape) == sizes, node, accumulator.tensor.shape, sizes)
        need(accumulator.root is not None, "what it adds to is a constant")
        need(
            is_channels_last(accumulator.tensor), "channels of what it adds to do not lie next to each other"
        )
        result = accumulator
        post = (
            Sum(a["accum_scale"], a["accum_zero_point"], torch.uint8) if dtype is torch.uint8 else Sum(),
            *post,
        )
    else:
        result = recorder.new(sizes, channels_last_strides(sizes), dtype)
    groups = a["groups"]
    product = Product(x, result, weight, scales, bias, post, geometry=geometry, groups=groups)

    def in_rows_of_codes() -> PlanTensor:
        multiply(recorder, node, a, product)
        return result

    def by_avx2() -> PlanTensor:
        avx2.multiply(recorder, node, a, product)
        return result

    def by_onednn() -> PlanTensor:
        shape = (
            (groups, weight.tensor.shape[0] // groups, *weight.tensor.shape[1:])
            if groups > 1
            else tuple(weight.tensor.shape)
        )
        tensors: dict[int, Any] = {SRC: x, DST: result}
        attributes = product_attributes(a, tensors, scales, 3 if groups > 1 else 1, dtype, post)
        bias_desc = None if bias is None else Desc.dense((weight.tensor.shape[0],), torch.float32)
        if bias is not None:
            tensors[BIAS] = bias

        def make(weights: Desc | Layout) -> Primitive:
            return recorder.convolution(
                Convolution(x.desc, bias_desc, result.desc, geometry, attributes), weights, node
            )

        primitive, tensors[WEIGHTS] = recorder.packed(make, weight, Desc.dense(shape, torch.int8))
        recorder.call(primitive, tensors, node)
        return result

    return recorder.first_possible({"C": in_rows_of_codes, "AVX2": by_avx2, "oneDNN": by_onednn})


def _unpadded(
    recorder: Recorder, value: Any, zero_point: int
) -> tuple[PlanTensor, list[int] | None, list[int] | None]:
    """Return what a convolution reads in front of a pad that it can make itself, and the pad."""
    if isinstance(value, Later) and value.node.target in PADS:
        a = value.named
        x, pads = recorder.optional(a["self"]), a["pad"]
        dims = x.tensor.dim() - 2 if x is not None else 0
        plain = a.get("mode", "constant") == "constant" and (a["value"] or 0) == zero_point and min(pads) >= 0
        if x is not None and plain and len(pads) <= 2 * dims:
            padded = [*pads, *[0] * (2 * dims - len(pads))]
            return x, padded[0::2][::-1], padded[1::2][::-1]
    return recorder.read(value), None, None


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * (dims if len(values) == 1 else 1)


OPERATORS = (
    PlannedOperator(
        (
            _onednn.qconv1d_pointwise.default,
            _onednn.qconv2d_pointwise.default,
            _onednn.qconv2d_pointwise.binary,
            _onednn.qconv3d_pointwise.default,
        ),
        {"C or oneDNN": convolution},
    ),
    PlannedOperator(PADS, waits=lambda _: True),  # a convolution pads by itself
)
