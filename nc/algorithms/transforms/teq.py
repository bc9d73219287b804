"""TEQ: a scale per input channel, learned (arXiv 2310.10944)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from nc.algorithms.solvers.base import InputNeeds, needing_gradients
from nc.algorithms.transforms.base import Scope, Target
from nc.algorithms.transforms.folding import LOOKED_AT
from nc.algorithms.transforms.scale_sets import (
    BlockError,
    ScaleSet,
    TransformOutcome,
    rounded,
    weight_of,
)
from nc.errors import ConfigError
from nc.formats.checks import is_number, is_whole
from nc.graph.plan import Applied


@dataclass(frozen=True)
class TEQ:
    """The scales of all sets of a block are learned together with Adam.

    The loss is the error of the block's output, without labels.

    The rounding error of a group counts as proportional to the group's range, which is differentiable. While
    scales are learned, ranges are those of rule "minmax". What is folded are the scales with the least error
    seen, and only if the block loses less with them by the layers' own range rule.

    Attributes:
        steps: of Adam, each with all samples; nothing is random.
        lr: learning rate of log(s), falls linearly to 0.
        tokens: the first samples are used until there are about this many tokens.

    Raises:
        ConfigError: a value that is out of range.
    """

    steps: int = 40
    lr: float = 0.02
    tokens: int = 1024

    name: ClassVar[str] = "teq"
    level: ClassVar[Literal["block"]] = "block"

    def __post_init__(self) -> None:
        """Check values."""
        if not (is_whole(self.steps, 1) and is_number(self.lr) and self.lr > 0 and is_whole(self.tokens, 1)):
            msg = f"{self}: steps and tokens are whole numbers from 1, and lr is above 0."
            raise ConfigError(msg)

    @property
    def needs(self) -> InputNeeds:
        """Any data."""
        return InputNeeds(squares=True, samples=LOOKED_AT, tokens=self.tokens)

    def apply(self, scope: Scope) -> Applied:
        """See `Transform.apply`."""
        outcome = TransformOutcome(self.name, scope)
        sets = outcome.sets
        if not sets:
            return outcome.applied()
        error = BlockError(scope, self.tokens)
        with needing_gradients("TEQ", scope.prefix):
            scales = self._learn(sets, error)
        ones = [torch.ones_like(scale) for scale in scales]
        before, after = (
            error(_all(found.rounded(s) for found, s in zip(sets, some, strict=True)))
            for some in (ones, scales)
        )
        if not after < before:
            return outcome.applied(f"no scales were better than none, error of the block {before:.1e}")
        for found, scale in zip(sets, scales, strict=True):
            outcome.fold(found, scale)
        return outcome.applied(f"error of the block {before:.1e} → {after:.1e}")

    def _learn(self, sets: list[ScaleSet], error: BlockError) -> list[torch.Tensor]:
        with torch.enable_grad():
            logs = [torch.zeros(found.link.size, dtype=torch.float32, requires_grad=True) for found in sets]
            optimizer = torch.optim.Adam(logs, lr=self.lr)
            best, least = [log.detach().clone() for log in logs], float("inf")
            for step in range(self.steps):
                optimizer.param_groups[0]["lr"] = self.lr * (1 - step / self.steps)
                total = 0.0
                gradients = [torch.zeros_like(log) for log in logs]
                for index in range(len(error.samples)):
                    lost = error.lost(
                        index, _all(_learnable(f, log.exp()) for f, log in zip(sets, logs, strict=True))
                    )
                    total += float(lost.detach())
                    if not lost.requires_grad:
                        continue  # no token of this sample reaches a layer with a scale
                    found = torch.autograd.grad(lost, logs, allow_unused=True)
                    for sum_, part in zip(gradients, found, strict=True):
                        if part is not None:  # some expert got no token
                            sum_ += part
                if total < least:
                    best, least = [log.detach().clone() for log in logs], total
                for log, gradient in zip(logs, gradients, strict=True):
                    log.grad = gradient
                optimizer.step()
        return [log.exp() for log in best]


def _all(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: weight for part in parts for name, weight in part.items()}


def _learnable(found: ScaleSet, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rounded weights of a set, differentiable with respect to the scale."""
    return {
        found.link.consumers[index]: _differentiable(target, found.link.spread(scale, index))
        for index, target in found.targets.items()
    }


def _differentiable(target: Target, scale: torch.Tensor) -> torch.Tensor:
    weight = weight_of(target)
    with torch.no_grad():
        lost = rounded(target, weight, scale.detach(), "minmax") * scale.detach() - weight * scale.detach()
    groups = (weight * scale).reshape(weight.shape[0], -1, target.form.group(weight.shape[1]))
    if target.form.symmetric:
        size = groups.abs().amax(2, keepdim=True)
    else:
        size = groups.amax(2, keepdim=True).clamp(min=0) - groups.amin(2, keepdim=True).clamp(max=0)
    share = (size / size.detach().clamp(min=1e-12)).expand_as(groups).reshape(weight.shape)
    return weight + lost * share / scale
