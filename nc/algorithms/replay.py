"""Running a graph again over kept calibration inputs, to look at values inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx


def inputs_of(
    module: fx.GraphModule, names: Iterable[str], batches: Sequence[Sequence[torch.Tensor]], rows: int
) -> dict[str, torch.Tensor]:
    """Rows of the values of some nodes, evenly spaced over all batches.

    Args:
        module: flat graph.
        names: names of the nodes.
        batches: flat inputs, each with shapes of its own.
        rows: how many to keep, about.

    Returns:
        Node name → fp32, shape [rows, channels]: the last dimension is the channels.
    """
    recorder = _Recorder(module, set(names), max(1, rows // max(1, len(batches))))
    for batch in batches:
        recorder.run(*batch)
    return {name: torch.cat(parts) for name, parts in recorder.rows.items()}


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: set[str], each: int) -> None:
        super().__init__(module)
        self.rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        self._each = each

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.name in self.rows:
            flat = value.reshape(-1, value.shape[-1])
            picked = torch.linspace(0, len(flat) - 1, min(self._each, len(flat))).round().long()
            self.rows[node.name].append(flat[picked].clone())
        return value
