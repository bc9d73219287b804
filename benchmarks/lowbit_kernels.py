"""One linear with low-bit weights, by our kernels, torch's, OpenVINO's and ONNX Runtime's.

Microseconds, GB/s, percent of what can be read.

    .venv-native/bin/python benchmarks/lowbit_kernels.py [--threads 2] [--rows 1 128]
        [--results results/low-bit-speed.jsonl]

OpenVINO and ONNX Runtime (with `onnx`) have rows where they can be imported. Each engine goes through several
copies of the layer, which together are larger than the caches, as a model is. Engines take turns; a row has
the median over the rounds, and the median of its ratios to `ours` in the same round. `--copies 1` measures
one layer again and again: it may stay in a cache.

    .venv-native/bin/python benchmarks/lowbit_kernels.py --crossover --rows 32 128 512 2048 [--layers
    2048x2048]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import results_rows
import torch
from results_rows import Figure

import nc
from nc.backends.low_bit.engine import set_backend
from nc.kernels.low_bit.aten import INT4PACK
from nc.kernels.low_bit.bag import BAG
from nc.kernels.low_bit.blocks import BLOCKS, BLOCKS_BF16
from nc.kernels.low_bit.compiled import C_BF16, C_BF16_IN_FP32, C_FP32, C_INT8, C_INT8_BLOCK32, KERNELS
from nc.kernels.low_bit.compiled_blocks import C_BLOCKS, C_BLOCKS_BF16, C_BLOCKS_INT8
from nc.kernels.low_bit.kernel import LowBitKernel
from nc.nn import QuantLinear
from nc.numerics.packed_weight import PackedWeight
from nc.profiling.bandwidth import read_bandwidth

#: Bytes that all copies of a layer have together.
_ALL = 96 << 20
#: Idle threads of some engines spin for so long, and would take the time of the next one.
_REST_S = 0.02
Call = Callable[[torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Engine:
    """One row: `make` gives what computes one copy of the layer."""

    name: str
    make: Callable[[PackedWeight], Call]
    dtype: torch.dtype = torch.float32
    most_rows: int = 1 << 30


def ours(act_dtype: str) -> Engine:
    """Return the layer as users have it."""

    def make(weight: PackedWeight) -> Call:
        layer = QuantLinear(weight, None, act_dtype)
        set_backend(layer, "native")
        return layer

    name = next((row.name for row in KERNELS if act_dtype in row.activations), act_dtype)
    return Engine(f"ours, {name}", make, torch.bfloat16 if act_dtype == "bf16" else torch.float32)


def kernel(row: LowBitKernel, dtype: torch.dtype = torch.float32) -> Engine:
    """Return a kernel of torch by itself."""
    assert row.linear is not None
    linear = row.linear

    def make(weight: PackedWeight) -> Call:
        layout = row.pack(weight)
        return lambda x: linear(x, layout, weight)

    return Engine(f"torch, {row.name}", make, dtype, row.max_rows)


def gemm(dtype: torch.dtype) -> Engine:
    """Return the weight dequantized before."""

    def make(weight: PackedWeight) -> Call:
        values = weight.dequantize().to(dtype)
        return lambda x: torch.nn.functional.linear(x, values)

    return Engine(f"torch, {str(dtype).removeprefix('torch.')} GEMM", make, dtype)


def openvino(activations: int) -> Engine:
    """Weights in u4 with zero point 8 and scales in fp16.

    Int8 activations in groups of `activations`, 0: fp32.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    def make(weight: PackedWeight) -> Call:
        (outputs, inputs), scale = weight.shape, weight.params.scale
        groups = scale.shape[1]
        codes = np.ascontiguousarray(weight.codes.numpy().reshape(-1))
        constant = op.constant(
            ov.Tensor(codes, [outputs, groups, inputs // groups], ov.Type.u4), shared_memory=False
        )
        zero = op.constant(
            ov.Tensor(np.array([0x88], dtype=np.uint8), [1, 1, 1], ov.Type.u4), shared_memory=False
        )
        shifted = op.subtract(op.convert(constant, "f16"), op.convert(zero, "f16"))
        values = op.multiply(shifted, op.constant(scale.half().unsqueeze(-1).numpy()))
        values = op.convert(op.reshape(values, [outputs, inputs], special_zero=False), "f32")
        x = op.parameter([-1, inputs], ov.Type.f32)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": activations,
            "PERFORMANCE_HINT": "LATENCY",
        }
        model = ov.Model([op.matmul(x, values, transpose_a=False, transpose_b=True)], [x])
        request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

        def call(rows: torch.Tensor) -> Any:
            request.set_input_tensor(ov.Tensor(rows.numpy(), shared_memory=True))
            request.infer()
            return torch.from_numpy(request.get_output_tensor().data)

        return call

    return Engine(f"OpenVINO, {f'int8 in {activations}' if activations else 'fp32'}", make)


def onnx_runtime(level: int) -> Engine:
    """MatMulNBits with an `accuracy_level`: 4 is int8 activations, 1 is fp32."""
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    def make(weight: PackedWeight) -> Call:
        (outputs, inputs), groups = weight.shape, weight.scale.shape[1]
        block = inputs // groups
        given = {
            "B": weight.codes.reshape(outputs, groups, block // 2).numpy(),
            "scales": weight.params.scale.reshape(-1).numpy(),
        }
        attributes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block, "accuracy_level": level}
        node = helper.make_node("MatMulNBits", ["x", *given], ["y"], domain="com.microsoft", **attributes)
        sizes = [
            helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["m", size])
            for n, size in (("x", inputs), ("y", outputs))
        ]
        graph = helper.make_graph(
            [node], "g", sizes[:1], sizes[1:], [numpy_helper.from_array(v, n) for n, v in given.items()]
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.force_spinning_stop", "1"
        )  # its idle threads would disturb the other engines
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])

    return Engine(f"ONNX Runtime, level {level}", make)


def engines(group: int, dtype: str) -> Iterator[Engine]:
    """All that can be imported and take weights of that format."""
    yield ours("int8")
    yield ours("int8_block32")
    yield ours("fp32")
    yield ours("bf16")
    yield kernel(BLOCKS)
    if dtype == "int4":
        yield kernel(BAG)
    if dtype == "int4" and group in (INT4PACK.groups or ()):
        yield kernel(INT4PACK, torch.bfloat16)
    yield gemm(torch.bfloat16)
    yield gemm(torch.float32)
    for make, settings, needed in (
        (openvino, (32, 0), ("openvino",)),
        (onnx_runtime, (4, 1), ("onnx", "onnxruntime")),
    ):
        if dtype == "int4" and all(map(importlib.util.find_spec, needed)):
            yield from [make(setting) for setting in settings]


def layer(outputs: int, inputs: int, group: int, dtype: str) -> PackedWeight:
    """Return a random layer with symmetric weights of a format.

    Its scales have 16 bits, as those of OpenVINO.
    """
    model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False)).eval()
    config = nc.WeightOnlyConfig(dtype, group_size=group, w_algo="minmax", scale_dtype="fp16")
    (found,) = nc.quantize(model, config, backend="reference")
    packed: PackedWeight = found.packed
    return packed


def seconds(calls: list[Call], x: torch.Tensor, least: float) -> float:
    """Of one call: the mean over all copies, again until `least` seconds are over."""
    time.sleep(_REST_S)
    calls[-1](x)
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < least:
        for call in calls:
            call(x)
        count += len(calls)
    return (time.perf_counter() - start) / count


def measure(weight: PackedWeight, group: int, rows: int, options: argparse.Namespace) -> None:
    """Print the rows of one layer and one number of rows of activations."""
    outputs, inputs = weight.shape
    copies = options.copies or math.ceil(_ALL / weight.bytes)
    x = torch.randn(rows, inputs)
    exact = x.double() @ weight.dequantize().double().T
    found = [
        engine
        for engine in engines(group, options.weights)
        if rows <= engine.most_rows and options.only in engine.name
    ]
    ready = [(engine, x.to(engine.dtype), [engine.make(weight) for _ in range(copies)]) for engine in found]
    times: dict[str, list[float]] = {engine.name: [] for engine in found}
    for _ in range(options.rounds):
        for engine, given, calls in ready:
            times[engine.name].append(seconds(calls, given, options.seconds))
    limit = read_bandwidth(torch.get_num_threads())
    print(f"\n{outputs} x {inputs}, groups of {group}, M = {rows}, {copies} copies, {limit:.1f} GB/s read\n")
    print(
        "| engine | us | GB/s | % of reading | time / ours int8 | time / ours fp32 | largest error "
        "|\n|---|---|---|---|---|---|---|"
    )
    for engine, given, calls in ready:
        taken = statistics.median(times[engine.name])
        rate = weight.bytes / taken / 1e9
        ratios = [
            f"{statistics.median(a / b for a, b in zip(times[engine.name], base, strict=True)):.2f}"
            if base
            else "-"
            for base in (times.get(f"ours, {row.name}", []) for row in (C_INT8, C_FP32))
        ]
        error = float((calls[0](given).double() - exact).abs().max() / exact.abs().max())
        cells = (
            engine.name,
            f"{1e6 * taken:.0f}",
            f"{rate:.1f}",
            f"{100 * rate / limit:.0f}",
            *ratios,
            f"{error:.1e}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
        what = {
            "measured": "linear",
            "layer": f"{outputs} x {inputs}",
            "group": group,
            "rows": rows,
            "engine": short(engine.name),
        }
        figures = {
            "time": results_rows.median([1e6 * time for time in times[engine.name]], "us"),
            "bandwidth": Figure(round(100 * rate / limit), "% of what can be read"),
        }
        record(options, what, figures)
    found_ours = times.get("ours, c int8 block32")
    for name, figure in (
        ("OpenVINO, int8 in 32", "beside OpenVINO"),
        ("ONNX Runtime, level 4", "beside ONNX Runtime"),
    ):
        if found_ours and name in times:
            ratios = [other / own for other, own in zip(times[name], found_ours, strict=True)]
            what = {
                "measured": "linear",
                "layer": f"{outputs} x {inputs}",
                "group": group,
                "rows": rows,
                "engine": "c int8 block32",
            }
            record(options, what, {figure: results_rows.median(ratios, f"x {short(name)}")})


def record(options: argparse.Namespace, what: dict[str, Any], figures: dict[str, Figure]) -> None:
    """Append a row with the conditions of this run."""
    conditions = {"weights": options.weights, "threads": options.threads, "rounds": options.rounds}
    results_rows.append(options.results, {**what, **conditions}, figures, ("openvino", "onnxruntime"))


def short(name: str) -> str:
    """Return the name of an engine as docs/results/low-bit-speed.md has it."""
    main = {
        "OpenVINO, int8 in 32": "OpenVINO",
        "ONNX Runtime, level 4": "ONNX Runtime",
        "torch, int4pack": "torch int4pack",
    }
    return main.get(
        name,
        name.removeprefix("ours, ")
        .removeprefix("torch, ")
        .replace("bfloat16", "bf16")
        .replace("float32", "fp32"),
    )


def crossover(weight: PackedWeight, group: int, options: argparse.Namespace) -> None:
    """Print for each number of rows how much longer it takes to dequantize blocks for a GEMM.

    `max_rows` of a kernel is where that is 1.
    """
    outputs, inputs = weight.shape
    pairs = [
        (C_INT8, BLOCKS),
        (C_INT8_BLOCK32, BLOCKS),
        (C_FP32, BLOCKS),
        (C_BF16, BLOCKS_BF16),
        (C_BF16_IN_FP32, BLOCKS),
    ]
    pairs += [(C_BLOCKS, BLOCKS), (C_BLOCKS_INT8, BLOCKS), (C_BLOCKS_BF16, BLOCKS_BF16)]
    pairs = [
        (row, other)
        for row, other in pairs
        if not any(r.why_not(weight.form, weight.shape, r.activations[-1]) for r in (row, other))
    ]
    print(
        f"\n{outputs} x {inputs}, groups of {group}, {options.threads} threads: time with blocks / time of "
        "the kernel\n"
    )
    print(f"| rows | {' | '.join(row.name for row, _ in pairs)} |\n{'|---' * (len(pairs) + 1)}|")
    for rows in options.rows:
        cells = []
        for row, other in pairs:
            x = torch.randn(rows, inputs).to(
                torch.bfloat16 if row.activations == ("bf16",) else torch.float32
            )
            own, blocks = (
                [dataclasses.replace(kernel(r), most_rows=rows).make(weight)] for r in (row, other)
            )
            ratios = [
                seconds(blocks, x, options.seconds) / seconds(own, x, options.seconds)
                for _ in range(options.rounds)
            ]
            cells.append(f"{statistics.median(ratios):.2f}")
            what = {
                "measured": "crossover",
                "layer": f"{outputs} x {inputs}",
                "group": group,
                "rows": rows,
                "engine": row.name,
            }
            record(options, what, {"ratio": results_rows.median(ratios, "x dequantized blocks")})
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", default=["2048x2048", "4096x4096", "11008x4096"], help="N x K")
    parser.add_argument("--groups", nargs="+", type=int, default=[64, 128])
    parser.add_argument(
        "--weights", default="int4", help="format of the weights; our kernels take all of them"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of an engine in a round, at least")
    parser.add_argument(
        "--copies", type=int, help="of a layer; default: as many as are larger than the caches"
    )
    parser.add_argument("--only", default="", help="engines with this in their names")
    parser.add_argument(
        "--crossover",
        action="store_true",
        help="our kernels against blocks that are dequantized for a GEMM, by rows",
    )
    results_rows.add_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        for size in options.layers:
            outputs, inputs = map(int, size.split("x"))
            for group in options.groups:
                weight = layer(outputs, inputs, group, options.weights)
                if options.crossover:
                    crossover(weight, group, options)
                for rows in () if options.crossover else options.rows:
                    measure(weight, group, rows, options)


if __name__ == "__main__":
    main()
