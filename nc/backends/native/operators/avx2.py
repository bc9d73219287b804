"""Linears, 1 x 1 and depthwise convolutions as functions in C (`products.c`).

They are for CPUs with AVX2 and neither VNNI nor AVX-512. There oneDNN packs the weight of an int8 matmul in
each call, and takes long for what follows a short sum (docs/results/kernels.md). What the functions can't do
is left to oneDNN, whose convolutions with larger windows are as fast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.operands import PlanTensor, WeightToPack
from nc.backends.native.plans.products import after_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, call_once, function_of
from nc.kernels.c_code.isas import ISAS, compiled
from nc.kernels.onednn.descriptions import Geometry, PostOp
from nc.process.unavailable import Unavailable

#: CPUs with one of these have other kernels in oneDNN.
_OTHERS = ("avx512f", "avx_vnni", "avx512_vnni", "amx_int8")
#: What is written, and what the zero point of int8 codes is more in the C code.
_WRITTEN, _SHIFT = (torch.uint8, torch.float32, torch.int8), 128
#: Outputs of a panel, to a multiple of what the last one is filled up, and the most positions of a window.
_PANEL, _WIDTH, _TAPS = abi.CONSTANTS.panel, abi.CONSTANTS.half_panel, abi.CONSTANTS.most_taps


_NO_WINDOW = "its window is larger than 1 x 1, and it is not depthwise in a known form"


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


@functools.cache
def _functions() -> Mapping[str, Function] | Unavailable:
    """Return the functions by name, or why there are none."""
    if why := c_functions.why_unavailable():
        return Unavailable(why)
    library = load_on_threads("products")
    if isinstance(library, Unavailable):
        return library
    if "avx2" not in compiled(library):
        return Unavailable("its C code was compiled without AVX2")
    names = [name for name, row in abi.FUNCTIONS.items() if row.source == "products"]
    return {name: function_of(library, name, f"{name} avx2") for name in names}


def why_unavailable() -> str:
    """Why these functions are not used here; "" when they are."""
    features = cpu.features()
    if missing := cpu.lacks(ISAS["avx2"]):
        return f"this CPU has no {', '.join(missing)}"
    other = next((name for name in _OTHERS if name in features), "")
    if other:
        return f"oneDNN has kernels for {other}"
    found = _functions()
    return found.reason if isinstance(found, Unavailable) else ""


def multiply(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], product: Product) -> None:
    """Append the call of a product; raises `Refused` where there is no function for it.

    Args:
        recorder: of the plan.
        node: of the graph.
        a: its arguments, of which scales and zero points are read.
        product: what to compute.
    """
    why = why_unavailable()
    need(not why, why)
    x, result, weight = product.x.tensor, product.result.tensor, product.weight
    after = after_of(product.post_ops)
    need(x.dtype is torch.uint8 and result.dtype in _WRITTEN, f"it reads {x.dtype} and writes {result.dtype}")
    need(result.numel(), "its result has no element")
    if _is_pointwise(product):
        form, make = "product", _in_panels
        inputs = weight.tensor.shape[1]
        need(product.other is None or product.other.tensor.is_contiguous(), "what it adds has gaps")
        stride = x.stride(0) if product.geometry is None else inputs
        shapes: dict[str, abi.Value] = {"inputs": inputs, "stride": stride, "rows": x.numel() // inputs}
        more: list[PlanTensor | torch.Tensor] = [] if product.other is None else [product.other]
    else:
        in_place = after.added != "nothing"
        need(_is_depthwise(product, in_place=in_place), _NO_WINDOW)
        form, make = "depthwise", _by_channels
        shapes = _window(product)
        more = [torch.full((x.shape[1],), a["x_zero_point"], dtype=torch.uint8, device="cpu")]
    packed, sums = recorder.weights.formed(weight, form, lambda: make(recorder.in_memory(weight)))
    outputs, size = weight.tensor.shape[0], sums.numel()
    factors = [
        _for_outputs(values, outputs, size)
        for values in (product.scales.float() * a["x_scale"], product.bias)
    ]
    tensors: list[PlanTensor | torch.Tensor] = [
        product.result,
        product.x,
        packed,
        sums * -a["x_zero_point"],
        *factors,
        *more,
    ]
    shift = _SHIFT if result.dtype is torch.int8 else 0
    inverse, zero_point = 0.0, 0
    if result.dtype is not torch.float32:
        inverse, zero_point = 1.0 / a["output_scale"], a["output_zero_point"] + shift
    fields = {
        "threads": openmp.threads(),
        "outputs": outputs,
        "added": abi.ADDED.number(after.added),
        "to": c_functions.NUMBERS[result.dtype],
        "activation": abi.ACTIVATION.number(after.activation),
        "alpha": after.alpha,
        "beta": after.beta,
        "added_scale": after.scale,
        "added_zero_point": after.zero_point,
        "inverse": inverse,
        "zero_point": zero_point,
        **shapes,
    }
    recorder.call_function(_function(form), fields, tensors, node, factors=2)


def _function(name: str) -> Function:
    found = _functions()
    assert not isinstance(found, Unavailable), "products are for where these functions are available"
    return found[name]


def _is_pointwise(product: Product) -> bool:
    """Whether each row of the result reads one row of codes."""
    g, (_, inputs, *window) = product.geometry, product.weight.tensor.shape
    stays = g is None or (math.prod(window) == 1 and set(g.strides) == {1} and not any((*g.before, *g.after)))
    return product.groups == 1 and inputs % 4 == 0 and stays


def _is_depthwise(product: Product, *, in_place: bool) -> bool:
    """Whether each channel is a group of its own, in a form that the C code knows.

    The code computes 16 channels at once, the last ones perhaps twice.
    """
    outputs, inputs, *window = product.weight.tensor.shape
    alone = inputs == 1 and outputs == product.groups
    in_panels = outputs >= _PANEL and not (in_place and outputs % _PANEL)
    return alone and in_panels and len(window) in (1, 2) and math.prod(window) <= _TAPS


def _window(product: Product) -> dict[str, abi.Value]:
    """Fields of a depthwise convolution; one dimension is an image of one row."""
    g, x = product.geometry, product.x.tensor
    assert g is not None
    missing = 4 - x.dim()
    pairs = {
        "image": x.shape[2:],
        "result": product.result.tensor.shape[2:],
        "window": product.weight.tensor.shape[2:],
        "steps": g.strides,
        "dilations": g.dilations,
    }
    fields = {name: (1,) * missing + tuple(pair) for name, pair in pairs.items()}
    return {"images": x.shape[0], **fields, "pads": (0,) * missing + tuple(g.before)}


def _in_panels(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as `nc_product` reads it, and the sums of its codes for each output."""
    outputs, inputs = codes.shape[:2]
    packed = torch.empty(-(-outputs // _WIDTH) * _WIDTH * inputs, dtype=torch.int8, device="cpu")
    sums = torch.zeros(-(-outputs // _PANEL) * _PANEL, dtype=torch.int32, device="cpu")
    fields = {"outputs": outputs, "inputs": inputs, "threads": openmp.threads()}
    call_once(_function("pack"), fields, [packed, codes.contiguous(), sums])
    return packed, sums


def _by_channels(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as `nc_depthwise` reads it, and the sums of its codes for each channel."""
    flat = codes.reshape(codes.shape[0], -1).to(torch.int16)
    pairs = torch.nn.functional.pad(flat, (0, flat.shape[1] % 2)).reshape(flat.shape[0], -1, 2)
    begins = [min(begin, flat.shape[0] - _PANEL) for begin in range(0, flat.shape[0], _PANEL)]
    packed = torch.stack([pairs[begin : begin + _PANEL].transpose(0, 1) for begin in begins]).contiguous()
    return packed, flat.sum(1, dtype=torch.int32)


def _for_outputs(values: torch.Tensor | None, outputs: int, size: int) -> torch.Tensor:
    """fp32 numbers for each output; those that fill up the last panel get 0."""
    result = torch.zeros(size, dtype=torch.float32, device="cpu")
    if values is not None:
        result[:outputs] = values.detach().reshape(-1)
    return result
