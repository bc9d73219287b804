"""Weight-only quantization beside another strategy in one model: the low-bit layers first, then the rest with these in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nc.config import AnyConfig
from nc.graph.fixed_module import FixedModule
from nc.observed.prepared import PreparedModel
from nc.weights.driver import Progress
from nc.weights.prepared import PreparedWeights
from nc.weights.saved_calls import RecordedCalls


class PreparedMixed(FixedModule):
    """Call it with calibration data; it returns what the float model returns. `convert` uses the data twice.

    Attributes:
        low_bit: the part for the low-bit layers; it keeps the calibration samples.
    """

    what, saved_by, cast_by = PreparedWeights.what, PreparedWeights.saved_by, PreparedWeights.cast_by

    def __init__(self, low_bit: PreparedWeights, prepare_graph: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.low_bit = low_bit
        self._prepare_graph = prepare_graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the float model's outputs. The inputs are kept for `convert`."""
        return self.low_bit(*args, **kwargs)

    @property
    def quant_config(self) -> AnyConfig:
        """The configuration."""
        return self.low_bit.quant_config

    def _users_model(self) -> torch.nn.Module | None:
        low_bit = self._modules.get("low_bit")
        return low_bit.model if isinstance(low_bit, PreparedWeights) else None

    def _dtypes(self) -> set[torch.dtype]:
        return self.low_bit._dtypes()  # noqa: SLF001 - of the same base class

    @property
    def statistics(self) -> RecordedCalls:
        """The calls so far, to save, load or merge."""
        return self.low_bit.statistics

    def graph_part(self, progress: Progress | None = None) -> PreparedModel:
        """Return the captured model with its low-bit layers, to be calibrated."""
        prepared: PreparedModel = self._prepare_graph(self.low_bit.quantized(progress))
        return prepared

    def calibrated(self, progress: Progress | None = None) -> PreparedModel:
        """Return the same, calibrated with the samples."""
        prepared = self.graph_part(progress)
        for args, kwargs in (sample.call for sample in self.low_bit.samples):
            prepared(*args, **kwargs)
        return prepared
