"""Tensors inside an engine, read without changing what it computes.

The graph is lowered once more with the tensors as additional outputs. To a fuser that is another graph, so an engine is believed only where
its outputs stay the same, bit for bit; where they do not, tensors are read in smaller groups, and those that can't be read even on their
own are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import Backend
from nc.graph.functions import quantize_per_tensor
from nc.graph.points import outputs_of, with_outputs
from nc.graph.qdq import QDQGraph
from nc.numerics import affine

Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def read(
    graph: QDQGraph, backend: Backend, run: Run, inputs: Sequence[torch.Tensor], places: Sequence[fx.Node], *, isolate: str
) -> dict[fx.Node, torch.Tensor]:
    """Values in an engine model of `graph`: its outputs, and of `places` those that it can show.

    Args:
        graph: the quantized model.
        backend: the engine.
        run: the engine model's own function.
        inputs: flat inputs.
        places: nodes of the graph.
        isolate: as for `Backend.lower`.

    Returns:
        Node → value; of quantize nodes the codes.
    """
    alone = list(run(inputs))
    leaves = list(graph.module.graph.nodes)[-1].args[0]
    wanted = set(outputs_of(graph.module))
    found = {leaf: value for leaf, value in zip(leaves, alone, strict=True) if isinstance(leaf, fx.Node) and leaf in wanted}
    groups = [tuple(places)] if places else []
    while groups:
        group = groups.pop()
        tapped = dataclasses.replace(graph, module=with_outputs(graph.module, group))
        values = list(backend.lower(tapped, verify="off", isolate=isolate).run(inputs))
        if _same(alone, values[: len(alone)]):
            found |= {node: _value(node, value) for node, value in zip(group, values[len(alone) :], strict=True)}
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return found


def _value(node: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """Codes of a quantize node's dequantized values; other values as they are."""
    return affine.quantize(value, *node.args[1:]) if node.target is quantize_per_tensor else value


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)]
    return all(x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs)
