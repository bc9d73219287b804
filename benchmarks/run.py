"""Speed as ratios: every engine in its own process, all processes interleaved in rounds of random order, medians of the rounds' ratios.

python benchmarks/run.py [--models hf-resnet50 bert-base] [--engines eager nc-int8] [--rounds 15] [--out table.md]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from pathlib import Path

from engines import DEFAULT, ENGINES
from models import NAMES

HERE = Path(__file__).parent


class Worker:
    """A running worker process."""

    def __init__(self, engine: str, model: str, threads: int, batch: int) -> None:
        command = [sys.executable, str(HERE / "worker.py"), engine, model, str(threads), str(batch)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE
        )

    def ready(self) -> float | None:
        """Seconds until the engine was warm; None when it failed."""
        words = self.process.stdout.readline().split()
        return float(words[1]) if words[:1] == ["ready"] else None

    def measure(self, runs: int) -> float:
        """Median latency in ms of `runs` calls."""
        print(runs, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def measure_model(model: str, engines: list[str], rounds: int, runs: int, threads: int, batch: int) -> dict[str, tuple[float, float]]:
    """Per engine: median latency in ms and the median over rounds of its speed relative to the first engine of the same round."""
    workers: dict[str, Worker] = {}
    try:
        for engine in engines:  # started one after the other: a start-up must not disturb another's
            worker = Worker(engine, model, threads, batch)
            seconds = worker.ready()
            if seconds is None:
                print(f"  {model}: {engine} could not be started", file=sys.stderr)
                worker.stop()
                continue
            print(f"  {model}: {engine} ready after {seconds:.1f} s", file=sys.stderr)
            workers[engine] = worker
        latencies: dict[str, list[float]] = {engine: [] for engine in workers}
        order = random.Random(0)
        for _ in range(rounds):
            for engine in order.sample(list(workers), len(workers)):  # whoever runs behind a slow engine starts with cold caches
                latencies[engine].append(workers[engine].measure(runs))
    finally:
        for worker in workers.values():
            worker.stop()
    base = latencies[engines[0]]
    return {
        engine: (statistics.median(values), statistics.median(b / v for b, v in zip(base, values, strict=True)))
        for engine, values in latencies.items()
    }


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--engines", nargs="+", default=list(DEFAULT), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5, help="calls of one engine in one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    lines = [
        f"{options.threads} threads, batch {options.batch}, {options.rounds} interleaved rounds of {options.runs} calls; speed relative to "
        f"{options.engines[0]} (median latency in ms)",
        "",
        "| model | " + " | ".join(options.engines) + " |",
        "|---" * (len(options.engines) + 1) + "|",
    ]
    for model in options.models:
        results = measure_model(model, options.engines, options.rounds, options.runs, options.threads, options.batch)
        cells = [f"{results[e][1]:.2f} ({results[e][0]:.1f})" if e in results else "-" for e in options.engines]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    print("\n" + text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
