"""How many multiply-adds this CPU can do at best: products of registers alone, on all threads at once.

python benchmarks/peak.py [--threads 2] [--results results/kernels.jsonl]

A model's multiply-adds at this rate are the least time that it can take; the tables of docs/results/speed.md
have the part of this limit that each model reaches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import results_rows
from results_rows import Figure, rounded

from nc.profiling import hardware


def measured(threads: int, results: Path | None) -> dict[str, float]:
    """Return 1e9 multiply-adds per second of each kind of numbers, and append a row of them to a file."""
    limits = hardware.measured(threads)
    if limits.missing:
        raise SystemExit(limits.missing)
    found = {kind: value / 1e9 for kind, value in limits.multiply_adds.items()}
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
