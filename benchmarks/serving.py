"""What a server sees.

Calls per second of several threads with one core each, and what the first call with new sizes costs.

    .venv-native/bin/python benchmarks/serving.py [--models minilm hf-resnet50] [--threads 2] [--results
    results/serving.jsonl]

* New sizes: ms of the first and of the second call with sizes that the model was not called with, beyond the
  fastest of five later ones. Before, what is in memory is taken from Python's garbage collector
  (`gc.freeze`), as servers do: a full collection takes 0.3 s in a process with a float model, the quantized
  one and transformers, and would fall into one call or another.
* Throughput: all threads call one model, each with one core. In each round one thread and all of them take
  turns; the number is the median of the rounds' ratios. The row `matrix product` is torch's, of 1024 x 1024
  in fp32: what the machine itself gives.
"""

from __future__ import annotations

import argparse
import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import results_rows
import torch
from models import build
from results_rows import Figure, rounded

NEW_IMAGES = (192, 256, 160, 288, 320)
NEW_LENGTHS = (64, 96, 100, 160, 200)


def quantized(name: str, backend: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a converted model and its inputs."""
    import nc

    model, inputs = build(name)
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=inputs, backend=backend)
    prepared(**inputs)
    return nc.convert(prepared, measure=False), inputs


def calls_per_second(run: Callable[[], Any], threads: int, seconds: float) -> float:
    """Of all threads together, which start and stop together."""
    start, counts = threading.Barrier(threads + 1), [0] * threads
    stop = threading.Event()

    def work(turn: int) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            run()
            start.wait()
            while not stop.is_set():
                run()
                counts[turn] += 1

    workers = [threading.Thread(target=work, args=(turn,)) for turn in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    done, took = sum(counts), time.perf_counter() - began
    stop.set()
    for worker in workers:
        worker.join()
    return done / took


def throughput(run: Callable[[], Any], options: argparse.Namespace) -> dict[str, Figure]:
    """Return calls per second of one thread and of all, and the ratio."""
    rounds = [
        [calls_per_second(run, n, options.seconds) for n in (1, options.threads)]
        for _ in range(options.rounds)
    ]
    one, several = zip(*rounds, strict=True)
    return {
        "one thread": results_rows.median(one, "calls/s"),
        "all threads": results_rows.median(several, "calls/s"),
        "throughput": results_rows.median([several / one for one, several in rounds], "x one thread"),
    }


def other_sizes(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return inputs of sizes that are new to a model: images of other heights, texts of other lengths."""
    if "input_ids" in inputs:
        return {
            str(n): {key: torch.ones(1, n, dtype=value.dtype) for key, value in inputs.items()}
            for n in NEW_LENGTHS
        }
    ((key, image),) = inputs.items()
    return {f"{n} x 224": {key: torch.randn(*image.shape[:2], n, 224)} for n in NEW_IMAGES}


def new_sizes(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Figure]:
    """Return the most that the first and the second call took beyond the fastest later one."""
    extra = []
    for given in other_sizes(inputs).values():
        times = []
        for _ in range(7):
            tick = time.perf_counter()
            model(**given)
            times.append(1e3 * (time.perf_counter() - tick))
        extra.append([times[0] - min(times[2:]), times[1] - min(times[2:])])
    first, second = zip(*extra, strict=True)
    least, most = rounded(min(first)), rounded(max(first))
    return {
        "first call": Figure(most, "ms more", least, most),
        "second call": Figure(rounded(max(second)), "ms more at most"),
    }


def main() -> None:
    """Print two Markdown tables, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["minilm", "bert-base", "hf-resnet50"])
    parser.add_argument("--backend", default="native")
    parser.add_argument("--threads", type=int, default=2, help="one core each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of calls per second")
    results_rows.add_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    models = {name: quantized(name, options.backend) for name in options.models}

    print(f"| model | first call with new sizes, ms more | second |\n{'|---' * 3}|")
    for name, (model, inputs) in models.items():
        gc.collect()
        gc.freeze()
        with torch.no_grad():
            model(**inputs)
            figures = new_sizes(model, inputs)
        first, second = figures.values()
        print(f"| {name} | {first.low:.0f} to {first.high:.0f} | {second.value:.0f} |", flush=True)
        what = {"measured": "new sizes", "model": name, "backend": options.backend, "batch": 1}
        results_rows.append(options.results, what, figures, ("transformers",))

    print(f"\n| model | calls per second, 1 thread | {options.threads} threads | ratio |\n{'|---' * 4}|")
    square = torch.randn(1024, 1024)
    runs: dict[str, Callable[[], Any]] = {"matrix product": lambda: square @ square}
    runs |= {name: functools.partial(model, **inputs) for name, (model, inputs) in models.items()}
    for name, run in runs.items():
        figures = throughput(run, options)
        print(f"| {name} | {' | '.join(str(figure.value) for figure in figures.values())} |", flush=True)
        what = {
            "measured": "throughput",
            "model": name,
            "backend": options.backend,
            "threads": options.threads,
        }
        results_rows.append(options.results, {**what, "rounds": options.rounds}, figures, ("transformers",))


if __name__ == "__main__":
    main()
