"""Auto: of several algorithms, the one that gives the readers of a tensor the least output error.

It compares the ranges of the algorithms at the operators that read the tensor.
"""

from __future__ import annotations

from nc.observers.base import RangeAlgorithm
from nc.observers.histogram import HISTOGRAM
from nc.observers.mse import MSE

#: What is tried, in this order; of equals the first stays.
CANDIDATES = ("minmax", "percentile", "mse", "kl")
#: Where no data is at hand, the least error of the input stands for that of the output.
AUTO = RangeAlgorithm("auto", HISTOGRAM, MSE.find_range)
