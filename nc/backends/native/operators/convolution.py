"""Convolutions of codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import depthwise
from nc.backends.native.plans.code_products import Product, multiply
from nc.backends.native.plans.layouts import channels_last, is_channels_last
from nc.backends.native.plans.operands import Later, PlanTensor, WeightToPack, check_sizes
from nc.backends.native.plans.products import bias_of, codes_of, output_sizes, post_ops_of, product_attributes
from nc.backends.native.plans.readers import PADS
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    POST_OP,
    SRC,
    WEIGHTS,
    Attributes,
    Desc,
    Geometry,
    PostOp,
    Sum,
    channels_last_strides,
)
from nc.kernels.onednn.primitives import Layout, Primitive
from nc.kernels.onednn.trials import Convolution

_onednn = torch.ops.onednn


def convolution(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`onednn::qconv*_pointwise`, with or without a sum."""
    return planned_convolution(
        recorder, node, a, codes_of(recorder, a["qw"]), post_ops_of(a, "attr", "unary_attr")
    )


def planned_convolution(
    recorder: Recorder,
    node: fx.Node,
    a: Mapping[str, Any],
    weight: WeightToPack,
    post: tuple[PostOp, ...],
    slopes: torch.Tensor | None = None,
) -> PlanTensor:
    """Append a convolution of codes; return its result.

    Args:
        recorder: of the plan.
        node: of the graph.
        a: its arguments.
        weight: codes, [out, C / groups, ...].
        post: what follows.
        slopes: of a `Prelu`, which comes first there.
    """
    x, before, after = _unpadded(recorder, a["qx"], a["x_zero_point"])
    scales, bias = recorder.constant(a["w_scale"]), bias_of(recorder, a["bias"])
    need(x.tensor.dim() == weight.tensor.dim(), "its input has no batch dimension")
    x = channels_last(recorder, x, node)
    geometry, sizes = window_of(node, x, weight, a, before, after)
    dtype = a["output_dtype"] or torch.uint8
    accumulator = recorder.optional(a.get("qaccum"))
    if accumulator is not None:
        check_sizes(tuple(accumulator.tensor.shape) == sizes, node, accumulator.tensor.shape, sizes)
        need(accumulator.root is not None, "what it adds to is a constant")
        need(
            is_channels_last(accumulator.tensor), "the channels of what it adds to are not next to each other"
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

    def by_channels() -> PlanTensor:
        depthwise.convolve(recorder, node, a, product)
        return result

    def by_onednn() -> PlanTensor:
        tensors: dict[int, Any] = {} if slopes is None else {POST_OP | WEIGHTS: slopes}
        attributes = product_attributes(a, tensors, scales, mask_of(groups), dtype, post)
        return call_onednn(recorder, node, product, geometry, attributes, tensors)

    return recorder.first_possible({"C": in_rows_of_codes, "C, depthwise": by_channels, "oneDNN": by_onednn})


def mask_of(groups: int) -> int:
    """Return the mask of scales of a weight that has one for each output."""
    return 3 if groups > 1 else 1


def window_of(
    node: fx.Node,
    x: PlanTensor,
    weight: WeightToPack,
    a: Mapping[str, Any],
    before: Sequence[int] | None = None,
    after: Sequence[int] | None = None,
) -> tuple[Geometry, tuple[int, ...]]:
    """Return how the window of a convolution moves, and the sizes of its result.

    Args:
        node: of the graph, for messages.
        x: [N, C, ...].
        weight: [out, C / groups, ...].
        a: arguments of the node: "stride", "padding", "dilation" and "groups".
        before: additional pads before the first element; None: no more.
        after: likewise after the last one.
    """
    dims = weight.tensor.dim() - 2
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
    return geometry, sizes


def call_onednn(
    recorder: Recorder,
    node: fx.Node,
    product: Product,
    geometry: Geometry,
    attributes: Attributes,
    tensors: Mapping[int, Any],
) -> PlanTensor:
    """Append a convolution by oneDNN; return its result.

    Args:
        recorder: of the plan.
        node: of the graph.
        product: what it computes.
        geometry: how its window moves.
        attributes: scales, zero points and what follows.
        tensors: what the attributes name.
    """
    x, result, weight, bias, groups = (
        product.x,
        product.result,
        product.weight,
        product.bias,
        product.groups,
    )
    outputs, *rest = weight.tensor.shape
    shape = (groups, outputs // groups, *rest) if groups > 1 else (outputs, *rest)
    bias_desc = None if bias is None else Desc.dense((outputs,), torch.float32)
    given = {SRC: x, DST: result, **tensors, **({} if bias is None else {BIAS: bias})}

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.convolution(
            Convolution(x.desc, bias_desc, result.desc, geometry, attributes), weights, node
        )

    primitive, given[WEIGHTS] = recorder.packed(make, weight, Desc.dense(shape, torch.int8))
    recorder.call(primitive, given, node)
    return result


def _unpadded(
    recorder: Recorder, value: Any, zero_point: int
) -> tuple[PlanTensor, list[int] | None, list[int] | None]:
    """Return the input of a pad that the convolution can apply itself, and the pads before and after."""
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
