"""The reference backend: the QDQ graph itself, in plain fp32 PyTorch.

Slow, exact, runs everywhere; every engine is checked against it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nc.backends.base import Backend, EngineModel, EngineReport, OpRun
from nc.formats import DTYPES, Capabilities, OpSupport
from nc.formats.rule_key import KIND_NAMES
from nc.graph.catalogue import CONVOLUTIONS, RECURRENT, WEIGHTED
from nc.graph.fake_quant import SIMULATED_ONLY
from nc.graph.fx_utils import call_graph
from nc.graph.plan import Decision
from nc.graph.qdq import QDQGraph
from nc.nn import KernelChoice
from nc.ops import CONVERTERS
from nc.profiling.nodes import profile_nodes

NAME = "reference"
_DYNAMIC = ("per_token", "per_tensor")
_NOTE = "simulated: codes are dequantized and computed in fp32"


class ReferenceBackend(Backend):
    """See the module text."""

    name = NAME
    remark = (
        "fp32 simulation of the integers: for checking, not for speed; auto uses it for simulated formats "
        "only"
    )

    def capabilities(self) -> Capabilities:
        """Every kind and dtype."""
        weighted = WEIGHTED | RECURRENT
        rows = tuple(
            OpSupport(
                kind=kind,
                activations=() if kind in RECURRENT else ("uint8", "int8"),
                weights=("int8",) if kind in weighted else (),
                fake=tuple(DTYPES) if kind in WEIGHTED else (),
                dynamic=_dynamic(kind),
                projections=_DYNAMIC,
                affine_only=kind in RECURRENT,
                note=_NOTE,
            )
            for kind in KIND_NAMES
        )
        rows += tuple(OpSupport(kind=kind, fake=tuple(DTYPES), note=_NOTE) for kind in sorted(SIMULATED_ONLY))
        fused_add = frozenset({"conv1d", "conv2d", "conv3d", "linear"})
        return Capabilities(backend=NAME, ops=rows, fused_add=fused_add, why_no_bf16="")

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """Run the graph's own module."""

        def run(inputs: Any) -> Any:
            with torch.no_grad():
                return call_graph(graph.module, inputs)

        def report() -> EngineReport:
            ops = tuple(
                OpRun(operator=d.operator, ran="fp32", reason=_simulated(d), kernels=_low_bit(d))
                for d in graph.plan.decisions
            )
            bytes_ = sum(b.numel() * b.element_size() for b in graph.module.buffers())
            return EngineReport(backend=NAME, ops=ops, weight_bytes=bytes_)

        return EngineModel(
            run=run,
            report=report,
            profile=functools.partial(profile_nodes, graph.module, graph.module, CONVERTERS),
        )


def _dynamic(kind: str) -> tuple[str, ...]:
    """Granularities of ranges that are found in each call."""
    if kind in CONVOLUTIONS:
        return ("per_tensor",)  # rows of an image's last dimension mean nothing to a window
    if kind == "matmul":
        return ("per_token",)
    return _DYNAMIC if kind == "linear" or kind in RECURRENT else ()


def _simulated(decision: Decision) -> str:
    if decision.spec.quantized:
        return _NOTE
    return "simulated: rounded to bf16 and computed in fp32" if decision.spec.bf16 else decision.reason


def _low_bit(decision: Decision) -> KernelChoice | None:
    """No kernel: the operator itself."""
    return KernelChoice(()) if decision.kind == "quant_linear" else None
