"""SmoothQuant for low-bit linears.

The largest inputs and the largest weights of a channel are balanced (arXiv 2211.10438, equation 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from nc.algorithms.solvers.base import InputNeeds
from nc.algorithms.transforms.base import Scope
from nc.algorithms.transforms.folding import LOOKED_AT
from nc.algorithms.transforms.scale_sets import ScaleSet, TransformOutcome, weight_of
from nc.formats.checks import is_number, require
from nc.graph.plan import Applied


@dataclass(frozen=True)
class Smooth:
    """A scale per input channel, `s = max|x|^alpha / max|w|^(1 - alpha)`, for linears that read one operator.

    Each set of linears that read one norm or linear has its own scale per input channel.

    It is for activations in 8 bits (`act_dtype="int8"`); for weights alone, `AWQ` searches the scale.

    Attributes:
        alpha: share of the activations' range that moves into the weights, 0 to 1.

    Raises:
        ConfigError: a value that is out of range.
    """

    alpha: float = 0.5

    name: ClassVar[str] = "smooth"
    level: ClassVar[Literal["block"]] = "block"

    def __post_init__(self) -> None:
        """Check values."""
        require(is_number(self.alpha) and 0 <= self.alpha <= 1, "alpha", "a number from 0 to 1", self.alpha)

    @property
    def needs(self) -> InputNeeds:
        """Any data."""
        return InputNeeds(squares=True, samples=LOOKED_AT)

    def apply(self, scope: Scope) -> Applied:
        """See `Transform.apply`."""
        outcome = TransformOutcome(self.name, scope)
        for found in outcome.sets:
            outcome.fold(found, self._scale(found))
        return outcome.applied(f"alpha {self.alpha}" if outcome.sets else "")

    def _scale(self, found: ScaleSet) -> torch.Tensor:
        a = found.gathered(lambda _, t: t.reached.largest, "amax")
        w = found.gathered(lambda _, t: weight_of(t).abs().amax(0), "amax")
        scale = a.pow(self.alpha) / w.clamp(min=1e-5).pow(1 - self.alpha)
        scale = torch.where((a > 0) & (w > 0), scale, 1.0)
        return scale.clamp(min=1e-5)
