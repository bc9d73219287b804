"""Softmax, in fp32 or as codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.operands import Later, PlanTensor
from nc.backends.native.plans.products import with_qparams
from nc.backends.native.plans.readers import only_quantized
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, PlannedOperator, need
from nc.kernels.onednn.descriptions import DST, SRC, Attributes, contiguous_strides

_aten = torch.ops.aten


def softmax(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::softmax` and `aten::_softmax` by oneDNN."""
    x = _input(recorder, a)
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), torch.float32)
    primitive = recorder.maker.softmax(x.desc, result.desc, a["dim"] % x.tensor.dim(), Attributes())
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


def softmax_to_codes(recorder: Recorder, _: fx.Node, later: Later, codes: OutputCodes) -> PlanTensor:
    """Return a softmax that writes codes, by oneDNN."""
    x = _input(recorder, later.named)
    need(not codes.zero_point, "oneDNN's softmax writes no codes with a zero point")
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), codes.dtype)
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = with_qparams(Attributes(), tensors, DST, codes.scale, 0)
    primitive = recorder.maker.softmax(x.desc, result.desc, later.named["dim"] % x.tensor.dim(), attributes)
    recorder.call(primitive, tensors, later.node)
    return result


def _input(recorder: Recorder, a: Mapping[str, Any]) -> PlanTensor:
    x = recorder.read(a.get("self", a.get("input")))
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}, not fp32")
    need(x.tensor.is_contiguous() and x.tensor.numel(), "its input has gaps, or no element")
    need(a.get("dtype") in (None, torch.float32), "its result is not fp32")
    return x


OPERATORS = (
    PlannedOperator(
        (_aten.softmax.int, _aten._softmax.default),
        {"oneDNN": softmax},
        {"oneDNN": softmax_to_codes},
        waits=only_quantized,
    ),
)
