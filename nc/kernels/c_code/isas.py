"""Instruction sets of the C code: those that a library was compiled for, and the features of the CPU that each needs."""

from __future__ import annotations

import ctypes

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
#: Name → all features that the compiler may use there, as /proc/cpuinfo names them. In the order of the numbers in `identity.h`.
ISAS = {
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "avx_vnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512_bf16": _BF16,
    "amx": (*_BF16, "amx_tile", "amx_int8", "amx_bf16"),
}
NUMBERS = {name: number for number, name in enumerate(ISAS)}


def compiled(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets that a library has code for: an old compiler leaves some out."""
    library.nc_isas.restype = ctypes.c_int64
    bits = library.nc_isas()
    return tuple(name for name, number in NUMBERS.items() if bits >> number & 1)
