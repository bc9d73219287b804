"""From a saved model to its first answer, each time in a new process.

Seconds for imports, `load` and the first call, and what it holds.

Imports are those of torch, nc and the engine. Memory is that of the process after the call without what it
had after the imports, as multiple of the constants: of the bytes of weights.safetensors.

python benchmarks/cold_start.py [--models hf-resnet50 bert-base] [--backend native]
    [--results results/serving.jsonl]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import results_rows

HERE = Path(__file__).parent
#: Figure → its unit, in the order of what a process prints.
PARTS = {
    "imports": "s",
    "load": "s",
    "first call": "s",
    "load and first call": "s",
    "memory": "x weights.safetensors",
}


def save(name: str, backend: str, folder: Path) -> None:
    """Quantize a model and save it with its inputs."""
    import torch
    from models import build

    import nc

    model, inputs = build(name)
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=inputs, backend=backend)
    prepared(**inputs)
    nc.convert(prepared).save(folder / "model")
    torch.save(inputs, folder / "inputs.pt")


def start(folder: Path, backend: str) -> list[float]:
    """In a new process: seconds of each part, and memory."""
    ticks = [time.perf_counter()]
    import torch

    import nc
    from nc.backends import choose_backend

    choose_backend(backend).start()
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    before = resident()
    ticks.append(time.perf_counter())
    model = nc.load(folder / "model", backend=backend)
    ticks.append(time.perf_counter())
    model(**inputs)
    ticks.append(time.perf_counter())
    memory = (resident() - before) / (folder / "model" / "weights.safetensors").stat().st_size
    return [ticks[1] - ticks[0], ticks[2] - ticks[1], ticks[3] - ticks[2], ticks[3] - ticks[1], memory]


def resident() -> int:
    """Bytes of this process that are in memory."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")
    )
    return 1024 * int(line.split()[1])


def main() -> None:
    """Print a Markdown table of medians, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["hf-resnet50", "bert-base"])
    parser.add_argument("--backend", default="native")
    parser.add_argument("--rounds", type=int, default=5)
    results_rows.add_option(parser)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.start:
        print(*start(options.start, options.backend))
        return
    print(f"backend {options.backend}, medians of {options.rounds} processes\n")
    print(
        f"| model | {' | '.join(f'{name}, {unit}' for name, unit in PARTS.items())} "
        f"|\n{'|---' * (len(PARTS) + 1)}|"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            save(name, options.backend, Path(folder))
            command = [
                sys.executable,
                str(HERE / "cold_start.py"),
                "--start",
                folder,
                "--backend",
                options.backend,
            ]
            rows = []
            for _ in range(options.rounds):
                done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE)
                rows.append([float(word) for word in done.stdout.split()])
            columns = dict(zip(PARTS, zip(*rows, strict=True), strict=True))
            figures = {part: results_rows.median(column, PARTS[part]) for part, column in columns.items()}
            what = {
                "measured": "cold start",
                "model": name,
                "backend": options.backend,
                "rounds": options.rounds,
            }
            results_rows.append(options.results, what, figures)
            print(
                f"| {name} | {' | '.join(f'{figure.value:.2f}' for figure in figures.values())} |", flush=True
            )


if __name__ == "__main__":
    main()
