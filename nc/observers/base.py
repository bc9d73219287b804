"""What an observer is: one statistic of one tensor, collected over calibration batches, and how a range is found from it.

The two are apart: several algorithms read one statistic, so that data seen once serves another algorithm tomorrow. A new algorithm is
one file with a pure `find_range`, and with a statistic of its own where none that exists will do; `nc.observers` lists it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from nc.errors import CalibrationError
from nc.spec import TensorSpec

State = dict[str, torch.Tensor]
#: An observed tensor: name of its node and of the statistic that is collected.
Key = tuple[str, str]
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Statistic:
    """What is collected of one tensor.

    Attributes:
        name: in saved statistics.
        start: initial value of each named tensor.
        update: `(state, x, low, high) -> state`; pure, x is a non-empty finite float tensor, low and high its extremes.
        merge: `(state, other) -> state`; pure, as if one observer had seen what both saw.
    """

    name: str
    start: Mapping[str, torch.Tensor]
    update: Callable[[State, torch.Tensor, torch.Tensor, torch.Tensor], State]
    merge: Callable[[State, State], State]


@dataclasses.dataclass(frozen=True, slots=True)
class RangeAlgorithm:
    """How a range is found: one value of `act_algo`.

    Attributes:
        name: as in `act_algo`.
        statistic: what it needs.
        find_range: `(state, spec) -> (low, high)`, fp32 scalars that the codes of `spec` are to cover.
    """

    name: str
    statistic: Statistic
    find_range: Callable[[State, TensorSpec], tuple[torch.Tensor, torch.Tensor]]


def merge_each(**combine: Combine) -> Callable[[State, State], State]:
    """A `merge` that combines each named tensor on its own."""

    def merge(state: State, other: State) -> State:
        return {name: how(state[name], other[name]) for name, how in combine.items()}

    return merge


class Observer(torch.nn.Module):
    """Collects a statistic in forward and returns its input untouched.

    Attributes:
        statistic: what it collects.
        operator: name of the operator that reads the tensor, for messages.
        batches: forwards that had at least one element.
        state: the statistic so far.
    """

    def __init__(self, statistic: Statistic, operator: str) -> None:
        super().__init__()
        self.statistic = statistic
        self.operator = operator
        self.batches = 0
        self.state: State = {name: start.clone() for name, start in statistic.start.items()}

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Update the statistic with `x`, any float tensor, and return `x`.

        Raises:
            CalibrationError: `x` holds NaN or Inf; the statistic stays as it was before this batch.
        """
        if x.numel():
            low, high = torch.aminmax(x.detach())
            if not bool(torch.isfinite(low) & torch.isfinite(high)):  # their difference may overflow
                self._refuse(x)
            self.state = self.statistic.update(self.state, x.detach(), low, high)
            self.batches += 1
        return x

    def _refuse(self, x: torch.Tensor) -> None:
        nan, inf = int(torch.isnan(x).sum()), int(torch.isinf(x).sum())
        msg = (
            f"The input of operator {self.operator!r} holds {nan} NaN and {inf} infinite values in "
            f"a tensor of shape {tuple(x.shape)}. Leave that batch out, or give the operator fp32: "
            f'set_local({self.operator!r}, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")).'
        )
        raise CalibrationError(msg)

    def merge(self, other: Observer) -> None:
        """Take in what another observer of the same tensor saw."""
        self.state = self.statistic.merge(self.state, other.state)
        self.batches += other.batches
