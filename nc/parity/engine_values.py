"""Tensors inside an engine, read without changing what it computes.

The graph is lowered once more with the tensors as additional outputs. This changes the graph that a fuser
sees, so values are used only if the outputs stay the same, bit for bit. Else tensors are read in smaller
groups. Tensors that cannot be read even alone are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends import engine_options
from nc.backends.base import Backend
from nc.errors import BackendError, BackendUnavailableError
from nc.graph.qdq import QDQGraph
from nc.graph.views import options, returned
from nc.ops import quantize_per_tensor
from nc.proof.intermediates import outputs_of, with_outputs

Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def read(
    graph: QDQGraph,
    backend: Backend,
    run: Run,
    inputs: Sequence[torch.Tensor],
    places: Sequence[fx.Node],
    *,
    isolate: str,
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
    leaves = returned(graph.module)
    wanted = set(outputs_of(graph.module))
    found = {
        leaf: value
        for leaf, value in zip(leaves, alone, strict=True)
        if isinstance(leaf, fx.Node) and leaf in wanted
    }
    groups = _apart(places)
    while groups:
        group = groups.pop()
        tapped = dataclasses.replace(graph, module=with_outputs(graph.module, group), expected=None)
        values = _outputs(tapped, backend, inputs, isolate)
        if values and _same(alone, values[: len(alone)]):
            found |= {
                node: _value(node, value) for node, value in zip(group, values[len(alone) :], strict=True)
            }
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return found


def _apart(places: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Return groups without equal quantize nodes, which are one tensor to compilers.

    IPEX hangs on a graph that returns one twice.
    """
    groups: list[dict[object, fx.Node]] = []
    for place in places:
        key = place.args if place.target is quantize_per_tensor else place
        group = next((g for g in groups if key not in g), None)
        if group is None:
            group = {}
            groups.append(group)
        group[key] = place
    return [tuple(group.values()) for group in groups]


def _outputs(graph: QDQGraph, backend: Backend, inputs: Sequence[torch.Tensor], isolate: str) -> list[Any]:
    """Return the outputs of a graph that an engine runs.

    [] if the engine fails: some compilers can't handle the additional outputs.
    """
    options = engine_options(backend, isolate=isolate, padding="computed")  # as the reference does
    try:
        return list(backend.lower(graph, verify="off", **options).run(inputs))
    except BackendUnavailableError:
        raise
    except BackendError:
        return []


def _value(node: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """Codes of a quantize node's dequantized values; other values as they are."""
    return node.target(value, *options(node)) if node.target is quantize_per_tensor else value


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)]
    return all(x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs)
