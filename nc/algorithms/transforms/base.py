"""What a transform is.

It changes weights of the float model so that they lose less when they are quantized, and the model stays the
same.

One per file, each a frozen dataclass of its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from nc.algorithms.solvers.base import InputNeeds
from nc.formats.tensor_format import TensorFormat
from nc.graph.plan import Applied
from nc.modules.statistics import InputStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A layer that will be quantized.

    Attributes:
        module: the float linear.
        form: the format that it will have.
        rule: its range rule.
        inputs: statistics of its inputs; None where nothing was collected.
        asked: whether its configuration asks for the transform. One that does not counts where it reads the
            same tensor as one that does.
    """

    module: torch.nn.Module
    form: TensorFormat
    rule: str
    inputs: InputStatistics | None = None
    asked: bool = True

    @property
    def reached(self) -> InputStatistics:
        """`inputs`, where it is known that there are some."""
        assert self.inputs is not None
        return self.inputs

    @property
    def tokens(self) -> int:
        """How many tokens of calibration reached the layer."""
        return 0 if self.inputs is None else self.inputs.tokens


@dataclass(kw_only=True, slots=True)
class Scope:
    """What a transform may change: one block of the model, or the whole model.

    Attributes:
        model: the whole float model. Parameters are replaced, never written into: they may be the user's.
        module: the block, or the model itself.
        prefix: name of the block in the model; "" for the model.
        targets: the layers of the scope that will be quantized, by their name in the model.
        samples: calibration samples that reach the scope, as (args, kwargs) of `module`; with several
            processes at least those that `Transform.needs` asks for.
        clips: a transform adds `Problem.clip` of layers, by their name in the model.
        keeps: of each sample the positions of [batch, length] that are not padding; None: all.
    """

    model: torch.nn.Module
    module: torch.nn.Module
    prefix: str
    targets: Mapping[str, Target]
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    keeps: Sequence[torch.Tensor | None] = ()
    clips: dict[str, torch.Tensor] = field(default_factory=dict)


@runtime_checkable
class Transform(Protocol):
    """Changes weights; an instance is a frozen dataclass of its options.

    Attributes:
        name: as configurations and reports write it.
        level: "model": applied once, before anything is solved; "block": to each block, with the inputs that
            reach it.
    """

    name: ClassVar[str]
    level: ClassVar[Literal["model", "block"]]

    @property
    def needs(self) -> InputNeeds:
        """What it wants collected of the inputs of the layers."""
        ...

    def apply(self, scope: Scope) -> Applied:
        """Change the scope in place and say what was done, or why nothing was."""
        ...
