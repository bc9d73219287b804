"""Run a graph again over kept calibration inputs, and read inner values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.algorithms.base import Batch, Bound, State, Tap
from nc.graph.catalogue import WEIGHTED, input_node, kind_of_node
from nc.graph.fx_utils import run_with
from nc.graph.plan import Plan
from nc.graph.views import Weighted

Observed = dict[tuple[str, str], State]


def collect(
    module: fx.GraphModule,
    plan: Plan,
    requests: Sequence[tuple[Sequence[Tap], Sequence[Batch], Bound | None]],
) -> list[tuple[Observed, list[Batch]]]:
    """Run batches through a graph, each at most once for all requests.

    Args:
        module: flat fp32 graph.
        plan: its int8 operators count for `Bound.macs`.
        requests: what each algorithm taps, of which batches, and its bound.

    Returns:
        For each request the states of its taps, and the batches that they saw (all, where it taps nothing).
    """
    results: list[tuple[Observed, list[Batch]]] = [
        ({}, [] if taps else list(batches)) for taps, batches, _ in requests
    ]
    names = {d.operator for d in plan.quantized}
    spent = [0.0] * len(requests)
    for batch in {id(batch): batch for taps, batches, _ in requests if taps for batch in batches}.values():
        open_ = [
            i
            for i, (taps, batches, bound) in enumerate(requests)
            if taps
            and any(b is batch for b in batches)
            and spent[i] < (math.inf if bound is None else bound.macs)
        ]
        if not open_:
            continue
        run = _Taps(names, [(requests[i][0], results[i][0]) for i in open_])
        run_with(module, batch, run.after, run.before)
        for i in open_:
            spent[i] += run.macs
            results[i][1].append(batch)
    return results


class _Taps:
    """What one batch shows on its way through a graph."""

    def __init__(self, names: set[str], requests: Sequence[tuple[Sequence[Tap], Observed]]) -> None:
        self.macs = 0.0
        self._names = names
        self._taps: dict[tuple[str, str], list[tuple[Tap, Observed]]] = {}
        for taps, observed in requests:
            for tap in taps:
                self._taps.setdefault((tap.operator, tap.role), []).append((tap, observed))

    def before(self, n: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        operator: str | None = n.meta.get("operator")
        if operator is not None and (operator, "input") in self._taps:
            self._see(operator, "input", env[input_node(n)])

    def after(self, n: fx.Node, value: Any, _: Mapping[fx.Node, Any]) -> Any:
        operator: str | None = n.meta.get("operator")
        if operator is not None and (operator, "output") in self._taps:
            self._see(operator, "output", value)
        if operator in self._names and kind_of_node(n) in WEIGHTED:
            self.macs += (
                value.numel()
                // value.shape[channel_axis(n, value)]
                * Weighted.of(n).weight.meta["val"].numel()
            )
        return value

    def _see(self, operator: str, role: str, value: torch.Tensor) -> None:
        for tap, observed in self._taps[operator, role]:
            observed[operator, role] = tap.update(observed.get((operator, role), {}), value)


def channel_axis(node: fx.Node, value: torch.Tensor) -> int:
    """Return the axis of the output channels in the result of a layer, batched or not."""
    if kind_of_node(node) == "linear":
        return value.dim() - 1
    return 1 if value.dim() == Weighted.of(node).weight.meta["val"].dim() else 0


def inputs_of(
    module: fx.GraphModule, names: Iterable[str], batches: Sequence[Sequence[torch.Tensor]], rows: int
) -> dict[str, torch.Tensor]:
    """Return rows of the values of some nodes, evenly spaced over all batches.

    Args:
        module: flat graph.
        names: names of the nodes.
        batches: flat inputs, each with its own shapes.
        rows: about how many to keep.

    Returns:
        Node name → fp32, shape [rows, channels]: the last dimension is the channels.
    """
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    each = max(1, rows // max(1, len(batches)))

    def keep(node: fx.Node, value: Any, _: object) -> Any:
        if node.name in kept:
            flat = value.reshape(-1, value.shape[-1])
            picked = (
                torch.linspace(0, len(flat) - 1, min(each, len(flat)), dtype=torch.float32).round().long()
            )
            kept[node.name].append(flat[picked].clone())
        return value

    for batch in batches:
        run_with(module, batch, keep)
    return {name: torch.cat(parts) for name, parts in kept.items()}
