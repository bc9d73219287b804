"""Where low-bit layers come from. Each layer carries it, so that nothing is attached to the user's model."""

from __future__ import annotations

import dataclasses
from typing import Any

from nc.graph.plan import Applied


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRun:
    """One quantization of a model.

    Attributes:
        plan: the decisions on all layers, as plain values (`WeightPlan.to_dict`); None where they are not
            known.
        applied: what each transform did.
        config: the configuration, as plain values.
        sqnr_db: of the outputs against the float model's in a call; None if they were not compared. It is not
            saved.
        verdict: the speed relative to float layers, see `nc.reports.weight_verdict`; None if not measured.
            It is not saved.
    """

    plan: dict[str, Any] | None = None
    applied: tuple[Applied, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    sqnr_db: float | None = None
    verdict: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The run that made a layer.

    Attributes:
        name: of the layer, in the model that was quantized.
        run: the run; all layers that it made share it.
    """

    name: str
    run: QuantizationRun
