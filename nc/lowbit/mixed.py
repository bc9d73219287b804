"""Weight-only quantization beside another strategy in one model: the low-bit layers first, then the rest with these in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nc.lowbit.blocks import Progress
from nc.lowbit.prepared import PreparedWeights
from nc.lowbit.recorded import RecordedCalls
from nc.prepared import PreparedModel


class PreparedMixed(torch.nn.Module):
    """Call it with calibration data; it returns what the float model returns. `convert` uses the data twice.

    Attributes:
        low_bit: the part for the low-bit layers; it keeps the calibration samples.
    """

    def __init__(self, low_bit: PreparedWeights, prepare_graph: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.low_bit = low_bit
        self._prepare_graph = prepare_graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The float model's outputs. The inputs are kept for `convert`."""
        return self.low_bit(*args, **kwargs)

    @property
    def statistics(self) -> RecordedCalls:
        """The calls so far, to save, load or merge."""
        return self.low_bit.statistics

    def graph_part(self, progress: Progress | None = None) -> PreparedModel:
        """The captured model with its low-bit layers, to be calibrated."""
        prepared: PreparedModel = self._prepare_graph(self.low_bit.quantized(progress))
        return prepared

    def calibrated(self, progress: Progress | None = None) -> PreparedModel:
        """The same, calibrated with the samples."""
        prepared = self.graph_part(progress)
        for args, kwargs in (sample.call for sample in self.low_bit.samples):
            prepared(*args, **kwargs)
        return prepared
