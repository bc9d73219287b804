"""Node data for Google's Model Explorer: what each operator runs in, and how long it takes.

The keys are names of nodes of the program that `torch.export.export` gives for the fp32 model, which Model
Explorer opens as a .pt2 file: its graph is called "graph", and the id of a node is its name there. nc
captures models with `torch.export` too, so the operators have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from nc.reports.op_report import OpReport
from nc.reports.page_strip import form_of

#: The id that Model Explorer gives to the graph of an exported program.
_GRAPH = "graph"
#: By which nc knows its own files; Model Explorer passes over what it does not know.
_MARK = {"writtenBy": "nc"}
_COLOURS = {
    "int8": "#8ab4f8",
    "bf16": "#81c995",
    "fp32": "#fcad70",
    "low-bit": "#4fd1c5",
    "other": "#c6b3ff",
}


def node_data(module: fx.GraphModule, ops: Sequence[OpReport]) -> dict[str, Any]:
    """Return node data as plain values, to be written as JSON.

    Args:
        module: the quantized graph, whose operators have the names of the captured nodes.
        ops: of the report. The value of a node is its share of the time in percent; without a profile, its
            multiply-adds on the example inputs.
    """
    nodes = {node.meta["operator"]: node.name for node in module.graph.nodes if "operator" in node.meta}
    timed = any(op.share for op in ops)
    results = {
        nodes[op.operator]: {
            "value": 100 * (op.share or 0.0) if timed else op.multiply_adds or 0,
            "bgColor": _COLOURS[form_of(op.ran)],
            "textColor": "#000000",
        }
        for op in ops
        if op.operator in nodes
    }
    return {_GRAPH: {"results": results, **_MARK}}


def is_node_data(document: Mapping[str, Any]) -> bool:
    """Return whether a document is what `node_data` returns."""
    graph = document.get(_GRAPH)
    return isinstance(graph, Mapping) and _MARK.items() <= graph.items()
