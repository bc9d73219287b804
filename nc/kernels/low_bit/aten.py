"""PyTorch's own weight-only operators: those that are fast, and those that are refused."""

from __future__ import annotations

import torch

from nc.kernels import tuning
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.numerics.packed_weight import PackedWeight

_INT4_GROUPS = (32, 64, 128, 256)


def _pack_int4(weight: PackedWeight) -> PackedLayout:
    """Return (codes in the order of this CPU's kernel, scales and values of code 8, bf16 [G, N, 2])."""
    params = weight.params
    middle = torch.zeros_like(params.scale)
    if params.minimum is not None:
        middle = params.minimum + 8 * params.scale
    elif params.zero is not None:
        middle = (8 - params.zero) * params.scale
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.unpacked().int(), 1)  # its name
    return codes, torch.stack([params.scale.t(), middle.t()], -1).to(torch.bfloat16).contiguous()


def _linear_int4(x: torch.Tensor, layout: PackedLayout, weight: PackedWeight) -> torch.Tensor:
    codes, factors = layout
    result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, codes, weight.form.group(weight.shape[1]), factors
    )
    return result


def _pack_int8(weight: PackedWeight) -> PackedLayout:
    """Return (int8 codes [N, K], bf16 scales [N])."""
    return (weight.unpacked() ^ 128).view(torch.int8), weight.params.scale[:, 0].to(torch.bfloat16)


def _linear_int8(x: torch.Tensor, layout: PackedLayout, _: PackedWeight) -> torch.Tensor:
    codes, scale = layout
    result: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, codes, scale)  # its name
    return result


INT4PACK = LowBitKernel(
    name="int4pack",
    what="aten::_weight_int4pack_mm_for_cpu: bf16 activations, bf16 scales, sums in fp32, result in bf16",
    bits=(4,),
    activations=("bf16",),  # for others it runs a scalar template
    groups=_INT4_GROUPS,
    outputs=16,
    inputs=2,
    isa=("aten_avx2",),
    max_rows=tuning.ATEN_ROWS.value,
    needs=("aten::_convert_weight_to_int4pack_for_cpu", "aten::_weight_int4pack_mm_for_cpu"),
    pack=_pack_int4,
    linear=_linear_int4,
)
INT8PACK = LowBitKernel(
    name="int8pack",
    what="aten::_weight_int8pack_mm: bf16 activations, bf16 scales, sums in fp32, result in bf16",
    bits=(8,),
    activations=("bf16",),  # for others it runs a scalar template
    whole_row=True,
    zero_points=False,
    isa=("aten_avx2",),
    max_rows=tuning.ATEN_ROWS.value,
    needs=("aten::_weight_int8pack_mm",),
    pack=_pack_int8,
    linear=_linear_int8,
)
DYN_QUANT_4BIT = LowBitKernel(
    name="dyn_quant_4bit",
    what="aten::_dyn_quant_matmul_4bit",
    bits=(4,),
    refused="on x86 it is one scalar thread, and its packed weight is fp32",
)
