"""Standard errors of figures: how far they would go from here with other data of the same kind."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

#: How often units are drawn.
DRAWS = 1000


def deviation(figure: Callable[[np.ndarray], float], units: int, block: int = 1) -> float:
    """Return the standard error of a figure of chosen units: a bootstrap of blocks.

    Args:
        figure: of units, by their numbers.
        units: how many there are.
        block: units in a row that are alike, and are drawn together.
    """
    draw = np.random.default_rng(0)
    starts = draw.integers(0, units, (DRAWS, -(-units // block)))
    chosen = (starts[:, :, None] + np.arange(block)) % units
    return statistics.stdev(figure(row.ravel()[:units]) for row in chosen)
