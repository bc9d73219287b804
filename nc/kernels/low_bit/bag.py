"""A few rows of activations in fp32, by FBGEMM's operators for weighted sums of embeddings.

The transposed weight is a table with one row of codes per input channel. The sum of the rows of one group,
weighted with the activations, is the group's share of all outputs before its scale:

    y[n] = sum_g scale[n, g] * sum_(k in g) x[k] * code[k, n]

FBGEMM sums in fp32 with vector instructions. The scales stay outside and weights are never rounded, so the
results differ from the reference as fp32 sums in another order do.
"""

from __future__ import annotations

import math

import torch

from nc.formats import dtype as named
from nc.formats.tensor_format import TensorFormat
from nc.kernels import tuning
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.numerics import bits
from nc.numerics.groups import about_middle
from nc.numerics.packed_weight import PackedWeight

#: Bits of a code in a table → the operator that reads it.
_READERS = {
    2: "embedding_bag_2bit_rowwise_offsets",
    4: "embedding_bag_4bit_rowwise_offsets",
    8: "embedding_bag_byte_rowwise_offsets",
}
#: Sums of this many input channels at most, so that one group per row is work for several threads.
_SUMMED = 128
#: Sums of fewer channels would cost more than threads gain.
_LEAST_SUMMED = 16


def grid(name: str) -> tuple[float, float, tuple[int, ...]] | None:
    """Return (lowest value, step, multiple of the step per code) of a floating-point format.

    The format has at most 256 equally spaced steps; for others None is returned.
    """
    values = named(name).values
    if not all(map(math.isfinite, values)):
        return None
    low, step = (
        min(values),
        min(b - a for a, b in zip(sorted(set(values)), sorted(set(values))[1:], strict=False)),
    )
    steps = [(value - low) / step for value in values]
    return (
        (low, step, tuple(int(s) for s in steps))
        if max(steps) < 256 and all(s == int(s) for s in steps)
        else None
    )


def _pack(weight: PackedWeight) -> PackedLayout:
    """Return (table, its row numbers, scale [G, N], offset of a group's weights [G, N] or None)."""
    form, params = weight.form, weight.params
    codes, low, step = weight.unpacked(), -float(form.middle), 1.0
    found = grid(form.dtype.name) if form.dtype.kind == "float" else None
    if found is not None:
        low, step, steps = found
        codes = torch.tensor(steps, dtype=torch.uint8, device="cpu")[codes.view(torch.uint8).int()]
    size = _table_bits(form)
    padding = -codes.shape[0] % (8 // size)
    table = bits.pack(torch.nn.functional.pad(codes.t(), (0, padding)), size)
    factors = torch.tensor(
        [step, low], dtype=torch.float32 if size == 8 else torch.float16, device="cpu"
    ).view(torch.uint8)
    table = torch.cat([table, factors.expand(table.shape[0], -1)], 1)
    scale, offset = about_middle(weight.unpacked().view(torch.uint8), params, form)
    index = torch.arange(table.shape[0], dtype=torch.int32, device="cpu")
    return table, index, scale.t().contiguous(), None if offset is None else offset.t().contiguous()


def _table_bits(form: TensorFormat) -> int:
    """Bits of a code in the table."""
    return 8 if form.dtype.kind == "float" or form.bits > 4 else 4 if form.bits > 2 else 2


def _summed(size: int) -> int:
    """Input channels of a group of `size` that are summed at once."""
    found = next(n for n in range(min(size, _SUMMED), 0, -1) if size % n == 0)
    return found if found >= min(size, _LEAST_SUMMED) else size


def _linear(x: torch.Tensor, layout: PackedLayout, weight: PackedWeight) -> torch.Tensor:
    table, index, scale, offset = layout
    assert table is not None
    assert index is not None
    assert scale is not None
    x = x.float().contiguous()
    (rows, inputs), (groups, outputs) = x.shape, scale.shape
    size = inputs // groups
    summed = _summed(size)
    reader = getattr(torch.ops.quantized, _READERS[_table_bits(weight.form)])
    starts = torch.arange(0, rows * inputs, summed, dtype=torch.int32, device="cpu")
    sums = reader(
        table, index if rows == 1 else index.repeat(rows), starts, False, 0, False, x.view(-1), None, False
    )
    sums = sums.view(rows, groups, size // summed, -1)[..., :outputs]
    result: torch.Tensor = sums.mul_(scale.unsqueeze(1)).sum((1, 2))
    return result if offset is None else result.addmm_(x.view(rows, groups, size).sum(-1), offset)


BAG = LowBitKernel(
    name="bag",
    what="weighted sums of rows of codes in fp32, by FBGEMM's embedding bags",
    bits=(1, 2, 3, 4, 5, 6, 7, 8),
    floats=("fp4_e2m1", "fp6_e2m3"),
    activations=("fp32", "bf16"),
    isa=("avx2",),
    max_rows=tuning.BAG_ROWS.value,
    needs=tuple(f"quantized::{name}" for name in _READERS.values()),
    pack=_pack,
    linear=_linear,
)
