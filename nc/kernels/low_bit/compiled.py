"""Kernels of our own in C (`nc/kernels/c_code/low_bit.c`).

A weight is read once per call and dequantized in registers.

`C_FP32` and those for bf16 have exact products and sums in fp32. `C_INT8` and `C_INT8_BLOCK32` are for
`act_dtype="int8"` and "int8_block32": they round activations as the reference does, and sum the products with
codes in int32, exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import torch

from nc.errors import BackendUnavailableError
from nc.kernels import cpu, tuning
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load
from nc.kernels.c_code.calls import Function, call_packed, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.c_code.limit import used
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.numerics.groups import about_middle
from nc.numerics.low_bit import BLOCK
from nc.numerics.packed_weight import PackedWeight
from nc.process.large_pages import LargePages
from nc.process.unavailable import Unavailable

#: Dtypes of scales → their numbers in the C code.
SCALES = {
    torch.float32: abi.DTYPE.number("f32"),
    torch.float16: abi.DTYPE.number("f16"),
    torch.bfloat16: abi.DTYPE.number("bf16"),
}
#: Instead of the length of a block: each row has one scale; x is not rounded, and has values of bf16.
ROW, BF16 = abi.CONSTANTS.block_row, abi.CONSTANTS.block_bf16
#: Outputs of a panel, and what K is padded to where one group covers a row.
PANEL, STEP = abi.CONSTANTS.panel, abi.CONSTANTS.low_bit_step
#: Of packed weights: what is read from there limits the speed.
_MEMORY = LargePages()


def why_unavailable() -> str:
    """Why the C code can't be used here; "" when it can."""
    found = _code()
    return found.reason if isinstance(found, Unavailable) else why_none(found.isas, usable())


def usable() -> tuple[str, ...]:
    """Instruction sets that this CPU has and the C code was compiled for, the best one first."""
    code = _code()
    return () if isinstance(code, Unavailable) else of_this_cpu(code.isas)


def of_this_cpu(compiled: Collection[str]) -> tuple[str, ...]:
    """Return the compiled instruction sets that this CPU has, the best one first."""
    return tuple(name for name in reversed(ISAS) if name in compiled and not cpu.code_lacks(ISAS[name]))


def why_none(compiled: Sequence[str], usable: Sequence[str]) -> str:
    """Why C code that was compiled for some instruction sets can't be used; "" when it can."""
    return (
        ""
        if usable
        else (
            f"its C code was compiled for {', '.join(compiled) or 'no instruction set'}, of which this CPU "
            "has none"
        )
    )


def _why_no_bf16() -> str:
    """Why the code for AVX512-BF16 can't be used here; "" when it can."""
    why = why_unavailable()
    return why or (
        ""
        if "avx512_bf16" in usable()
        else "its C code was compiled without AVX512-BF16, which takes GCC 10 or clang 9"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """The compiled function, and instruction sets that it has code for and may use."""

    function: Function
    isas: tuple[str, ...]


@functools.cache
def _code() -> _Code | Unavailable:
    """Return the code, or why there is none. It runs on the threads of the OpenMP library that torch uses."""
    try:
        library = load("low_bit")
        openmp.connect(library)
    except (BackendUnavailableError, OSError) as error:
        return Unavailable(f"its C code can't be loaded: {error}")
    allowed = [name for name in used(library) if name != "amx" or library.nc_low_bit_amx()]
    return _Code(function_of(library, "low_bit"), tuple(allowed))


def function() -> Function:
    """Return what computes a linear; only where it is available."""
    code = _code()
    assert not isinstance(code, Unavailable), "kernels that are not available are never chosen"
    return code.function


def block_of(kernel: LowBitKernel) -> int:
    """Return the argument `block` of the `linear` of a kernel in C."""
    return int(getattr(kernel.linear, "keywords", {}).get("block", 0))


def isa() -> int:
    """Return the best instruction set that the C code was compiled for and may use here.

    This CPU has it, and the user and the operating system allow it.
    """
    return NUMBERS[usable()[0]]


def pack(weight: PackedWeight, best: int | None = None) -> PackedLayout:
    """Return codes, scales, offsets or None, values of 4-bit codes, and an `abi.LOW_BIT_WEIGHT`.

    `low_bit.c` describes their memory layout.

    Args:
        weight: of a format that the kernels take.
        best: the instruction set to compute with, a number of `ISAS`; None: see `isa`. The layout is the same
            for all.
    """
    form, params, (outputs, inputs) = weight.form, weight.params, weight.shape
    size = 4 if form.bits <= 4 else 8
    group = form.group(inputs)
    padded = -(-inputs // STEP) * STEP
    panels = -(-outputs // PANEL)
    codes = weight.unpacked().view(torch.uint8)
    scale, offset = about_middle(codes, params, form)
    codes = torch.nn.functional.pad(codes, (0, padded - inputs, 0, panels * PANEL - outputs))
    if size == 4:
        low, high = codes.view(panels, PANEL, padded // 8, 2, 4).unbind(3)
        codes = low | high << 4
    else:
        codes = codes.view(panels, PANEL, padded // 4, 4)
    values = torch.arange(16, dtype=torch.float32, device="cpu") - form.middle
    scale = panels_of(scale)
    if not form.two_levels and weight.scale.dtype in SCALES:
        scale = scale.to(weight.scale.dtype)  # as they are stored
    best = isa() if best is None else best
    sizes = abi.LOW_BIT_WEIGHT.packed(
        outputs=outputs,
        inputs=inputs,
        padded=padded,
        group=padded if group == inputs else group,
        bits=size,
        middle=form.middle,
        isa=best,
        scale_dtype=SCALES[scale.dtype],
    )
    laid, offset = codes.permute(0, 2, 1, 3), None if offset is None else panels_of(offset)
    return _MEMORY.copied(laid), _MEMORY.copied(scale), offset, values, as_tensor(sizes)


def as_tensor(packed: bytes) -> torch.Tensor:
    """Return a structure as int64, so that functions in C read it as they read tensors."""
    return torch.frombuffer(bytearray(packed), dtype=torch.int64).clone()


def panels_of(factors: torch.Tensor) -> torch.Tensor:
    """[N, G] → [panels, G, 16]."""
    outputs, groups = factors.shape
    padded = torch.nn.functional.pad(factors, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()


#: What a call reads in place of a tensor that it has not.
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


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
    x = x.float().contiguous()
    if block in (0, BF16) and x.shape[1] % STEP:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % STEP))
    return call(function(), x, layout, weight, bias, block)


def call(
    function: Function,
    x: torch.Tensor,
    layout: PackedLayout,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    block: int,
) -> torch.Tensor:
    """Return what `low_bit` or `low_bit_blocks` gives for fp32 rows without gaps.

    Raises:
        BackendError: the code can't run.
    """
    codes, scale, offset, values, sizes = layout
    assert codes is not None
    assert scale is not None
    assert values is not None
    assert sizes is not None
    result = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device="cpu")
    packed = _packed(function, x.shape[0], x.shape[1], block, openmp.threads())
    offset = _NOTHING if offset is None else offset
    added = _NOTHING if bias is None else bias.float().contiguous()
    call_packed(function, packed, [result, x, sizes, codes, scale, offset, values, added])
    return result


@functools.lru_cache(maxsize=256)
def _packed(function: Function, rows: int, stride: int, block: int, threads: int) -> bytes:
    """Return the first argument of a call; packing it takes longer than the product of a small layer."""
    return function.packed({"rows": rows, "stride": stride, "block": block, "threads": threads})


# `max_rows` of those for bf16: above, it is faster to dequantize blocks for a GEMM in bf16, on a CPU that has
# instructions for that. In int8 and fp32 the kernels are the faster ones for any number of rows:
# `benchmarks/lowbit_kernels.py --crossover`.
C_INT8 = LowBitKernel(
    name="c int8",
    what=(
        "C of nc: each token in int8, products with codes summed in int32 for each group (AMX, VNNI, or "
        "AVX2 without saturation)"
    ),
    bits=(1, 2, 3, 4, 5, 6, 7, 8),
    activations=("int8",),
    group_step=STEP,
    isa=("avx2",),
    in_c=True,
    unavailable=why_unavailable,
    pack=pack,
    linear=functools.partial(linear, block=ROW),
    adds_bias=True,
)
C_INT8_BLOCK32 = dataclasses.replace(
    C_INT8,
    name="c int8 block32",
    what="the same with a scale of activations for each 32 elements",
    activations=("int8_block32",),
    linear=functools.partial(linear, block=BLOCK),
)
C_FP32 = LowBitKernel(
    name="c fp32",
    what=(
        "C of nc: codes become fp32 in registers, or activations three digits of 8 bits; sums in fp32 (AMX, "
        "VNNI, AVX-512 or AVX2)"
    ),
    bits=C_INT8.bits,
    activations=("fp32",),
    group_step=STEP,
    isa=("avx2",),
    in_c=True,
    unavailable=why_unavailable,
    pack=pack,
    linear=linear,
    adds_bias=True,
)
C_BF16 = dataclasses.replace(
    C_FP32,
    name="c bf16",
    what=(
        "C of nc: codes become bf16 exactly, multiplied with activations in bf16, sums in fp32 (AMX or "
        "AVX512-BF16)"
    ),
    bits=(1, 2, 3, 4),
    activations=("bf16",),
    isa=("avx2", "avx512f", "avx512_vnni", "avx512_bf16"),
    unavailable=_why_no_bf16,
    max_rows=tuning.BF16_ROWS.value,
)
C_BF16_FEW_ROWS = dataclasses.replace(
    C_FP32,
    name="c bf16 few rows",
    activations=("bf16",),
    isa=C_BF16.isa,
    unavailable=_why_no_bf16,
    max_rows=tuning.BF16_FEW_ROWS.value,
)
C_BF16_IN_FP32 = dataclasses.replace(
    C_FP32,
    name="c bf16 in fp32",
    activations=("bf16",),
    unavailable=lambda: (
        "this CPU has instructions for bf16"
        if not (cpu.code_lacks(C_BF16.isa) or _why_no_bf16())
        else why_unavailable()
    ),
)
KERNELS = (C_INT8, C_INT8_BLOCK32, C_FP32, C_BF16, C_BF16_FEW_ROWS, C_BF16_IN_FP32)
