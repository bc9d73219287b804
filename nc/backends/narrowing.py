"""A stored graph for an engine whose sums could saturate on this CPU."""

from __future__ import annotations

from nc.backends.base import Backend
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import named, narrow
from nc.kernels import cpu
from nc.process.warn import warn


def narrowed(graph: QDQGraph, engine: Backend) -> QDQGraph:
    """Return the graph with sums that cannot saturate on this engine and CPU; warns if codes had to change.

    Args:
        graph: the stored model.
        engine: what it is for.
    """
    graph, names = narrow(graph, engine.capabilities())
    if names:
        text = (
            f"Backend {engine.name!r} adds products in 16 bits on this CPU{cpu.why_narrow()}. {len(names)} "
            f"of {len(graph.plan.quantized)} quantized layers could saturate: {named(names)}. They were "
            "quantized again from their int8 codes, which costs some accuracy (see the report). The files "
            "are unchanged. To avoid this, convert the fp32 model here."
        )
        warn(text)
    return graph
