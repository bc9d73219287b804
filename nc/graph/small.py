"""Operators that int8 with ranges found in each call makes slower: finding and applying them costs more than the product saves."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from nc.graph.capture import Graph
from nc.graph.naming import Operator

#: Multiply-adds on the example below which a dynamic linear was slower than fp32 (docs/dynamic.md).
_LEAST_MACS = {"per_tensor": 8e6, "per_token": 4e7}
#: Nor does it pay where the inner or the outer size is this small: the work per element of input or output is too little.
_LEAST_SIZE = 64


class Sizes:
    """Sizes of a graph's operators on its example, found by one run when they are first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @functools.cached_property
    def _outputs(self) -> dict[str, tuple[int, ...]]:
        recorder = _Recorder(self._graph.module)
        with torch.no_grad():
            recorder.run(*self._graph.example)
        return recorder.shapes

    def slower_in_int8(self, op: Operator, granularity: str) -> str:
        """Why an operator would be slower as dynamic int8 than in fp32, at the example's size; "" where it would not."""
        if op.kind != "linear":
            return ""
        node = next(n for n in self._graph.module.graph.nodes if n.name == op.node)
        outputs, inner = node.args[1].meta["val"].shape
        rows = math.prod(self._outputs[op.node][:-1])
        if rows * inner * outputs >= _LEAST_MACS[granularity] and min(inner, outputs) >= _LEAST_SIZE:
            return ""
        return f"skip_slow: {rows} x {inner} x {outputs} is too small to gain by dynamic int8"


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            self.shapes[node.name] = tuple(value.shape)
        return value
