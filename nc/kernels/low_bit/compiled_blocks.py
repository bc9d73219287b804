"""Kernels of our own in C for every format and every group (`nc/kernels/c_code/low_bit_blocks.c`).

Weights are decoded by blocks that stay in a cache; products and sums are those of fp32.
`nc.kernels.low_bit.compiled` has kernels for integers in groups of multiples of 32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from nc.errors import BackendError
from nc.formats.dtypes import DType
from nc.kernels import tuning
from nc.kernels.c_code import abi, isas
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.low_bit import compiled
from nc.kernels.low_bit.compiled import BF16, PANEL
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.numerics.groups import about_middle, chunks
from nc.numerics.low_bit import BLOCK
from nc.numerics.packed_weight import PackedWeight
from nc.process.large_pages import LargePages
from nc.process.unavailable import Unavailable

#: What the inputs of a group are padded to.
STEP = abi.CONSTANTS.blocks_step
#: Kinds of stored codes: their numbers in the C code.
TABLE, INTEGER, E4M3, E5M2 = (abi.CODING.number(name) for name in ("table", "integer", "e4m3", "e5m2"))
#: The C code reads E4M3 as fp16, with another bias of the exponent.
_E4M3_UNIT = 2.0**8
#: Magnitudes that AMX multiplies exactly: parts of smaller ones could be below 2^-126, which it takes as 0.
_LEAST, _MOST = 2.0**-90, 2.0**126
#: Significant bits of bf16 and fp32.
_BF16_BITS, _FP32_BITS = 8, 24
_MEMORY = LargePages()


def why_unavailable() -> str:
    """Why the C code can't be used here; "" when it can."""
    found = _code()
    return found.reason if isinstance(found, Unavailable) else compiled.why_none(found.isas, usable())


def usable() -> tuple[str, ...]:
    """Instruction sets that this CPU has and the C code was compiled for, the best one first."""
    code = _code()
    if isinstance(code, Unavailable):
        return ()
    asked = compiled.usable()  # asks the operating system for AMX, for the whole process
    return tuple(name for name in compiled.of_this_cpu(code.isas) if name != "amx" or name in asked)


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """The compiled function, and the instruction sets that it was compiled for."""

    function: Function
    isas: tuple[str, ...]


@functools.cache
def _code() -> _Code | Unavailable:
    """Return the code, or why there is none. It runs on the threads of the OpenMP library that torch uses."""
    library = load_on_threads("low_bit_blocks")
    if isinstance(library, Unavailable):
        return Unavailable(f"its C code can't be loaded: {library}")
    return _Code(function_of(library, "low_bit_blocks"), isas.compiled(library))


def function() -> Function:
    """Return what computes a linear; only where it is available."""
    code = _code()
    assert not isinstance(code, Unavailable), "kernels that are not available are never chosen"
    return code.function


def isa() -> int:
    """Return the best instruction set that the code has and may use here, a number of `c_code.isas`.

    It may be called only where the code is available.
    """
    return isas.NUMBERS[usable()[0]]


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """How codes of a format are stored: a weight is `unit * read(stored[code])`.

    Attributes:
        kind: `TABLE`, `INTEGER`, `E4M3` or `E5M2`.
        stored: uint8, the stored byte of each code.
        read: fp32, what the C code reads of each code.
        unit: a power of two, or 1.
    """

    kind: int
    stored: torch.Tensor
    read: torch.Tensor
    unit: float


@functools.cache
def coding(dtype: DType) -> Coding:
    """How codes of a format are stored.

    Raises:
        BackendError: its values fit none of the kinds.
    """
    values = torch.tensor(
        dtype.values or [float(code - 2 ** (dtype.bits - 1)) for code in range(2**dtype.bits)],
        dtype=torch.float32,
        device="cpu",
    )
    codes = torch.arange(len(values), dtype=torch.uint8, device="cpu")
    if len(values) <= PANEL:
        return Coding(TABLE, codes, values, 1.0)
    finite = values[values.isfinite()]
    unit = float(finite[finite > 0].min())
    steps = finite / unit
    if len(finite) == len(values) and torch.equal(steps.to(torch.int8).float(), steps):
        return Coding(INTEGER, steps.to(torch.int8).view(torch.uint8), steps, unit)
    for kind, storage, unit in ((E5M2, torch.float8_e5m2, 1.0), (E4M3, torch.float8_e4m3fn, _E4M3_UNIT)):
        held = values.to(storage)
        if torch.equal(held.float()[values.isfinite()], finite) and torch.equal(
            held.float().isfinite(), values.isfinite()
        ):
            return Coding(kind, held.view(torch.uint8), values / unit, unit)
    msg = (
        f"The values of {dtype} are neither 16, nor multiples of one number, nor those of a format of 8 bits."
    )
    raise BackendError(msg)


def pack(weight: PackedWeight, best: int | None = None) -> PackedLayout:
    """Return codes, scales, offsets or None, values of codes and factors of outputs, and what describes them.

    The last one is an `abi.LOW_BIT_BLOCKS_WEIGHT`. `low_bit_blocks.c` describes the memory layout.

    Args:
        weight: of any format that has a `coding`.
        best: the instruction set to compute with, a number of `nc.kernels.c_code.isas`; None: the best one.
            The layout is the same for all.
    """
    form, (outputs, inputs) = weight.form, weight.shape
    code = coding(form.dtype)
    codes = weight.unpacked().view(torch.uint8)
    scale, offset, factor = _scales(weight, codes)
    if code.kind == E4M3:  # C reads NaN as a number
        scale = scale.masked_fill(_of_groups(code.read, codes, scale.shape[1]).isnan(), math.nan)
    parts = _parts(code, codes, scale, offset)
    group = inputs // scale.shape[1]
    held = -(-group // STEP) * STEP
    padded = torch.nn.functional.pad(codes.view(outputs, -1, group), (0, held - group)).view(outputs, -1)
    padded = torch.nn.functional.pad(padded, (0, 0, 0, -outputs % PANEL))
    panels = len(padded) // PANEL
    if code.kind == TABLE:
        low, high = padded.view(panels, PANEL, -1, 2, 4).unbind(3)
        laid = (low | high << 4).permute(0, 2, 1, 3)
    else:
        laid = _mapped(padded, code).view(panels, PANEL, -1).transpose(1, 2)
    values = torch.zeros(PANEL + panels * PANEL, dtype=torch.float32, device="cpu")
    if code.kind == TABLE:
        values[: len(code.read)] = code.read
    values[PANEL : PANEL + outputs] = factor * code.unit
    scale = _smallest(compiled.panels_of(scale))
    best = isa() if best is None else best
    packed = abi.LOW_BIT_BLOCKS_WEIGHT.packed(
        outputs=outputs,
        inputs=inputs,
        groups=inputs // group,
        held=held,
        coding=code.kind,
        parts=parts,
        isa=best,
        scale_dtype=compiled.SCALES[scale.dtype],
    )
    sizes = compiled.as_tensor(packed)
    return (
        _MEMORY.copied(laid),
        _MEMORY.copied(scale),
        None if offset is None else compiled.panels_of(offset),
        values,
        sizes,
    )


def _scales(
    weight: PackedWeight, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Scales [N, G], offsets [N, G] or None, and what each output is multiplied by in the end, [N] or [1]."""
    scale, offset = about_middle(codes, weight.params, weight.form)
    outer = weight.outer_scale
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    if offset is not None:
        return scale, offset, one
    if scale.shape[1] == 1:
        return torch.ones_like(scale), None, scale[:, 0]
    if outer is not None and outer.numel() == 1:
        return weight.scale.float(), None, outer.float().reshape(1)
    return scale, None, one


def _mapped(codes: torch.Tensor, code: Coding) -> torch.Tensor:
    """Return stored bytes of codes, of which none is beyond those of the format."""
    if torch.equal(code.stored, torch.arange(len(code.stored), dtype=torch.uint8, device="cpu")):
        return codes
    return code.stored[codes.int()]


def _of_groups(read: torch.Tensor, codes: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the largest magnitude of the values in each group, [N, G]; NaN where one is."""
    sizes, result = read.abs(), torch.empty(len(codes), groups, dtype=torch.float32, device="cpu")
    for rows in chunks(*codes.shape):
        part = codes[rows].reshape(-1, groups, codes.shape[1] // groups)
        result[rows] = sizes.index_select(0, part.flatten().int()).view(part.shape).amax(2)
    return result


def _parts(code: Coding, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> int:
    """Return the numbers of bf16 whose sum a decoded weight is, `value * scale + offset`.

    0 is returned where AMX would lose some of them.
    """
    largest = _of_groups(code.read, codes, scale.shape[1]) * scale.abs()
    if offset is not None:
        largest += offset.abs()
    if not ((largest == 0) | ((largest >= _LEAST) & (largest <= _MOST))).all():
        return 0
    of_values, of_scales = _significant_bits(code.read), _significant_bits(scale)
    bits = max(of_values, of_scales) if 1 in (of_values, of_scales) else of_values + of_scales
    return -(-min(bits if offset is None else _FP32_BITS, _FP32_BITS) // _BF16_BITS)


def _significant_bits(numbers: torch.Tensor) -> int:
    """Return the largest number of significant bits of fp32 numbers: 1 for powers of two, 24 at most."""
    mantissas = numbers.contiguous().view(torch.int32) & 0x7FFFFF | 0x800000
    return _FP32_BITS - next((bit for bit in range(_FP32_BITS) if (mantissas >> bit & 1).any()), _FP32_BITS)


def _smallest(scale: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in 16 bits, where they have no more."""
    found = (scale.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((narrow for narrow in found if torch.equal(narrow.float(), scale)), scale)


def linear(
    x: torch.Tensor,
    layout: PackedLayout,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    block: int = 0,
) -> torch.Tensor:
    """Compute `x @ W.T + bias`, fp32, shape [M, N].

    Args:
        x: fp32 or bf16, shape [M, K].
        layout: the weight as `pack` returns it.
        weight: W, shape [N, K].
        bias: shape [N].
        block: 0 multiplies x as it is; else x is rounded to int8, with one scale per row (-1) or per `block`
            elements of a row.

    Raises:
        BackendError: the code can't run.
    """
    if not block and x.dtype == torch.bfloat16:
        block = BF16
    return compiled.call(function(), x.float().contiguous(), layout, weight, bias, block)


#: The floating-point formats that have a `coding`.
FLOATS = ("nf4", "af4", "af4_32", "fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "mxint8")
C_BLOCKS = LowBitKernel(
    name="c blocks",
    what=(
        "C of nc: codes become fp32 by blocks in a cache, sums in fp32 (AMX by parts in bf16, AVX-512 or "
        "AVX2)"
    ),
    bits=(1, 2, 3, 4, 5, 6, 7, 8),
    floats=FLOATS,
    activations=("fp32",),
    isa=("avx2",),
    in_c=True,
    unavailable=why_unavailable,
    pack=pack,
    linear=linear,
    adds_bias=True,
)
C_BLOCKS_INT8 = dataclasses.replace(
    C_BLOCKS,
    name="c blocks int8",
    what="the same with activations that are rounded to int8, each token by itself",
    activations=("int8",),
    linear=functools.partial(linear, block=compiled.ROW),
)
C_BLOCKS_INT8_BLOCK32 = dataclasses.replace(
    C_BLOCKS,
    name="c blocks int8 block32",
    what="the same with a scale of activations for each 32 elements",
    activations=("int8_block32",),
    linear=functools.partial(linear, block=BLOCK),
)
C_BLOCKS_BF16 = dataclasses.replace(
    C_BLOCKS,
    name="c blocks bf16",
    what=(
        "the same with activations in bf16; AMX multiplies weights that are rounded to bf16, others those "
        "in fp32"
    ),
    activations=("bf16",),
    max_rows=tuning.BF16_BLOCKS_ROWS.value,
)
KERNELS = (C_BLOCKS_INT8, C_BLOCKS_INT8_BLOCK32, C_BLOCKS, C_BLOCKS_BF16)
