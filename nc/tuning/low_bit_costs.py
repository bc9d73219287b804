"""What candidates cost layers, in accuracy and in bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from nc.text.json_text import built


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Estimates of one search.

    Attributes:
        noise: layer → candidate → what it adds to the loss, from `noise_of`; without layers of which nothing
            is known.
        sizes: layer → candidate → bytes, of all layers.
    """

    noise: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def candidates(self) -> set[str]:
        """Return the names of all candidates."""
        return {name for each in self.sizes.values() for name in each}

    def finite(self) -> LayerCosts:
        """Return a copy without candidates whose noise is NaN or infinite."""
        kept = {
            name
            for name in self.candidates()
            if all(math.isfinite(each[name]) for each in self.noise.values())
        }
        return LayerCosts(noise=_chosen(self.noise, kept), sizes=_chosen(self.sizes, kept) if kept else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerCosts:
        """Return the inverse of `dataclasses.asdict`, through JSON too.

        Raises:
            ValueError: it is not that.
        """
        costs = built(cls, data, "the estimates")
        names = costs.candidates()
        if len(data) < 2 or any(
            set(each) != names for part in (costs.noise, costs.sizes) for each in part.values()
        ):
            msg = "not all candidates are known for all layers"
            raise ValueError(msg)
        return costs


def _chosen(part: Mapping[str, Mapping[str, float]], kept: Collection[str]) -> dict[str, dict[str, float]]:
    return {layer: {name: v for name, v in each.items() if name in kept} for layer, each in part.items()}
