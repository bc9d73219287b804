"""Transposed convolutions: those that read codes, and what is done with their result, become one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from nc.backends.native.fuse import constant, put, why_no_codes
from nc.backends.native.plans.layouts import channels_last
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.products import bias_of, named_codes, post_ops_of, product_attributes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.backends.native.regions import region_of
from nc.backends.native.torch_library import ACTIVATIONS, define, stored
from nc.graph.catalogue import is_transposed, schema_arguments
from nc.graph.fx_utils import call_function, constant_of
from nc.graph.views import Conv, Dequantize
from nc.kernels.onednn.descriptions import BIAS, DST, SRC, WEIGHTS, Desc, Geometry, channels_last_strides
from nc.kernels.onednn.primitives import Layout, Primitive
from nc.kernels.onednn.trials import Convolution
from nc.numerics import affine

_SCHEMA = (
    "qconv_transpose(Tensor qx, float x_scale, int x_zero_point, Tensor qw, Tensor w_scale, Tensor? bias, "
    "int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, float output_scale, int "
    "output_zero_point, ScalarType output_dtype, str attr, float[] scalars, str algorithm) -> Tensor"
)


@functools.cache
def transposed_convolution() -> torch._ops.OpOverload:
    """Return a transposed convolution of uint8 codes with int8 codes, and an activation; for plans."""
    return define(_SCHEMA, _transposed, _transposed_like)


def _transposed(
    qx: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    qw: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_scale: float,
    output_zero_point: int,
    output_dtype: torch.dtype,
    attr: str,
    scalars: Sequence[float],
    algorithm: str,
) -> torch.Tensor:
    weight = qw.float() * w_scale.view(1, -1, *[1] * (qw.dim() - 2))
    convolution = {
        3: functional.conv_transpose1d,
        4: functional.conv_transpose2d,
        5: functional.conv_transpose3d,
    }[qx.dim()]
    x = affine.dequantize(qx, x_scale, x_zero_point)
    values = convolution(
        x, weight, bias, list(stride), list(padding), list(output_padding), groups, list(dilation)
    )
    return stored(
        ACTIVATIONS[attr](values, scalars, algorithm), output_scale, output_zero_point, output_dtype
    )


def _transposed_like(qx: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _transposed(qx, *rest)


# ---- how it is found in a graph ----


def fuse_transposed(module: fx.GraphModule) -> None:
    """Replace every transposed convolution that reads codes."""
    for node in list(module.graph.nodes):
        if is_transposed(node) and not why_not_transposed(node):
            _replace(module, node)


def why_not_transposed(node: fx.Node) -> str:
    """Why no kernel computes a transposed convolution in int8; "" where one does, and for other operators."""
    if not is_transposed(node):
        return ""
    if Conv.of(node).input.meta["val"].dim() != Conv.of(node).weight.meta["val"].dim():
        return "its input has no batch dimension, which kernels need"
    return why_no_codes(node)


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    region, conv = region_of(node), Conv.of(node)
    x, weight = Dequantize.of(conv.input), Dequantize.of(conv.weight)
    dims = node.meta["val"].dim() - 2
    stride, padding, dilation = conv.sizes(dims)
    output_padding = [*conv.output_padding] * (dims if len(conv.output_padding) == 1 else 1)
    given = (
        constant_of(module, weight.scale)
        if isinstance(weight.scale, fx.Node)
        else torch.tensor([weight.scale], dtype=torch.float32)
    )
    scales = given.float()
    last = region.nodes[-1]
    with module.graph.inserting_before(last):
        arguments = (
            x.codes,
            *x.numbers,
            weight.codes,
            constant(module, f"{node.name}_scales", scales),
            conv.bias,
            stride,
            padding,
            output_padding,
            dilation,
            conv.groups,
            *(region.codes or (1.0, 0, torch.float32)),
            region.activation.name,
            list(region.activation.arguments),
            region.activation.algorithm,
        )
        call = call_function(module.graph, transposed_convolution(), arguments)
    put(module, call, region.nodes, converted=region.codes is not None)
    for side in (conv.input, conv.weight):
        if not side.users:
            module.graph.erase_node(side)


# ---- how plans compute it ----


def convolve(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::qconv_transpose` by oneDNN."""
    x, weight, scales, bias = (
        recorder.read(a["qx"]),
        recorder.constant(a["qw"]),
        recorder.constant(a["w_scale"]),
        bias_of(recorder, a["bias"]),
    )
    post = post_ops_of(a, "attr")
    x, weight, groups = channels_last(recorder, x, node), weight.contiguous(), a["groups"]
    ends = [pad - more for pad, more in zip(a["padding"], a["output_padding"], strict=True)]
    window, channels = tuple(weight.shape[2:]), weight.shape[0] // groups
    pads = tuple(a["padding"]), tuple(ends)
    geometry = Geometry(
        tuple(a["stride"]), *pads, tuple(a["dilation"]), transposed=True, window=window, channels=channels
    )
    how = zip(
        x.tensor.shape[2:],
        weight.shape[2:],
        geometry.strides,
        geometry.before,
        geometry.after,
        geometry.dilations,
        strict=True,
    )
    outputs = weight.shape[1] * groups
    spatial = [
        (i - 1) * stride - before - after + dilation * (k - 1) + 1
        for i, k, stride, before, after, dilation in how
    ]
    sizes = x.tensor.shape[0], outputs, *spatial
    need(math.prod((*sizes, x.tensor.numel())), "its input or its result has no element")
    result = recorder.new(sizes, channels_last_strides(sizes), a["output_dtype"])
    # [in, out / groups, ...] as [groups, out / groups, in / groups, ...]
    by_groups = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    by_groups = by_groups if groups > 1 else by_groups[0]
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = product_attributes(a, tensors, scales, 3 if groups > 1 else 1, a["output_dtype"], post)
    bias_desc = None if bias is None else Desc.dense((outputs,), torch.float32)
    if bias is not None:
        tensors[BIAS] = bias

    def make(weights: Desc | Layout) -> Primitive:
        return recorder.convolution(
            Convolution(x.desc, bias_desc, result.desc, geometry, attributes), weights, node
        )

    primitive, tensors[WEIGHTS] = recorder.packed(
        make, named_codes(schema_arguments(node)["qw"], weight), Desc.of(by_groups)
    )
    recorder.call(primitive, tensors, node)
    return result


OPERATORS = (PlannedOperator((transposed_convolution(),), {"oneDNN": convolve}, only_here=True, weight="qw"),)
