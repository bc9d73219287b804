"""A quantized graph as OpenVINO's own files, which need neither torch nor nc."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from nc.backends.base import EngineModel
from nc.backends.openvino.convert import of_graph
from nc.backends.openvino.lower import run_part, wants_bf16
from nc.backends.openvino.runtime import Requests, compiled, core
from nc.backends.verify import check_option, first_disagreement, verify_outputs
from nc.errors import BackendError
from nc.graph.qdq import QDQGraph


def files(graph: QDQGraph, engine: EngineModel | None = None, *, verify: str = "raise") -> dict[str, bytes]:  # noqa: ARG001 - not needed
    """Contents of the `.xml` and the `.bin`; read again, run once and compared with the graph.

    Args:
        graph: the quantized model.
        engine: not needed.
        verify: see `nc.backends.verify`.

    Raises:
        BackendError: an operator has no translation.
        VerificationError: OpenVINO computes something else than the graph.
    """
    import openvino

    check_option("verify", verify, ("raise", "warn", "off"))
    core()
    converted = of_graph(graph)
    _fix_sizes(converted.model, graph)
    threads, bf16 = torch.get_num_threads(), wants_bf16(graph)
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        target = Path(directory) / "model.xml"
        openvino.save_model(converted.model, target, compress_to_fp16=False)
        written = {suffix: target.with_suffix(suffix).read_bytes() for suffix in (".xml", ".bin")}
        if verify != "off":
            outputs = Requests(compiled(target, threads, bf16=bf16)).infer(graph.example)
            first = functools.partial(
                first_disagreement, graph.module, graph.example, functools.partial(run_part, threads=threads, bf16=bf16)
            )
            verify_outputs(graph, converted.program.together(outputs, graph.example), verify, "OpenVINO", first)
    return written


def _fix_sizes(model: Any, graph: QDQGraph) -> None:
    """Give the inputs the sizes that the captured model fixed: the conversion leaves all of them free, and nc's signature is not there."""
    import openvino

    leaves = [leaf for leaf in graph.signature.leaves if leaf.used]
    shapes = {
        port: openvino.PartialShape([dim if isinstance(dim, int) else openvino.Dimension.dynamic() for dim in leaf.dims])
        for port, leaf in zip(model.inputs, leaves, strict=True)
    }
    try:
        model.reshape(shapes)
    except RuntimeError as error:
        msg = f"OpenVINO's conversion of the quantized graph failed: it can't have the sizes that the model fixed: {error}"
        raise BackendError(msg) from error
