"""Engines of recurrent.py: what each makes of a module, as a call from tensors to a tuple of tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from onnx_static import quantize_onnx
from recurrent_task import Call, Part, Tensors
from torch import nn

import nc

#: What torch's dynamic quantization knows of recurrent models.
_KINDS = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.Linear)


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What an engine made of a module.

    Attributes:
        call: it.
        int8: how many of how many products run int8; "" where that is not known.
    """

    call: Call
    int8: str = ""


def float32(part: Part) -> Made:
    """Return the module as it is."""
    return Made(lambda *inputs: _tuple(part.module(*inputs)))


def dynamic(part: Part) -> Made:
    """Quantize with this project's dynamic configuration."""
    return _own(part, nc.DynamicQuantConfig())


def automatic(part: Part) -> Made:
    """Quantize with what this project chooses for all the examples."""
    return _own(part, "auto", lambda prepared: [prepared(*given) for given in part.examples])


def torch_dynamic(part: Part) -> Made:
    """Quantize with torch's own dynamic quantization."""
    quantized = torch.ao.quantization.quantize_dynamic(part.module, set(_KINDS))
    return Made(lambda *inputs: _tuple(quantized(*inputs)))


def onnx_float(part: Part) -> Made:
    """Run ONNX Runtime in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        return _session(_exported(part, Path(folder)))


def onnx_dynamic(part: Part) -> Made:
    """Quantize with ONNX Runtime's dynamic quantization, which leaves GRU layers in fp32.

    Without convolutions, which it takes by default: those of the voice detector would leave 0.4 dB.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8.onnx"
        logging.getLogger().setLevel(logging.ERROR)  # it recommends to call its pre-processing
        quantize_dynamic(
            _exported(part, Path(folder)),
            target,
            op_types_to_quantize=[kind for kind in IntegerOpsRegistry if kind != "Conv"],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return _session(target)


def onnx_static(part: Part) -> Made:
    """Quantize with ONNX Runtime's static quantization, which leaves recurrent layers in fp32.

    Without weights of 7 bits, which its documentation asks for on CPUs without VNNI: on one of these, they
    lose more than sums that saturate, 7.7 instead of 10.0 dB of the voice detector.
    """
    feeds = ({f"x{i}": x.numpy() for i, x in enumerate(given)} for given in part.examples)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8.onnx"
        logging.getLogger().setLevel(logging.ERROR)  # it recommends to call its pre-processing
        quantize_onnx(_exported(part, Path(folder)), target, feeds)
        return _session(target)


def openvino_float(part: Part) -> Made:
    """Run OpenVINO in fp32."""
    return _compiled(_converted(part))


def nncf(part: Part) -> Made:
    """Quantize with NNCF's defaults, and run OpenVINO."""
    import nncf as tool

    logging.getLogger("nncf").setLevel(logging.ERROR)
    data = tool.Dataset([{str(i): x.numpy() for i, x in enumerate(given)} for given in part.examples])
    model = _converted(part)
    for i, given in enumerate(model.inputs):
        given.get_tensor().set_names({str(i)})
    with contextlib.redirect_stdout(sys.stderr):  # its progress bars
        return _compiled(tool.quantize(model, data, subset_size=len(part.examples)))


ENGINES: dict[str, Callable[[Part], Made]] = {
    "fp32": float32,
    "nc dynamic": dynamic,
    "nc auto": automatic,
    "torch dynamic": torch_dynamic,
    "ONNX Runtime fp32": onnx_float,
    "ONNX Runtime static": onnx_static,
    "ONNX Runtime dynamic": onnx_dynamic,
    "OpenVINO fp32": openvino_float,
    "NNCF + OpenVINO": nncf,
}


def _own(part: Part, config: Any, run: Callable[[Any], object] | None = None) -> Made:
    """Quantize with this project, and say what stays float."""
    quantized = nc.quantize(part.module, config, run, example_inputs=part.examples[0], backend="native")
    report = quantized.report()
    asked = [op for op in report.ops if op.asked == "int8"]
    left = {f"{op.name}: {op.reason}" for op in asked if op.ran != "int8"}
    for line in sorted(left):
        print(f"    stays float: {line}", file=sys.stderr)
    return Made(
        lambda *inputs: _tuple(quantized(*inputs)), f"{sum(op.ran == 'int8' for op in asked)} of {len(asked)}"
    )


def _tuple(result: Any) -> Tensors:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _exported(part: Part, folder: Path) -> Path:
    """Write the module as ONNX.

    Layers by the older exporter: the newer one computes the weights of LSTM layers in the graph, and the
    quantizer leaves these alone. Cells by the newer one: the older one takes no free sizes there. Its notes
    of sizes are left out, which the quantizer does not keep right.
    """
    import onnx

    path = folder / "fp32.onnx"
    cells = any(isinstance(module, nn.RNNCellBase) for module in part.module.modules())
    names = [f"x{i}" for i in range(len(part.axes))]
    if cells:
        free = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in part.axes]
        chosen: dict[str, Any] = {"dynamo": True, "dynamic_shapes": free, "verbose": False}
        examples = tuple(torch.cat((x, x)) for x in part.examples[0])  # a size of 1 would be a fixed one
    else:
        free = {name: dict(axes) for name, axes in zip(names, part.axes, strict=True)}
        chosen = {"dynamo": False, "dynamic_axes": free, "opset_version": 17}
        examples = part.examples[0]
    torch.onnx.export(part.module, examples, path, input_names=names, **chosen)
    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)
    return path


def _session(path: Path) -> Made:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def call(*inputs: torch.Tensor) -> Tensors:
        found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        return tuple(torch.from_numpy(x) for x in found)

    return Made(call)


def _converted(part: Part) -> Any:
    import openvino

    return openvino.convert_model(part.module, example_input=part.examples[0])


def _compiled(model: Any) -> Made:
    import openvino

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", options)
    request = compiled.create_infer_request()
    kinds = (
        "FullyConnected",
        "MatMul",
        "Convolution",
        "LSTMCell",
        "GRUCell",
        "RNNCell",
        "RNNSeq",
        "LSTMSequence",
    )
    ran = []
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if info["layerType"].astype(str) in kinds:
            ran.append(info["runtimePrecision"].astype(str))

    def call(*inputs: torch.Tensor) -> Tensors:
        found = request.infer([x.numpy() for x in inputs])
        return tuple(torch.from_numpy(found[i].copy()) for i in range(len(found)))

    return Made(call, f"{sum(p in ('i8', 'u8') for p in ran)} of {len(ran)}")
