"""Speed as ratios.

Every engine in its own process, all processes interleaved in rounds of random order, medians of the rounds'
ratios.

python benchmarks/run.py [--models hf-resnet50 bert-base] [--engines eager nc-int8] [--rounds 15]
    [--results results/speed.jsonl]

Speeds are relative to the first engine of `--engines`.
"""

from __future__ import annotations

import argparse
import random
import sys

import results_rows
from engines import DEFAULT, ENGINES
from models import NAMES
from results_rows import Figure
from worker import Worker

#: Packages of engines and models, where they are installed.
PACKAGES = ("transformers", "intel-extension-for-pytorch", "torchao", "openvino", "nncf", "onnxruntime")


def measure_model(
    model: str, engines: list[str], rounds: int, runs: int, threads: int, batch: int
) -> dict[str, dict[str, Figure]]:
    """Per engine: latency in ms, and speed relative to the first engine of the same round.

    Medians over the rounds.
    """
    workers: dict[str, Worker] = {}
    try:
        for engine in engines:  # started one after the other: a start-up must not disturb another's
            worker = Worker("worker.py", engine, model, threads, batch)
            seconds = worker.ready()
            if seconds is None:
                print(f"  {model}: {engine} could not be started: {worker.reason()}", file=sys.stderr)
                worker.stop()
                continue
            print(f"  {model}: {engine} ready after {seconds:.1f} s", file=sys.stderr)
            workers[engine] = worker
        latencies: dict[str, list[float]] = {engine: [] for engine in workers}
        order = random.Random(0)
        for _ in range(rounds):
            for engine in order.sample(
                list(workers), len(workers)
            ):  # whoever runs behind a slow engine starts with cold caches
                latencies[engine].append(workers[engine].measure(runs))
    finally:
        for worker in workers.values():
            worker.stop()
    base = latencies[engines[0]]
    return {
        engine: {
            "latency": results_rows.median(values, "ms"),
            "speed": results_rows.median(
                [b / v for b, v in zip(base, values, strict=True)], f"x {engines[0]}"
            ),
        }
        for engine, values in latencies.items()
    }


def cell(figures: dict[str, Figure]) -> str:
    """Return the speed, and the latency in parentheses."""
    return f"{figures['speed'].value:.2f} ({figures['latency'].value:.1f})"


def main() -> None:
    """Measure, print a Markdown table, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--engines", nargs="+", default=list(DEFAULT), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5, help="calls of one engine in one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    results_rows.add_option(parser)
    options = parser.parse_args()
    lines = [
        f"{options.threads} threads, batch {options.batch}, {options.rounds} interleaved rounds of "
        f"{options.runs} calls; speed relative to {options.engines[0]} (median latency in ms)",
        "",
        "| model | " + " | ".join(options.engines) + " |",
        "|---" * (len(options.engines) + 1) + "|",
    ]
    for model in options.models:
        results = measure_model(
            model, options.engines, options.rounds, options.runs, options.threads, options.batch
        )
        conditions = {
            "batch": options.batch,
            "threads": options.threads,
            "rounds": options.rounds,
            "calls": options.runs,
        }
        for engine, figures in results.items():
            what = {"model": model, "engine": engine, "base": options.engines[0], **conditions}
            results_rows.append(options.results, what, figures, PACKAGES)
        cells = [cell(results[e]) if e in results else "-" for e in options.engines]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
