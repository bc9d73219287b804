"""What `nc/kernels/tuning.py` was chosen by, measured again on this machine.

python benchmarks/tuning.py [elements] [dynamic] [threads]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch

import nc
from nc.backends.native.plans import c_functions
from nc.kernels.c_code.calls import call_once


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """Return the median of each, called in turns for about a second."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end or len(times[0]) < 20:
        for call, found in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(found) for found in times]


def elements() -> None:
    """Print how long a sum of two tensors takes in C and in torch.

    `MOST_ELEMENTS` is where both are equal.
    """
    print("elements      C µs  torch µs")
    for bits in range(10, 23, 2):
        x, y = torch.randn(2**bits), torch.randn(2**bits)
        result = torch.empty_like(x)
        f32 = c_functions.DTYPES[torch.float32]
        fields = c_functions.map_fields("add", [2**bits], [f32] * 3, [[1]] * 3)
        function = c_functions.function("map")
        ours, theirs = microseconds(
            functools.partial(call_once, function, fields, [result, x, y]),
            functools.partial(torch.add, x, y, out=result),
        )
        print(f"{2**bits:8d}  {ours:8.1f}  {theirs:8.1f}")


def dynamic() -> None:
    """Print linears in fp32 and with FBGEMM's dynamic kernels, from which `DYNAMIC_COST` is read off."""
    print("rows  inputs  outputs   fp32 µs  per tensor  per token")
    for rows, inputs, outputs in (
        (1, 64, 64), (1, 4096, 4096), (128, 64, 64), (128, 768, 768), (512, 1024, 4096), (4096, 64, 64)
    ):  # fmt: skip
        x = torch.randn(rows, inputs)
        model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).eval()
        calls: list[Callable[[], object]] = [
            functools.partial(torch.nn.functional.linear, x, model[0].weight)
        ]
        for granularity in ("per_tensor", "per_token"):
            config = nc.DynamicQuantConfig(act_granularity=granularity)
            quantized = nc.quantize(model, config, example_inputs=x, backend="native", measure=False)
            calls.append(functools.partial(quantized, x))
        times = microseconds(*calls)
        print(f"{rows:4d}  {inputs:6d}  {outputs:7d}  " + "  ".join(f"{value:9.1f}" for value in times))


def threads() -> None:
    """Print low-bit linears with one thread and with all.

    `WORK_PER_THREAD` is the weights times rows from where all of them are faster.
    """
    most = torch.get_num_threads()
    print(f"weights   1 thread µs  {most} threads µs")
    for width in (64, 128, 256, 384, 512, 1024):
        model = torch.nn.Sequential(torch.nn.Linear(width, width)).eval()
        layer = nc.quantize(
            model, nc.WeightOnlyConfig("int4", group_size=32), backend="native", measure=False
        )[0]
        x = torch.randn(1, width)

        def with_threads(count: int, layer: torch.nn.Module = layer, x: torch.Tensor = x) -> None:
            torch.set_num_threads(count)
            layer(x)

        times = microseconds(functools.partial(with_threads, 1), functools.partial(with_threads, most))
        print(f"{width**2:7d}  {times[0]:11.1f}  {times[1]:12.1f}")


PARTS = {"elements": elements, "dynamic": dynamic, "threads": threads}


def main() -> None:
    """Measure the parts that are named, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    asked = parser.parse_args().parts or list(PARTS)
    if unknown := [name for name in asked if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    for name in asked:
        PARTS[name]()


if __name__ == "__main__":
    main()
