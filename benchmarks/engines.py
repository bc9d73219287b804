"""Engines of the benchmarks.

Each turns a model into a callable without arguments, in a process of its own.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Run = Callable[[], Any]


def eager(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """fp32, as the user has it."""
    return lambda: model(**inputs)


def ipex_fp32(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """fp32 through `ipex.optimize`, traced and frozen."""
    import intel_extension_for_pytorch as ipex

    return _traced(ipex.optimize(model), inputs)


def ipex_int8(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """Return the plain `ipex.quantization` flow with min-max observers, as Neural Compressor drives it."""
    import intel_extension_for_pytorch as ipex
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping

    qconfig = QConfig(
        activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, dtype=torch.quint8),
        weight=PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
    )
    mapping = QConfigMapping().set_global(qconfig)
    prepared = ipex.quantization.prepare(model, mapping, example_kwarg_inputs=inputs, inplace=False)
    prepared(**inputs)
    return _traced(ipex.quantization.convert(prepared), inputs)


def nc_int8(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    backend: str = "ipex",
    smooth: bool = False,
    compile: bool = False,
    remainder: str = "fp32",
    library: str = "",
) -> Run:
    """Quantize with this project; SmoothQuant's scales are folded where that is possible.

    `library` is the value of `NC_ONEDNN`.
    """
    import nc

    os.environ["NC_ONEDNN"] = library
    config = nc.SmoothQuantConfig(folding=True) if smooth else nc.StaticQuantConfig(remainder=remainder)
    quantized = _converted(model, inputs, config, backend, compile=compile)
    return lambda: quantized(**inputs)


def _converted(
    model: torch.nn.Module, inputs: dict[str, Any], config: Any, backend: str, **options: Any
) -> Any:
    """Prepare, one calibration batch, convert."""
    import nc

    prepared = nc.prepare(model, config, example_inputs=inputs, backend=backend)
    prepared(**inputs)
    return nc.convert(prepared, measure=False, **options)


def nc_pt2(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """`nc.export_pt2`: the quantized graph compiled ahead of time, for the sizes of the inputs."""
    import nc

    quantized = _converted(model, inputs, nc.StaticQuantConfig(), "native")
    with tempfile.TemporaryDirectory() as folder:
        nc.export_pt2(quantized, f"{folder}/model.pt2")
        program = torch._inductor.aoti_load_package(f"{folder}/model.pt2")
    flat = quantized.graph.signature.bind((), inputs)
    return lambda: program(*flat)


def inductor_int8(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """Torchao's PT2E flow for x86, compiled by Inductor; Inductor in fp32 is `inductor_fp32`."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (), inputs).module(), quantizer)
    prepared(**inputs)
    return inductor_fp32(convert_pt2e(prepared), inputs)


def inductor_fp32(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """`torch.compile` with constants frozen."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    compiled = torch.compile(model)
    return lambda: compiled(**inputs)


def peer(model: torch.nn.Module, inputs: dict[str, Any], name: str) -> Run:
    """Return an engine of peers.py, calibrated with the same batch."""
    import peers

    if isinstance(getattr(model, "pooler", None), torch.nn.AvgPool2d):
        # EfficientNet's window is larger than what it pools, which OpenVINO refuses when it compiles; this is
        # the same mean
        model.pooler = torch.nn.AdaptiveAvgPool2d(1)
    transformer = "input_ids" in inputs or "vit" in type(model).__name__.lower()
    task = SimpleNamespace(model=model, calibration=[inputs], free=(0,))
    candidates = {
        "NNCF": peers.nncf_int8(**({"model_type": "transformer"} if transformer else {})),
        "ONNX": peers.onnx_static,
    }
    run = candidates[name](task)[0]
    return lambda: run(**inputs)


def nc_dynamic(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    granularity: str = "per_token",
    matmuls: bool = False,
) -> Run:
    """Dynamic quantization of this project, of linears alone or with the products of attention."""
    import nc

    config = nc.DynamicQuantConfig(act_granularity=granularity)
    if matmuls:
        config.set_local("matmul", nc.DynamicQuantConfig())
    quantized = nc.quantize(model, config, example_inputs=inputs)
    return lambda: quantized(**inputs)


def nc_bf16(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """Everything that `native` computes in bf16."""
    import nc

    quantized = _converted(model, inputs, nc.StaticQuantConfig(w_dtype="bf16", act_dtype="bf16"), "native")
    return lambda: quantized(**inputs)


def nc_mixed(model: torch.nn.Module, inputs: dict[str, Any], algorithm: str = "percentile") -> Run:
    """Linears with ranges of this project that are found in each call, all else with static ones."""
    import nc

    config = nc.StaticQuantConfig(act_algo=algorithm) + nc.DynamicQuantConfig()
    quantized = _converted(model, inputs, config, "native")
    return lambda: quantized(**inputs)


def inductor_bf16(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """`torch.compile` of the model under autocast to bf16, with constants frozen."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    compiled = torch.compile(model)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(**inputs)

    return run


def torch_dynamic(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """`torch.ao.quantization.quantize_dynamic`, linears in int8."""
    from torch.ao.quantization import quantize_dynamic

    quantized = quantize_dynamic(model, {torch.nn.Linear})
    return lambda: quantized(**inputs)


def zentorch_dynamic(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """AMD's `zentorch`: linears in int8, with a range per row that it finds in each call."""
    import zentorch  # noqa: F401  # registers its operators and its compiler

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, _ZentorchLinear(child))
    compiled = torch.compile(model, backend="zentorch")
    return lambda: compiled(**inputs)


class _ZentorchLinear(torch.nn.Module):
    """A linear by zentorch's operator, with symmetric int8 weights, a scale for each output."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", torch.round(linear.weight.detach() / scale).to(torch.int8))
        self.register_buffer("scale", scale.flatten())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.zentorch.zentorch_dynamic_qlinear(
            x, self.codes, self.scale, self.bias
        )
        return result


def nc_prepared(model: torch.nn.Module, inputs: dict[str, Any], algorithm: str = "minmax") -> Run:
    """Return a calibrating forward of this project."""
    import nc

    prepared = nc.prepare(model, nc.StaticQuantConfig(act_algo=algorithm), example_inputs=inputs)
    return lambda: prepared(**inputs)


def ipex_prepared(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """Return a calibrating forward of plain IPEX with torch's HistogramObserver, IPEX's default."""
    import intel_extension_for_pytorch as ipex

    mapping = ipex.quantization.default_static_qconfig_mapping
    prepared = ipex.quantization.prepare(model, mapping, example_kwarg_inputs=inputs, inplace=False)
    return lambda: prepared(**inputs)


def _traced(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    traced = torch.jit.trace(model, example_kwarg_inputs=inputs, strict=False, check_trace=False)
    frozen = torch.jit.freeze(traced.eval())
    return lambda: frozen(**inputs)


ENGINES: dict[str, Callable[[torch.nn.Module, dict[str, Any]], Run]] = {
    "eager": eager,
    "ipex-fp32": ipex_fp32,
    "ipex-int8": ipex_int8,
    "nc-int8": nc_int8,
    "nc-smooth": functools.partial(nc_int8, smooth=True),
    "nc-native": functools.partial(nc_int8, backend="native"),
    "nc-native-operators": functools.partial(nc_int8, backend="native", library="none"),
    "nc-native-compiled": functools.partial(nc_int8, backend="native", compile=True),
    "nc-native-bf16": functools.partial(nc_int8, backend="native", remainder="bf16"),
    "nc-pt2": nc_pt2,
    "inductor-fp32": inductor_fp32,
    "inductor-int8": inductor_int8,
    "openvino-int8": functools.partial(peer, name="NNCF"),
    "onnxruntime-int8": functools.partial(peer, name="ONNX"),
    "nc-bf16": nc_bf16,
    "inductor-bf16": inductor_bf16,
    "nc-dynamic": nc_dynamic,
    "nc-dynamic-attention": functools.partial(nc_dynamic, matmuls=True),
    "nc-percentile-dynamic": nc_mixed,
    "nc-dynamic-tensor": functools.partial(nc_dynamic, granularity="per_tensor"),
    "torch-dynamic": torch_dynamic,
    "zentorch-dynamic": zentorch_dynamic,
    "nc-prepared": nc_prepared,
    "nc-prepared-histogram": functools.partial(nc_prepared, algorithm="mse"),
    "ipex-prepared-histogram": ipex_prepared,
}
#: What a table of speeds shows unless told otherwise.
DEFAULT = ("eager", "ipex-fp32", "ipex-int8", "nc-int8", "nc-prepared")


def start(engine: str, model_name: str, threads: int, batch: int = 1) -> Run:
    """Return the warmed-up callable of one engine on one model."""
    from models import build

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    model, inputs = build(model_name, batch)
    with torch.no_grad():
        run = ENGINES[engine](model, inputs)
        for _ in range(5):
            run()
    return run
