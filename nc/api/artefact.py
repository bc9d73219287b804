"""Save and load quantized models as directories without code, and export programs. docs/concepts/the-artefact.md."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.algorithms.inputs.layers import has_low_bit
from nc.api.quantized import QuantizedModel, checked
from nc.api.weight_report import weight_report
from nc.backends import choose_backend, cpu, engine_options, export_formats, exporting_backends, first_that_can, get_backend, why_chosen
from nc.backends.auto_order import kind_of_model
from nc.backends.base import Backend, EngineModel, check_bf16, exports_of, lower
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.backends.low_bit.engine import set_backend
from nc.backends.onnx import OnnxReport
from nc.backends.onnx import write as write_onnx
from nc.backends.reference import NAME as REFERENCE
from nc.errors import ArtefactError, ConfigError, InputError, NCError, UnsupportedError
from nc.graph.catalogue import kind_of_node
from nc.graph.qdq import QDQGraph, in_memory
from nc.graph.saturation import named, narrow
from nc.ops import RECURRENT
from nc.process.torch_settings import check_default_device, without_autocast
from nc.process.warn import warn
from nc.storage import folder, store
from nc.storage.atomic import replaced
from nc.weights.files import artefact as low_bit

#: The one format of `export_model` that no backend declares.
_ONNX = "onnx"


def save(model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str] = "saved_results", format: str = "default") -> None:  # noqa: A002
    """Save a quantized model as a directory of three files: weights, graph (or how low-bit weights are read) and checksums.

    The directory is written under another name and then renamed, so it is never incomplete. Saving the same model
    again gives the same bytes. The example inputs of `prepare` are saved too, because `load` warms up and
    verifies the engine with them.

    Args:
        model: the result of `convert` or `load`.
        checkpoint_dir: created with its parents; an earlier artefact there is replaced.
        format: "default", the only one.

    Raises:
        ConfigError: another format.
        StateError: not a quantized model.
        ArtefactError: the directory contains other files, or a part of the model cannot be saved; the message names it.
        ArtefactOperatorError: the model uses an operator that `load` would not accept.
    """
    if format != "default":
        msg = f'Expected format="default", but got {format!r}.'
        raise ConfigError(msg)
    if isinstance(model, torch.nn.Module) and not isinstance(model, QuantizedModel) and has_low_bit(model):
        low_bit.write(model, checkpoint_dir)
        return
    q_model = checked(model, "save")
    store.write(q_model.graph, q_model.backend, checkpoint_dir)


def load(
    model_name_or_path: str | os.PathLike[str],
    original_model: torch.nn.Module | None = None,
    format: str = "default",  # noqa: A002 - Neural Compressor's name
    device: str = "cpu",
    *,
    model: torch.nn.Module | None = None,
    backend: str = "auto",
    verify: str = "raise",
    verify_sizes: bool = True,
    isolate: str = "auto",
    compile: bool = False,  # noqa: A002
) -> Any:
    """Load a saved model.

    The class of the user's model is not needed, except for a model with low-bit weights that is not of transformers: give `model`.

    Every file is checked before anything is built from it. Nothing is unpickled, and no code from the
    artefact is executed: its graph may only call operators of a fixed list. Outputs have the
    structure that they had at capture; see `nc.storage.pytree_json` for classes that are not installed here.

    If the engine adds products in 16 bits on this CPU, layers whose sums could overflow are quantized again
    from their int8 codes, with an `NCWarning`. The files do not change.

    Args:
        model_name_or_path: the directory that `save` wrote.
        original_model: as `model`, for scripts written for Neural Compressor. Ignored for a graph, which contains the whole model.
        format: "default", the only one.
        device: "cpu", the only one.
        model: a float model of the class that was saved, e.g. a fresh one. Its layers are replaced in a copy; it stays as it is.
        backend: "ipex", "native", "openvino", "reference", a registered one, or "auto": the first engine that can run here and computes
            this model correctly. The report says why earlier engines were not used.
        verify: "raise" or "warn" if the engine disagrees with the reference on the example inputs, or "off".
        verify_sizes: as in `convert`.
        isolate: run the first fused call in a child process: "auto" (only for unknown patterns), "always" or "never".
        compile: compile the fp32 operators between the int8 kernels of backend "native" with `torch.compile`; needs a C++ compiler.

    Returns:
        A `QuantizedModel`; for a model with low-bit weights a module of the user's class, whose layers `backend` computes and for which
        `verify`, `verify_sizes`, `isolate` and `compile` have no effect.

    Raises:
        StateError: torch's default device is not the CPU.
        ArtefactMissingError: the directory or one of its files does not exist.
        ArtefactCorruptError: a file is truncated or altered.
        ArtefactSchemaError: a newer version wrote it, or it is not an artefact.
        ArtefactOperatorError: it contains an operator that is not allowed.
        UnsupportedError: its integer ranges need CPU features that this CPU does not have.
        UnknownBackendError, BackendUnavailableError: as for `prepare`.
        VerificationError: the results of the engine differ from those of the reference.
        BackendError: the engine failed; for "auto", every engine failed, and the message has all reasons.
        ConfigError: another format or device, or the backend has no `compile`.
        ArtefactError: `model` is needed, or is not the model that was saved.
        InputError: `model` is not a torch.nn.Module.
    """
    if format != "default" or device != "cpu":
        msg = f'Expected format="default" and device="cpu", but got {format!r} and {device!r}.'
        raise ConfigError(msg)
    check_default_device("load")
    content = folder.read(model_name_or_path, wait=False)
    with content.checked():  # another thread computes the checksum of the weights meanwhile
        if content.format == low_bit.FORMAT:
            low_bit_engine(backend)  # refused before the work, not after it
            given = original_model if model is None else model
            if given is not None and not isinstance(given, torch.nn.Module):
                msg = f"Expected model to be a torch.nn.Module, but got {type(given).__name__}."
                raise InputError(msg)
            return set_backend(low_bit.read(content, given, lambda built: str(weight_report(built))), backend)
        stored = store.checked(content)
        if choose_backend(backend).name != REFERENCE:  # which computes in fp32, alike on every CPU
            _check_cpu(stored.plan.isa, stored.directory)
        graph, directory, weights = stored.graph(wait=False), stored.directory, content.weights

        kind = kind_of_model(map(kind_of_node, graph.module.graph.nodes))

        def attempt(engine: Backend) -> tuple[QDQGraph, EngineModel]:
            narrowed = _narrowed(graph if getattr(engine, "packs_weights", False) else in_memory(graph), engine)
            sizes = {"verify_sizes": verify_sizes, "verify_kernels": "in doubt"}
            options = engine_options(engine, **sizes, isolate=isolate, compile=compile)
            return narrowed, lower(engine, narrowed, verify=verify, **options)

        def check() -> None:
            with folder.malformed(directory / folder.MODEL):
                _run(graph, lambda inputs: graph.module(*inputs))

        if any(node.target in RECURRENT.values() for node in graph.module.graph.nodes):
            check()  # torch's kernels of these do not look at the sizes of what they read
        try:
            (lowered_graph, lowered), name, failed = first_that_can(backend, choose_backend(backend, kind).name, attempt, model=kind)
            if not (lowered.verified and _fits(lowered_graph)):
                _run(lowered_graph, lowered.run)
        except Exception as error:
            check()  # a graph that can't run at all is the fault of the artefact
            if isinstance(error, NCError):
                raise
            msg = (
                f"{str(directory)!r}: the engine cannot run this graph ({type(error).__name__}: {error}). If its files were altered, copy "
                'or save the model again. backend="reference" runs it.'
            )
            raise ArtefactError(msg) from error
        weights.release()  # engines have packed them
        return QuantizedModel(lowered_graph, lowered, name, why_chosen(backend, name, failed, kind))


def _fits(graph: QDQGraph) -> bool:
    """Whether the outputs that the graph expects for its example are known, and have the captured structure; raises as `_run`."""
    if graph.expected is None:
        return False
    graph.signature.unflatten(graph.expected)
    return True


def _run(graph: QDQGraph, run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]) -> None:
    """Make one call with the example inputs, the structure of whose outputs must be the captured one."""
    with torch.no_grad(), without_autocast():
        graph.signature.unflatten(run([tensor.clone() for tensor in graph.example]))


def export_torchscript(q_model: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write the engine's frozen TorchScript program as one file, for C++ and for serving without `nc`.

    The file is a program: load it only from a source that you trust. Load it with `torch.jit.load`:

    * The process must first import `intel_extension_for_pytorch` (in C++: link its library). Without it there are no int8 kernels.
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
    _export(q_model, path, "torchscript", "export_torchscript")


def export_pt2(q_model: QuantizedModel, path: str | os.PathLike[str], *, free_sizes: bool = False, verify: str = "raise") -> None:
    """Write a program compiled ahead of time by AOTInductor as one file, for C++ and for serving without `nc`.

    The file is a program: load it only from a source that you trust. Load it with
    `torch._inductor.aoti_load_package`, in C++ with `torch::inductor::AOTIModelPackageLoader`:

    * It works with this version of torch only, and on CPUs with the features of this CPU.
    * It takes the tensors that the graph reads, in the order of `q_model.graph.signature`, and returns a flat
      tuple of tensors.

    Args:
        q_model: the result of `convert` or `load`, on any backend; static quantization only.
        path: the file; created with its parents, replaced as a whole.
        free_sizes: leave batch and sequence free; else they are those of the example inputs. Weights of
            convolutions are packed for the example's sizes; for other sizes a kernel may repack them in every call.
        verify: "raise" or "warn" if the program disagrees with the reference on the example inputs, or "off".

    Raises:
        StateError: not a quantized model.
        UnsupportedError: an operator is quantized dynamically, has no int8 kernel, or computes in bf16, which this CPU does not have.
        BackendUnavailableError: there is no C++ compiler, or the CPU has no feature that int8 kernels need.
        BackendError: AOTInductor failed.
        VerificationError: the results of the program differ from those of the reference.
    """
    _export(q_model, path, "pt2", "export_pt2", free_sizes=free_sizes, verify=verify)


def export_openvino(q_model: QuantizedModel, path: str | os.PathLike[str], *, verify: str = "raise") -> None:
    """Write a model of OpenVINO as two files, for serving without `nc` and without torch.

    Free sizes stay free. Those that decide about the path through the model's Python code are fixed, with a warning:
    docs/concepts/the-way-of-a-model.md.
    `openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})` loads it; without the hint OpenVINO computes in bf16
    what is not int8, where the CPU can. Inputs are named after the arguments of the model, and outputs `output_0`, `output_1` and so on:
    the flat outputs that are tensors.

    Args:
        q_model: the result of `convert` or `load`, on any backend.
        path: the file with the graph, `.xml`; the weights come beside it, `.bin`. Created with its parents, replaced when both are written.
        verify: "raise" or "warn" if OpenVINO disagrees with the reference on the example inputs, or "off".

    Raises:
        ConfigError: the name does not end in `.xml`.
        StateError: not a quantized model.
        BackendUnavailableError: openvino is not installed.
        BackendError: an operator has no translation.
        VerificationError: the results of OpenVINO differ from those of the reference.
    """
    _export(q_model, path, "openvino", "export_openvino", verify=verify)


def export_onnx(q_model: QuantizedModel, path: str | os.PathLike[str], *, verify: str = "raise", without_vnni: bool = False) -> OnnxReport:
    """Write an ONNX file (opset 21) with quantize and dequantize nodes and int8 weights, and say what ONNX Runtime computes in int8.

    Inputs are named after the arguments of the model, and outputs `output_0`, `output_1` and so on: the flat outputs that are tensors.
    Free sizes stay free. Those that decide about the path through the model's Python code are fixed, with a warning:
    docs/concepts/the-way-of-a-model.md.
    ONNX Runtime has int8 convolutions only where the output is quantized too: `prepare(placement="outputs")`.

    Args:
        q_model: the result of `convert` or `load`, on any backend.
        path: the file, `.onnx`; created with its parents, replaced as a whole. Constants of more than 2 GB go into a file beside it, whose
            name has `.data` at its end.
        verify: "raise" or "warn" if ONNX Runtime disagrees with the reference on the example inputs, or "off", which needs no ONNX Runtime.
        without_vnni: make the file for CPUs without VNNI too: quantize again, from their codes, weights that could saturate the 16-bit sums
            of ONNX Runtime's kernels there. A few of them are reduced, which costs some accuracy.

    Returns:
        What ran by which kernel, from a profile of ONNX Runtime on the example inputs; `print` shows it. The check runs kernels that can't
        saturate: it judges the file, not this CPU. Operators that can saturate on CPUs without VNNI are in `saturating`, and in a warning
        that says what to do.

    Raises:
        ConfigError: the name does not end in `.onnx`.
        StateError: not a quantized model.
        UnsupportedError: the model reads values of its inputs in Python, or takes inputs in bf16.
        BackendUnavailableError: onnx, onnxscript or onnxruntime is not installed.
        BackendError: an operator has no translation, or ONNX Runtime fails.
        VerificationError: the results of ONNX Runtime differ from those of the reference.
    """
    return _export_onnx(q_model, path, "export_onnx", verify=verify, without_vnni=without_vnni)


def _export_onnx(q_model: QuantizedModel, path: str | os.PathLike[str], step: str, **options: Any) -> OnnxReport:
    graph = _alone(checked(q_model, step).graph)
    return write_onnx(graph, Path(path), **options)


def export_model(q_model: QuantizedModel, path: str | os.PathLike[str], format: str, **options: Any) -> None:  # noqa: A002
    """Write a program for serving without `nc` as one file, in any format that a backend declares.

    Args:
        q_model: the result of `convert` or `load`.
        path: the file; created with its parents, replaced as a whole.
        format: "torchscript" (see `export_torchscript`), "pt2" (see `export_pt2`), "openvino" (see `export_openvino`), "onnx" (see
            `export_onnx`, which also returns a report), or one of a registered backend.
        options: those of the format.

    Raises:
        StateError: not a quantized model.
        UnsupportedError: the model's backend cannot write this format, and no other backend can write it from the quantized graph. The
            message names the backends that have the format.
        NCError: as the function that writes the format.
    """
    if format == _ONNX:
        _export_onnx(q_model, path, "export_model", **options)
    else:
        _export(q_model, path, format, "export_model", **options)


def _export(q_model: QuantizedModel, path: str | os.PathLike[str], format: str, step: str, **options: Any) -> None:  # noqa: A002
    """`export_model`; `step` is the name of the public function, for messages."""
    graph = _alone(checked(q_model, step).graph)
    names = exporting_backends(format)
    own = exports_of(get_backend(q_model.backend)).get(format)
    if own is not None and not own.from_graph:
        _write(own.write(graph, q_model.engine, **options), path)
        return
    name = next((name for name in names if exports_of(get_backend(name))[format].from_graph), None)
    if name is None:
        if names:
            others = " or ".join(f'backend="{name}"' for name in names)
            msg = f"Backend {q_model.backend!r} has no form {format!r}; load or convert with {others}."
        else:
            msg = f"No backend writes the format {format!r}; there are {', '.join(map(repr, (*export_formats(), _ONNX)))}."
        raise UnsupportedError(msg)
    engine = choose_backend(name)
    check_bf16(engine, graph)
    _write(exports_of(engine)[format].write(_narrowed(graph, engine), None, **options), path)


def _write(data: bytes | Mapping[str, bytes], path: str | os.PathLike[str]) -> None:
    """Write a file with its parents, as a whole; or several of one name, none of which is replaced before all are written.

    Raises:
        ConfigError: the name does not have the suffix that it should.
        ArtefactError: a directory has the name, or one of several files is a link.
    """
    if not isinstance(data, Mapping):
        data = {Path(path).suffix: data}
    first = next(iter(data))
    if Path(path).suffix != first:
        msg = f"Expected a path that ends in {first!r}, but got {str(path)!r}."
        raise ConfigError(msg)
    files = {Path(path).with_suffix(suffix): content for suffix, content in data.items()}
    link = next((file for file in files if file.is_symlink()), None)
    if link is not None and len(files) > 1:
        msg = f"{str(link)!r} is a link, and the files {' and '.join(data)} must stay side by side. Give the path that it leads to."
        raise ArtefactError(msg)
    with contextlib.ExitStack() as stack:
        for file, content in files.items():
            stack.enter_context(replaced(file)).write_bytes(content)


def _alone(graph: QDQGraph) -> QDQGraph:
    """Return a graph as another format's program can hold it, where nobody checks which path the model takes through its Python code.

    Raises:
        UnsupportedError: the path depends on values.
    """
    if graph.signature.reads:
        msg = (
            f"The model reads values of its inputs in Python, at {graph.signature.reads[0].where}. At each call nc checks that the path it "
            "captured fits these values; a program in another format would not check it. Rewrite that place with torch.where."
        )
        raise UnsupportedError(msg)
    effects = graph.signature.effects
    if effects:
        names = effects.names(graph.signature.in_spec.context, [leaf.path for leaf in graph.signature.leaves])
        text = (
            f"The model changes its arguments. The program changes none: its last outputs are the new values of {', '.join(names)}, in "
            "this order. Whoever calls it puts them there."
        )
        warn(text)
    asked = next((condition for condition in graph.signature.conditions if condition.silent), None)
    if asked is None:
        return graph
    shown = asked.described([leaf.path for leaf in graph.signature.leaves])
    text = (
        f"The model asks for sizes in Python, at {asked.where}: it was captured with {shown}. nc checks this at each call; the program "
        "would not, so such sizes are fixed in it to those of example_inputs."
    )
    warn(text)
    return dataclasses.replace(graph, signature=graph.signature.without_conditions(graph.example))


def _check_cpu(isa: tuple[str, ...], directory: Path) -> None:
    """Raise UnsupportedError when this CPU lacks a feature that the artefact's integer ranges rely on."""
    missing = cpu.missing(isa)
    if missing:
        msg = (
            f"{str(directory)!r} was quantized for CPUs with {', '.join(isa)}; this one lacks "
            f"{', '.join(missing)} (it has {', '.join(cpu.features()) or 'none that matter'}) and would compute other "
            'numbers. Convert the model again on this CPU, or load it with backend="reference" (slow).'
        )
        raise UnsupportedError(msg)


def _narrowed(graph: QDQGraph, engine: Backend) -> QDQGraph:
    """Return the graph with sums that cannot saturate on this engine and CPU; warns if codes had to change.

    Args:
        graph: the stored model.
        engine: what it is for.
    """
    graph, names = narrow(graph, engine.capabilities())
    if names:
        text = (
            f"Backend {engine.name!r} adds products in 16 bits on this CPU{cpu.why_narrow()}. {len(names)} of "
            f"{len(graph.plan.quantized)} quantized layers could saturate: {named(names)}. They were quantized again from their int8 "
            "codes, which costs some accuracy (see the report). The files are unchanged. To avoid this, convert the fp32 model here."
        )
        warn(text)
    return graph
