"""Algorithms: one per file, each a frozen dataclass of its options with the members of `base.Algorithm`.

A configuration can name the algorithms in `PRE` and `POST`. `in_order` decides the order in which all
algorithms are applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from nc.algorithms.base import Algorithm, Stage
from nc.algorithms.bias_absorption import BiasAbsorption
from nc.algorithms.bias_correction import BiasCorrection
from nc.algorithms.channel_scaling import ChannelScaling
from nc.algorithms.dead_channels import DeadChannels
from nc.algorithms.equalization import Equalization
from nc.algorithms.range_search import RangeSearch
from nc.algorithms.smoothing import SmoothQuant
from nc.algorithms.weight_rounding import WeightRounding
from nc.graph.plan import Plan, Step
from nc.observers.auto import AUTO

PRE: dict[str, type] = {cls.name: cls for cls in (Equalization, BiasAbsorption, ChannelScaling)}
POST: dict[str, type] = {cls.name: cls for cls in (WeightRounding, BiasCorrection)}


def in_order(
    plan: Plan, pre: Sequence[Algorithm], post: Sequence[Algorithm], *, smooths: bool = False
) -> tuple[Algorithm, ...]:
    """All algorithms for a plan, in the order in which they are applied.

    Args:
        plan: says whether the range search has anything to do.
        pre: of the configuration.
        post: of the configuration.
        smooths: whether the configuration asks for SmoothQuant.
    """
    specs = [d.spec for d in plan.quantized]
    searches = any(spec.activation is not None and spec.activation.algo == AUTO.name for spec in specs)
    listed = (
        *pre,
        *([SmoothQuant()] if smooths and specs else []),
        *([RangeSearch()] if searches else []),
        *post,
        *([DeadChannels()] if specs else []),
    )
    stages = list(Stage)
    return tuple(
        sorted(listed, key=lambda a: stages.index(a.stage))
    )  # stable: within a stage the order above


def steps(algorithms: Sequence[Algorithm]) -> tuple[Step, ...]:
    """Return the same as part of a plan."""
    return tuple(Step(a.name, a.stage.value, _options(a)) for a in algorithms)


def _options(algorithm: Algorithm) -> str:
    if not dataclasses.is_dataclass(algorithm):
        return ""
    return ", ".join(f"{f.name}={getattr(algorithm, f.name)!r}" for f in dataclasses.fields(algorithm))


#: Stages of the algorithms that a configuration takes as "pre" and "post".
PRE_STAGES, POST_STAGES = (Stage.FLOAT, Stage.STATISTICS), (Stage.QPARAMS, Stage.CODES)


def is_algorithm(value: object, stages: Collection[Stage], known: Mapping[str, type]) -> bool:
    """Tell whether a value is an algorithm of one of these stages.

    Its name must not be that of another class in `known`.
    """
    if not (isinstance(value, Algorithm) and dataclasses.is_dataclass(value) and value.stage in stages):
        return False
    return known.get(value.name, type(value)) is type(value)
