"""The short tests of kernels, once for each instruction set that this CPU has, in processes that are limited
to it.

    python test/isas.py [NAME…] [--jobs 2]

Each process has the limits of `environment`: on the C code of this package, and on oneDNN, torch and FBGEMM,
so a CPU with AMX computes as one with AVX2 alone does. `make test-isas` runs it, and pytest's marker `isas`
selects the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable

from nc.backends import cpu
from nc.kernels.c_code.isas import ISAS
from nc.kernels.c_code.limit import VARIABLE

#: Name of an instruction set → what limits oneDNN, torch's operators and FBGEMM to it ("": nothing does).
LIMITS = {
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx_vnni": ("AVX2_VNNI", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512", ""),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", ""),
    "amx": ("AVX512_CORE_AMX", "avx512", ""),
}
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "FBGEMM_ENABLE_INSTRUCTIONS")


def environment(name: str) -> dict[str, str]:
    """Return the variables that limit a process to an instruction set."""
    return {
        VARIABLE: name,
        **{variable: value for variable, value in zip(_VARIABLES, LIMITS[name], strict=True) if value},
    }


def lacking(name: str) -> tuple[str, ...]:
    """Return the features of the CPU that an instruction set needs and that are missing here."""
    return tuple(flag for flag in ISAS[name] if flag not in cpu.flags())


def run(name: str, jobs: int) -> int:
    """Run the tests for one instruction set, and return pytest's exit code."""
    command = [
        "-m",
        "pytest",
        "-q",
        "--disable-warnings",
        "-n",
        str(jobs),
        "--dist",
        "worksteal",
        "-m",
        "isas and not exhaustive",
    ]
    others = {
        variable: value
        for variable, value in os.environ.items()
        if variable not in (*_VARIABLES, "DNNL_MAX_CPU_ISA")
    }
    return subprocess.run(
        [sys.executable, *command], env={**others, **environment(name)}, check=False
    ).returncode


def summary(codes: dict[str, int], asked: Iterable[str]) -> list[str]:
    """Return one line for each instruction set that was asked for.

    How its tests ended, or what this CPU lacks for it.
    """
    said = {
        name: "passed" if code == 0 else f"FAILED (exit code {code} of pytest)"
        for name, code in codes.items()
    }
    return [
        f"{name}: {said.get(name) or 'skipped, this CPU lacks ' + ', '.join(lacking(name))}" for name in asked
    ]


def main() -> None:
    """Run the tests for all instruction sets that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ISAS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    options = parser.parse_args()
    asked = options.names or list(ISAS)
    if unknown := [name for name in asked if name not in ISAS]:
        parser.error(f"no such instruction set: {', '.join(unknown)}")
    codes = {}
    for name in asked:
        if not lacking(name):
            print(
                f"--- {name}: {' '.join(f'{key}={value}' for key, value in environment(name).items())}",
                flush=True,
            )
            codes[name] = run(name, options.jobs)
    print(*summary(codes, asked), sep="\n")
    sys.exit(1 if not codes or any(codes.values()) else 0)


if __name__ == "__main__":
    main()
