"""Linears and convolutions as primitives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import prepack, transposed_convolution
from nc.backends.native.plans import avx2
from nc.backends.native.plans.elementwise import copy
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Codes, Later, Traced, check_sizes
from nc.errors import BackendError
from nc.graph.catalogue import schema_arguments
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    POST_OP,
    SCALES,
    SRC,
    SRC_1,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    BinaryOp,
    Desc,
    Eltwise,
    Geometry,
    PostOp,
    Sum,
    channels_last_strides,
    contiguous_strides,
)
from nc.kernels.onednn.primitives import Layout, Primitive
from nc.kernels.onednn.trials import Convolution

_onednn, _aten = torch.ops.onednn, torch.ops.aten
#: Activations behind a product that need no numbers of the model's.
ACTIVATIONS: Mapping[str, Eltwise] = {
    "relu": Eltwise("relu"),
    "tanh": Eltwise("tanh"),
    "swish": Eltwise("swish", 1.0),
    "hardswish": Eltwise("hardswish", 1 / 6, 0.5),
    "gelu_tanh": Eltwise("gelu_tanh"),
    "gelu_erf": Eltwise("gelu_erf"),
}
#: Constant pads of codes: a convolution pads by itself.
PADS = (_aten.pad.default, _aten.constant_pad_nd.default)


def linear(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`onednn::qlinear_pointwise`, with or without a sum."""
    x, weight = recorder.read(a["qx"]), _codes(recorder, a["qw"])
    scales, bias = recorder.constant(a["w_scale"]), _bias(recorder, a["bias"])
    post = post_ops_of(a, "post_op_name", "unary_post_op")
    if x is None or weight is None or scales is None or post is None or (a["bias"] is not None and bias is None) or x.tensor.dim() < 1:
        return None
    outputs, inputs = weight.tensor.shape
    check_sizes(x.tensor.shape[-1] == inputs, node, x.tensor.shape, weight.tensor.shape)
    sizes = *x.tensor.shape[:-1], outputs
    if not x.tensor.numel():
        return recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"] or torch.uint8)
    rows = _rows(x) or _rows(in_rows(recorder, x, node))
    assert rows is not None
    other, binary = recorder.read(a.get("other")), a.get("binary_post_op", "none")
    if binary == "sum":  # into the memory of the other side, which the graph has made free
        if other is None or other.root is None or not other.tensor.is_contiguous():
            return None
        check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
        result = other
    else:
        result = recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"] or torch.uint8)
    flat = Traced(result.tensor.view(-1, outputs), result.root)
    tensors: dict[int, Any] = {SRC: rows, DST: flat}
    post_ops: tuple[PostOp, ...] = post
    if binary == "sum":
        post_ops = (Sum(a["other_scale"], a["other_zp"], result.tensor.dtype), *post)
    elif binary == "add":
        added = None if other is None else _rows(other) or _rows(in_rows(recorder, other, node))
        if added is None or added.tensor.shape != flat.tensor.shape:
            return None
        post_ops = (BinaryOp("add", added.desc), *post)
        tensors[POST_OP | SRC_1] = added
    product = avx2.Product(rows, flat, weight, scales, bias, post_ops, tensors.get(POST_OP | SRC_1))
    if avx2.multiply(recorder, node, a, product):
        return result
    attributes = _attributes(a, tensors, scales, 1 << 1, result.tensor.dtype, post_ops)
    bias_desc = None if bias is None else Desc.dense((1, outputs), torch.float32)
    if bias is not None:
        tensors[BIAS] = bias

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.maker.matmul(rows.desc, weights, bias_desc, flat.desc, attributes)

    primitive, tensors[WEIGHTS] = recorder.packed(make, weight, Desc((inputs, outputs), (1, inputs), torch.int8))
    recorder.call(primitive, tensors, node)
    return result


def convolution(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`onednn::qconv*_pointwise`, with or without a sum."""
    x, before, after = _unpadded(recorder, a["qx"], a["x_zero_point"])
    weight, scales, bias = _codes(recorder, a["qw"]), recorder.constant(a["w_scale"]), _bias(recorder, a["bias"])
    post = post_ops_of(a, "attr", "unary_attr")
    if weight is None or scales is None or post is None or (a["bias"] is not None and bias is None):
        return None
    dims = weight.tensor.dim() - 2
    if x.tensor.dim() != weight.tensor.dim():
        return None
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
    sizes = x.tensor.shape[0], weight.tensor.shape[0], *output_sizes(x.tensor.shape[2:], weight.tensor.shape[2:], geometry)
    fit = x.tensor.shape[1] == weight.tensor.shape[1] * a["groups"] and min(sizes[2:]) > 0
    check_sizes(fit, node, x.tensor.shape, weight.tensor.shape)
    dtype = a["output_dtype"] or torch.uint8
    accumulator = recorder.read(a.get("qaccum"))
    if accumulator is not None:
        check_sizes(tuple(accumulator.tensor.shape) == sizes, node, accumulator.tensor.shape, sizes)
        if accumulator.root is None:
            return None
        if not _is_channels_last(accumulator.tensor):
            return None
        result = accumulator
        post = (Sum(a["accum_scale"], a["accum_zero_point"], torch.uint8) if dtype is torch.uint8 else Sum(), *post)
    else:
        result = recorder.new(sizes, channels_last_strides(sizes), dtype)
    groups = a["groups"]
    product = avx2.Product(x, result, weight, scales, bias, post, geometry=geometry, groups=groups)
    if avx2.multiply(recorder, node, a, product):
        return result
    shape = (groups, weight.tensor.shape[0] // groups, *weight.tensor.shape[1:]) if groups > 1 else tuple(weight.tensor.shape)
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = _attributes(a, tensors, scales, 3 if groups > 1 else 1, dtype, post)
    bias_desc = None if bias is None else Desc.dense((weight.tensor.shape[0],), torch.float32)
    if bias is not None:
        tensors[BIAS] = bias

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.convolution(Convolution(x.desc, bias_desc, result.desc, geometry, attributes), weights, node)

    primitive, tensors[WEIGHTS] = recorder.packed(make, weight, Desc.dense(shape, torch.int8))
    recorder.call(primitive, tensors, node)
    return result


def transposed(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`nc_native::qconv_transpose`."""
    x, weight, scales, bias = (
        recorder.read(a["qx"]),
        recorder.constant(a["qw"]),
        recorder.constant(a["w_scale"]),
        _bias(recorder, a["bias"]),
    )
    post = post_ops_of(a, "attr")
    if x is None or weight is None or scales is None or post is None or (a["bias"] is not None and bias is None):
        return None
    x, weight, groups = channels_last(recorder, x, node), weight.contiguous(), a["groups"]
    ends = [pad - more for pad, more in zip(a["padding"], a["output_padding"], strict=True)]
    window, channels = tuple(weight.shape[2:]), weight.shape[0] // groups
    pads = tuple(a["padding"]), tuple(ends)
    geometry = Geometry(tuple(a["stride"]), *pads, tuple(a["dilation"]), transposed=True, window=window, channels=channels)
    how = zip(x.tensor.shape[2:], weight.shape[2:], geometry.strides, geometry.before, geometry.after, geometry.dilations, strict=True)
    outputs = weight.shape[1] * groups
    spatial = [(i - 1) * stride - before - after + dilation * (k - 1) + 1 for i, k, stride, before, after, dilation in how]
    sizes = x.tensor.shape[0], outputs, *spatial
    if not math.prod((*sizes, x.tensor.numel())):
        return None
    result = recorder.new(sizes, channels_last_strides(sizes), a["output_dtype"])
    # [in, out / groups, ...] as [groups, out / groups, in / groups, ...]
    by_groups = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    by_groups = by_groups if groups > 1 else by_groups[0]
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = _attributes(a, tensors, scales, 3 if groups > 1 else 1, a["output_dtype"], post)
    bias_desc = None if bias is None else Desc.dense((outputs,), torch.float32)
    if bias is not None:
        tensors[BIAS] = bias

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.convolution(Convolution(x.desc, bias_desc, result.desc, geometry, attributes), weights, node)

    primitive, tensors[WEIGHTS] = recorder.packed(make, _named(schema_arguments(node)["qw"], weight), Desc.of(by_groups))
    recorder.call(primitive, tensors, node)
    return result


def in_rows(recorder: Recorder, x: Traced, node: fx.Node) -> Traced:
    """Return a tensor that lies row by row: itself, or a copy."""
    if x.tensor.is_contiguous():
        return x
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


def channels_last(recorder: Recorder, x: Traced, node: fx.Node) -> Traced:
    """Return a tensor whose channels lie next to each other: itself, or a copy."""
    if _is_channels_last(x.tensor):
        return x
    result = recorder.new(x.tensor.shape, channels_last_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether strides are those of [N, ..., C]; where a size is 1 its stride does not count for torch, but kernels are chosen by it."""
    return tuple(tensor.stride()) == channels_last_strides(tensor.shape)


def _rows(x: Traced) -> Traced | None:
    """Return a tensor [..., K] as rows, where that needs no copy."""
    if x.tensor.dim() == 2 and x.tensor.stride(1) == 1:
        return x
    if x.tensor.shape[-1] == 1 and x.tensor.is_contiguous():  # a stride of one element says nothing
        return Traced(x.tensor.as_strided((x.tensor.numel(), 1), (1, 1)), x.root)
    try:
        return Traced(x.tensor.view(-1, x.tensor.shape[-1]), x.root) if x.tensor.stride(-1) == 1 else None
    except RuntimeError:  # rows with gaps that no stride describes
        return None


def _codes(recorder: Recorder, value: Any) -> Codes | None:
    """Return the weight that the graph would pack."""
    if not isinstance(value, Later) or value.node.target not in PREPACKS:
        return None
    codes = recorder.constant(value.named["weight"])
    return None if codes is None else _named(value.node.all_input_nodes[0], codes.contiguous())


def _named(source: fx.Node, codes: torch.Tensor) -> Codes:
    return Codes(str(source.target) if source.op == "get_attr" else source.name, codes)


def _bias(recorder: Recorder, value: Any) -> torch.Tensor | None:
    bias = recorder.constant(value)
    return None if bias is None else bias.detach().float().contiguous()


def post_ops_of(a: Mapping[str, Any], *names: str) -> tuple[PostOp, ...] | None:
    """Return the activation behind the product; None for one that is not known."""
    key = next(name for name in names if name in a)
    prefix = key.removesuffix("_name")
    name = a[key] or "none"
    numbers = [float(v) for v in (a.get(f"{prefix}_args") or a.get("scalars") or a.get("unary_scalars") or [])]
    algorithm = a.get(f"{prefix}_algorithm") or a.get("algorithm") or a.get("unary_algorithm") or ""
    if name == "none":
        return ()
    known = {
        **ACTIVATIONS,
        "gelu": ACTIVATIONS["gelu_tanh" if algorithm == "tanh" else "gelu_erf"],
        "leaky_relu": Eltwise("relu", *numbers[:1]),
        "hardtanh": Eltwise("clip", *numbers[:2]),
    }
    return (known[name],) if name in known else None


def _attributes(
    a: Mapping[str, Any], tensors: dict[int, Any], scales: torch.Tensor, mask: int, dtype: torch.dtype, post_ops: tuple[PostOp, ...]
) -> Attributes:
    """Scales and zero points, which are arguments of the call too."""
    tensors[SCALES | WEIGHTS] = scales.detach().float().contiguous()
    masks = {WEIGHTS: mask if scales.numel() > 1 else 0}
    attributes = with_qparams(Attributes(masks, {}, post_ops), tensors, SRC, a["x_scale"], a["x_zero_point"])
    if not dtype.is_floating_point:
        attributes = with_qparams(attributes, tensors, DST, a["output_scale"], a["output_zero_point"])
    return attributes


def with_qparams(attributes: Attributes, tensors: dict[int, Any], argument: int, scale: float, zero_point: int) -> Attributes:
    """Attributes of a primitive one of whose arguments has codes; scale and zero point become tensors of the call, which grow by them."""
    tensors[SCALES | argument] = torch.tensor([scale], dtype=torch.float32, device="cpu")
    zero_points = dict(attributes.zero_points)
    if zero_point:
        zero_points[argument] = 0
        tensors[ZERO_POINTS | argument] = torch.tensor([zero_point], dtype=torch.int32, device="cpu")
    return dataclasses.replace(attributes, scales={**attributes.scales, argument: 0}, zero_points=zero_points)


def _unpadded(recorder: Recorder, value: Any, zero_point: int) -> tuple[Traced, list[int] | None, list[int] | None]:
    """Return what a convolution reads in front of a pad that it can make itself, and the pad."""
    if isinstance(value, Later) and value.node.target in PADS:
        a = value.named
        x, pads = recorder.read(a["self"]), a["pad"]
        dims = x.tensor.dim() - 2 if x is not None else 0
        plain = a.get("mode", "constant") == "constant" and (a["value"] or 0) == zero_point and min(pads) >= 0
        if x is not None and plain and len(pads) <= 2 * dims:
            padded = [*pads, *[0] * (2 * dims - len(pads))]
            return x, padded[0::2][::-1], padded[1::2][::-1]
    x = recorder.read(value)
    if x is None:
        msg = "a convolution reads no tensor"
        raise BackendError(msg)
    return x, None, None


def output_sizes(inputs: Sequence[int], kernel: Sequence[int], g: Geometry) -> list[int]:
    """Spatial sizes of a convolution's result."""
    how = zip(inputs, kernel, g.strides, g.before, g.after, g.dilations, strict=True)
    return [(i + before + after - (dilation * (k - 1) + 1)) // stride + 1 for i, k, stride, before, after, dilation in how]


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * (dims if len(values) == 1 else 1)


#: What packs weights for torch's operators.
PREPACKS = frozenset({prepack("linear"), prepack("conv2d")})
#: Nodes that wait for what reads them: a product packs its weight, and pads by itself.
LATER: Mapping[Any, Callable[[fx.Node], bool]] = dict.fromkeys((*PREPACKS, *PADS), lambda _: True)
HANDLERS: Mapping[Any, Handler] = {
    _onednn.qlinear_pointwise.default: linear,
    _onednn.qlinear_pointwise.binary: linear,
    _onednn.qconv1d_pointwise.default: convolution,
    _onednn.qconv2d_pointwise.default: convolution,
    _onednn.qconv2d_pointwise.binary: convolution,
    _onednn.qconv3d_pointwise.default: convolution,
    transposed_convolution(): transposed,
}
