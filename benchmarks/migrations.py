"""Figures of the migration pages: MiniLM by another tool's own lines, and by nc's, in one process.

    .venv-native/bin/python benchmarks/migrations.py torch
    .venv-onnx/bin/python benchmarks/migrations.py onnxruntime
    .venv/bin/python benchmarks/migrations.py neural_compressor

"torch" is torch.ao.quantization.quantize_dynamic; "onnxruntime" is quantize_dynamic of
onnxruntime.quantization, of a file of torch.onnx.export; "neural_compressor" is its StaticQuantConfig on IPEX
(packages neural-compressor-pt 3.10, pydantic, py-cpuinfo, prettytable, wcwidth, schema, deprecated, wrapt,
psutil and accelerate, in a folder of PYTHONPATH). Each beside nc's DynamicQuantConfig and StaticQuantConfig,
on the backend native. Least ms of one text and of 16 texts of 64 tokens, in turns; the mean and the least
cosine of embeddings of 128 paragraphs to fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nc
from nc.profiling.latency import interleaved

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import minilm

Model = Callable[..., Any]


def by_torch(model: torch.nn.Module) -> Model:
    """Quantize as torch.ao does."""
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def by_onnxruntime(model: torch.nn.Module) -> Model:
    """Export, quantize and run as ONNX Runtime's documents say."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers.modeling_outputs import BaseModelOutput

    x = inputs(2)
    place = tempfile.mkdtemp()
    dims = {name: {0: "rows", 1: "tokens"} for name in x}

    class Hidden(torch.nn.Module):
        """The model with inputs by position."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            return self.model(**given).last_hidden_state

    torch.onnx.export(
        Hidden().eval(),
        tuple(x.values()),
        f"{place}/float.onnx",
        dynamic_axes=dims,
        input_names=list(x),
        dynamo=False,
    )
    quantize_dynamic(f"{place}/float.onnx", f"{place}/int8.onnx", weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(f"{place}/int8.onnx", options, ["CPUExecutionProvider"])

    def run(**given: torch.Tensor) -> Any:
        hidden = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))

    return run


def by_neural_compressor(
    model: torch.nn.Module, x: dict[str, torch.Tensor], run: Callable[..., None]
) -> Model:
    """Quantize statically on IPEX, which Neural Compressor takes where it is imported."""
    import intel_extension_for_pytorch  # noqa: F401
    from neural_compressor.torch.quantization import StaticQuantConfig, convert, prepare
    from transformers.modeling_outputs import BaseModelOutput

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes nc_workspace
        prepared = prepare(model, quant_config=StaticQuantConfig(), example_inputs=x, inplace=False)
        run(prepared)
        found: Any = convert(prepared)
    return lambda **given: BaseModelOutput(last_hidden_state=found(**given)["last_hidden_state"])


def inputs(rows: int) -> dict[str, torch.Tensor]:
    """Return texts of 64 tokens."""
    ids = torch.randint(1000, 20000, (rows, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=("torch", "onnxruntime", "neural_compressor"))
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model, tokenizer = minilm.load_model(), minilm.load_tokenizer()
    calibration, evaluation = (list(minilm.batches(texts, tokenizer)) for texts in minilm.split())
    evaluation = evaluation[:8]
    x = dict(calibration[0])

    def run(prepared: Model) -> None:
        for batch in calibration:
            prepared(**batch)

    peers: dict[str, Callable[[], Model]] = {
        "torch": lambda: by_torch(model),
        "onnxruntime": lambda: by_onnxruntime(model),
        "neural_compressor": lambda: by_neural_compressor(model, x, run),
    }
    made: dict[str, Model] = {"fp32": model, options.peer: peers[options.peer]()}
    made["nc dynamic"] = nc.quantize(
        model, nc.DynamicQuantConfig(), example_inputs=x, backend="native", measure=False
    )
    made["nc static"] = nc.quantize(
        model, nc.StaticQuantConfig(), run, example_inputs=x, backend="native", measure=False
    )
    with torch.no_grad():
        expected = minilm.embed(model, evaluation)
        cosines = {name: (minilm.embed(one, evaluation) * expected).sum(-1) for name, one in made.items()}
        least: dict[str, list[float]] = {name: [] for name in made}
        for rows in (1, 16):
            given = inputs(rows)
            calls = {name: lambda one=one, given=given: one(**given) for name, one in made.items()}
            times = list(interleaved(calls, options.rounds))
            for name, found in least.items():
                found.append(min(row[name] for row in times))
    for name, (one, many) in least.items():
        cosine = cosines[name]
        near = f"cosine {cosine.mean():.4f}, least {cosine.min():.4f}"
        print(f"{name:17} {one:7.2f} ms   {many:7.2f} ms for 16   {near}")


if __name__ == "__main__":
    main()
