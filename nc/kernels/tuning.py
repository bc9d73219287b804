"""Numbers that were chosen by measurement, each with the machine, the date, and what measures it again.

Another machine may want others: run the script, and change a row. Sizes of caches are none of them, they are
asked for (`nc.kernels.caches`, and `second_cache` in C).

Imports nothing of nc: setup.py runs this file where there is no torch.
"""

from __future__ import annotations

import dataclasses
import typing

_T = typing.TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned(typing.Generic[_T]):
    """One number, or some that were measured together.

    Attributes:
        value: the number or numbers.
        what: what they decide.
        machine: where it was measured.
        date: when it was measured, YYYY-MM-DD.
        measure: the command that measures it again.
    """

    value: _T
    what: str
    machine: str
    date: str
    measure: str


_AMX = "Intel Xeon with AMX, 2 cores"
_ZEN3 = "AMD Zen 3 (AVX2), 2 cores"
_ZEN4 = "AMD Zen 4 (AVX512-VNNI), 2 cores"
_ZEN5 = "AMD Zen 5 (AVX512-VNNI and AVX-VNNI), virtual machine, 2 cores"
_AVX2 = "a CPU with AVX2, 2 cores"
_CROSSOVER = "python benchmarks/lowbit_kernels.py --crossover --rows 4 8 16 32 128 512 2048 4096"

# --- rows of activations up to which a kernel for low-bit weights is faster than a GEMM of dequantized blocks

ATEN_ROWS = Tuned(32, "torch's own kernels for 4 and 8 bits", _AVX2, "2026-11-22", _CROSSOVER)
BAG_ROWS = Tuned(8, "FBGEMM's embedding bags", _AVX2, "2026-11-22", _CROSSOVER)
BF16_ROWS = Tuned(2048, "codes that become bf16, with AVX512-BF16 or AMX", _AMX, "2026-11-24", _CROSSOVER)
BF16_FEW_ROWS = Tuned(8, "codes that become fp32, activations in bf16", _ZEN4, "2026-11-23", _CROSSOVER)
BF16_BLOCKS_ROWS = Tuned(
    1024, "weights decoded by blocks, activations in bf16 (with AMX: 4096)", _ZEN3, "2026-11-26", _CROSSOVER
)

# --- native

LOW_BIT_ROWS = Tuned(
    16,
    "rows of the example from which 8-bit weights have the product of dynamic linears",
    _ZEN4,
    "2026-11-27",
    "python benchmarks/tuning.py low_bit_rows",
)
MOST_ELEMENTS = Tuned(
    2**16,
    "elements above which oneDNN and torch, which divide the work among threads, compute an operator",
    _ZEN4,
    "2026-11-23",
    "python benchmarks/tuning.py elements",
)
FEWEST_ROWS = Tuned(
    64,
    "rows of a head of attention for which a task packs keys and values that another one packs too",
    _AMX,
    "2026-11-26",
    "python benchmarks/run.py --models bert-base --engines nc-native",
)
CODE_PRODUCTS = Tuned(
    ("avx512_vnni", "avx2"),
    "instruction sets with which linears and 1 x 1 convolutions of codes are faster in C than by oneDNN",
    _ZEN4,
    "2026-11-27",
    "python benchmarks/rows.py",
)
INT8_ATTENTION = Tuned(
    ("avx512_vnni", "avx_vnni"),
    "instruction sets with which attention of int8 codes of padded batches is faster in C than by oneDNN",
    _ZEN5,
    "2026-11-29",
    "python benchmarks/tuning.py int8_attention",
)

# --- C

WORK_PER_THREAD = Tuned(
    65536,
    "weights times rows below which another thread costs more than it gains",
    _ZEN4,
    "2026-11-23",
    "python benchmarks/tuning.py threads",
)
FEW_ROWS = Tuned(
    8,
    "low_bit.c: rows below which codes are not written as fp32 and read again",
    _ZEN3,
    "2026-11-25",
    "python benchmarks/lowbit_kernels.py --rows 4 8 16",
)
FEW_ROWS_OF_BLOCKS = Tuned(
    6,
    "low_bit_blocks.c: at most so many rows, for which codes are decoded into registers",
    _ZEN3,
    "2026-11-26",
    "python benchmarks/lowbit_kernels.py --rows 4 8 16",
)
ROWS_OF_PIECE = Tuned(
    64,
    "rows.c: rows that are multiplied with all weights before the next ones, where there are many (AMX: 8 x)",
    _ZEN4,
    "2026-11-27",
    "python benchmarks/rows.py",
)
PIECES_PER_THREAD = Tuned(
    8,
    "rows.c: pieces of 32 rows for each thread from which results are rounded piece by piece, in the cache",
    _ZEN4,
    "2026-11-27",
    "python benchmarks/run.py --models minilm bert-base --engines nc-dynamic",
)
_IN_C = ("WORK_PER_THREAD", "FEW_ROWS", "FEW_ROWS_OF_BLOCKS", "ROWS_OF_PIECE", "PIECES_PER_THREAD")


def definitions() -> str:
    """Return the numbers that the C code reads, in C."""
    return f"enum {{ {', '.join(f'{name} = {globals()[name].value}' for name in _IN_C)} }};\n"
