"""Depthwise convolutions as functions in C (`depthwise.c`).

They are for CPUs with AVX2 and neither VNNI nor AVX-512, where oneDNN takes long for what follows a short sum
(docs/results/kernels.md). What the function can't do is left to oneDNN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.code_products import (
    Product,
    fields_of,
    finish_of,
    kernels_beyond_avx2,
    tensors_of,
)
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels import cpu
from nc.kernels.c_code import abi
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import ISAS, compiled
from nc.process.unavailable import Unavailable

#: Channels that are computed at once, and the most positions of a window.
_PANEL, _TAPS = abi.CONSTANTS.panel, abi.CONSTANTS.most_taps


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function, or why there is none."""
    if why := c_functions.why_unavailable():
        return Unavailable(why)
    library = load_on_threads("depthwise")
    if isinstance(library, Unavailable):
        return library
    if "avx2" not in compiled(library):
        return Unavailable("its C code was compiled without AVX2")
    return function_of(library, "depthwise", "depthwise avx2")


def why_unavailable() -> str:
    """Why the function is not used here; "" when it is."""
    if missing := cpu.code_lacks(ISAS["avx2"]):
        return f"this CPU has no {', '.join(missing)}"
    if why := kernels_beyond_avx2():
        return why
    found = _function()
    return found.reason if isinstance(found, Unavailable) else ""


def convolve(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], product: Product) -> None:
    """Append the call of a depthwise convolution; raises `Refused` where there is no function for it.

    Args:
        recorder: of the plan.
        node: of the graph.
        a: its arguments, of which scales and zero points are read.
        product: what to compute.
    """
    why = why_unavailable()
    need(not why, why)
    function = _function()
    assert not isinstance(function, Unavailable), "refused above"
    finish, weight = finish_of(a, product), product.weight
    in_place = finish.after.added != "nothing"
    need(_is_depthwise(product, in_place=in_place), "it is not depthwise in a known form")
    packed, sums = recorder.weights.formed(
        weight, "depthwise", lambda: _by_channels(recorder.in_memory(weight))
    )
    beside = torch.full((product.x.tensor.shape[1],), a["x_zero_point"], dtype=torch.uint8, device="cpu")
    tensors = [*tensors_of(a, product, finish, packed, sums), beside]
    recorder.call_function(
        function, fields_of(recorder, product, finish) | _window(product), tensors, node, factors=2
    )


def _is_depthwise(product: Product, *, in_place: bool) -> bool:
    """Return whether each channel is a separate group, in a form that the C code knows.

    The code computes 16 channels at once, the last ones perhaps twice.
    """
    outputs, inputs, *window = product.weight.tensor.shape
    alone = inputs == 1 and outputs == product.groups
    in_panels = outputs >= _PANEL and not (in_place and outputs % _PANEL)
    return alone and in_panels and len(window) in (1, 2) and math.prod(window) <= _TAPS


def _window(product: Product) -> dict[str, abi.Value]:
    """Fields of a depthwise convolution; one dimension is an image of one row."""
    g, x = product.geometry, product.x.tensor
    assert g is not None, "a product with groups is a convolution"
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


def _by_channels(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as `nc_depthwise` reads it, and the sums of its codes for each channel."""
    flat = codes.reshape(codes.shape[0], -1).to(torch.int16)
    pairs = torch.nn.functional.pad(flat, (0, flat.shape[1] % 2)).reshape(flat.shape[0], -1, 2)
    begins = [min(begin, flat.shape[0] - _PANEL) for begin in range(0, flat.shape[0], _PANEL)]
    packed = torch.stack([pairs[begin : begin + _PANEL].transpose(0, 1) for begin in begins]).contiguous()
    return packed, flat.sum(1, dtype=torch.int32)
