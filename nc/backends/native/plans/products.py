"""What products of an activation and a packed weight share.

They share their weights, biases, scales, and what follows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.operands import Later, WeightToPack
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import Refused, need
from nc.backends.native.torch_library import prepack
from nc.kernels.c_code import abi
from nc.kernels.onednn.descriptions import (
    DST,
    SCALES,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    BinaryOp,
    Eltwise,
    Geometry,
    PostOp,
    Sum,
)

#: What packs weights for torch's operators.
PREPACKS = frozenset({prepack("linear"), prepack("conv2d")})
_NOT_PACKED = "its weight is not packed in the graph"
_TOO_MUCH = "more than a sum and an activation follow it"
#: Activations after a product that need no numbers of the model.
ACTIVATIONS: Mapping[str, Eltwise] = {
    "relu": Eltwise("relu"),
    "tanh": Eltwise("tanh"),
    "swish": Eltwise("swish", 1.0),
    "hardswish": Eltwise("hardswish", 1 / 6, 0.5),
    "gelu_tanh": Eltwise("gelu_tanh"),
    "gelu_erf": Eltwise("gelu_erf"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class After:
    """What follows a sum: a member of `abi.ADDED`, scale and zero point; an `abi.ACTIVATION`, two numbers.

    The result of the activation is multiplied by `factor`, and `term` is added.
    """

    added: str = "nothing"
    scale: float = 1.0
    zero_point: int = 0
    activation: str = "identity"
    alpha: float = 0.0
    beta: float = 0.0
    factor: float = 1.0
    term: float = 0.0


def codes_of(recorder: Recorder, value: Any) -> WeightToPack:
    """Return the weight that the graph would pack."""
    if not isinstance(value, Later) or value.node.target not in PREPACKS:
        raise Refused(_NOT_PACKED)
    codes = recorder.constant(value.named["weight"])
    return named_codes(value.node.all_input_nodes[0], codes.contiguous())


def named_codes(source: fx.Node, codes: torch.Tensor) -> WeightToPack:
    """Return a weight with the name of what gives it."""
    return WeightToPack(str(source.target) if source.op == "get_attr" else source.name, codes)


def bias_of(recorder: Recorder, value: Any) -> torch.Tensor | None:
    """Return a bias in fp32, or None."""
    bias = recorder.optional_constant(value)
    return None if bias is None else bias.detach().float().contiguous()


def post_ops_of(a: Mapping[str, Any], *names: str) -> tuple[PostOp, ...]:
    """Return the activation after the product; raises `Refused` for an unknown one."""
    key = next(name for name in names if name in a)
    prefix = key.removesuffix("_name")
    name = a[key] or "none"
    numbers = [
        float(v) for v in (a.get(f"{prefix}_args") or a.get("scalars") or a.get("unary_scalars") or [])
    ]
    algorithm = a.get(f"{prefix}_algorithm") or a.get("algorithm") or a.get("unary_algorithm") or ""
    if name == "none":
        return ()
    known = {
        **ACTIVATIONS,
        "gelu": ACTIVATIONS["gelu_tanh" if algorithm == "tanh" else "gelu_erf"],
        "leaky_relu": Eltwise("relu", *numbers[:1]),
        "hardtanh": Eltwise("clip", *numbers[:2]),
    }
    need(name in known, f"oneDNN has no {name} after it")
    return (known[name],)


def after_of(post_ops: Sequence[PostOp]) -> After:
    """Return what follows a sum; raises `Refused` for what the C code does not know."""
    first, *rest = post_ops or (None,)
    if isinstance(first, Sum):
        in_codes = first.dtype is torch.uint8
        need(in_codes or first.dtype in (None, torch.float32), f"it adds to {first.dtype}")
        need(in_codes or not first.zero_point, "it adds to fp32 with a zero point")
        after = After("codes_in_place" if in_codes else "fp32_in_place", first.scale, first.zero_point)
    elif isinstance(first, BinaryOp):
        need(
            first.name == "add" and first.other.dtype is torch.float32,
            "what follows it is not an addition of fp32",
        )
        after = After("fp32_other")
    else:
        after, rest = After(), list(post_ops)
    if rest and isinstance(rest[-1], Eltwise) and rest[-1].name == "linear":
        line = rest.pop()
        assert isinstance(line, Eltwise)
        after = dataclasses.replace(after, factor=line.alpha, term=line.beta)
    if not rest:
        return after
    last, *more = rest
    if more or not isinstance(last, Eltwise):
        raise Refused(_TOO_MUCH)
    name = "leaky_relu" if last.name == "relu" and last.alpha else last.name
    need(name in abi.ACTIVATION.members, f"it has no {name}")
    return dataclasses.replace(after, activation=name, alpha=last.alpha, beta=last.beta)


def product_attributes(
    a: Mapping[str, Any],
    tensors: dict[int, Any],
    scales: torch.Tensor,
    mask: int,
    dtype: torch.dtype,
    post_ops: tuple[PostOp, ...],
) -> Attributes:
    """Scales and zero points, which are arguments of the call too."""
    tensors[SCALES | WEIGHTS] = scales.detach().float().contiguous()
    masks = {WEIGHTS: mask if scales.numel() > 1 else 0}
    attributes = with_qparams(Attributes(masks, {}, post_ops), tensors, SRC, a["x_scale"], a["x_zero_point"])
    if not dtype.is_floating_point:
        attributes = with_qparams(attributes, tensors, DST, a["output_scale"], a["output_zero_point"])
    return attributes


def with_qparams(
    attributes: Attributes, tensors: dict[int, Any], argument: int, scale: float, zero_point: int
) -> Attributes:
    """Attributes of a primitive one of whose arguments has codes.

    Scale and zero point become tensors of the call, which grow by them.
    """
    tensors[SCALES | argument] = torch.tensor([scale], dtype=torch.float32, device="cpu")
    zero_points = dict(attributes.zero_points)
    if zero_point:
        zero_points[argument] = 0
        tensors[ZERO_POINTS | argument] = torch.tensor([zero_point], dtype=torch.int32, device="cpu")
    return dataclasses.replace(attributes, scales={**attributes.scales, argument: 0}, zero_points=zero_points)


def output_sizes(inputs: Sequence[int], kernel: Sequence[int], g: Geometry) -> list[int]:
    """Spatial sizes of a convolution's result."""
    how = zip(inputs, kernel, g.strides, g.before, g.after, g.dilations, strict=True)
    return [
        (i + before + after - (dilation * (k - 1) + 1)) // stride + 1
        for i, k, stride, before, after, dilation in how
    ]
