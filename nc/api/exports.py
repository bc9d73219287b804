"""Write quantized models as programs of other runtimes.

There is a function for each format of an engine of `nc`, and one for all formats.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from nc.api.quantized import QuantizedModel, checked
from nc.backends import exporter_for
from nc.backends.base import check_available, check_bf16
from nc.backends.exporting import export
from nc.backends.narrowing import narrowed
from nc.backends.onnx import OnnxReport
from nc.errors import UnsupportedError
from nc.formats.checks import checked_path
from nc.graph.qdq import QDQGraph
from nc.process.warn import warn


def export_torchscript(q_model: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write the engine's frozen TorchScript program as one file, for C++ and for serving without `nc`.

    The file is a program: load it only from a source that you trust. Load it with `torch.jit.load`:

    * The process must first import `intel_extension_for_pytorch` (in C++: link its library). Without it the
      int8 kernels are missing.
    * It takes the tensors that the graph reads, in the order of `q_model.graph.signature`, and returns a flat
      tuple of outputs.
    * Inputs must be contiguous (row-major): call `x.contiguous()`. Another layout can give wrong numbers.
    * The first three calls are slow. They must finish before several threads call it.

    Args:
        q_model: the result of `convert` or `load`.
        path: the file; created with its parents, replaced as a whole.

    Raises:
        StateError: not a quantized model.
        UnsupportedError: its backend has no TorchScript form.
    """
    exported(q_model, path, "torchscript", "export_torchscript")


def export_pt2(
    q_model: QuantizedModel, path: str | os.PathLike[str], *, free_sizes: bool = False, verify: str = "raise"
) -> None:
    """Write a program compiled ahead of time by AOTInductor as one file.

    It is for C++ and for serving without `nc`.

    The file is a program: load it only from a source that you trust. Load it with
    `torch._inductor.aoti_load_package`, in C++ with `torch::inductor::AOTIModelPackageLoader`:

    * It works with this version of torch only, and on CPUs with the features of this CPU.
    * It takes the tensors that the graph reads, in the order of `q_model.graph.signature`, and returns a flat
      tuple of tensors.

    Args:
        q_model: the result of `convert` or `load`, on any backend; static quantization only.
        path: the file; created with its parents, replaced as a whole.
        free_sizes: leave batch and sequence free; else they are those of the example inputs. Weights of
            convolutions are packed for the example's sizes; for other sizes a kernel may repack them in every
            call.
        verify: "raise" or "warn" if the program disagrees with the reference on the example inputs, or "off".

    Raises:
        StateError: not a quantized model.
        UnsupportedError: an operator is quantized dynamically, has no int8 kernel, or computes in bf16, which
            this CPU does not have.
        BackendUnavailableError: there is no C++ compiler, or the CPU lacks a feature that int8 kernels need.
        BackendError: AOTInductor failed.
        VerificationError: the results of the program differ from those of the reference.
    """
    exported(q_model, path, "pt2", "export_pt2", free_sizes=free_sizes, verify=verify)


def export_openvino(q_model: QuantizedModel, path: str | os.PathLike[str], *, verify: str = "raise") -> None:
    """Write a model of OpenVINO as two files, for serving without `nc` and without torch.

    Free sizes stay free. Those that decide about the path through the model's Python code are fixed, with a
    warning: docs/concepts/the-way-of-a-model.md. `openvino.Core().compile_model(path, "CPU",
    {"INFERENCE_PRECISION_HINT": "f32"})` loads it; without the hint OpenVINO computes in bf16 what is not
    int8, where the CPU can. Inputs are named after the arguments of the model, outputs after the
    members of what it returns ("logits"), or `output_0`, `output_1` and so on where these have no names.

    Args:
        q_model: the result of `convert` or `load`, on any backend.
        path: the file with the graph, `.xml`; the weights come beside it, `.bin`. Created with its parents,
            replaced when both are written.
        verify: "raise" or "warn" if OpenVINO disagrees with the reference on the example inputs, or "off".

    Raises:
        ConfigError: the name does not end in `.xml`.
        StateError: not a quantized model.
        BackendUnavailableError: openvino is not installed.
        BackendError: an operator has no translation.
        VerificationError: the results of OpenVINO differ from those of the reference.
    """
    exported(q_model, path, "openvino", "export_openvino", verify=verify)


def export_onnx(
    q_model: QuantizedModel,
    path: str | os.PathLike[str],
    *,
    verify: str = "raise",
    without_vnni: bool = False,
) -> OnnxReport:
    """Write an ONNX file with int8 weights, and say what ONNX Runtime computes in int8.

    The file has opset 21, and quantize and dequantize nodes.

    Inputs are named after the arguments of the model, outputs after the members of what it returns
    ("logits"), or `output_0`, `output_1` and so on where these have no names. Free sizes stay free. Those
    that decide about the path through the model's Python code are fixed, with a warning:
    docs/concepts/the-way-of-a-model.md. ONNX Runtime has int8
    convolutions only where the output is quantized too: `prepare(placement="outputs")`.

    Args:
        q_model: the result of `convert` or `load`, on any backend.
        path: the file, `.onnx`; created with its parents, replaced as a whole. Constants of more than 2 GB go
            into a file beside it, whose name has `.data` at its end.
        verify: "raise" or "warn" if ONNX Runtime disagrees with the reference on the example inputs, or
            "off", which needs no ONNX Runtime.
        without_vnni: make the file for CPUs without VNNI too: quantize again, from their codes, weights that
            could saturate the 16-bit sums of ONNX Runtime's kernels there. A few of them are reduced, which
            costs some accuracy.

    Returns:
        What ran by which kernel, from a profile of ONNX Runtime on the example inputs; `print` shows it. The
        check runs kernels that can't saturate: it judges the file, not this CPU. Operators that can saturate
        on CPUs without VNNI are in `saturating`, and in a warning that says what to do.

    Raises:
        ConfigError: the name does not end in `.onnx`.
        StateError: not a quantized model.
        UnsupportedError: the model reads values of its inputs in Python, or takes inputs in bf16.
        BackendUnavailableError: onnx, onnxscript or onnxruntime is not installed.
        BackendError: an operator has no translation, or ONNX Runtime fails.
        VerificationError: the results of ONNX Runtime differ from those of the reference.
    """
    report: OnnxReport = exported(
        q_model, path, "onnx", "export_onnx", verify=verify, without_vnni=without_vnni
    )
    return report


def export_runner(
    q_model: QuantizedModel,
    folder: str | os.PathLike[str],
    *,
    threads: Sequence[int] | None = None,
    verify: str = "raise",
) -> None:
    """Write a folder for the package nc-run, which runs the model without torch and without `nc`.

    It holds data only: a plan of calls of nc's functions in C, their constants, and the outputs for the
    example inputs. Models of padded texts take texts of any number and length; all others take inputs of the
    example's sizes. `nc_run.load(folder)` gives the same bits as the plan gives here, on a CPU with the
    instruction sets of this one.

    Args:
        q_model: the result of `convert` or `load`, on any backend.
        folder: created with its parents; an earlier one is replaced as a whole.
        threads: numbers of threads, each of which gets its plan; None: 1, and those that torch uses.
        verify: "raise" or "warn" if the plan disagrees with the reference on the example inputs, or "off".

    Raises:
        StateError: not a quantized model.
        UnsupportedError: an operator has no function in C that computes it; the message names those operators
            with the reasons.
        ConfigError: an argument has no such value.
        ArtefactError: something else is at the folder's path, or it can't be written.
        BackendUnavailableError: there is no C code here.
        VerificationError: the plan's outputs differ from those of the reference.
    """
    exported(q_model, folder, "runner", "export_runner", threads=threads, verify=verify)


def export_model(q_model: QuantizedModel, path: str | os.PathLike[str], format: str, **options: Any) -> None:
    """Write a program for serving without `nc` as one file, in any format that a backend declares.

    Args:
        q_model: the result of `convert` or `load`.
        path: the file; created with its parents, replaced as a whole.
        format: "torchscript" (see `export_torchscript`), "pt2" (see `export_pt2`), "openvino" (see
            `export_openvino`), "onnx" (see `export_onnx`, which also returns a report), "runner" (see
            `export_runner`, which writes a folder), or one of a registered backend.
        options: those of the format.

    Raises:
        StateError: not a quantized model.
        UnsupportedError: the model's backend cannot write this format, and no other backend can write it from
            the quantized graph. The message names the backends that have the format.
        ConfigError: the format has no such option, an option no such value, or the name of the file another
            suffix.
        NCError: as the function that writes the format.
    """
    exported(q_model, path, format, "export_model", **options)


def exported(
    q_model: QuantizedModel, path: str | os.PathLike[str], format: str, step: str, **options: Any
) -> Any:
    """`export_model`; `step` is the name of the public function, for messages.

    Returns what the exporter tells.
    """
    graph, target = _alone(checked(q_model, step).graph), checked_path("path", path)
    exporter, engine = exporter_for(format, q_model.backend)
    if engine is None:
        return export(exporter, format, graph, q_model.engine, target, options)
    check_available(engine)
    check_bf16(engine, graph)
    return export(exporter, format, narrowed(graph, engine), None, target, options)


def _alone(graph: QDQGraph) -> QDQGraph:
    """Return a graph as another format's program can hold it.

    Such a program does not check which path the model takes through its Python code.

    Raises:
        UnsupportedError: the path depends on values.
    """
    if graph.signature.reads:
        msg = (
            f"The model reads values of its inputs in Python, at {graph.signature.reads[0].where}. At each "
            "call nc checks that the path it captured fits these values; a program in another format would "
            "not check it. Rewrite that place with torch.where."
        )
        raise UnsupportedError(msg)
    effects = graph.signature.effects
    if effects:
        names = effects.names(graph.signature.in_spec.context, [leaf.path for leaf in graph.signature.leaves])
        text = (
            "The model changes its arguments. The program changes none: its last outputs are the new values "
            f"of {', '.join(names)}, in this order. Whoever calls it puts them there."
        )
        warn(text)
    asked = next((condition for condition in graph.signature.conditions if condition.silent), None)
    if asked is None:
        return graph
    shown = asked.described([leaf.path for leaf in graph.signature.leaves])
    text = (
        f"The model asks for sizes in Python, at {asked.where}: it was captured with {shown}. nc checks this "
        "at each call; the program would not, so such sizes are fixed in it to those of example_inputs."
    )
    warn(text)
    return dataclasses.replace(graph, signature=graph.signature.without_conditions(graph.example))
