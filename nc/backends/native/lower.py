"""QDQ graph → graph of oneDNN calls, run by PyTorch; verified against the QDQ graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport, OpRun
from nc.backends.dynamic import packed_bytes
from nc.backends.native.compiled import compiled
from nc.backends.native.execute import Call, executable
from nc.backends.native.fuse import is_kernel
from nc.backends.native.passes import finish, kernels
from nc.backends.native.qdq_rewrites import CONVERTERS, dequantize, quantize
from nc.backends.passes import Outcome, run_passes
from nc.backends.profiling.nodes import node_steps, profile_nodes
from nc.backends.verify import check_option, first_disagreement, verify_outputs
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.plan import Decision


def lower(graph: QDQGraph, *, verify: str = "raise", compile: bool = False) -> EngineModel:  # noqa: A002
    """An engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        compile: let `torch.compile` fuse what is fp32 between the kernels.

    Raises:
        VerificationError: the kernels compute something else than the graph; names the first operator that differs.
        BackendError, BackendUnavailableError: the graph can't be compiled here.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    module, outcome = _lowered(graph.module, graph.example)
    call, details = _callable(module, graph.example, compile)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return call(*inputs)

    def run_part(part: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        with torch.no_grad():
            return _callable(_lowered(part, inputs)[0], inputs, compile)[0](*inputs)

    first = functools.partial(first_disagreement, graph.module, graph.example, run_part)
    sqnr = verify_outputs(graph, run(graph.example), verify, "The native backend", first)
    packed = packed_bytes(graph.module)

    def report() -> EngineReport:
        found = executed(module)
        targets = [node.target for node in module.graph.nodes]
        return EngineReport(
            backend="native",
            ops=tuple(_op_run(d, found, outcome) for d in graph.plan.decisions),
            quantize_outside=targets.count(quantize),
            dequantize_outside=targets.count(dequantize),
            weight_bytes=packed + sum(t.numel() * t.element_size() for t in module.buffers()),
            sqnr_db=sqnr,
            details=details,
        )

    # of compiled code nothing says which part of it computes which operator
    profile = None if compile else functools.partial(profile_nodes, module, call, CONVERTERS)
    steps = None if compile else functools.partial(node_steps, module, CONVERTERS)
    return EngineModel(run=run, report=report, profile=profile, steps=steps)


def _lowered(part: fx.GraphModule, example: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, Outcome]:
    """The graph of oneDNN calls for a QDQ graph, which stays as it is."""
    module, _ = copy_module(part)
    return module, run_passes(module, (*kernels(example), *finish()))


def _callable(module: fx.GraphModule, example: Sequence[torch.Tensor], compile: bool) -> tuple[Call, dict[str, str]]:  # noqa: A002
    """What runs a lowered graph, and what the report says of that."""
    if compile:
        return compiled(copy_module(module)[0]), {"between the kernels": "compiled by torch.compile"}
    call, run_by = executable(module, example)
    return call, {"run by": run_by} if run_by else {}


def _op_run(decision: Decision, found: Mapping[str, str], outcome: Outcome) -> OpRun:
    asked = decision.spec.precision
    if asked in ("fp32", found.get(decision.operator)):
        return OpRun(operator=decision.operator, ran=asked, reason=decision.reason)
    why = outcome.refused.get((decision.operator, asked), "it became part of a fp32 call")
    how = "rounded to bf16 before and after" if asked == "bf16" else "between dequantize and quantize"
    return OpRun(operator=decision.operator, ran="fp32", reason=f"{why}; it runs in fp32, {how}")


def executed(module: fx.GraphModule) -> dict[str, str]:
    """Names of the operators that the graph computes in int8 or bf16, and in which."""
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        if is_kernel(node):
            found |= dict.fromkeys(node.meta["operators"], "int8")
        elif _is_dynamic_kernel(node):
            found[node.meta["operator"]] = "int8"
        elif node.meta.get("bf16"):
            found[node.meta["operator"]] = "bf16"
    return found


def _is_dynamic_kernel(node: fx.Node) -> bool:
    """Whether a node is what `replace_dynamic` makes of a dynamic operator."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.startswith(("quantized::linear", "aten::quantized_"))
