"""How many multiply-adds this CPU can do at best: products of registers alone, on all threads at once.

python benchmarks/peak.py [--threads 2] [--results results/kernels.jsonl]

It compiles peak.c. A model's multiply-adds at this rate are the least time that it can take; the tables of
docs/results/speed.md have the part of this limit that each model reaches.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import results_rows
from results_rows import Figure, rounded

from nc.backends import cpu
from nc.kernels.c_code import flags
from nc.kernels.c_code.limit import permits
from nc.process import env

_SOURCE = Path(__file__).with_name("peak.c")
#: Kind of numbers → features of the CPU and what peak.c calls their products, the fastest ones first.
KINDS = {
    "int8": (
        ("amx_int8", "AMX_INT8"),
        ("avx512_vnni", "AVX512_VNNI"),
        ("avx_vnni", "AVX_VNNI"),
        ("avx2", "AVX2"),
    ),
    "bf16": (("amx_bf16", "AMX_BF16"), ("avx512_bf16", "AVX512_BF16")),
    "fp32": (("avx512f", "FMA_512"), ("avx2", "FMA")),
}


def rate(name: str, threads: int) -> float:
    """Return multiply-adds per second of all threads together; 0 where tiles are not to be had.

    Args:
        name: of a kind of products in peak.c.
        threads: how many.

    Raises:
        subprocess.CalledProcessError: the compiler does not know the instructions.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peak.so"
        compiler = flags.compiler(env.CC.get()).split()
        made = [*compiler, "-O2", "-shared", "-fPIC", f"-DKIND_{name}", "-o", str(target), str(_SOURCE)]
        subprocess.run(made, check=True, capture_output=True)
        peak = ctypes.CDLL(str(target)).nc_peak
    peak.restype = ctypes.c_double
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: peak(), range(threads)))


def limits(threads: int) -> dict[str, float]:
    """Return multiply-adds per second of each kind of numbers that this CPU multiplies."""
    has = cpu.detected()
    best = {
        kind: next((name for flag, name in products if flag in has and permits(flag)), "")
        for kind, products in KINDS.items()
    }
    return {kind: rate(name, threads) for kind, name in best.items() if name}


def measured(threads: int, results: Path | None) -> dict[str, float]:
    """Return 1e9 multiply-adds per second of each kind of numbers, and append a row of them to a file."""
    found = {kind: value / 1e9 for kind, value in limits(threads).items()}
    figures = {kind: Figure(rounded(value), "1e9 multiply-adds/s") for kind, value in found.items()}
    results_rows.append(results, {"measured": "limit", "threads": threads}, figures)
    return found


def main() -> None:
    """Measure, print, and append a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    results_rows.add_option(parser)
    options = parser.parse_args()
    for kind, value in measured(options.threads, options.results).items():
        print(f"{kind}: {value:.0f}e9 multiply-adds per second, {options.threads} threads")


if __name__ == "__main__":
    main()
