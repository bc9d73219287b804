"""Convolutions whose input has a range that is found in each call.

A function in C (`steps.c`) measures the input and rounds it to codes, once for all convolutions that read it.
oneDNN's convolutions read scale and zero point from the plan's memory, where that function has put them. What
is done with their result goes with them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.native.fuse import constant, is_kernel, put, weight_of
from nc.backends.native.grouped import join, joined
from nc.backends.native.operators.convolution import call_onednn, mask_of, window_of
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.code_products import Product
from nc.backends.native.plans.layouts import channels_last, copy, is_channels_last
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import bias_of, codes_of, post_ops_of, with_qparams
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need, why_refused
from nc.backends.native.regions import Region, activation_of, region_of
from nc.backends.native.torch_library import define, only_in_plans, prepack
from nc.graph.catalogue import (
    CONVOLUTIONS,
    MOVES,
    POOLS,
    climb,
    kind_of_node,
    op_name,
    schema_arguments,
    works_in_place,
)
from nc.graph.fx_utils import call_function, constant_value, give_values_of, note_value_of
from nc.graph.views import Conv, Dequantize, DynamicQDQ, set_argument
from nc.kernels.onednn.descriptions import (
    DST,
    SCALES,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    PostOp,
    Sum,
    channels_last_strides,
)
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_dequantize_dynamic

#: Activations whose results are 0 or more.
_NOT_NEGATIVE = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid"})
#: Bytes of a scale and a zero point.
_QPARAMS = 8


_in_torch = only_in_plans("convolution of images that are rounded in each call")


@functools.cache
def rounded_images() -> torch._ops.OpOverload:
    """Return what rounds images; only `dynamic_convolution` can read the result, of the shape of `x`.

    `zero_point`: they may have one other than 0.
    """
    return define(
        "rounded_images(Tensor x, bool symmetric, bool zero_point) -> Tensor",
        _in_torch,
        lambda x, *_: torch.empty_like(x, dtype=torch.uint8),
    )


@functools.cache
def dynamic_convolution() -> torch._ops.OpOverload:
    """Return the convolution of rounded images: `activation(convolution + bias + other)`, fp32 or codes.

    `zero_point`: see `rounded_images`. `weight` is packed as for oneDNN's linears. `other` has the dtype of
    the result, which is written there with `in_place`.
    """
    return define(
        "dynamic_convolution(Tensor images, bool zero_point, Tensor weight, Tensor w_scale, Tensor? bias, "
        "Tensor? other, float other_scale, int other_zero_point, bool in_place, int[] stride, int[] padding, "
        "int[] dilation, int groups, float output_scale, int output_zero_point, ScalarType output_dtype, "
        "str attr, float[] scalars, str algorithm) -> Tensor",
        _in_torch,
        _in_torch,
    )


# ---- how it is found in a graph ----


def round_inputs(module: fx.GraphModule) -> None:
    """Let convolutions read rounded images where they read what has a range that is found in each call."""
    rounded: dict[fx.Node, fx.Node] = {}
    for node in [n for n in module.graph.nodes if _is_dynamic(n) and not why_not_dynamic_convolution(n)]:
        ranges = Conv.of(node).input
        if ranges not in rounded:
            rounded[ranges] = _rounded(module, ranges)
        set_argument(node, "input", rounded[ranges])
    _drop_unused(module, quantize_dequantize_dynamic)


def fuse_rounded(module: fx.GraphModule) -> None:
    """Replace every convolution of rounded images, and what follows it, by one call.

    Run it after all other fusions: what it adds may be overwritten if only earlier kernels read it.
    """
    for node in list(module.graph.nodes):
        if _reads_rounded(node):
            _replace(module, node)
    _drop_unused(module, dequantize_per_channel, dequantize_per_tensor)


def _drop_unused(module: fx.GraphModule, *targets: object) -> None:
    for node in reversed(module.graph.nodes):
        if not node.users and node.target in targets:
            module.graph.erase_node(node)


def why_not_dynamic_convolution(node: fx.Node) -> str:
    """Why `round_inputs` leaves a convolution in fp32; "" where it does not, and for other operators."""
    return why_refused(_check, node) if _is_dynamic(node) else ""


def _is_dynamic(node: fx.Node) -> bool:
    """Return whether a node is a convolution whose input has a range that is found in each call."""
    if kind_of_node(node) not in CONVOLUTIONS:
        return False
    ranges = Conv.of(node).input
    return isinstance(ranges, fx.Node) and ranges.target is quantize_dequantize_dynamic


def _check(node: fx.Node) -> None:
    """Raise `Refused` for a convolution that plans do not compute."""
    conv, module, missing = Conv.of(node), node.graph.owning_module, c_functions.why_unavailable()
    assert module is not None, "passes run on modules"
    need(not missing, missing)
    need(not any(map(works_in_place, node.graph.nodes)), "operators of this graph work in place")
    need(
        getattr(node.target, "_overloadname", "default") == "default",
        "its padding differs from side to side, and kernels take one number for both",
    )
    ranges = DynamicQDQ.of(conv.input)
    x = ranges.input.meta.get("val")
    dtype = getattr(x, "dtype", None)
    need(dtype is torch.float32, f"its input is {dtype}, not fp32")
    need(not ranges.per_token, "its input has a range for each row")
    need(conv.weight.target in (dequantize_per_channel, dequantize_per_tensor), "its weight is not quantized")
    weight = Dequantize.of(conv.weight)
    need(weight.codes.op == "get_attr", "its weight is not a constant")
    need(weight.axis in (None, 0), "its weight has a scale for each input")
    need(
        x is not None and x.dim() == conv.weight.meta["val"].dim(),
        "its input has no batch dimension, which kernels need",
    )
    bias = conv.bias
    need(bias is None or constant_value(module, bias) is not None, "its bias is computed from the inputs")
    need(
        joined(node),
        "oneDNN has no fast int8 kernel for it on this CPU, and in plain C++ int8 takes longer than fp32",
    )


def _may_be_negative(x: fx.Node) -> bool:
    """Return whether a tensor may have numbers below 0; else its zero point is 0."""
    source = climb(x, lambda node: op_name(node) in MOVES | POOLS)
    activation = activation_of(source)
    clipped = activation is not None and activation.name == "hardtanh" and activation.arguments[0] >= 0
    return not (op_name(source) in _NOT_NEGATIVE or clipped)


def _rounded(module: fx.GraphModule, ranges: fx.Node) -> fx.Node:
    """Return what rounds the input of dynamic convolutions."""
    view = DynamicQDQ.of(ranges)
    with module.graph.inserting_before(ranges):
        zero_point = view.symmetric or _may_be_negative(view.input)
        codes = call_function(module.graph, rounded_images(), (view.input, view.symmetric, zero_point))
    note_value_of(codes, view.input)
    give_values_of(codes)
    return codes


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    region, conv = region_of(node, planned=True), Conv.of(node)
    codes, scales = weight_of(module, conv.weight)
    stride, padding, dilation = conv.sizes(codes.dim() - 2)
    together, groups = joined(node), conv.groups
    last = region.nodes[-1]
    with module.graph.inserting_before(last):
        weight = Dequantize.of(conv.weight).codes
        if together > 1:
            weight = constant(module, f"{node.name}_joined", join(codes, groups, together))
            groups //= together
        arguments = (
            conv.input,
            schema_arguments(conv.input)["zero_point"],
            call_function(module.graph, prepack("linear"), (weight, None)),
            constant(module, f"{node.name}_scales", scales.float()),
            conv.bias,
            *_added(region),
            stride,
            padding,
            dilation,
            groups,
            *(region.codes or (1.0, 0, torch.float32)),
            region.activation.name,
            list(region.activation.arguments),
            region.activation.algorithm,
        )
        call = call_function(module.graph, dynamic_convolution(), arguments)
    put(module, call, region.nodes, converted=region.codes is not None)
    call.meta[DYNAMIC_KERNEL] = True


def _added(region: Region) -> tuple[fx.Node | None, float, int, bool]:
    """Return what a region adds, its scale and zero point, and whether the result may overwrite it."""
    side = region.other
    if side is None:
        return None, 1.0, 0, False
    if region.codes is None:
        return side, 1.0, 0, _is_free(side, region)
    view = Dequantize.of(side)
    return view.codes, *view.numbers, len(side.users) == 1 and _is_free(view.codes, region)


def _is_free(value: fx.Node, region: Region) -> bool:
    """Return whether nothing reads a tensor after a region has run.

    A kernel made the tensor, and only kernels before the region's end read it.
    """
    own = set(region.nodes) | {region.other}
    others = [user for user in value.users if user not in own and (user.users or user.op == "output")]
    reads_at_once = all(_is_kernel(user) or user.target is rounded_images() for user in others)
    return _is_kernel(value) and reads_at_once and all(user < region.nodes[-1] for user in others)


def _is_kernel(node: fx.Node) -> bool:
    """Return whether a node calls a kernel that writes its own memory, or is about to become one."""
    return is_kernel(node) or node.target is dynamic_convolution() or _reads_rounded(node)


def _reads_rounded(node: fx.Node) -> bool:
    """Return whether a node is a convolution of rounded images."""
    return kind_of_node(node) in CONVOLUTIONS and Conv.of(node).input.target is rounded_images()


# ---- how plans compute it ----


def round_images(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Measure and round images in C: channels-last codes, followed by their scale and zero point."""
    c_functions.available()
    x = recorder.read(a["x"])
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}")
    if not (is_channels_last(x.tensor) or x.tensor.is_contiguous()) or x.tensor.is_neg():
        x = channels_last(recorder, x, node)
    images, channels, *spatial = x.tensor.shape
    elements, threads = x.tensor.numel(), recorder.threads
    memory = recorder.new((aligned(elements) + _QPARAMS,), (1,), torch.uint8)
    ranges = recorder.new((2 * threads,), (1,), torch.float32)
    fields = {
        "images": images,
        "channels": channels,
        "pixels": math.prod(spatial),
        "channels_last": is_channels_last(x.tensor),
        "symmetric": a["symmetric"],
        "threads": threads,
    }
    strides = channels_last_strides(x.tensor.shape)
    codes = PlanTensor(memory.tensor[:elements].as_strided(x.tensor.shape, strides), memory.root)
    scale, _ = _qparams(codes)
    recorder.call_function(c_functions.function("round_images"), fields, [codes, scale, x, ranges], node)
    return codes


def _qparams(images: PlanTensor) -> tuple[PlanTensor, PlanTensor]:
    """Return scale and zero point of rounded images, which follow the codes in memory."""
    at = aligned(images.tensor.numel()) // 4
    storage = images.tensor.untyped_storage()
    scale, zero_point = (
        torch.empty(0, dtype=dtype, device="cpu").set_(storage, at + place, (1,), (1,))
        for place, dtype in enumerate((torch.float32, torch.int32))
    )
    return PlanTensor(scale, images.root), PlanTensor(zero_point, images.root)


def convolve(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Convolve rounded images by oneDNN; what follows goes with it."""
    x, weight = recorder.read(a["images"]), codes_of(recorder, a["weight"])
    scales, bias = recorder.constant(a["w_scale"]), bias_of(recorder, a["bias"])
    need(x.tensor.dtype is torch.uint8 and x.root is not None, "its input is not rounded")
    geometry, sizes = window_of(node, x, weight, a)
    dtype, groups = a["output_dtype"], a["groups"]
    scale, zero_point = _qparams(x)
    tensors: dict[int, Any] = {
        SCALES | SRC: scale,
        SCALES | WEIGHTS: scales.detach().float().contiguous(),
    }
    post: tuple[PostOp, ...] = post_ops_of(a, "attr")
    spoils = bool(post) and dtype is torch.float32  # maxima and minima make numbers of what is none
    result, sums = _result(recorder, node, a, sizes)
    post = (*sums, *post)
    masks = {SRC: 0, WEIGHTS: mask_of(groups) if scales.numel() > 1 else 0}
    attributes = Attributes(masks, {}, post)
    if a["zero_point"]:
        attributes = dataclasses.replace(attributes, zero_points={SRC: 0})
        tensors[ZERO_POINTS | SRC] = zero_point
    if not dtype.is_floating_point:
        attributes = with_qparams(attributes, tensors, DST, a["output_scale"], a["output_zero_point"])
    product = Product(x, result, weight, scales, bias, post, geometry=geometry, groups=groups)
    call_onednn(recorder, node, product, geometry, attributes, tensors)
    if spoils:
        fields, rounding = {"elements": result.tensor.numel()}, node.all_input_nodes[0]
        recorder.call_function(c_functions.function("spoil"), fields, [result, scale], rounding)
    return result


def _result(
    recorder: Recorder, node: fx.Node, a: Mapping[str, Any], sizes: tuple[int, ...]
) -> tuple[PlanTensor, tuple[Sum, ...]]:
    """Return memory for the result, which holds what is added, and how that is added."""
    other, dtype = recorder.optional(a["other"]), a["output_dtype"]
    if other is None:
        return recorder.new(sizes, channels_last_strides(sizes), dtype), ()
    check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
    need(other.tensor.dtype is dtype, f"it adds {other.tensor.dtype} to {dtype}")
    sums = (Sum(),) if dtype is torch.float32 else (Sum(a["other_scale"], a["other_zero_point"], dtype),)
    if a["in_place"] and other.root is not None and is_channels_last(other.tensor):
        return other, sums
    result = recorder.new(sizes, channels_last_strides(sizes), dtype)
    copy(recorder, other, result, node)
    return result, sums


OPERATORS = (
    PlannedOperator((rounded_images(),), {"C": round_images}),
    PlannedOperator((dynamic_convolution(),), {"oneDNN": convolve}, plain=True),
)
