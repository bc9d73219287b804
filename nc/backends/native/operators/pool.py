"""Pools: the largest code of a window, means over all positions, means of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.elementwise import in_c, input_of
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import FLOATS, function
from nc.backends.native.plans.layouts import channels_last
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.readers import SPATIAL
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.kernels.onednn.descriptions import DST, SRC, Geometry, channels_last_strides

_aten = torch.ops.aten


def max_pool(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`quantized::max_pool2d` on codes by oneDNN."""
    x = recorder.read(a["qx"])
    need(not a["ceil_mode"], "oneDNN has no `ceil_mode`")
    need(x.tensor.dim() in SPATIAL, "its input is neither images nor volumes")
    return _pool(recorder, node, "max", x, a["kernel_size"], a["stride"], a["padding"], a["dilation"])


def mean_of_positions(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Means over all positions of images by oneDNN.

    They are `aten::adaptive_avg_pool2d` to one, and `aten::mean` of the last two dimensions.
    """
    x = recorder.read(input_of(a))
    need(
        x.tensor.dim() == 4 and x.tensor.dtype is torch.float32, "its input is not a batch of images in fp32"
    )
    if "output_size" in a:
        need(all(size == 1 for size in a["output_size"]), "its result has more than one position")
    else:
        need(
            a.get("dim") and sorted(d % 4 for d in a["dim"]) == [2, 3],
            "it is not the mean of the last two dimensions",
        )
        need(a.get("dtype") in (None, torch.float32), "its result is not fp32")
    result = _pool(recorder, node, "mean", x, x.tensor.shape[2:], (1, 1), (0, 0), (1, 1))
    keep = "output_size" in a or a.get("keepdim")
    return result if keep else PlanTensor(result.tensor[:, :, 0, 0], result.root)


def mean_of_rows(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::mean` over the last dimension in C."""
    x = in_c(recorder, a["self"])
    dims = x.tensor.dim()
    need(
        dims and a["dim"] and len(a["dim"]) == 1 and a["dim"][0] % dims == dims - 1,
        "it is not the mean of the last dimension",
    )
    need(a["dtype"] in (None, x.tensor.dtype), "its result has another dtype than its input")
    need(x.tensor.is_contiguous(), "its input has gaps")
    *sizes, width = x.tensor.shape
    result = c_functions.new(recorder, [*sizes, 1], x.tensor.dtype)
    kind = FLOATS[x.tensor.dtype]
    fields = {"to": kind, "of": kind, "rows": x.tensor.numel() // width, "width": width, "stride": width}
    recorder.call_function(function("mean"), fields, [result, x], node)
    return result if a["keepdim"] else PlanTensor(result.tensor.squeeze(-1), result.root)


def _pool(
    recorder: Recorder,
    node: fx.Node,
    name: str,
    x: PlanTensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> PlanTensor:
    x = channels_last(recorder, x, node)
    geometry = Geometry(tuple(strides), tuple(pads), tuple(pads), tuple(dilations))
    how = zip(x.tensor.shape[2:], kernel, strides, pads, dilations, strict=True)
    sizes = *x.tensor.shape[:2], *((i + 2 * p - (d * (k - 1) + 1)) // s + 1 for i, k, s, p, d in how)
    check_sizes(min(sizes[2:]) > 0, node, x.tensor.shape, kernel)
    result = recorder.new(sizes, channels_last_strides(sizes), x.tensor.dtype)
    primitive = recorder.maker.pooling(name, x.desc, result.desc, tuple(kernel), geometry)
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


OPERATORS = (
    PlannedOperator((torch.ops.quantized.max_pool2d.default,), {"oneDNN": max_pool}),
    PlannedOperator((_aten.adaptive_avg_pool2d.default, _aten.mean.dim), {"oneDNN": mean_of_positions}),
    PlannedOperator((_aten.mean.dim,), {"C": mean_of_rows}, of_one_token=True),
)
