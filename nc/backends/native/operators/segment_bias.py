"""What keeps texts apart whose rows follow each other: attention in C reads where they begin.

Nothing computes it as a tensor, which has the square of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from nc.backends.native.plans.operands import operator_name
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator
from nc.errors import BackendError
from nc.ops import segment_bias


def refuse(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Raise BackendError: something reads it that is not an attention in C."""
    readers = ", ".join(dict.fromkeys(operator_name(user) for user in node.users))
    msg = f"no kernel here computes {readers} for texts whose rows follow each other{recorder.last_refusal()}"
    raise BackendError(msg)


OPERATORS = (PlannedOperator((segment_bias,), {"C": refuse}, waits=lambda node: True),)
