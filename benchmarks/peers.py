"""Other projects' quantizers on the tasks of accuracy.py, in the environment of `make setup-peers`.

python benchmarks/peers.py --data DIR [--task minilm digits lm] [--only "NNCF transformer"] [--rounds 9]

DIR is a folder that `accuracy.py --data DIR` has filled: the same weights, calibration and evaluation data.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx_static import quantize_onnx
from results_rows import add_option
from task import Batch, Task
from task_minilm import minilm
from tasks import ROUNDS, TASKS, Candidate, Result, compare, fp32, loaded

PACKAGES = ("transformers", "nncf", "openvino", "onnxruntime", "ctranslate2")
_ONNX_INT8 = (
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "ConvInteger",
    "QAttention",
)
_ONNX_FP32 = (
    "Conv",
    "FusedConv",
    "MatMul",
    "FusedMatMul",
    "Gemm",
    "FusedGemm",
    "Attention",
    "MultiHeadAttention",
)


def arrays(batch: Batch) -> dict[str, Any]:
    """Return a batch for engines that know no tensors."""
    return {name: tensor.numpy() for name, tensor in batch.items()}


def openvino_fp32(task: Task) -> Result:
    """OpenVINO without quantization: what its own kernels cost."""
    return (*compiled(openvino_of(task))[:2], "-")


def nncf_int8(**options: str) -> Candidate:
    """`nncf.quantize` with options by their names in nncf's enumerations, executed by OpenVINO."""

    def run(task: Task) -> Result:
        import nncf

        parsed = {"model_type": nncf.ModelType, "preset": nncf.QuantizationPreset}
        chosen = {name: parsed[name](value) for name, value in options.items()}
        data = nncf.Dataset([arrays(batch) for batch in task.calibration])
        with contextlib.redirect_stdout(sys.stderr):  # its progress bars
            quantized = nncf.quantize(openvino_of(task), data, **chosen)
        return compiled(quantized)

    return run


def openvino_of(task: Task) -> Any:
    """Return a task's model for OpenVINO."""
    import openvino

    return openvino.convert_model(task.model, example_input=dict(task.calibration[0]))


def compiled(model: Any) -> Result:
    """Return a model that OpenVINO executes."""
    import openvino

    size = sum(op.data.nbytes for op in model.get_ops() if op.get_type_name() == "Constant")
    # fp32 for the rest: where the CPU has bf16, OpenVINO would use it
    program = openvino.Core().compile_model(
        model, "CPU", {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    )
    products: list[str] = []
    for op in program.get_runtime_model().get_ops():
        info = op.get_rt_info()
        kind = info["layerType"].astype(str)
        if kind in ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention"):
            products += [info["runtimePrecision"].astype(str)] * (
                2 if kind == "ScaledDotProductAttention" else 1
            )
    int8 = sum(precision in ("i8", "u8") for precision in products)
    return (
        lambda **batch: torch.from_numpy(program(arrays(batch))[0].copy()),
        f"{size / 1e6:.1f}",
        f"{int8} of {len(products)}",
    )


def onnx_fp32(task: Task) -> Result:
    """ONNX Runtime without quantization."""
    with tempfile.TemporaryDirectory() as folder:
        return (*_session(_onnx(task, Path(folder)))[:2], "-")


def onnx_static(task: Task) -> Result:
    """ONNX Runtime's static quantization: QDQ, uint8 activations by min-max, int8 weights per channel."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8.onnx"
        quantize_onnx(
            _onnx(task, Path(folder)), target, map(arrays, task.calibration), reduce_range=_saturates()
        )
        return _session(target)


def onnx_dynamic(task: Task) -> Result:
    """ONNX Runtime's dynamic quantization, which it recommends for transformers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8.onnx"
        quantize_dynamic(
            _onnx(task, Path(folder)),
            target,
            per_channel=True,
            reduce_range=_saturates(),
            weight_type=QuantType.QInt8,
        )
        return _session(target)


def ctranslate2_int8(task: Task) -> Result:
    """CTranslate2: linears in int8 with a range for each row. It takes texts as they are."""
    with tempfile.TemporaryDirectory() as folder:
        task.model.save_pretrained(folder)
        minilm.load_tokenizer().save_pretrained(folder)
        encoder, size = ctranslate2_encoder(folder)

    def run(**batch: torch.Tensor) -> torch.Tensor:
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        hidden = encoder.forward_batch([ids[mask].tolist() for ids, mask in rows]).last_hidden_state
        return torch.from_numpy(np.array(hidden))

    return run, size, "-"


def ctranslate2_encoder(folder: str) -> tuple[Any, str]:
    """Return the encoder of a folder that transformers wrote, with a tokenizer, and its size in MB."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as place:
        target = f"{place}/encoder"
        ctranslate2.converters.TransformersConverter(folder).convert(target, quantization="int8")
        size = (Path(target) / "model.bin").stat().st_size
        threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()}
        return ctranslate2.Encoder(target, compute_type="int8", **threads), f"{size / 1e6:.1f}"


def _saturates() -> bool:
    """Whether ONNX Runtime's documentation asks for 7-bit weights: x86 without VNNI."""
    return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def _onnx(task: Task, folder: Path) -> Path:
    """Return the model as ONNX, with the graph optimizations that quantization wants to be done first."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    example = task.calibration[0]
    free = {name: {i: torch.export.Dim.DYNAMIC for i in task.free} for name in example}
    torch.onnx.export(
        task.model,
        (),
        folder / "raw.onnx",
        kwargs=dict(example),
        dynamic_shapes=free,
        dynamo=True,
        verbose=False,
        external_data=False,
    )
    quant_pre_process(folder / "raw.onnx", folder / "fp32.onnx", skip_symbolic_shape=True)
    model = onnx.load(folder / "fp32.onnx")
    del model.graph.value_info[
        :
    ]  # dynamic quantization transposes weights, and then fails over their shapes in here
    onnx.save(model, folder / "fp32.onnx")
    return folder / "fp32.onnx"


def _session(path: Path) -> Result:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = [
        node.op_type
        for node in onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    ]
    int8, float_ = (sum(kind in names for kind in kinds) for names in (_ONNX_INT8, _ONNX_FP32))
    size = sum(p.stat().st_size for p in path.parent.glob(f"{path.stem}.onnx*"))
    return (
        lambda **batch: torch.from_numpy(session.run(None, arrays(batch))[0]),
        f"{size / 1e6:.1f}",
        f"{int8} of {int8 + float_}",
    )


PEERS: dict[str, Candidate] = {
    "fp32, this torch": fp32,
    "OpenVINO fp32": openvino_fp32,
    "NNCF": nncf_int8(),
    "NNCF mixed": nncf_int8(preset="mixed"),
    "NNCF transformer": nncf_int8(model_type="transformer"),
    "ONNX Runtime fp32": onnx_fp32,
    "ONNX Runtime static": onnx_static,
    "ONNX Runtime dynamic": onnx_dynamic,
    "CTranslate2": ctranslate2_int8,
}


@torch.no_grad()
def main() -> None:
    """Print a Markdown table for each task, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder that accuracy.py --data has filled")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which a call of each is timed")
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in options.task:
        task = loaded(name, options.data)
        if task is not None:
            chosen = {peer: PEERS[peer] for peer in options.only}
            compare(task, chosen, options.results, PACKAGES, options.rounds)


if __name__ == "__main__":
    main()
