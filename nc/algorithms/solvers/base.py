"""What a solver is: it chooses codes and scales for the weight of one layer.

One per file, each a frozen dataclass of its options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from nc.errors import UnsupportedError
from nc.formats.tensor_format import TensorFormat
from nc.modules.statistics import InputStatistics
from nc.numerics.packed_weight import PackedWeight
from nc.process.error_texts import is_of_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class InputNeeds:
    """What has to be collected of a layer's inputs.

    Attributes:
        squares: the mean square of each input channel.
        hessian: the mean of x x^T.
        float_inputs: also the products of these inputs with those of the float model (two-sided solvers).
        samples: how many of the first samples a transform or block solver runs itself; None: all. With
            several processes, rank 0 has these at hand, and its part of the others; statistics are those of
            all.
        tokens: likewise as many of the first samples as have so many tokens.
    """

    squares: bool = False
    hessian: bool = False
    float_inputs: bool = False
    samples: int | None = None
    tokens: int = 0

    def __or__(self, other: InputNeeds) -> InputNeeds:
        """Return what either wants collected."""
        return InputNeeds(
            squares=self.squares or other.squares,
            hessian=self.hessian or other.hessian,
            float_inputs=self.float_inputs or other.float_inputs,
        )

    @property
    def data(self) -> bool:
        """Whether calibration data is needed at all."""
        return self.squares or self.hessian or self.float_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One layer to solve.

    Attributes:
        name: of the layer.
        weight: fp32, shape [N, K], finite.
        form: the format of the result; its groups divide K.
        rule: range rule, one of `nc.numerics.group_ranges.RULES`.
        inputs: statistics of its inputs in the model as it is quantized so far; None if there are none.
        clip: parts of the groups' largest magnitudes that ranges are found for, shape [N, K / group], as
            `nc.numerics.group_ranges.choose` takes them; None: the whole ranges.
        notes: a solver appends what a reader of the report must know, e.g. that it fell back to round to
            nearest.
    """

    name: str
    weight: torch.Tensor
    form: TensorFormat
    rule: str
    inputs: InputStatistics | None = None
    clip: torch.Tensor | None = field(default=None, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)

    @property
    def tokens(self) -> int:
        """How many tokens reached the layer."""
        return 0 if self.inputs is None else self.inputs.tokens


@runtime_checkable
class Solver(Protocol):
    """Chooses codes; an instance is a frozen dataclass of its options.

    Attributes:
        name: as configurations and reports write it.
    """

    name: ClassVar[str]

    @property
    def needs(self) -> InputNeeds:
        """What it wants collected."""
        ...

    def solve(self, problem: Problem) -> PackedWeight:
        """Codes and scales of a layer.

        Raises:
            UnsupportedError: it cannot produce this format; says which it can.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProblem:
    """The layers of one block, to be solved together.

    Attributes:
        name: of the block.
        module: the float block. A solver leaves it as it was.
        layers: the problems of its linears, by their name in `module`.
        samples: what reaches the block in the model as it is quantized so far, as (args, kwargs).
        targets: for each sample the output that the block should have.
        run: a sample → the output tensor of `module`, with gradients.
    """

    name: str
    module: torch.nn.Module
    layers: Mapping[str, Problem]
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    targets: Sequence[torch.Tensor]
    run: Callable[[tuple[tuple[Any, ...], dict[str, Any]]], torch.Tensor]


@runtime_checkable
class BlockSolver(Solver, Protocol):
    """Solves the layers of a block together; a single layer that is in no block it solves too."""

    def solve_block(self, problem: BlockProblem) -> dict[str, PackedWeight]:
        """Codes and scales of all layers of a block, by the names in `problem.layers`."""
        ...


@contextlib.contextmanager
def needing_gradients(who: str, block: str) -> Iterator[None]:
    """Inside, `who` learns by gradients in a block.

    Raises:
        UnsupportedError: torch gives none, e.g. because the block changes in place what its layers read.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_gradients(error):  # anything else, which the block would say without gradients too
            raise
        msg = (
            f"{who} needs gradients inside block {block!r}, and torch gives none: {error} Quantize it "
            f"without {who}."
        )
        raise UnsupportedError(msg) from error
