"""What prepare and convert cost: seconds, and memory beyond what the fp32 model takes, each model in a process of its own.

python benchmarks/cost.py [--models hf-resnet50 bert-base] [--out table.md]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path

from models import NAMES

HERE = Path(__file__).parent
HEAD = ("| model | prepare s | convert s | together s | extra memory MB | of its fp32 bytes |", "|---|---|---|---|---|---|")


def _status(field: str) -> float:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


def measure(name: str, threads: int) -> str:
    """One row: calibration is one batch, and is not counted. Memory is the peak over what a warm fp32 model and imported engine take."""
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
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=inputs, backend="ipex")
    ticks.append(time.perf_counter())
    prepared(**inputs)
    ticks.append(time.perf_counter())
    nc.convert(prepared, measure=False)
    ticks.append(time.perf_counter())
    extra = _status("VmHWM") - before
    size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    prepare, convert = ticks[1] - ticks[0], ticks[3] - ticks[2]
    return f"| {name} | {prepare:.1f} | {convert:.1f} | {prepare + convert:.1f} | {extra / 1e6:.0f} | {extra / size:.2f} × |"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(measure(options.row, options.threads))
        return
    rows = list(HEAD)
    for name in options.models:
        command = [sys.executable, str(HERE / "cost.py"), "--row", name, "--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
        failed = f"| {name} | failed: {done.stderr[-200:]!r} | | | | |"
        rows.append(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else failed)
        print(rows[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
