"""What this CPU can do: instruction sets that decide which integer kernels are right and fast."""

from __future__ import annotations

import functools
from pathlib import Path

#: Flags of /proc/cpuinfo that matter here → the names used in artefacts and messages.
_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "amx_tile": "amx_tile",
}
#: Any of these multiplies u8 x s8 into 32 bits; without them pair sums saturate at 16 bits.
WIDE_ACCUMULATION = ("avx512_vnni", "avx_vnni", "amx_int8")


@functools.cache
def features() -> tuple[str, ...]:
    """Names of the features that this CPU has, in the order of the table above."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    flags = set(next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), []))
    return tuple(name for flag, name in _FLAGS.items() if flag in flags)


def accumulates_wide() -> bool:
    """Whether u8 x s8 products are summed without saturation (VNNI or AMX)."""
    return any(name in features() for name in WIDE_ACCUMULATION)


def relied_on() -> tuple[str, ...]:
    """The feature that the numbers of int8 kernels rely on: the one that sums in 32 bits, or AVX2, whose 16-bit sums must not saturate."""
    return next(((name,) for name in WIDE_ACCUMULATION if name in features()), ("avx2",))
