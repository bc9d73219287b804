"""What an observer is: one statistic of one tensor, collected over calibration batches.

A new observer is one file with a pure `update` and a pure `find_range`, and one entry in `nc.observers.OBSERVERS`. Its state is
declared once, as named tensors with how two of them merge; merging, saving and resetting need nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from nc.errors import CalibrationError

State = dict[str, torch.Tensor]
_MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "sum": torch.add,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Statistic:
    """One kind of observer.

    Attributes:
        name: as in `act_algo`.
        state: initial value and merge ("min", "max", "sum") of each named tensor.
        update: `(state, x, low, high) -> state`; pure, x is a non-empty float tensor, low and high its extremes.
        find_range: `state -> (low, high)`, fp32 scalars.
    """

    name: str
    state: Mapping[str, tuple[torch.Tensor, str]]
    update: Callable[[State, torch.Tensor, torch.Tensor, torch.Tensor], State]
    find_range: Callable[[State], tuple[torch.Tensor, torch.Tensor]]


class Observer(torch.nn.Module):
    """Collects a statistic in forward and returns its input untouched.

    Attributes:
        operator: name of the operator that reads the tensor, for messages.
        batches: forwards that had at least one element.
    """

    def __init__(self, statistic: Statistic, operator: str) -> None:
        super().__init__()
        self.statistic = statistic
        self.operator = operator
        self.batches = 0
        self.state: State = {name: start.clone() for name, (start, _) in statistic.state.items()}

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
        self.state = {name: _MERGES[how](self.state[name], other.state[name]) for name, (_, how) in self.statistic.state.items()}
        self.batches += other.batches

    def find_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(low, high) that the codes must cover; fp32 scalars."""
        return self.statistic.find_range(self.state)
