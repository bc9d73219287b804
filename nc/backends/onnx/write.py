"""A quantized graph as an ONNX file, compared with the graph by ONNX Runtime before anybody gets it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel
from nc.backends.onnx.convert import OnnxModel, convert, of_graph
from nc.backends.onnx.integers import int32_biases
from nc.backends.onnx.program import program
from nc.backends.onnx.report import OnnxReport, operators
from nc.backends.onnx.runtime import EXACT, ExecutedKernel, run, version
from nc.backends.onnx.sums import WITHOUT_VNNI, saturating
from nc.backends.verify import agreement_db, first_disagreement, required_db, verify_outputs
from nc.errors import BackendError, BackendUnavailableError, UnsupportedError
from nc.graph.plan import OUTPUTS
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import named, narrow
from nc.process.error_texts import is_of_tensor_used_twice
from nc.process.warn import warn

SUFFIX = ".onnx"
_INSTALL = "pip install 'nc-quant[onnx]'"


def write(
    graph: QDQGraph,
    engine: EngineModel | None,
    file: Path,
    *,
    verify: str = "raise",
    without_vnni: bool = False,
) -> OnnxReport:
    """Write the file, and beside it `.data` with the constants where they are more than 2 GB.

    Args:
        graph: the quantized model.
        engine: not needed.
        file: where.
        verify: see `nc.backends.verify`; "off" needs no ONNX Runtime.
        without_vnni: quantize weights again that could saturate on CPUs without VNNI.

    Raises:
        UnsupportedError: an input has a type that can't be given to ONNX Runtime.
        BackendUnavailableError: a package is missing.
        BackendError: an operator has no translation, or ONNX Runtime fails.
        VerificationError: ONNX Runtime computes something else than the graph.
    """
    _check_packages(verify)
    _check_inputs(graph)
    if without_vnni:
        graph, _ = narrow(graph, WITHOUT_VNNI)
    converted = of_graph(graph)
    if graph.plan.placement == OUTPUTS:
        int32_biases(converted.model.model)
    converted.save(str(file))
    report = OnnxReport() if verify == "off" else _checked(graph, converted, file, verify)
    fp32 = {op.operator for op in report.operators if not op.int8}
    report = dataclasses.replace(
        report, saturating=tuple(name for name in saturating(graph) if name not in fp32)
    )
    if report.saturating and verify != "off":  # once more, as ONNX Runtime runs it by itself
        outputs, _ = _run(file, graph.example, exact=False)
        report = dataclasses.replace(
            report, saturated_db=agreement_db(graph, converted.program.together(outputs, graph.example))
        )
    if report.saturating:
        warn(_advice(report, required_db(graph), without_vnni))
    return report


def _advice(report: OnnxReport, required: float, without_vnni: bool) -> str:
    """Return the text of a warning about operators that can saturate, with what to do.

    Args:
        report: the report, with these operators and the agreement of the example's outputs on this CPU.
        required: the agreement that is required, in dB; the text says if this CPU is below it.
        without_vnni: whether weights were reduced already; if not, the text suggests it.
    """
    db = report.saturated_db
    seen = db is not None and db < required
    here = (
        f" On this CPU they do: the outputs for the example agree with the quantized graph to {db:.1f} dB "
        "only."
        if seen
        else ""
    )
    again = "" if without_vnni else " Or export with without_vnni=True: a few weights are reduced."
    return (
        "ONNX Runtime adds products in 16 bits on CPUs without VNNI. Operators whose sums can saturate "
        "there, so that results are wrong: "
        f'{named(report.saturating)}.{here} Set the session option "{EXACT}" to "1": '
        f"these CPUs then run slower kernels that can't saturate.{again}"
    )


def _check_packages(verify: str) -> None:
    """Raise BackendUnavailableError for a package that is missing."""
    needed = ("onnx", "onnxscript", *(() if verify == "off" else ("onnxruntime",)))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        without = ' verify="off" writes the file without running it.' if missing == ["onnxruntime"] else ""
        msg = f"export_onnx() needs {' and '.join(missing)}: {_INSTALL}.{without}"
        raise BackendUnavailableError(msg)


def _check_inputs(graph: QDQGraph) -> None:
    """Raise UnsupportedError for inputs in bf16, which numpy does not have."""
    names = [leaf.path for leaf in graph.signature.leaves if leaf.used and leaf.dtype is torch.bfloat16]
    if names:
        msg = (
            f"export_onnx() takes no inputs in bf16, as {names[0]!r} is. Let the model take fp32 there, and "
            "call .bfloat16() in it."
        )
        raise UnsupportedError(msg)


def _checked(graph: QDQGraph, converted: OnnxModel, file: Path, verify: str) -> OnnxReport:
    """Run the file once, compare its outputs with those of the graph, and say what ran.

    What is checked is the file, not the CPU: sums that saturate here, and not where the file will run, are in
    a warning.
    """
    outputs, kernels = _run(file, graph.example, exact=True)
    outputs = converted.program.together(outputs, graph.example)
    first = functools.partial(first_disagreement, graph.module, graph.example, _run_part)
    sqnr = verify_outputs(graph, outputs, verify, "ONNX Runtime", first)
    ran = operators(graph.plan, kernels, converted.nodes)
    return OnnxReport(runtime=f"ONNX Runtime {version()}", operators=ran, sqnr_db=sqnr)


def _run_part(part: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
    """Return what ONNX Runtime gives for a part of a graph."""
    source = program(part, inputs)
    with tempfile.TemporaryDirectory(prefix="nc-") as folder:
        file = Path(folder) / f"part{SUFFIX}"
        convert(source, inputs).save(str(file))
        return source.together(_run(file, inputs, exact=True)[0], inputs)


def _run(
    file: Path, inputs: Sequence[torch.Tensor], *, exact: bool
) -> tuple[list[torch.Tensor], tuple[ExecutedKernel, ...]]:
    try:
        try:
            return run(file, inputs, exact=exact)
        except Exception as error:  # the error has no specific class
            if not exact or not is_of_tensor_used_twice(error):
                raise
        return run(file, inputs, optimize=False)[0], run(file, inputs)[1]
    except Exception as error:  # whatever an engine may raise
        msg = (
            "ONNX Runtime fails on the exported model: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        )
        raise BackendError(msg) from error
