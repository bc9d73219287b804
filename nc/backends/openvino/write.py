"""A quantized graph as OpenVINO's own files, which need neither torch nor nc."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from nc.backends.base import EngineModel, EngineReport
from nc.backends.openvino.convert import of_graph
from nc.backends.openvino.lower import report_of, run_part, wants_bf16
from nc.backends.openvino.runtime import Requests, compiled, core
from nc.backends.verify import first_disagreement, verify_outputs
from nc.errors import BackendError
from nc.graph.qdq import QDQGraph


def write(
    graph: QDQGraph, engine: EngineModel | None, file: Path, *, verify: str = "raise"
) -> EngineReport | None:
    """Write the `.xml`, and the `.bin` beside it; read again, run once and compared with the graph.

    Args:
        graph: the quantized model.
        engine: not needed.
        file: the `.xml`.
        verify: see `nc.backends.verify`.

    Returns:
        What OpenVINO runs; None where it was not asked.

    Raises:
        BackendError: an operator has no translation.
        VerificationError: OpenVINO computes something else than the graph.
    """
    import openvino

    core()
    converted = of_graph(graph)
    _fix_sizes(converted.model, graph)
    threads, bf16 = torch.get_num_threads(), wants_bf16(graph)
    try:
        openvino.save_model(converted.model, file, compress_to_fp16=False)
    except RuntimeError as error:  # how OpenVINO says that a disk is full
        raise OSError(str(error)) from error
    if verify == "off":
        return None
    model = compiled(file, threads, bf16=bf16)
    outputs = Requests(model).infer(graph.example)
    part = functools.partial(run_part, threads=threads, bf16=bf16)
    first = functools.partial(first_disagreement, graph.module, graph.example, part)
    sqnr = verify_outputs(
        graph, converted.program.together(outputs, graph.example), verify, "OpenVINO", first
    )
    return report_of(graph, converted, model, sqnr, threads)


def _fix_sizes(model: Any, graph: QDQGraph) -> None:
    """Give the inputs of an OpenVINO model the sizes that are fixed in the captured model.

    The conversion leaves all sizes free, and the file does not have nc's signature, which checks them.

    Raises:
        BackendError: the model can't be reshaped to these sizes.
    """
    import openvino

    leaves = [leaf for leaf in graph.signature.leaves if leaf.used]
    shapes = {
        port: openvino.PartialShape(
            [dim if isinstance(dim, int) else openvino.Dimension.dynamic() for dim in leaf.dims]
        )
        for port, leaf in zip(model.inputs, leaves, strict=True)
    }
    try:
        model.reshape(shapes)
    except RuntimeError as error:
        msg = (
            "OpenVINO's conversion of the quantized graph failed: it can't have the sizes that the model "
            f"fixed: {error}"
        )
        raise BackendError(msg) from error
