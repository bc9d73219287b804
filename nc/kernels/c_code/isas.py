"""Instruction sets of the C code.

They are those that a library was compiled for, and the features of the CPU that each needs.

Imports nothing of nc: setup.py runs this file where there is no torch.
"""

from __future__ import annotations

import ctypes

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
#: Name → all features that the compiler may use there, as in /proc/cpuinfo; in the order of `abi.ISA`.
ISAS = {
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "avx_vnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512_bf16": _BF16,
    "amx": (*_BF16, "amx_tile", "amx_int8", "amx_bf16"),
}
#: Those of `abi.ISA`; test_abi.py compares the order.
NUMBERS = {name: number for number, name in enumerate(ISAS)}
#: Instruction sets that not every supported compiler knows → those that do.
COMPILERS = {
    "avx_vnni": "gcc 11 or clang 12",
    "avx512_bf16": "gcc 10 or clang 9",
    "amx": "gcc 11 or clang 12",
}


def compiled(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets that a library has code for: an old compiler leaves some out."""
    library.nc_isas.restype = ctypes.c_int64
    return named(library.nc_isas())


def missing(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets that the source of a library has code for and its compiler did not know."""
    library.nc_written_for.restype = ctypes.c_int64
    return tuple(name for name in named(library.nc_written_for()) if name not in compiled(library))


def named(bits: int) -> tuple[str, ...]:
    """Return the names of numbers: bit i for number i."""
    return tuple(name for name, number in NUMBERS.items() if bits >> number & 1)
