"""Codes of tensors, and tensors of codes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.elementwise import apply
from nc.backends.native.operators.int8_attention import is_probabilities
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.layouts import dense_strides, flat, is_dense
from nc.backends.native.plans.operands import Later, PlanTensor
from nc.backends.native.plans.products import with_qparams
from nc.backends.native.plans.readers import strides_of_codes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, PlannedOperator, need
from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.kernels.onednn.descriptions import DST, SRC, SRC_1, Attributes, Desc, Eltwise, channels_last_strides
from nc.ops import quantize_per_tensor


def to_uint8(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """fp32 → uint8 codes."""
    return _to_codes(recorder, node, a["0"], OutputCodes(a["1"], a["2"], torch.uint8))


def to_int8(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """fp32 → int8 codes, for the second input of a product."""
    need(a["dtype"] is torch.int8, f"its codes are {a['dtype']}")
    x, scale, zero_point = a["x"], a["scale"], a["zero_point"]
    limits = a["quant_min"], a["quant_max"]
    if limits != (-128, 127):  # a conversion knows the limits of its dtype only
        x = recorder.read(x)
        need(x.tensor.dtype is torch.float32 and is_dense(x.tensor), "its input is not fp32 without gaps")
        x = apply(recorder, node, x, Eltwise("clip", *((limit - zero_point) * scale for limit in limits)))
    return _to_codes(recorder, node, x, OutputCodes(scale, zero_point, torch.int8))


def _to_codes(recorder: Recorder, node: fx.Node, value: Any, codes: OutputCodes) -> PlanTensor:
    """Return codes, by what computes the value where it can write them."""
    known = recorder.operators.get(value.node.target) if isinstance(value, Later) else None
    at_once = known.to_codes if known is not None else {}
    ways: dict[str, Callable[[], PlanTensor]] = {}
    for name, way in at_once.items():
        ways[f"{name} at once"] = functools.partial(way, recorder, node, value, codes)
    ways["apart"] = functools.partial(_apart, recorder, node, value, codes)
    return recorder.first_possible(ways)


def _apart(recorder: Recorder, node: fx.Node, value: Any, codes: OutputCodes) -> PlanTensor:
    """Return codes of a tensor in memory."""
    x = recorder.read(value)
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}, not fp32")
    result = recorder.new(x.tensor.shape, strides_of_codes(node, x.tensor), codes.dtype)

    def in_c() -> PlanTensor:
        c_functions.available()
        images, channels, pixels = _planes(x.tensor, result.tensor)
        sizes = images, channels, pixels
        c_functions.to_codes(recorder, node, result, x, codes.scale, codes.zero_point, sizes)
        return result

    def converted() -> PlanTensor:
        _convert(recorder, node, x, result, DST, codes.scale, codes.zero_point)
        return result

    return recorder.first_possible({"C": in_c, "oneDNN": converted})


def _planes(x: torch.Tensor, codes: torch.Tensor) -> tuple[int, int, int]:
    """Return numbers of images, channels and pixels, as the function in C takes them.

    It is one channel where the codes are in the order of x. Three channels become next to each other: for
    224 x 224 pixels, oneDNN took 3 times as long.

    Raises:
        Refused: the codes have another order.
    """
    need(not x.is_neg(), "a view negates its input")
    if is_dense(x) and x.stride() == codes.stride():
        return 1, 1, x.numel()
    need(
        x.dim() == 4 and x.shape[1] == 3 and x.numel(),
        "its input is not a batch of images with three channels",
    )
    need(x.is_contiguous(), "its input has gaps")
    need(codes.stride() == channels_last_strides(x.shape), "no convolution reads its codes")
    images, channels, rows, columns = x.shape
    return images, channels, rows * columns


def from_codes(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """uint8 codes → fp32."""
    x = recorder.read(a["0"])
    result = recorder.new(x.tensor.shape, dense_strides(x.tensor), torch.float32)
    _convert(recorder, node, x, result, SRC, a["1"], a["2"])
    return result


def _convert(
    recorder: Recorder,
    node: fx.Node,
    x: PlanTensor,
    result: PlanTensor,
    codes: int,
    scale: float,
    zero_point: int,
) -> None:
    """Convert between fp32 and the codes of one side, `SRC` or `DST`."""
    source, target = flat(x, result)

    def scaled() -> None:
        need(codes == DST and len(source.sizes) == 1, "its input and its codes have different memory layouts")
        # as a product with 1 and what follows it: two to four times as fast as a reorder, and ties are
        # rounded as torch rounds them
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        attributes = Attributes(post_ops=(Eltwise("linear", 1.0 / scale, float(zero_point)),))
        primitive = recorder.maker.binary("mul", source, Desc.of(one), target, attributes)
        recorder.call(primitive, {SRC: x, SRC_1: one, DST: result}, node)

    def reordered() -> None:
        maker = recorder.maker
        tensors: dict[int, Any] = {SRC: x, DST: result}
        attributes = with_qparams(Attributes(), tensors, codes, scale, zero_point)
        recorder.call(maker.reorder(maker.layout(source), maker.layout(target), attributes), tensors, node)

    recorder.first_possible({"binary": scaled, "reorder": reordered})


OPERATORS = (
    PlannedOperator((quantize,), {"uint8": to_uint8}, waits=is_probabilities),
    PlannedOperator((quantize_per_tensor,), {"int8": to_int8}),
    PlannedOperator((dequantize,), {"oneDNN": from_codes}),
)
