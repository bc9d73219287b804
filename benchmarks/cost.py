"""What prepare and convert cost.

Seconds, and memory beyond what the fp32 model takes, each model in a process of its own.

python benchmarks/cost.py [--models hf-resnet50 bert-base] [--results results/preparation.jsonl]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import results_rows
from models import NAMES
from results_rows import Figure

HERE = Path(__file__).parent
#: Figure → its unit.
UNITS = {
    "prepare": "s",
    "convert": "s",
    "together": "s",
    "extra memory": "MB",
    "relative memory": "x fp32 bytes",
}
BACKEND = "ipex"


def _status(field: str) -> float:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith(field)
    )
    return float(line.split()[1]) * 1024


def measure(name: str, threads: int) -> dict[str, float]:
    """Return a number for each of `UNITS`.

    Calibration is one batch, and is not counted. Memory is the peak over what a warm fp32 model and imported
    engine take.
    """
    import torch
    from models import build

    import nc
    from nc.backends.ipex.quiet import import_ipex

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    model, inputs = build(name)
    with torch.no_grad():
        model(**inputs)
    import_ipex()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # start the peak anew
    ticks = [time.perf_counter()]
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=inputs, backend=BACKEND)
    ticks.append(time.perf_counter())
    prepared(**inputs)
    ticks.append(time.perf_counter())
    nc.convert(prepared, measure=False)
    ticks.append(time.perf_counter())
    extra = _status("VmHWM") - before
    size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    prepare, convert = ticks[1] - ticks[0], ticks[3] - ticks[2]
    numbers = (prepare, convert, prepare + convert, extra / 1e6, extra / size)
    return dict(zip(UNITS, map(results_rows.rounded, numbers), strict=True))


def main() -> None:
    """Print a Markdown table, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--threads", type=int, default=2)
    results_rows.add_option(parser)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row, options.threads)))
        return
    print(
        f"| model | {' | '.join(f'{part}, {unit}' for part, unit in UNITS.items())} "
        f"|\n{'|---' * (len(UNITS) + 1)}|"
    )
    for name in options.models:
        command = [sys.executable, str(HERE / "cost.py"), "--row", name, "--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr[-200:]!r} |", flush=True)
            continue
        numbers = json.loads(done.stdout.strip().splitlines()[-1])
        figures = {part: Figure(number, UNITS[part]) for part, number in numbers.items()}
        what = {
            "measured": "prepare and convert",
            "model": name,
            "backend": BACKEND,
            "threads": options.threads,
        }
        results_rows.append(options.results, what, figures, ("intel-extension-for-pytorch", "transformers"))
        print(f"| {name} | {' | '.join(str(number) for number in numbers.values())} |", flush=True)


if __name__ == "__main__":
    main()
