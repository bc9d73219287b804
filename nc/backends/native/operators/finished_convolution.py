"""Convolutions and what follows them, if torch's own kernels do not compute that, as one call.

That is an activation without a post-operation in torch, PReLU with a slope for each channel, and numbers that
the activation's result is multiplied by or that are added to it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from nc.backends.native.fuse import constant, put, weight_of, why_not_int8
from nc.backends.native.grouped import join, joined
from nc.backends.native.operators.convolution import planned_convolution
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.products import bias_of, named_codes, post_ops_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator
from nc.backends.native.regions import (
    ACTIVATIONS,
    IN_PLANS,
    Activation,
    activation_of,
    codes_behind,
    only_user,
)
from nc.backends.native.torch_library import ACTIVATIONS as FUNCTIONS
from nc.backends.native.torch_library import define, stored
from nc.graph.catalogue import CONVOLUTIONS, kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import call_function, constant_value
from nc.graph.numbers import numbers_of
from nc.graph.placement import works_in_place
from nc.graph.views import Conv, Dequantize
from nc.kernels.onednn.descriptions import Desc, Eltwise, Prelu
from nc.numerics import affine

_SCHEMA = (
    "qconv_finished(Tensor qx, float x_scale, int x_zero_point, Tensor qw, Tensor w_scale, Tensor? bias, "
    "int[] stride, int[] padding, int[] dilation, int groups, float output_scale, int output_zero_point, "
    "ScalarType output_dtype, str attr, float[] scalars, str algorithm, Tensor? slopes, float factor, "
    "float term) -> Tensor"
)


@functools.cache
def finished_convolution() -> torch._ops.OpOverload:
    """Return a convolution of uint8 codes with int8 codes, an activation, a factor and a term; for plans."""
    return define(_SCHEMA, _finished, lambda *arguments: _finished(*arguments))


def _finished(
    qx: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    qw: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_scale: float,
    output_zero_point: int,
    output_dtype: torch.dtype,
    attr: str,
    scalars: Sequence[float],
    algorithm: str,
    slopes: torch.Tensor | None,
    factor: float,
    term: float,
) -> torch.Tensor:
    convolution = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[qx.dim()]
    weight = qw.float() * w_scale.view(-1, *[1] * (qw.dim() - 1))
    x = affine.dequantize(qx, x_scale, x_zero_point)
    values = convolution(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    values = FUNCTIONS[attr](values, scalars, algorithm)
    values = values if slopes is None else functional.prelu(values, slopes)
    return stored(values * factor + term, output_scale, output_zero_point, output_dtype)


# ---- how it is found in a graph ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Tail:
    """What follows a convolution: an activation, or slopes of a PReLU, and numbers; and the nodes."""

    nodes: tuple[fx.Node, ...]
    activation: Activation = Activation()
    slopes: torch.Tensor | None = None
    factor: float = 1.0
    term: float = 0.0


def fuse_finished(module: fx.GraphModule) -> None:
    """Replace convolutions that read codes, where torch's kernels do not do what follows them."""
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        if kind_of_node(node) in CONVOLUTIONS and not why_not_int8(node):
            tail = _tail_of(module, node)
            if tail is not None:
                _replace(module, node, tail)


def _tail_of(module: fx.GraphModule, node: fx.Node) -> _Tail | None:
    """Return what follows a convolution, as far as one call does it; None where torch's kernels do it."""
    tail, user = _Tail((node,)), only_user(node)
    activation = None if user is None else activation_of(user)
    if user is not None and activation is not None and activation.name in IN_PLANS:
        tail = dataclasses.replace(tail, nodes=(node, user), activation=activation)
    elif user is not None and op_name(user) == "prelu":
        slopes = constant_value(module, schema_arguments(user)["weight"])
        if slopes is None or slopes.numel() != node.meta["val"].shape[1] or slopes.dtype is not torch.float32:
            return None
        tail = dataclasses.replace(tail, nodes=(node, user), slopes=slopes.detach())
    else:
        return None  # numbers directly after a convolution are in its weight
    plain = tail
    while (user := only_user(tail.nodes[-1])) is not None:
        numbers = numbers_of(module, user, tail.nodes[-1])
        if numbers is None or any(each.dim() or not math.isfinite(each) for each in numbers):
            break
        factor, term = map(float, numbers)
        tail = dataclasses.replace(
            tail, nodes=(*tail.nodes, user), factor=tail.factor * factor, term=tail.term * factor + term
        )
    known = ACTIVATIONS[kind_of_node(node) or ""]
    by_torch = tail is plain and tail.slopes is None and tail.activation.name in known
    return None if by_torch else tail


def _replace(module: fx.GraphModule, node: fx.Node, tail: _Tail) -> None:
    conv = Conv.of(node)
    codes, scales = weight_of(module, conv.weight)
    sizes = conv.sizes(codes.dim() - 2)
    together = joined(node)
    codes = codes if together == 1 else join(codes, conv.groups, together)
    x, found = Dequantize.of(conv.input), codes_behind(tail.nodes[-1])
    name, activation = node.name, tail.activation
    with module.graph.inserting_before(tail.nodes[-1]):
        arguments = (
            x.codes,
            *x.numbers,
            constant(module, f"{name}_codes", codes),
            constant(module, f"{name}_scales", scales),
            conv.bias,
            *sizes,
            conv.groups // together,
            *(found or (1.0, 0, torch.float32)),
            activation.name,
            list(activation.arguments),
            activation.algorithm,
            None if tail.slopes is None else constant(module, f"{name}_slopes", tail.slopes),
            tail.factor,
            tail.term,
        )
        call = call_function(module.graph, finished_convolution(), arguments)
    put(module, call, tail.nodes, converted=found is not None)


# ---- how plans compute it ----


def convolve(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::qconv_finished`, in C or by oneDNN."""
    weight = named_codes(schema_arguments(node)["qw"], recorder.constant(a["qw"]).contiguous())
    post, slopes = list(post_ops_of(a, "attr")), bias_of(recorder, a["slopes"])
    if slopes is not None:
        slopes = slopes.view(1, -1, *[1] * (weight.tensor.dim() - 2))
        post.append(Prelu(Desc.of(slopes)))
    if (a["factor"], a["term"]) != (1.0, 0.0):
        post.append(Eltwise("linear", a["factor"], a["term"]))
    return planned_convolution(recorder, node, a, weight, tuple(post), slopes)


OPERATORS = (
    PlannedOperator((finished_convolution(),), {"C or oneDNN": convolve}, only_here=True, weight="qw"),
)
