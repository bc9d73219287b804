"""Weight-only quantization beside another strategy in one model.

The low-bit layers come first, then the rest with these in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nc.api.preparation.base import Conversion, Preparation
from nc.api.preparation.weights import PreparedWeights
from nc.weights.saved_calls import RecordedCalls


class PreparedCombined(Preparation):
    """The float model. Call it with calibration data; it returns what the float model returns.

    `convert` uses the data twice.

    Attributes:
        low_bit: the part for the low-bit layers; it keeps the calibration samples.
        plan: that of the low-bit layers. The other operators are known when these layers are in place.
    """

    saved_by, cast_by = PreparedWeights.saved_by, PreparedWeights.cast_by

    def __init__(
        self, low_bit: PreparedWeights, prepare_rest: Callable[[torch.nn.Module], Preparation]
    ) -> None:
        super().__init__()
        self.low_bit = low_bit
        self.plan, self.quant_config = low_bit.plan, low_bit.quant_config
        self._prepare_rest = prepare_rest

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the float model's outputs. The inputs are kept for `convert`."""
        return self.low_bit(*args, **kwargs)

    @property
    def statistics(self) -> RecordedCalls:
        """The calls so far, to save, load or merge."""
        return self.low_bit.statistics

    def convert(self, asked: Conversion) -> torch.nn.Module:
        """Return what the rest gives.

        It is a captured model with the low-bit layers, calibrated with the same samples.
        """
        rest = self._prepare_rest(self.low_bit.quantized(asked.progress))
        for args, kwargs in (sample.call for sample in self.low_bit.samples):
            rest(*args, **kwargs)
        return rest.convert(dataclasses.replace(asked, progress=None))

    def _users_model(self) -> torch.nn.Module | None:
        low_bit = self._modules.get("low_bit")
        return low_bit.model if isinstance(low_bit, PreparedWeights) else None

    def _dtypes(self) -> set[torch.dtype]:
        return self.low_bit._dtypes()  # of the same base class
