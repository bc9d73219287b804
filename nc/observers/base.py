"""Observers collect one statistic of one tensor over calibration batches.

Range algorithms compute a range from it.

Several algorithms can read one statistic, so saved statistics can be used with another algorithm later. A new
algorithm is one file with a pure `find_range`, and its own statistic if no existing one fits; `nc.observers`
lists it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from nc.errors import CalibrationError
from nc.formats import TensorFormat

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
        update: `(state, x, low, high) -> state`; pure, x is a non-empty finite float tensor, low and high its
            extremes.
        merge: `(state, other) -> state`; pure; the state of one observer that saw the data of both.
        by_batch: whether it depends on the order of batches or on how data is divided into them.
    """

    name: str
    start: Mapping[str, torch.Tensor]
    update: Callable[[State, torch.Tensor, torch.Tensor, torch.Tensor], State]
    merge: Callable[[State, State], State]
    by_batch: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RangeAlgorithm:
    """How a range is found: one value of `act_algo`.

    Attributes:
        name: as in `act_algo`.
        statistic: what it needs.
        find_range: `(state, spec) -> (low, high)`, fp32 scalars: the range that the codes of `spec` cover.
    """

    name: str
    statistic: Statistic
    find_range: Callable[[State, TensorFormat], tuple[torch.Tensor, torch.Tensor]]


def merge_each(**combine: Combine) -> Callable[[State, State], State]:
    """Return a `merge` that combines each named tensor on its own."""

    def merge(state: State, other: State) -> State:
        return {name: how(state[name], other[name]) for name, how in combine.items()}

    return merge


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """How many batches were seen, and how their extremes grew.

    It tells whether more data would change the range.

    Attributes:
        batches: those that had at least one element.
        growth: (number of the batch, counted from 1; smallest and largest value of all batches up to it) for
            each batch that brought a new extreme, which grows with the logarithm of the batches. Empty when
            it is not known.
    """

    batches: int = 0
    growth: tuple[tuple[int, float, float], ...] = ()

    def then(self, later: Seen) -> Seen:
        """As if `later`'s batches had come after these."""
        total = self.batches + later.batches
        if any(s.batches and not s.growth for s in (self, later)):
            return Seen(total)
        growth = list(self.growth)
        for batch, low, high in later.growth:
            extremes = (min(growth[-1][1], low), max(growth[-1][2], high)) if growth else (low, high)
            if not growth or extremes != growth[-1][1:]:
                growth.append((self.batches + batch, *extremes))
        return Seen(total, tuple(growth))

    def stretched(self, low: float, high: float) -> Seen:
        """Return the same history of a tensor whose extremes are these at its end."""
        if not self.growth:
            return self
        _, last_low, last_high = self.growth[-1]
        below, above = low / last_low if last_low else 1.0, high / last_high if last_high else 1.0
        return Seen(self.batches, tuple((batch, a * below, b * above) for batch, a, b in self.growth))

    def extremes(self, batches: int) -> tuple[float, float] | None:
        """Smallest and largest value of the first `batches` (at least 1); None when that is not known."""
        return next(((low, high) for batch, low, high in reversed(self.growth) if batch <= batches), None)


class Observer(torch.nn.Module):
    """Collects a statistic in forward and returns its input unchanged.

    Attributes:
        statistic: what it collects.
        operator: name of the operator that reads the tensor, for messages.
        seen: the batches so far.
        state: the statistic so far.
    """

    def __init__(self, statistic: Statistic, operator: str) -> None:
        super().__init__()
        self.statistic = statistic
        self.operator = operator
        self.seen = Seen()
        self.state: State = {name: start.clone() for name, start in statistic.start.items()}

    @property
    def batches(self) -> int:
        """Forwards that had at least one element."""
        return self.seen.batches

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Update the statistic with `x`, any float tensor, and return `x`.

        Raises:
            CalibrationError: `x` contains NaN or Inf; the statistic does not change.
        """
        if x.numel():
            low, high = torch.aminmax(x.detach())
            if not bool(torch.isfinite(low) & torch.isfinite(high)):  # their difference may overflow
                self._refuse(x)
            self.state = self.statistic.update(self.state, x.detach(), low, high)
            self.seen = self.seen.then(Seen(1, ((1, float(low), float(high)),)))
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
        """Merge the statistic of another observer of the same tensor, as if its data had come afterwards."""
        self.state = self.statistic.merge(self.state, other.state)
        self.seen = self.seen.then(other.seen)
