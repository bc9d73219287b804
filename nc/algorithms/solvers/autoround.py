"""AutoRound: rounding and ranges are learned by signed gradients (arXiv 2309.05516).

It learns which way each weight is rounded, and the range of each group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.utils import parametrize

from nc.algorithms.solvers.base import BlockProblem, InputNeeds, Problem, needing_gradients
from nc.errors import ConfigError
from nc.formats.checks import is_number, is_whole
from nc.numerics import formats
from nc.numerics.group_ranges import choose
from nc.numerics.groups import GroupParams, decode, spread
from nc.numerics.packed_weight import PackedWeight, pack
from nc.numerics.stored_scales import stored, stored_minimum

#: How far the ends of a range may move from those of the range rule, as parts of it.
_RANGE = (0.5, 1.5)
#: Steps between two losses over all samples.
_CHECK = 10


@dataclass(frozen=True)
class AutoRound:
    """AutoRound. The defaults are those of its "light" recipe, for CPUs.

    Give it some 32 samples of 256 tokens.

    Each weight gets V in [-0.5, 0.5], which is added before it is rounded, and each group two factors for the
    ends of its range, where the range rule gives the start. A step is `-lr * sign(gradient)` of the mean
    squared error of the block's output, with lr going to 0 linearly. The parameters with the smallest loss
    over all samples stay, so the block is never worse than where it starts.

    Attributes:
        steps: how many.
        batch: samples in each.
        samples: at most so many samples are used.
        lr: learning rate of V; None: 0.25 / steps ("light": 0.005).
        range_lr: learning rate of the factors; None: lr / 2^(bits - 1), so that the largest codes move by as
            much as with a step of V. The paper's is lr, which is too large for 4 bits: the block of the tests
            loses 0.72 of what round to nearest loses, and with this one 0.60.
        seed: of the order of the samples.

    Raises:
        ConfigError: a value that is out of range.
    """

    steps: int = 50
    batch: int = 8
    samples: int = 32
    lr: float | None = None
    range_lr: float | None = None
    seed: int = 0

    name: ClassVar[str] = "autoround"

    def __post_init__(self) -> None:
        """Check values."""
        counts, rates = (self.steps, self.batch, self.samples), (self.lr, self.range_lr)
        fits = all(is_whole(v, 1) for v in counts) and all(
            v is None or (is_number(v) and v > 0) for v in rates
        )
        if not (fits and is_whole(self.seed)):
            msg = (
                f"{self}: steps, batch and samples are whole numbers from 1, learning rates above 0, and "
                "seed a whole number from 0."
            )
            raise ConfigError(msg)

    @property
    def needs(self) -> InputNeeds:
        """The Hessian: it judges what was learned, and a single layer is learned with it."""
        return InputNeeds(squares=True, hessian=True, samples=self.samples)

    def solve(self, problem: Problem) -> PackedWeight:
        """See `Solver.solve`; for a layer that is in no block. What is made small is the H-weighted loss."""
        assert problem.inputs is not None
        rounding = _Rounding(problem)
        hessian = problem.inputs.hessian.float()

        def loss(_: Sequence[int]) -> torch.Tensor:
            error: torch.Tensor = rounding(rounding.weight) - rounding.weight
            return ((error @ hessian) * error).sum()

        self._learn([rounding], loss, 1)
        return rounding.packed()

    def solve_block(self, problem: BlockProblem) -> dict[str, PackedWeight]:
        """See `BlockSolver.solve_block`."""
        roundings = {name: _Rounding(layer) for name, layer in problem.layers.items()}

        def loss(samples: Sequence[int]) -> torch.Tensor:
            errors = [
                (problem.run(problem.samples[i]).float() - problem.targets[i].float()).square()
                for i in samples
            ]
            total: torch.Tensor = sum(error.sum() for error in errors) / sum(
                error.numel() for error in errors
            )  # type: ignore[assignment]
            return total

        with _rounded(problem.module, roundings), needing_gradients("AutoRound", problem.name):
            self._learn(list(roundings.values()), loss, min(self.samples, len(problem.samples)))
        return {name: rounding.packed() for name, rounding in roundings.items()}

    def _learn(
        self, roundings: list[_Rounding], loss: Callable[[Sequence[int]], torch.Tensor], samples: int
    ) -> None:
        """Change the roundings in place; `loss` is of some samples."""
        lr = self.lr or 0.25 / self.steps
        learned = [_Learned(p, lr, (-0.5, 0.5)) for r in roundings for p in r.offsets]
        for r in roundings:
            learned += [_Learned(p, self.range_lr or lr / r.form.middle, _RANGE) for p in r.factors]
        tensors = [one.tensor for one in learned]
        generator = torch.Generator().manual_seed(self.seed)
        best, least = [p.detach().clone() for p in tensors], float("inf")
        for step in range(self.steps + 1):
            if step % _CHECK == 0 or step == self.steps:
                with torch.no_grad():
                    now = sum(float(loss([i])) for i in range(samples))
                if now < least:
                    best, least = [p.detach().clone() for p in tensors], now
            if step == self.steps:
                break
            chosen = torch.randperm(samples, generator=generator)[: self.batch].tolist()
            with torch.enable_grad():
                gradients = torch.autograd.grad(loss(chosen), tensors, allow_unused=True)
            _descend(learned, gradients, 1 - step / self.steps)
        with torch.no_grad():
            for p, kept in zip(tensors, best, strict=True):
                p.copy_(kept)


@dataclass(frozen=True, slots=True)
class _Learned:
    """What is learned.

    Attributes:
        tensor: its values.
        rate: the length of the first step.
        limits: of the values.
    """

    tensor: torch.Tensor
    rate: float
    limits: tuple[float, float]


@torch.no_grad()
def _descend(learned: Sequence[_Learned], gradients: Sequence[torch.Tensor | None], share: float) -> None:
    """Go a `share` of the first step against the signs of gradients; None: the loss does not depend on it."""
    for one, gradient in zip(learned, gradients, strict=True):
        if gradient is not None:
            one.tensor.sub_(gradient.sign(), alpha=one.rate * share).clamp_(*one.limits)


class _Rounding(torch.nn.Module):
    """A weight that is quantized and dequantized, with gradients for V and the factors of the ranges."""

    weight: torch.Tensor

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.form = problem.form
        self.register_buffer("weight", problem.weight.float())
        importance = None if problem.inputs is None else problem.inputs.mean_square
        self.start = choose(problem.weight, self.form, problem.rule, importance, clip=problem.clip)
        rows = problem.weight.reshape(*self.start.scale.shape, -1)
        self.offsets = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros_like(rows))])
        count = 1 if self.form.symmetric else 2
        self.factors = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.ones_like(self.start.scale)) for _ in range(count)]
        )
        self.gaps = (
            _gaps(rows / self.start.scale.unsqueeze(-1), problem) if self.form.dtype.kind == "float" else None
        )

    def params(self) -> GroupParams:
        """Scales, zero points and minima as they are now."""
        start, top = self.start, 2**self.form.bits - 1
        if self.form.symmetric:
            return GroupParams(self._stored(start.scale * self.factors[0], start.scale), outer=start.outer)
        low = start.minimum if start.minimum is not None else -start.zero * start.scale  # type: ignore[operator]
        high = (low + top * start.scale) * self.factors[0]
        low = low * self.factors[1]
        scale = self._stored((high - low) / top, start.scale)
        if self.form.float_zero:
            outer = (
                None
                if start.outer is None or start.outer.minimum is None
                else spread(start.outer.minimum, scale.shape[1])
            )
            return GroupParams(
                scale,
                minimum=_straight(low, stored_minimum(low.detach(), self.form, outer)),
                outer=start.outer,
            )
        return GroupParams(
            scale, _straight(-low / scale, (-low / scale).detach().round().clamp(0, top)), outer=start.outer
        )

    def _stored(self, scale: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return scales rounded to their storage format.

        A scale that would be zero or change its sign keeps its start value.
        """
        outer = None if self.start.outer is None else spread(self.start.outer.scale, scale.shape[1])
        rounded = stored(scale.detach(), self.form, outer)
        return _straight(scale, torch.where(rounded * start > 0, rounded, start))

    def _codes(self, params: GroupParams) -> torch.Tensor:
        """Whole codes minus the zero point, or values of a floating-point format; shape [N, G, group]."""
        rows = self.weight.reshape(self.offsets[0].shape)
        scale = params.scale.unsqueeze(-1)
        if self.gaps is not None:
            wanted = rows / scale + self.offsets[0] * self.gaps
            wanted = wanted.clamp(-self.form.dtype.largest, self.form.dtype.largest)
            units = GroupParams(torch.ones_like(params.scale))
            codes = formats.nearest_codes(wanted.detach(), self.form.dtype).flatten(1)
            return _straight(wanted, decode(codes, units, self.form).reshape(wanted.shape))
        zero = self._zero(params)
        wanted = (
            rows if params.minimum is None else rows - params.minimum.unsqueeze(-1)
        ) / scale + self.offsets[0]
        return (_straight(wanted, wanted.detach().round()) + zero).clamp(0, 2**self.form.bits - 1) - zero

    def _zero(self, params: GroupParams) -> torch.Tensor | float:
        if params.minimum is not None:
            return 0.0
        return float(self.form.middle) if params.zero is None else params.zero.unsqueeze(-1)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in the shape and dtype of the module's."""
        params = self.params()
        rounded = self._codes(params) * params.scale.unsqueeze(-1)
        if params.minimum is not None:
            rounded = rounded + params.minimum.unsqueeze(-1)
        rounded = rounded.reshape(self.weight.shape)
        return (rounded.T if _is_transposed(weight, self.weight) else rounded).to(weight.dtype)

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """Return what was learned, as it is stored."""
        found = self.params()
        units = self._codes(found)
        codes = (
            formats.nearest_codes(units, self.form.dtype)
            if self.gaps is not None
            else units + self._zero(found)
        )
        return pack(codes.to(torch.uint8).reshape(self.weight.shape), found, self.form)


def _straight(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return `rounded`, with the gradient of `value`."""
    return rounded.detach() + (value - value.detach())


def _gaps(units: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return the distance of the two values of a floating-point format that each number is between."""
    values = torch.tensor(sorted(set(filter(math.isfinite, problem.form.dtype.values))), dtype=torch.float32)
    above = torch.bucketize(units.contiguous(), values).clamp(1, len(values) - 1)
    return values[above] - values[above - 1]


def _is_transposed(weight: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether a module holds [K, N] where `rows` is [N, K] (transformers' `Conv1D`)."""
    return weight.shape != rows.shape or (
        weight.shape[0] == weight.shape[1] and not torch.equal(weight.detach().float(), rows)
    )


@contextlib.contextmanager
def _rounded(module: torch.nn.Module, roundings: Mapping[str, _Rounding]) -> Iterator[None]:
    """Inside, the layers of a block have rounded weights."""
    layers = [module.get_submodule(name) for name in roundings]
    try:
        for layer, rounding in zip(layers, roundings.values(), strict=True):
            parametrize.register_parametrization(layer, "weight", rounding)
        yield
    finally:
        for layer in layers:
            if parametrize.is_parametrized(layer, "weight"):
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
