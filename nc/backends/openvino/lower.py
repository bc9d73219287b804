"""QDQ graph → compiled OpenVINO model, verified against the graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport
from nc.backends.new_sizes import NewSizes
from nc.backends.openvino.convert import OpenVinoModel, convert, of_graph
from nc.backends.openvino.layers import layers_of, op_run
from nc.backends.openvino.program import program
from nc.backends.openvino.runtime import Requests, compiled, version
from nc.backends.verify import check_option, first_disagreement, verify_outputs
from nc.graph.qdq import QDQGraph


def lower(graph: QDQGraph, *, verify: str = "raise", verify_sizes: bool = True) -> EngineModel:
    """Return an engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        verify_sizes: compare the outputs for new sizes too, in their first call; not with verify="off".

    Raises:
        BackendError: an operator has no translation.
        VerificationError: OpenVINO computes something else than the graph; names the first operator that
            differs.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    threads, bf16 = torch.get_num_threads(), wants_bf16(graph)
    converted = of_graph(graph)
    model = compiled(converted.model, threads, bf16=bf16)
    requests = Requests(model)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        return converted.program.together(requests.infer(inputs), inputs)

    first = functools.partial(
        first_disagreement,
        graph.module,
        graph.example,
        functools.partial(run_part, threads=threads, bf16=bf16),
    )
    sqnr = verify_outputs(graph, run(graph.example), verify, "OpenVINO", first)
    new_sizes = NewSizes(run, graph, "OpenVINO") if verify_sizes and verify != "off" else None

    def report() -> EngineReport:
        found = report_of(graph, converted, model, sqnr, threads)
        return dataclasses.replace(
            found, details={**found.details, **({} if new_sizes is None else new_sizes.details())}
        )

    return EngineModel(run=new_sizes or run, report=report)


def report_of(
    graph: QDQGraph, converted: OpenVinoModel, model: Any, sqnr: float | None, threads: int
) -> EngineReport:
    """Return what OpenVINO runs of a graph.

    Args:
        graph: the quantized model.
        converted: made from it.
        model: that, compiled.
        sqnr: see `EngineReport.sqnr_db`.
        threads: that it was compiled for.
    """
    layers = layers_of(model)
    return EngineReport(
        backend="openvino",
        ops=tuple(op_run(d, layers, converted.layers) for d in graph.plan.decisions),
        quantize_outside=sum(layer.kind == "FakeQuantize" for layer in layers),
        weight_bytes=_constant_bytes(converted),
        sqnr_db=sqnr,
        details={
            "OpenVINO": version(),
            "threads": threads,
            **({"all that is not int8": "bf16"} if wants_bf16(graph) else {}),
        },
    )


def wants_bf16(graph: QDQGraph) -> bool:
    """Return whether the plan asks bf16 of an operator."""
    return any(decision.spec.bf16 for decision in graph.plan.decisions)


def run_part(
    part: fx.GraphModule, inputs: tuple[torch.Tensor, ...], *, threads: int, bf16: bool
) -> Sequence[Any]:
    """Return what OpenVINO gives for a part of a graph."""
    source = program(part, inputs)
    converted = convert(source, inputs)
    return source.together(Requests(compiled(converted.model, threads, bf16=bf16)).infer(inputs), inputs)


def _constant_bytes(converted: OpenVinoModel) -> int:
    """Bytes of the constants of a model."""
    constants = [node for node in converted.model.get_ops() if node.get_type_name() == "Constant"]
    return sum(int(node.get_byte_size()) for node in constants)
