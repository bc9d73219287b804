"""What every result of `prepare` can do."""

from __future__ import annotations

import abc
import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

import torch

from nc.config import AnyConfig
from nc.config.auto import AutoConfig
from nc.errors import StateError
from nc.graph.fixed_module import FixedModule
from nc.graph.plan import Plan
from nc.planning.layer_plan import WeightPlan
from nc.process.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Self


class CalibrationData(Protocol):
    """What a prepared model has seen."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one file."""

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace it by that of a file."""

    def merge(self, other: Any) -> None:
        """Add that of another prepared model, or of a file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The arguments of `nc.convert`, whose docstring says what they mean.

    `judged` are flat inputs on which the noise of each operator is estimated; without any it is not.
    `judged_by` are those that the accuracy is measured on, of data that was held out: None takes calibration
    data, and with none at all it is not measured.
    """

    backend: str | None = None
    verify: str = "raise"
    verify_sizes: bool = True
    isolate: str = "auto"
    compile: bool = False
    padding: str = "skipped"
    measure: bool = True
    guard: str = "warn"
    judged: Sequence[Sequence[torch.Tensor]] = ()
    judged_by: Sequence[Sequence[torch.Tensor]] | None = None
    progress: Progress | None = None


class Preparation(FixedModule, abc.ABC):
    """A model under calibration: call it as the user's model; it returns what the float model returns.

    Attributes:
        plan: the decisions; `print(prepared.plan)` shows them.
        quant_config: the configuration.
    """

    what = "A prepared model"

    plan: Plan | WeightPlan
    quant_config: AnyConfig | AutoConfig

    @property
    @abc.abstractmethod
    def statistics(self) -> CalibrationData:
        """What it was called with so far, to save, load or merge."""

    @abc.abstractmethod
    def convert(self, asked: Conversion) -> torch.nn.Module:
        """Return the quantized model; see `nc.convert`. Calibration can go on afterwards."""


class CapturedPreparation(Preparation):
    """What those preparations have in common that hold a captured graph: they are copied, but not pickled."""

    def __copy__(self) -> Self:
        """Return a model that shares everything."""
        copied = self.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a model that shares nothing."""
        memo[id(self)] = copied = self.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse what pickle and `torch.save` call: of a graph they keep the code only.

        Raises:
            StateError: always.
        """
        msg = (
            "A prepared model can't be pickled, nor saved with torch.save(): save what it has seen, with "
            "prepared.statistics.save(), and load that in a model that is prepared alike."
        )
        raise StateError(msg)
