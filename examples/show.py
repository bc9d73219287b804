"""Printing for the examples: which operators run int8, latency, sizes."""

from __future__ import annotations

import collections
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nc.profiling.latency import interleaved, median, ratio

T = TypeVar("T")
console = Console(highlight=False, markup=False, emoji=False)  # reports hold brackets, which are not markup
if not console.is_terminal:
    console.width = 140  # a file or pipe has no width


def heading(text: str) -> None:
    """Print a heading."""
    console.print(f"\n{text}", style="bold")


def progress(items: Iterable[T], text: str, total: int | None = None) -> Iterable[T]:
    """Iterate over items with a progress bar on stderr."""
    return track(items, text, total=total, console=Console(stderr=True))


def operators(report: Any) -> None:
    """Print how many operators run int8, and the others grouped by reason."""
    heading("What runs int8, read from the graph that the engine executes")
    table = Table("operators", "type", "asked", "ran", "why", box=None, pad_edge=False)
    rows: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for op in report.ops:
        rows[op.kind, op.asked, op.ran, op.reason].append(op.operator)
    for (kind, asked, ran, why), names in sorted(rows.items(), key=lambda row: row[0][2], reverse=True):
        shown = names[0] if len(names) == 1 else f"{len(names)} × e.g. {names[0]}"
        table.add_row(shown, kind, asked, ran, why)
    console.print(table)
    console.print(str(report), soft_wrap=True)


def latency(fp32: Callable[[], object], int8: Callable[[], object], what: str, rounds: int) -> None:
    """Time two models, one call each per round."""
    candidates = {"fp32": fp32, "int8": int8}
    with torch.no_grad():
        times = list(progress(interleaved(candidates, rounds), "time", total=rounds))
    middle = median(times)
    heading(f"Latency, {what}, {torch.get_num_threads()} threads, median of {rounds} interleaved rounds")
    console.print(f"fp32 (eager PyTorch) {middle['fp32']:.1f} ms, int8 {middle['int8']:.1f} ms: ", end="")
    console.print(f"{ratio(times, 'fp32', 'int8'):.2f} × as fast")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sizes(fp32: int, int8: int) -> None:
    """Bytes of the two models on disk."""
    heading("Size on disk")
    console.print(f"fp32 safetensors {fp32 / 1e6:.1f} MB, int8 artefact {int8 / 1e6:.1f} MB")


def in_new_process(*arguments: str | Path) -> None:
    """Run this example again with other arguments in a new process; raises if that fails."""
    sys.stdout.flush()
    subprocess.run([sys.executable, sys.argv[0], *map(str, arguments)], check=True)


def same_numbers(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor], what: str) -> None:
    """Print the difference of two lists of tensors; exit with code 1 if it is more than rounding."""
    largest = max(float((e - g).abs().max()) for e, g in zip(expected, got, strict=True))
    scale = statistics.fmean(float(e.abs().mean()) for e in expected)
    verdict = "the same numbers" if largest <= 1e-4 * scale else "OTHER NUMBERS"
    console.print(f"{what}: {verdict} (largest difference {largest:.1e}, mean magnitude {scale:.1e})")
    if verdict != "the same numbers":
        sys.exit(1)
