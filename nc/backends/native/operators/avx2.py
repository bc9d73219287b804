"""Linears, 1 x 1 and depthwise convolutions as functions in C (`products.c`).

They are for CPUs with AVX2 and neither VNNI nor AVX-512. There oneDNN packs the weight of an int8 matmul in
each call, and takes long for what follows a short sum (docs/results/kernels.md). What the functions can't do
is left to oneDNN, whose convolutions with larger windows are as fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.code_products import (
    Product,
    fields_of,
    finish_of,
    is_pointwise,
    rows_of,
    tensors_of,
)
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, call_once, function_of
from nc.kernels.c_code.isas import ISAS, compiled
from nc.process.unavailable import Unavailable

#: CPUs with one of these have other kernels in oneDNN.
_OTHERS = ("avx512f", "avx_vnni", "avx512_vnni", "amx_int8")
#: What is written, and what the zero point of int8 codes is more in the C code.
_WRITTEN, _SHIFT = (torch.uint8, torch.float32, torch.int8), 128
#: Outputs of a panel, to a multiple of what the last one is filled up, and the most positions of a window.
_PANEL, _WIDTH, _TAPS = abi.CONSTANTS.panel, abi.CONSTANTS.half_panel, abi.CONSTANTS.most_taps


_NO_WINDOW = "its window is larger than 1 x 1, and it is not depthwise in a known form"


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
    finish, weight = finish_of(a, product), product.weight
    more: list[PlanTensor | torch.Tensor]
    if is_pointwise(product):
        form, make, shapes = "product", _in_panels, rows_of(product)
        more = [] if product.other is None else [product.other]
    else:
        in_place = finish.after.added != "nothing"
        need(_is_depthwise(product, in_place=in_place), _NO_WINDOW)
        form, make, shapes = "depthwise", _by_channels, _window(product)
        zero_point = a["x_zero_point"]
        more = [torch.full((product.x.tensor.shape[1],), zero_point, dtype=torch.uint8, device="cpu")]
    packed, sums = recorder.weights.formed(weight, form, lambda: make(recorder.in_memory(weight)))
    tensors = [*tensors_of(a, product, finish, packed, sums), *more]
    fields = fields_of(recorder, product, finish) | shapes
    recorder.call_function(_function(form), fields, tensors, node, factors=2)


def _function(name: str) -> Function:
    found = _functions()
    assert not isinstance(found, Unavailable), "products are for where these functions are available"
    return found[name]


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
