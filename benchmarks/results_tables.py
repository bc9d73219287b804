"""What the frames of the pages name: the tables of each page.

Two pages have modules of their own, results_architectures.py and results_lowbit.py; the overview has
results_overview.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import results_architectures
import results_lowbit
import results_overview
from results_limit import PART, with_parts
from results_markdown import Column, Table
from results_rows import Row

Rows = Mapping[str, Sequence[Row]]

OPENVINO = "openvino-int8"
#: Engines of run.py that calibrate.
PREPARED = ("nc-prepared", "nc-prepared-histogram", "ipex-prepared-histogram")
#: Tasks of accuracy.py with labels, or with weights that others trained.
LABELLED = ("mnist", "pitch", "pictures", "similarity", "spam", "faces")
#: Conditions of the main comparison: words, batch, threads.
CONDITIONS = (("batch 1, 2 threads", 1, 2), ("batch 1, 1 thread", 1, 1), ("batch 16, 2 threads", 16, 2))
#: Case of worse.py → what its column of judgement says.
CASES = {
    **dict.fromkeys(("voice", "tagger", "layout", "encoder", "half", "tiny", "speech"), ""),
    "detector": "scores above .3 that stay, %",
    "recordings": "error of a recording 8 times as long, dB",
    "padding": "least cosine of a text alone and in a batch",
}


def _beside_openvino() -> list[Column]:
    columns = []
    for words, batch, threads in CONDITIONS:
        here = {"batch": batch, "threads": threads}
        columns += [
            Column(f"{words}: nc-native ms", "latency", 1, {**here, "engine": "nc-native"}),
            Column("of the limit", PART, None, {**here, "engine": "nc-native"}),
            Column("openvino-int8 ms", "latency", 1, {**here, "engine": OPENVINO}),
            Column("speed", "speed", 2, {**here, "engine": "nc-native"}, mean=True),
        ]
    return columns


def _engines(*names: str) -> list[Column]:
    return [Column(name, "speed", 2, {"engine": name}, beside=("latency", PART)) for name in names]


def _same(digits: int | None, *headers: str) -> list[Column]:
    """Return columns whose headers are names of figures, with their units."""
    return [Column(header, header.partition(", ")[0], digits) for header in headers]


#: Sections that the page has only once there are rows.
_HEADED = {
    "serving-mixed": """## Texts of mixed lengths

Batches of 32 texts, in random order and sorted by length. A padded batch has "padded / real" tokens for each
real one. sentence-transformers tokenizes, too; the other engines get token ids. The cosine is that of mean
vectors. "-before" is an older state of `nc`.
""",
    "serving-random": """## Random lengths

1 to 32 texts of 3 to 512 tokens in each call, and nothing warm: microseconds of a call for each real token.
""",
}

_MODEL = {"model": "model"}
_LINEAR = {"layer": "layer", "group": "group"}
_BLOCK32 = {"engine": "c int8 block32"}
_ENGINES = (
    "c int8",
    "c int8 block32",
    "c fp32",
    "c bf16",
    "torch int4pack",
    "bf16 GEMM",
    "fp32 GEMM",
    "OpenVINO",
    "ONNX Runtime",
)

_OF_FILES = ("nc", "ik-Q4_1", "ik-Q4_0")

#: File, and name of the part in the frames → the table.
TABLES: dict[str, dict[str, Table]] = {
    "speed": {
        "speed-openvino": Table(
            {"base": OPENVINO, "further": None, "graph": None}, _MODEL, _beside_openvino(), apart=("torch",)
        ),
        "speed-further": Table(
            {"base": OPENVINO, "further": True},
            {
                **_MODEL,
                "batch": "batch",
                "threads": "threads",
                "run": "run",
                "biases": "biases",
                "rounds": "rounds",
            },
            [
                Column("nc-native ms", "latency", 1, {"engine": "nc-native"}),
                Column("of the limit", PART, None, {"engine": "nc-native"}),
                Column("openvino-int8 ms", "latency", 1, {"engine": OPENVINO}),
                Column("speed", "speed", None, {"engine": "nc-native"}),
            ],
        ),
        "speed-rotary": Table(
            {"graph": "of nc"},
            _MODEL,
            [
                Column("nc-native ms", "latency", 1, {"engine": "nc-native"}),
                Column("OpenVINO ms", "latency", 1, {"engine": OPENVINO}),
                Column("speed", "speed", 2, {"engine": "nc-native"}),
            ],
        ),
        "speed-ipex": Table(
            {"base": "nc-int8"},
            _MODEL,
            [
                Column("native ms", "latency", None, {"engine": "nc-native"}),
                Column("of the limit", PART, None, {"engine": "nc-native"}),
                Column("ipex ms", "latency", None, {"engine": "nc-int8"}),
                Column("speed", "speed", 2, {"engine": "nc-native"}, mean=True),
            ],
            by={"threads": "threads", "rounds": "rounds", "ONEDNN_MAX_CPU_ISA": "limit"},
            apart=("torch",),
        ),
        "speed-recipes": Table(
            {"base": "nc-native"},
            _MODEL,
            _engines(
                "nc-native",
                "nc-dynamic",
                "nc-percentile-dynamic",
                "nc-bf16",
                "inductor-bf16",
                "zentorch-dynamic",
            ),
            by={"batch": "batch"},
            apart=("torch",),
        ),
        "speed-eager": Table(
            {"base": "eager"},
            _MODEL,
            _engines(
                "eager",
                "nc-native",
                "nc-native-bf16",
                "nc-native-compiled",
                "nc-pt2",
                "nc-int8",
                "ipex-fp32",
                "ipex-int8",
                "inductor-int8",
                OPENVINO,
                "onnxruntime-int8",
            ),  # fmt: skip
            by={"batch": "batch"},
            apart=("torch",),
        ),
    },
    "serving": {
        "serving-cold": Table(
            {"measured": "cold start"},
            _MODEL,
            [
                Column("load and first call, s", "load and first call", 2, spread=True),
                Column("imports, s", "imports", None, spread=True),
                Column("memory, × weights.safetensors", "memory", 2),
            ],
        ),
        "serving-openvino": Table(
            {"measured": "cold start beside OpenVINO"},
            {**_MODEL, "engine": "engine"},
            [
                Column("read, or check and lower, s", "read, or check and lower", 2),
                *_same(2, "compile, s", "first call, s", "together, s"),
            ],
        ),
        "serving-throughput": Table(
            {"measured": "throughput"},
            {**_MODEL, "threads": "threads", "processes": "processes"},
            [
                Column("calls per second, × one", "throughput", 2, spread=True),
                Column("calls per second of one", "one thread", None, spread=True),
            ],
        ),
        "serving-mixed": Table(
            {"measured": "mixed lengths"},
            {"engine": "engine"},
            [
                Column("texts/s", "texts", None, spread=True),
                Column("× fp32", "speed", 2),
                Column("CPU ms per text", "CPU", None),
                Column("mean cosine to fp32", "cosine", 5),
                Column("worst", "worst cosine", 4),
                Column("padded / real tokens", "padding", 2),
            ],
            by={"": "model", "texts:": "texts", "in the order": "order", "threads:": "threads"},
        ),
        "serving-random": Table(
            {"measured": "random lengths"},
            {"engine": "engine"},
            [
                *_same(None, "p50, µs per real token", "p99"),
                Column("memory after a tenth of the calls, MB", "early memory", 0),
                Column("after all", "memory", 0),
            ],
            by={"": "model", "threads:": "threads", "calls:": "calls"},
        ),
        "serving-sizes": Table(
            {"measured": "new sizes"},
            _MODEL,
            [
                Column("first call: ms more", "first call", None, spread=True),
                Column("second call: ms more, at most", "second call", None),
                Column("whole first call, ms", "whole first call", None, spread=True),
                Column("whole second call, ms", "whole second call", None, spread=True),
            ],
        ),
    },
    "preparation": {
        "preparation-int8": Table(
            {"measured": "prepare and convert"},
            {**_MODEL, "backend": "backend"},
            [
                *_same(1, "prepare, s", "convert, s", "together, s"),
                Column("extra memory, MB", "extra memory", 0),
                Column("extra memory, × fp32 bytes", "relative memory", 2),
            ],
        ),
        "preparation-calibration": Table(
            {"measured": "calibration call"},
            {"flow": "flow"},
            [
                Column(name, "time", None, {"model": name}, spread=True)
                for name in ("hf-resnet50", "bert-base", "minilm", "hf-mobilenet_v2", "hf-vit-b16")
            ],
        ),
        "preparation-speed": Table(
            {"base": "eager", "engine": PREPARED},
            _MODEL,
            _engines(*PREPARED),
            apart=("torch",),
        ),
        "preparation-files": Table(
            {"measured": "low-bit from files"},
            {
                **_MODEL,
                "format": "format",
                "solver": "solver",
                "calibration": "tokens",
                "threads": "threads",
                "blocks": "blocks",
            },
            [*_same(0, "peak, MB", "bound, MB", "time, s"), Column("per block, s", "time per block", 0)],
        ),
        "preparation-memory": Table(
            {"measured": "low-bit in memory"},
            {"range rule (`w_algo`)": "w_algo", "format": "format", "threads": "threads"},
            [Column("s per 1e9 weights", "time", 0)],
        ),
    },
    "kernels": {
        "kernels-rate": Table(
            {"measured": "rate"},
            {"threads": "threads"},
            [*_same(0, "int8", "fp32"), Column("function of nc in C, int8", "function in C", 0, spread=True)],
        ),
        "kernels-limit": Table(
            {"measured": "limit"},
            {"threads": "threads"},
            [Column(kind, kind, 0) for kind in ("int8", "bf16", "fp32")],
        ),
        "kernels-ceiling": Table(
            {"measured": "ceiling"},
            {**_MODEL, "batch": "batch"},
            [
                Column("1e9 multiply-adds", "work", 2),
                *_same(None, "at least, ms", "at the limit, ms"),
                Column("eager fp32, ms", "eager", 1),
                Column("speed at most, × eager", "speed at most", None),
            ],
        ),
        "kernels-linears": Table(
            {"measured": "share of linears"},
            {**_MODEL, "batch": "batch", "threads": "threads"},
            [Column("linears, ms", "linears", None), Column("whole call, ms", "call", None)],
        ),
        "kernels-steps": Table(
            {"measured": "steps of bert-base"},
            {"step": "step"},
            _same(None, "nc-native, ms", "OpenVINO, ms"),
        ),
        "kernels-products": Table(
            {"measured": "product"},
            {"product": "product"},
            _same(0, "oneDNN, µs", "function in C, µs"),
        ),
        "kernels-attention": Table(
            {"measured": "attention"},
            {"layer": "layer"},
            _same(0, "scores, µs", "softmax, µs", "sums of values, µs", "together, µs", "function in C, µs"),
        ),
        "kernels-attention-model": Table(
            {"measured": "attention in the model"},
            {**_MODEL, "batch": "batch", "ONEDNN_MAX_CPU_ISA": "limit"},
            _same(1, "parts, ms", "function in C, ms"),
        ),
        "kernels-image": Table(
            {"measured": "convolution of an image"},
            {"window": "window", "batch": "batch"},
            _same(0, "AMX, µs", "VNNI, µs"),
        ),
        "kernels-softmax": Table(
            {"measured": ("softmax", "softmax in the caches")},
            {"sizes": "sizes", "threads": "threads"},
            _same(None, "oneDNN", "function in C"),
            by={"": "measured"},
        ),
    },
    "accuracy": {
        "accuracy-minilm": Table(
            {"measured": "accuracy", "task": "minilm"},
            {"flow": "flow", "backend": "backend", "int8 products": "int8 products"},
            [
                Column("mean cosine", "mean cosine", None),
                Column("worst cosine", "worst cosine", 4),
                *_same(1, "same neighbour, %", "SQNR, dB"),
            ],
        ),
        "accuracy-noise": Table(
            {"measured": "noise"},
            {"noise on the fp32 embeddings": "noise"},
            [Column("same neighbour, %", "same neighbour", 1, spread=True)],
        ),
        "accuracy-digits": Table(
            {"measured": "accuracy", "task": "digits"},
            {"flow": "flow", "int8 products": "int8 products"},
            [
                Column("accuracy, %", "accuracy", 2),
                Column("changed answers", "changed answers", 0),
                Column("SQNR, dB", "SQNR", 1),
            ],
        ),
        "accuracy-lm": Table(
            {"measured": "accuracy", "task": "lm"},
            {"flow": "flow", "int8 products": "int8 products"},
            [
                Column("perplexity", "perplexity", 4),
                Column("more than fp32, %", "more than fp32", 2),
                Column("SQNR, dB", "SQNR", 1),
            ],
        ),
        "accuracy-tasks": Table(
            {"measured": "accuracy", "task": LABELLED},
            {"flow": "flow"},
            [
                Column(task, "difference to fp32", None, {"task": task}, beside=("SQNR", "speed"))
                for task in LABELLED
            ],
        ),
        "accuracy-recurrent": Table(
            {"measured": "recurrent"},
            {"engine": "engine", "int8 products": "int8 products"},
            [
                Column("errors, %", "errors", 2, beside=("standard error",)),
                Column("more than fp32, %", "more errors"),
                Column("SQNR, dB", "SQNR", 1),
                Column("one: speed, × fp32", "speed, one", 2),
                Column("many: speed, × fp32", "speed, many", 2),
            ],
            by={"": "model", "errors:": "metric"},
        ),
        "accuracy-operators": Table(
            {"measured": "sensitivity"},
            {"of": "of", "in int8": "operators"},
            [Column("1 - mean cosine, 1e-4", "loss", None)],
        ),
    },
    "worse": {
        f"worse-{case}": Table(
            {"measured": "worse", "case": case},
            {"tool": "tool"},
            [
                Column("ms", "time", 1),
                Column("× fp32", "speed", 2, spread=True),
                Column("error, dB", "error", 1),
                Column(judged, "judged", None),
                Column("int8 products", "int8 products", None),
            ],
        )
        for case, judged in CASES.items()
    },
    "low-bit-speed": {
        "tokens": Table(
            {"measured": "tokens", "further": None},
            {**_MODEL, "engine": "engine", "rounds": "rounds"},
            [
                Column("prefill, tokens/s", "prefill", 0),
                Column("× llama.cpp", "prefill speed", 2),
                Column("decode, tokens/s", "decode", 0),
                Column("× llama.cpp", "decode speed", 2),
            ],
        ),
        "batches": Table(
            {"measured": "batches of tokens"},
            {**_MODEL, "work": "work"},
            [
                *(Column(f"{name}, ms", "CPU", 1, {"engine": name}) for name in _OF_FILES),
                *(Column(f"nc × {name}", "time", 2, {"engine": name}) for name in _OF_FILES[1:]),
            ],
            by={"NC_MAX_ISA": "limit"},
        ),
        "speech": Table(
            {"measured": "speech"},
            {"recordings": "recordings", "count": "count", "engine": "engine"},
            [
                Column("word errors, %", "word errors", 2),
                Column("more than fp32, points", "more than fp32", 2),
                Column("standard error", "standard error", 2),
                Column("× fp32", "speed", 2),
            ],
        ),
        "translation": Table(
            {"measured": "translation"},
            {"model": "model", "batch": "batch", "engine": "engine"},
            [
                Column("first token, ms", "first", 1),
                Column("each step, ms", "step", 2),
                Column("× fp32", "speed", 2),
            ],
        ),
        "tokens-further": Table(
            {"measured": "tokens", "further": True},
            {**_MODEL, "run": "run", "engine": "engine"},
            [Column("decode, tokens/s", "decode", 0), Column("× llama.cpp", "decode speed", 2)],
        ),
        "linear": Table(
            {"measured": "linear"},
            _LINEAR,
            [
                *(Column(name, "time", 0, {"engine": name}) for name in _ENGINES),
                Column("× the faster of OpenVINO and ONNX Runtime", "beside others", None, _BLOCK32),
                Column("× OpenVINO", "beside OpenVINO", None, _BLOCK32, spread=True),
                Column("× ONNX Runtime", "beside ONNX Runtime", None, _BLOCK32, spread=True),
                Column("% of the read bandwidth", "bandwidth", 0, _BLOCK32),
            ],
            by={"rows": "rows", "threads": "threads", "ONEDNN_MAX_CPU_ISA": "limit"},
        ),
        "beside-gemm": Table(
            {"measured": "beside a GEMM"},
            {"layer": "layer", "rows": "rows", "kernel": "engine"},
            [Column("speed, × GEMM", "speed", 2, spread=True)],
        ),
        "huge-pages": Table(
            {"measured": "huge pages"},
            _LINEAR,
            [
                Column("pages of 4 KB, µs", "time", 0, {"pages": "pages of 4 KB"}),
                Column("huge pages of 2 MB, µs", "time", 0, {"pages": "huge pages"}),
            ],
        ),
        "crossover": Table(
            {"measured": "crossover"},
            {"rows": "rows"},
            [
                Column(f"`{name}`", "ratio", 2, {"engine": name})
                for name in ("c int8", "c int8 block32", "c fp32", "c bf16", "c bf16 in fp32")
            ],
            by={"": "layer"},
        ),
    },
}


def _table(file: str, name: str, table: Table) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        made = table.render(with_parts(rows) if file == "speed" else rows[file])
        return f"{_HEADED[name]}\n{made}" if made and name in _HEADED else made

    return text


#: Name in a frame → what gives its text.
PARTS: dict[str, Callable[[Rows], str]] = {
    **{name: _table(file, name, table) for file, tables in TABLES.items() for name, table in tables.items()},
    **results_architectures.PARTS,
    **results_lowbit.PARTS,
    **results_overview.PARTS,
}
