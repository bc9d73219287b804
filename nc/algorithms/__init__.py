"""Algorithms: what is done to the fp32 graph before it is observed (`PRE`), and to the QDQ graph last (`POST`).

One per file; these tables are the one place where a new one is entered. Each is a frozen dataclass of its options, with a `name` and
`apply`: of a PRE algorithm `apply(module) -> names of the operators it changed`, of a POST algorithm
`apply(float_module, qdq_module, operators, batches) -> number of operators it changed`.
"""

from __future__ import annotations

from nc.algorithms.bias_absorption import BiasAbsorption
from nc.algorithms.bias_correction import BiasCorrection
from nc.algorithms.equalization import Equalization

PRE: dict[str, type] = {cls.name: cls for cls in (Equalization, BiasAbsorption)}
POST: dict[str, type] = {cls.name: cls for cls in (BiasCorrection,)}
