"""Any format and any number of rows.

The weight is dequantized in blocks of output channels, each multiplied at once.

Beside inputs and result this needs memory for one block only: at most three fp32 tensors of `BLOCK` elements,
6 MB. The weights are exactly those of the reference.
"""

from __future__ import annotations

import torch

from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.numerics.groups import decode
from nc.numerics.packed_weight import PackedWeight

#: Weights of a block. Smaller ones cost calls, larger ones leave the cache.
BLOCK = 1 << 19
_BITS = tuple(range(1, 9))
#: FBGEMM's operators read rows of codes, each followed by a scale and an offset in fp16.
_FACTORS = torch.tensor([1.0, 0.0], dtype=torch.float16, device="cpu").view(torch.uint8)
_ROW_READERS = {4: "embedding_bag_4bit_rowwise_offsets", 2: "embedding_bag_2bit_rowwise_offsets"}


def rows_of(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Output channels `start` to `stop` of a weight; views."""

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or tensor.shape[0] != weight.shape[0] else tensor[start:stop]

    scale = part(weight.scale)
    assert scale is not None
    return PackedWeight(
        form=weight.form,
        shape=(stop - start, weight.shape[1]),
        codes=weight.codes[start:stop],
        scale=scale,
        zero=part(weight.zero),
        minimum=part(weight.minimum),
        outer_scale=part(weight.outer_scale),
        outer_minimum=part(weight.outer_minimum),
    )


def _dequantized(weight: PackedWeight) -> torch.Tensor:
    """As `weight.dequantize()`, faster for FP8 and for integers of 2 and 4 bits."""
    rows, columns = weight.shape
    stored = weight.form.dtype.storage
    if stored.is_floating_point:
        scale = weight.params.scale
        return (
            weight.unpacked()
            .view(stored)
            .float()
            .view(*scale.shape, -1)
            .mul_(scale.unsqueeze(-1))
            .view(rows, columns)
        )
    reader = _ROW_READERS.get(weight.form.bits)
    if weight.form.dtype.kind == "float" or reader is None or columns * weight.form.bits % 8:
        return weight.dequantize()
    with_factors = torch.cat([weight.codes, _FACTORS.expand(rows, 4)], 1)
    each = torch.arange(rows, dtype=torch.int32, device="cpu")
    codes = getattr(torch.ops.quantized, reader)(
        with_factors, each, each, False, 0, False, None, None, False
    )  # no names
    return decode(codes, weight.params, weight.form)


def _linear(
    x: torch.Tensor, _: PackedLayout, weight: PackedWeight, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    outputs, inputs = weight.shape
    rounded = x.dtype == torch.bfloat16
    x = x.to(compute)
    result = x.new_empty(x.shape[0], outputs)
    size = max(1, BLOCK // inputs)
    for start in range(0, outputs, size):
        stop = min(outputs, start + size)
        block = _dequantized(rows_of(weight, start, stop))
        block = block.to(torch.bfloat16).to(compute) if rounded else block
        result[:, start:stop] = x @ block.t()
    return result


def _linear_bf16(x: torch.Tensor, layout: PackedLayout, weight: PackedWeight) -> torch.Tensor:
    return _linear(x, layout, weight, torch.bfloat16)


BLOCKS_BF16 = LowBitKernel(
    name="blocks bf16",
    what="blocks of output channels are dequantized and multiplied in bf16",
    bits=_BITS,
    floats=None,
    activations=("bf16",),
    isa=("avx512_bf16",),
    linear=_linear_bf16,
)
BLOCKS = LowBitKernel(
    name="blocks",
    what="blocks of output channels are dequantized and multiplied in fp32",
    bits=_BITS,
    floats=None,
    activations=("fp32", "bf16"),
    isa=("avx2",),
    linear=_linear,
)
