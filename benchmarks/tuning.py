"""What `nc/kernels/tuning.py` was chosen by, measured again on this machine.

python benchmarks/tuning.py [elements] [threads] [low_bit_rows] [int8_attention]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
import unittest.mock
from collections.abc import Callable

import torch

import nc
from nc.backends.native.operators import int8_attention as operator
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.row_linears import CODES, TILE, code, pack
from nc.kernels import tuning
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import call_once, call_packed
from nc.kernels.c_code.isas import NUMBERS
from nc.kernels.low_bit.compiled import C_INT8
from nc.process.unavailable import Unavailable


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


def low_bit_rows() -> None:
    """Print linears with 8-bit and 4-bit weights and int8 activations, by their kernel and by that of rows.

    `LOW_BIT_ROWS` is the number of rows from where the product of rows takes no longer, with what it saves
    besides: codes that several linears share, activations and sums.
    """
    print("dtype  rows  inputs  outputs  c int8 µs   rows µs")
    sizes = ((768, 768), (768, 3072), (3072, 768), (2048, 2048))
    for dtype, (inputs, outputs), count in itertools.product(("int8", "int4"), sizes, (1, 4, 8, 16, 64, 512)):
        x = torch.randn(count, inputs)
        model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False)).eval()
        config = nc.WeightOnlyConfig(dtype, group_size=-1, act_dtype="int8", w_algo="minmax")
        weight = nc.quantize(model, config, backend="native", measure=False)[0].packed
        layout = C_INT8.pack(weight)
        assert C_INT8.linear is not None
        times = microseconds(
            functools.partial(C_INT8.linear, x, layout, weight), _of_rows(x, weight.unpacked(), outputs)
        )
        print(f"{dtype}  {count:4d}  {inputs:6d}  {outputs:7d}  " + " ".join(f"{t:9.1f}" for t in times))


def int8_attention() -> None:
    """Print attention of padded batches in C and by oneDNN, 12 heads on one thread.

    `INT8_ATTENTION` has the instruction sets for which C is faster. NC_MAX_ISA and ONEDNN_MAX_CPU_ISA choose
    one.
    """
    torch.set_num_threads(1)
    found = operator.isas()
    print(f"width  keys  c {found[0]} µs  oneDNN µs")
    for width, keys in itertools.product((32, 64), (64, 128, 256)):
        inputs = tuple(torch.randn(8, 12, keys, width) * width**-0.25 for _ in range(3))
        calls = []
        for isas in (found, ()):
            row = dataclasses.replace(tuning.INT8_ATTENTION, value=isas)
            with unittest.mock.patch.object(tuning, "INT8_ATTENTION", row):
                model = nc.quantize(
                    _Attention().eval(),
                    nc.StaticQuantConfig(),
                    lambda prepared, inputs=inputs: prepared(*inputs),
                    example_inputs=inputs,
                    backend="native",
                )
                model(*inputs)
            calls.append(functools.partial(model, *inputs))
        print(f"{width:5d}  {keys:4d}  " + "  ".join(f"{t:9.1f}" for t in microseconds(*calls)))


class _Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT, -1) @ v


def _of_rows(x: torch.Tensor, codes: torch.Tensor, outputs: int) -> Callable[[], object]:
    """Return a call that rounds rows and multiplies them; which weights they are takes no time."""
    found = code(CODES)
    if isinstance(found, Unavailable):
        raise SystemExit(found.reason)
    packed, sums = pack(CODES, codes.view(torch.int8))
    factor, result = torch.rand(packed.shape[0] * TILE), torch.empty(len(x), outputs)
    memory = torch.empty(CODES.held(*x.shape), dtype=torch.uint8)
    sizes: dict[str, abi.Value] = {"rows": len(x), "inputs": x.shape[1], "isa": NUMBERS[found.isa]}
    sizes["threads"] = torch.get_num_threads()
    rounded = found.rounds.packed(sizes | {"stride": x.shape[1], "symmetric": True, "per_row": True})
    how = {"outputs": outputs, "bf16": False, "alpha": 0.0, "beta": 0.0}
    product = found.product.packed(sizes | how | {"activation": abi.ACTIVATION.number("identity")})

    def call() -> None:
        call_packed(found.rounds, rounded, [memory, x])
        call_packed(found.product, product, [result, memory, packed, sums, factor, factor])

    return call


PARTS = {
    "elements": elements,
    "threads": threads,
    "low_bit_rows": low_bit_rows,
    "int8_attention": int8_attention,
}


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
