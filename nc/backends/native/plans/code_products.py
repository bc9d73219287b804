"""How plans compute linears and 1 x 1 convolutions of codes in C (`rows.c`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions, rows
from nc.backends.native.plans.operands import PlanTensor, WeightToPack
from nc.backends.native.plans.products import After, after_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels import tuning
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.isas import NUMBERS
from nc.kernels.onednn.descriptions import Geometry, PostOp
from nc.process.unavailable import Unavailable

#: What is written, and what the zero point of int8 codes is more in the C code.
_WRITTEN, _SHIFT = (torch.uint8, torch.float32, torch.int8), 128
#: Activation → the bounds that are all that it does.
_BOUNDS: Mapping[str, Callable[[Mapping[str, Any]], tuple[float, float]]] = {
    "identity": lambda _: (-math.inf, math.inf),
    "relu": lambda _: (0.0, math.inf),
    "clip": lambda fields: (fields["alpha"], fields["beta"]),
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a linear or convolution computes.

    Attributes:
        x: codes [rows, K] whose rows may have gaps, or [N, C, ...] with channels last.
        result: fp32 or codes [rows, outputs], or [N, outputs, ...] with channels last.
        weight: codes [outputs, K], or [outputs, C / groups, ...].
        scales: of the weight, one or one for each output.
        bias: fp32, or None.
        post_ops: what follows, in order.
        other: what a `BinaryOp` adds.
        geometry: how the window moves; None for a linear.
        groups: of the channels.
    """

    x: PlanTensor
    result: PlanTensor
    weight: WeightToPack
    scales: torch.Tensor
    bias: torch.Tensor | None
    post_ops: tuple[PostOp, ...]
    other: PlanTensor | None = None
    geometry: Geometry | None = None
    groups: int = 1


def check(product: Product) -> After:
    """Return what follows a product; raises `Refused` for dtypes or followers that no C code knows."""
    x, result = product.x.tensor, product.result.tensor
    need(x.dtype is torch.uint8 and result.dtype in _WRITTEN, f"it reads {x.dtype} and writes {result.dtype}")
    need(result.numel(), "its result has no element")
    return after_of(product.post_ops)


def is_pointwise(product: Product) -> bool:
    """Whether each row of the result reads one row of codes."""
    g, (_, inputs, *window) = product.geometry, product.weight.tensor.shape
    stays = g is None or (math.prod(window) == 1 and set(g.strides) == {1} and not any((*g.before, *g.after)))
    return product.groups == 1 and inputs % 4 == 0 and stays


def rows_of(product: Product) -> dict[str, abi.Value]:
    """Fields of the rows that a pointwise product reads."""
    x, inputs = product.x.tensor, product.weight.tensor.shape[1]
    need(product.other is None or product.other.tensor.is_contiguous(), "what it adds has gaps")
    stride = x.stride(0) if product.geometry is None else inputs
    return {"inputs": inputs, "stride": stride, "rows": x.numel() // inputs}


def fields_of(a: Mapping[str, Any], product: Product, after: After) -> dict[str, abi.Value]:
    """Fields that all products of codes have; scales and zero points are arguments of the node."""
    dtype, inverse, zero_point = product.result.tensor.dtype, 0.0, 0
    if dtype is not torch.float32:
        shift = _SHIFT if dtype is torch.int8 else 0
        inverse, zero_point = 1.0 / a["output_scale"], a["output_zero_point"] + shift
    return {
        "threads": openmp.threads(),
        "outputs": product.weight.tensor.shape[0],
        "added": abi.ADDED.number(after.added),
        "to": c_functions.NUMBERS[dtype],
        "activation": abi.ACTIVATION.number(after.activation),
        "alpha": after.alpha,
        "beta": after.beta,
        "added_scale": after.scale,
        "added_zero_point": after.zero_point,
        "inverse": inverse,
        "zero_point": zero_point,
    }


def tensors_of(
    a: Mapping[str, Any],
    product: Product,
    packed: torch.Tensor,
    sums: torch.Tensor,
    more: Sequence[PlanTensor | torch.Tensor],
) -> list[PlanTensor | torch.Tensor]:
    """Tensors that all products of codes take; numbers of outputs are as many as the weight's `sums`."""
    scales = product.scales.detach().float().reshape(-1) * a["x_scale"]
    factors = [
        rows.for_outputs(values, product.weight.tensor.shape[0], sums.numel())
        for values in (scales, product.bias)
    ]
    return [product.result, product.x, packed, sums * -a["x_zero_point"], *factors, *more]


def multiply(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], product: Product) -> None:
    """Append the call of a pointwise product; raises `Refused` where there is no function for it.

    Args:
        recorder: of the plan.
        node: of the graph.
        a: its arguments, of which scales and zero points are read.
        product: what to compute.
    """
    found = rows.code(rows.CODES)
    why = found.reason if isinstance(found, Unavailable) else ""
    need(not why, why)
    assert not isinstance(found, Unavailable), "refused above"
    need(found.isa in tuning.CODE_PRODUCTS.value, f"oneDNN is faster with {found.isa}")
    need(is_pointwise(product), "it is no linear of 4 inputs or a multiple of them, and no 1 x 1 convolution")
    after, fields = check(product), rows_of(product)
    weight = product.weight
    packed, sums = recorder.weights.formed(weight, "rows ", lambda: _packed(recorder.in_memory(weight)))
    more = [] if product.other is None else [product.other]
    fields |= fields_of(a, product, after) | {"isa": NUMBERS[found.isa]}
    fields, *tensors = _plain(fields, tensors_of(a, product, packed, sums, more))
    recorder.call_function(found.codes, fields, tensors, node, factors=2)


def _plain(fields: dict[str, abi.Value], tensors: list[Any]) -> list[Any]:
    """Return fields and tensors by which C computes codes with fewer operations, where there are such.

    The step from results to codes is part of scale, bias and bounds, unless a function that is not linear
    comes between.
    """
    bounds = _BOUNDS.get(abi.ACTIVATION.members[fields["activation"]])
    if fields["to"] == c_functions.NUMBERS[torch.float32] or bounds is None:
        return [fields, *tensors]
    inverse, zero_point = fields["inverse"], fields["zero_point"]
    low, high = (bound * inverse + zero_point for bound in bounds(fields))
    *others, scale, bias = tensors[:6]
    added_scale = fields["added_scale"] * inverse
    offset = zero_point - (fields["added_zero_point"] * added_scale if fields["added"] else 0)
    scale, bias = (scale.double() * inverse).float(), (bias.double() * inverse + offset).float()
    fields |= {
        "activation": abi.ACTIVATION.number("clip"),
        "alpha": min(max(low, 0.0), 255.0),
        "beta": min(max(high, 0.0), 255.0),
        "added_scale": added_scale,
        "added_zero_point": 0,
        "inverse": 1.0,
        "zero_point": 0,
    }
    return [fields, *others, scale, bias, *tensors[6:]]


def _packed(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [outputs, inputs, 1, ...] as `code_product` reads it."""
    return rows.pack(rows.CODES, codes.reshape(codes.shape[:2]))
