"""How fast int8 can be on this CPU at best.

The limit of the CPU (peak.py), oneDNN's rate on a large product, and the time that a model's multiply-adds
take at the limit.

python benchmarks/ceiling.py [--models hf-resnet50 bert-base] [--results results/kernels.jsonl]

The bound leaves out everything that is not a multiply-add (quantizing, memory, activations, fp32 operators),
so nothing reaches it. A model's eager time divided by it is the speed-up that no int8 engine on this CPU can
pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import peak
import results_rows
import torch
from models import NAMES, build
from results_rows import Figure, rounded
from torch.utils.flop_counter import FlopCounterMode

_SIZE = 1536


def int8_product() -> Callable[[], object]:
    """Compute one int8 linear of `_SIZE`³ multiply-adds by stock PyTorch's oneDNN operator.

    Activations are uint8, weights int8.
    """
    x = torch.randint(0, 128, (_SIZE, _SIZE), dtype=torch.uint8)
    weight = torch.randint(-64, 64, (_SIZE, _SIZE), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, x.shape)
    scales, zeros = torch.ones(_SIZE), torch.zeros(_SIZE, dtype=torch.int64)
    output = (1.0, 0, torch.float32)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scales, zeros, None, *output, "none", [], ""
    )


def fp32_product() -> Callable[[], object]:
    """Return the same in fp32."""
    x, weight = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    return lambda: torch.nn.functional.linear(x, weight)


def best_ms(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Latencies in ms of each, interleaved, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 3):
        for name, run in runs.items():
            tick = time.perf_counter()
            run()
            if round_ >= 3:
                times[name].append((time.perf_counter() - tick) * 1e3)
    return times


@torch.no_grad()
def main() -> None:
    """Measure, print a Markdown table, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    results_rows.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = best_ms({"int8": int8_product(), "fp32": fp32_product()}, options.rounds)
    rate = {
        name: _SIZE**3 / min(times) / 1e6 for name, times in products.items()
    }  # the fastest run: this is a bound
    figures = {name: Figure(rounded(found), "1e9 multiply-adds/s") for name, found in rate.items()}
    results_rows.append(options.results, {"measured": "rate", "threads": options.threads}, figures)
    limits = peak.measured(options.threads, options.results)
    print(
        f"{options.threads} threads, 1e9 multiply-adds per second: int8 {rate['int8']:.0f}, fp32 "
        f"{rate['fp32']:.0f}; limit: int8 {limits['int8']:.0f}\n"
    )
    print("| model | 1e9 multiply-adds | at the limit, ms | eager fp32, ms | speed-up at most |")
    print("|---|---|---|---|---|")
    for name in options.models:
        model, inputs = build(name)
        torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know the fused operator
        with FlopCounterMode(display=False) as counter:
            model(**inputs)
        torch.backends.mha.set_fastpath_enabled(True)
        work = counter.get_total_flops() / 2e9
        eager = statistics.median(best_ms({"eager": lambda m=model, i=inputs: m(**i)}, 10)["eager"])
        bound = 1e3 * work / limits["int8"]
        print(f"| {name} | {work:.2f} | {bound:.1f} | {eager:.1f} | {eager / bound:.1f} |", flush=True)
        figures = {
            "work": Figure(rounded(work), "1e9 multiply-adds"),
            "at the limit": Figure(rounded(bound), "ms"),
            "eager": Figure(rounded(eager), "ms"),
            "speed at most": Figure(rounded(eager / bound), "x eager"),
        }
        what = {"measured": "ceiling", "model": name, "batch": 1, "threads": options.threads}
        results_rows.append(options.results, what, figures, ("transformers",))


if __name__ == "__main__":
    main()
