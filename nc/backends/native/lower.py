"""QDQ graph → graph of oneDNN calls, run by PyTorch; verified against the QDQ graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport, OpRun
from nc.backends.dynamic import packed_bytes, replace_dynamic
from nc.backends.native.attention import recompose
from nc.backends.native.bf16 import compute_in_bf16, drop_round_trips
from nc.backends.native.compiled import compiled
from nc.backends.native.execute import executable
from nc.backends.native.fuse import fuse, is_kernel, note_shapes
from nc.backends.native.merge import merge
from nc.backends.native.qdq_rewrites import CONVERTERS, hoist, pool_codes, remaining, unsigned
from nc.backends.profiling.nodes import node_steps, profile_nodes
from nc.backends.verify import check_option, verify_outputs
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.plan import Decision


def lower(graph: QDQGraph, *, verify: str = "raise", isolate: str = "auto", compile: bool = False) -> EngineModel:  # noqa: A002
    """An engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        isolate: as for other engines; no fuser runs here, so nothing runs in a child.
        compile: let `torch.compile` fuse what is fp32 between the kernels.

    Raises:
        VerificationError: the kernels compute something else than the graph.
        BackendError, BackendUnavailableError: the graph can't be compiled here.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    check_option("isolate", isolate, ("auto", "always", "never"))
    module = kernels(graph)
    pool_codes(module)
    outside = remaining(module)
    drop_unused(module)
    module.recompile()

    details = {}
    if compile:
        call, details["between the kernels"] = compiled(copy_module(module)[0]), "compiled by torch.compile"
    else:
        call, why_python = executable(module, graph.example)
        if why_python:
            details["run by"] = f"Python: {why_python}"

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            return call(*inputs)

    sqnr = verify_outputs(graph, run(graph.example), verify, "The native backend")

    def report() -> EngineReport:
        found = executed(module)
        return EngineReport(
            backend="native",
            ops=tuple(_op_run(d, found) for d in graph.plan.decisions),
            quantize_outside=outside[0],
            dequantize_outside=outside[1],
            weight_bytes=packed_bytes(graph.module) + sum(t.numel() * t.element_size() for t in module.buffers()),
            sqnr_db=sqnr,
            details=details,
        )

    # of compiled code nothing says which part of it computes which operator
    profile = None if compile else functools.partial(profile_nodes, module, call, CONVERTERS)
    steps = None if compile else functools.partial(node_steps, module, CONVERTERS)
    return EngineModel(run=run, report=report, profile=profile, steps=steps)


def kernels(graph: QDQGraph, *, packed: bool = True) -> fx.GraphModule:
    """A copy of the graph in which int8 operators are calls of kernels; `packed` as in `fuse`."""
    module, _ = copy_module(graph.module)
    note_shapes(module, graph.example)
    replace_dynamic(module)
    compute_in_bf16(module)
    recompose(module)
    unsigned(module)
    hoist(module)
    drop_round_trips(module)
    merge(module)
    fuse(module, packed=packed)
    return module


def _op_run(decision: Decision, found: Mapping[str, str]) -> OpRun:
    asked = decision.spec.precision
    if asked in ("fp32", found.get(decision.operator)):
        return OpRun(operator=decision.operator, ran=asked, reason=decision.reason)
    return OpRun(operator=decision.operator, ran="fp32", reason="no kernel fits it there: it runs in fp32, between dequantize and quantize")


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


def drop_unused(module: fx.GraphModule) -> None:
    """Constants that nothing reads any more: codes of packed weights."""
    for node in [n for n in module.graph.nodes if n.op == "get_attr" and not n.users]:
        module.graph.erase_node(node)
    used = {n.target for n in module.graph.nodes if n.op == "get_attr"}
    for name in [name for name in module._buffers if name not in used]:
        del module._buffers[name]
