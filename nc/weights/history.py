"""What was done to a model with low-bit weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from nc.graph.plan import Applied


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What was done to a model; it is the model's attribute `nc_record`.

    Attributes:
        plan: the decisions, as plain values (`WeightPlan.to_dict`); None for a model that was loaded from another tool's files.
        applied: what each transform did.
        config: the configuration, as plain values.
    """

    plan: dict[str, Any] | None = None
    applied: tuple[Applied, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
