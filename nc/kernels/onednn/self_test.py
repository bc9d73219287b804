"""Does a oneDNN library compute what torch's own operators do?

One int8 product and one int8 convolution tell, at first use.
"""

from __future__ import annotations

import torch

from nc.kernels.onednn.call_lists import Scratch, packed, run_once
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    SCALES,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    Desc,
    Geometry,
)
from nc.kernels.onednn.primitives import Maker, Primitive

_onednn = torch.ops.onednn
_SCALE, _ZERO_POINT = 0.02, 117
_INPUTS, _OUTPUTS, _ROWS, _SIZE = 48, 32, 5, 6


def why_wrong(maker: Maker) -> str:
    """Return what is wrong with a library; "" when it computes the same numbers with int8 kernels.

    Raises:
        BackendError: a call failed.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(_OUTPUTS, generator=generator, dtype=torch.float32) * 0.01 + 0.001
    bias = torch.randn(_OUTPUTS, generator=generator, dtype=torch.float32)
    weight = torch.randint(-127, 128, (_OUTPUTS, _INPUTS), generator=generator, dtype=torch.int8)
    codes = torch.randint(0, 256, (1, _INPUTS, _SIZE, _SIZE), generator=generator, dtype=torch.uint8)
    rows = codes[0].flatten(1).t()[:_ROWS].contiguous()
    images = codes.to(memory_format=torch.channels_last)
    return _why_product_wrong(maker, rows, weight, scales, bias) or _why_convolution_wrong(
        maker, images, weight, scales, bias
    )


def _why_product_wrong(
    maker: Maker, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> str:
    result = torch.empty(_ROWS, _OUTPUTS, dtype=torch.float32)
    desc = Desc((_INPUTS, _OUTPUTS), (1, _INPUTS), torch.int8)
    attributes = Attributes({SRC: 0, WEIGHTS: 2}, {SRC: 0})
    primitive = maker.matmul(
        Desc.of(x), desc, Desc.dense((1, _OUTPUTS), torch.float32), Desc.of(result), attributes
    )
    tensors = {
        SRC: x,
        WEIGHTS: packed(maker, weight, desc, primitive.layouts[WEIGHTS], Scratch()),
        BIAS: bias,
        DST: result,
    }
    run_once(maker, primitive, tensors | _numbers(scales))
    none = torch.zeros(_OUTPUTS, dtype=torch.int64)
    own = _onednn.qlinear_prepack(weight, None)
    expected = _onednn.qlinear_pointwise(
        x, _SCALE, _ZERO_POINT, own, scales, none, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return _why_apart(primitive, result, expected)


def _why_convolution_wrong(
    maker: Maker, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> str:
    kernel = weight[:, :, None, None].expand(-1, -1, 3, 3).contiguous()
    result = torch.empty(1, _OUTPUTS, _SIZE, _SIZE, dtype=torch.float32).to(memory_format=torch.channels_last)
    geometry = Geometry((1, 1), (1, 1), (1, 1), (1, 1))
    bias_desc = Desc.dense((_OUTPUTS,), torch.float32)
    attributes = Attributes({SRC: 0, WEIGHTS: 1}, {SRC: 0})
    primitive = maker.convolution(
        Desc.of(x), Desc.of(kernel), bias_desc, Desc.of(result), geometry, attributes
    )
    tensors = {
        SRC: x,
        WEIGHTS: packed(maker, kernel, Desc.of(kernel), primitive.layouts[WEIGHTS], Scratch()),
        BIAS: bias,
        DST: result,
    }
    run_once(maker, primitive, tensors | _numbers(scales))
    none = torch.zeros(_OUTPUTS, dtype=torch.int64)
    sizes = [1, 1], [1, 1], [1, 1], 1
    own = _onednn.qconv_prepack(kernel, scales, _SCALE, _ZERO_POINT, *sizes, list(x.shape))
    arguments = x, _SCALE, _ZERO_POINT, own, scales, none, bias, *sizes
    expected = _onednn.qconv2d_pointwise(*arguments, 1.0, 0, torch.float32, "none", [], "")
    return _why_apart(primitive, result, expected)


def _numbers(scales: torch.Tensor) -> dict[int, torch.Tensor]:
    return {
        SCALES | SRC: torch.tensor([_SCALE], dtype=torch.float32),
        SCALES | WEIGHTS: scales,
        ZERO_POINTS | SRC: torch.tensor([_ZERO_POINT], dtype=torch.int32),
    }


def _why_apart(primitive: Primitive, result: torch.Tensor, expected: torch.Tensor) -> str:
    if primitive.is_reference:
        return f"its int8 {primitive.kind} is the reference kernel {primitive.kernel!r}"
    if not torch.allclose(result, expected, rtol=1e-5, atol=1e-5):
        return (
            f"its int8 {primitive.kind} ({primitive.kernel}) differs from torch's by "
            f"{float((result - expected).abs().max()):g}"
        )
    return ""
