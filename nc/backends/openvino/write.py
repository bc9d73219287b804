"""A quantized graph as OpenVINO's own files, which need neither torch nor nc."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from nc.backends.base import EngineModel
from nc.backends.openvino.convert import of_graph
from nc.backends.openvino.lower import run_part, wants_bf16
from nc.backends.openvino.runtime import Requests, compiled, core
from nc.backends.verify import check_option, first_disagreement, verify_outputs
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
