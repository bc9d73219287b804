"""Ways to compute a node in a plan. A way records calls and returns their result, or refuses and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.operands import PlanTensor


class Refused(Exception):
    """A way can't compute a node; the text says why. The recorder then takes the next one."""


def need(condition: object, why: str) -> None:
    """Raise `Refused` for this reason unless a condition holds."""
    if not condition:
        raise Refused(why)


def why_refused(check: Callable[..., object], *arguments: Any) -> str:
    """Return why a check, or a way, raises `Refused`; "" where it does not."""
    try:
        check(*arguments)
    except Refused as refused:
        return str(refused)
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputCodes:
    """What a result is quantized to where it is written.

    It is `round(x / scale) + zero_point`, in the limits of the dtype.
    """

    scale: float
    zero_point: int
    dtype: torch.dtype


#: Recorder, node, its arguments by name → the result; raises `Refused` for what it can't do.
Way = Callable[..., PlanTensor]
#: The same for an operator with several results.
WayToSeveral = Callable[..., Sequence[PlanTensor]]
#: Recorder, the node that waits, `OutputCodes` → its result as codes; for a node that one quantize node alone
#: reads.
WayToCodes = Callable[..., PlanTensor]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedOperator:
    """What plans know of some operators.

    Attributes:
        targets: the operators of torch.
        ways: by their names in reports, the best first.
        to_codes: those that write codes.
        waits: whether a node waits for its readers, which may take it into their own kernels.
        plain: where no way has a fast kernel of oneDNN's, the same ways take its plain C++, since torch can't
            compute the operator.
        only_here: torch's operator of it computes in fp32, so that only these ways run it in int8.
        weight: its argument that is the codes of a weight which its ways pack; "" where there is none.
        of_one_token: these ways take the place of others in graphs of one token, whose tensors are small.
        only_c: these ways are for plans that call C alone; elsewhere torch is better.
    """

    targets: tuple[Any, ...]
    ways: Mapping[str, Way | WayToSeveral] = dataclasses.field(default_factory=dict)
    to_codes: Mapping[str, WayToCodes] = dataclasses.field(default_factory=dict)
    waits: Callable[[fx.Node], bool] | None = None
    plain: bool = False
    only_here: bool = False
    weight: str = ""
    of_one_token: bool = False
    only_c: bool = False
