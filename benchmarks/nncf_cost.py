"""What NNCF's calibration costs per sample, in times of OpenVINO's fp32 inference.

In the environment of `make setup-peers`.

python benchmarks/nncf_cost.py [--models hf-resnet50 bert-base] [--results results/preparation.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import nncf
import openvino
import results_rows
import torch
from models import build

_FEW, _MANY = 5, 45
#: The line of docs/results/preparation.md.
FLOW = "NNCF with OpenVINO, against OpenVINO's fp32"


def fp32_ms(run: Callable[[], Any], rounds: int = 30) -> float:
    """Median latency in ms."""
    times = []
    for _ in range(rounds):
        tick = time.perf_counter()
        run()
        times.append((time.perf_counter() - tick) * 1e3)
    return statistics.median(times)


def per_sample_ms(model: Any, sample: dict[str, Any], transformer: bool) -> float:
    """Return what a sample more costs `nncf.quantize`, without bias correction.

    What does not grow with the data cancels out.
    """
    options = {"model_type": nncf.ModelType.TRANSFORMER} if transformer else {}
    options["advanced_parameters"] = nncf.AdvancedQuantizationParameters(disable_bias_correction=True)

    def seconds(count: int) -> float:
        tick = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
            nncf.quantize(model, nncf.Dataset([sample] * count), subset_size=count, **options)
        return time.perf_counter() - tick

    return (seconds(_MANY) - seconds(_FEW)) / (_MANY - _FEW) * 1e3


@torch.no_grad()
def main() -> None:
    """Print a Markdown table, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["hf-resnet50", "bert-base"])
    parser.add_argument("--threads", type=int, default=2)
    results_rows.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | OpenVINO fp32, ms | NNCF per sample, ms | ratio |\n|---|---|---|---|")
    for name in options.models:
        model, inputs = build(name)
        converted = openvino.convert_model(model, example_input=dict(inputs))
        settings = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(converted, "CPU", settings)
        sample = {key: value.numpy() for key, value in inputs.items()}
        per_sample_ms(converted, sample, "bert" in name)  # the first run loads what later ones have
        times = [fp32_ms(lambda c=compiled, s=sample: c(s))]
        samples = [per_sample_ms(converted, sample, "bert" in name) for _ in range(2)]
        times.append(fp32_ms(lambda c=compiled, s=sample: c(s)))
        fp32, each = statistics.mean(times), statistics.mean(samples)
        print(f"| {name} | {fp32:.1f} | {each:.1f} | {each / fp32:.2f} |", flush=True)
        figure = results_rows.median([sample / fp32 for sample in samples], "x OpenVINO fp32")
        what = {
            "measured": "calibration call",
            "model": name,
            "engine": "nncf",
            "flow": FLOW,
            "threads": options.threads,
        }
        results_rows.append(options.results, what, {"time": figure}, ("nncf", "openvino"))


if __name__ == "__main__":
    main()
