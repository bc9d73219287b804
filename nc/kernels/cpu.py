"""The instruction sets of this CPU that decide which integer kernels are correct and fast.

There are two sets of features. The machine's decide what is concluded about torch, FBGEMM and oneDNN; the
code's decide which of nc's own C code runs. They differ only where nc's tests emulate an instruction set.

A CPU counts as wide only if its kernels surely sum in 32 bits, else as narrow. So a wrong answer here costs
accuracy, never correctness.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from nc.kernels.c_code import emulation, limit
from nc.kernels.c_code.isas import ISAS
from nc.process import env

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


_AVX512 = ("avx2", "avx512f")
#: Every CPU with AMX has it too.
BF16 = "avx512_bf16"
#: What oneDNN uses at most under a limit. Unknown names leave it everything, and so do the newer ones, which
#: all include VNNI.
_ONEDNN_LIMITS = {
    "sse41": (),
    "avx": (),
    "avx2": ("avx2",),
    "avx2_vnni": ("avx2", "avx_vnni"),
    "avx2_vnni_2": ("avx2", "avx_vnni"),
    "avx512_core": _AVX512,
    "avx512_core_vnni": (*_AVX512, "avx512_vnni"),
    "avx512_core_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_core_fp16": (*_AVX512, "avx512_vnni", "avx_vnni", "avx512_bf16"),
    "avx10_1_512": (*_AVX512, "avx512_vnni", "avx_vnni", "avx512_bf16"),
}
#: oneDNN takes the first that is not empty.
_ONEDNN_VARIABLES = (env.ONEDNN_MAX_CPU_ISA, env.DNNL_MAX_CPU_ISA)
#: Values of FBGEMM_ENABLE_INSTRUCTIONS without VNNI.
_FBGEMM_NARROW = ("AVX2", "AVX512", "AVX512_256")


def _onednn_limit(values: Mapping[str, str]) -> str:
    """Return the variable that limits oneDNN, as "NAME=value"; "" when none does."""
    name = next((variable.name for variable in _ONEDNN_VARIABLES if values.get(variable.name)), "")
    return f"{name}={values[name]}" if name and values[name].lower() in _ONEDNN_LIMITS else ""


@functools.cache
def flags() -> frozenset[str]:
    """All features of this CPU, as /proc/cpuinfo names them."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return frozenset(
        next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), ())
    )


def model_name() -> str:
    """Return the CPU's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


@functools.cache
def detected() -> tuple[str, ...]:
    """Names of the features that this CPU has, in the order of the table above."""
    return tuple(name for flag, name in _FLAGS.items() if flag in flags())


def limits() -> tuple[str, ...]:
    """Environment variables that keep kernels from features, as "NAME=value".

    They are oneDNN's, and `NC_MAX_ISA` of the C code of this package.

    oneDNN reads its variable once, at its first use: what was set when the process started may still hold.

    Raises:
        ConfigError: `NC_MAX_ISA` names no instruction set.
    """
    ours = f"{limit.VARIABLE}={limit.limit()}" if not all(map(limit.permits, _FLAGS)) else ""
    return tuple(dict.fromkeys(filter(None, (*_onednn_limits(), ours))))


def machine_features() -> tuple[str, ...]:
    """Names of the features that this CPU has, and that both oneDNN and the C code of this package may use.

    Raises:
        ConfigError: see `limits`.
    """
    return _features(detected(), _onednn_limits(), limit.limit())


def code_features() -> tuple[str, ...]:
    """Names of the features that the C code of this package may use, which tests may emulate.

    Raises:
        ConfigError: see `limits`.
    """
    return tuple(name for name in _FLAGS.values() if not code_lacks([name]))


@functools.cache
def _features(known: tuple[str, ...], onednn_limits: tuple[str, ...], ours: str) -> tuple[str, ...]:
    """Return the known features that all limits allow; cached, because kernels ask in each call."""
    allowed = [_ONEDNN_LIMITS[found.split("=", 1)[1].lower()] for found in onednn_limits]
    return tuple(
        name for name in known if limit.leaves(ours, name) and all(name in names for names in allowed)
    )


def _onednn_limits() -> tuple[str, ...]:
    now = {variable.name: variable.get() for variable in _ONEDNN_VARIABLES}
    found = (_onednn_limit(env.at_start()), _onednn_limit(now))
    return tuple(dict.fromkeys(filter(None, found)))


def code_lacks(needed: Iterable[str]) -> tuple[str, ...]:
    """Return what C code does not find here, or may not use, of flags of /proc/cpuinfo."""
    if of := emulation.emulated():
        return tuple(flag for flag in needed if flag not in ISAS[of] or not limit.permits(flag))
    return machine_lacks(needed)


def machine_lacks(needed: Iterable[str]) -> tuple[str, ...]:
    """Return what this CPU does not have, or what limits forbid, of flags of /proc/cpuinfo."""
    may = machine_features()
    return tuple(flag for flag in needed if (flag not in may if flag in _FLAGS else flag not in flags()))


def accumulates_wide() -> bool:
    """Return whether oneDNN sums u8 x s8 products without saturation (VNNI or AMX)."""
    return any(name in machine_features() for name in WIDE_ACCUMULATION)


def fbgemm_accumulates_wide() -> bool:
    """Tell the same of FBGEMM, which knows the VNNI of AVX-512 only.

    It takes no notice of oneDNN's limits; to count them all the same costs accuracy, where somebody sets
    them, and is never wrong.
    """
    return (
        "avx512_vnni" in machine_features()
        and env.FBGEMM_ENABLE_INSTRUCTIONS.get().upper() not in _FBGEMM_NARROW
    )


def why_narrow() -> str:
    """Return what hides features that this CPU has, as text to append; "" when nothing does."""
    return f" (limited by {', '.join(limits())})" if limits() and machine_features() != detected() else ""


def relied_on() -> tuple[str, ...]:
    """Return the feature that int8 kernels' numbers rely on.

    It is the one that sums in 32 bits, or AVX2, whose 16-bit sums must not saturate.
    """
    return next(((name,) for name in WIDE_ACCUMULATION if name in machine_features()), ("avx2",))


def missing(needed: Iterable[str]) -> tuple[str, ...]:
    """Return what an artefact relies on and this CPU lacks.

    How products are summed is none of it: where kernels do that in 16 bits (`Capabilities.narrow_sums`),
    `nc.graph.saturation` sees to it.
    """
    return tuple(name for name in needed if name not in (*machine_features(), *WIDE_ACCUMULATION))
