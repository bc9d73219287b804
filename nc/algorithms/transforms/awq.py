"""AWQ: input channels with large activations get a finer grid (arXiv 2306.00978, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from nc.algorithms.solvers.base import InputNeeds
from nc.algorithms.transforms.base import Scope, Target
from nc.algorithms.transforms.clip import clip_ranges
from nc.algorithms.transforms.folding import LOOKED_AT
from nc.algorithms.transforms.scale_sets import (
    BlockError,
    ScaleSet,
    TransformOutcome,
    full,
    rounded,
    weight_of,
)
from nc.errors import ConfigError
from nc.formats.checks import is_whole
from nc.graph.plan import Applied
from nc.numerics.group_ranges import RULES


@dataclass(frozen=True)
class AWQ:
    """A scale per input channel for each set of linears that read one norm or linear.

    The scale is `s = a^r`, where a is the mean of |x| and r is from a grid.

    Candidates are compared by the error of the layers' outputs, `tr((W - W^) H (W - W^)^T)`, in the layers'
    own format and range rule: all candidates with the rule "minmax", then the best few with the layers' rule.
    The best one is used only if the error of the block's output is less than without a scale: by this
    measure the result is never worse than without one.

    The clip search comes afterwards, see `clip`: smaller ranges for the groups of a layer that is not a query
    or key projection, where its output and the block's lose less. Weights keep their values: a solver's
    losses count what is clipped.

    Attributes:
        grid: number of exponents, r = i / grid.
        duo_scaling: True: `s = a^r / w^(1 - r)`, w = mean |w| over the largest of the group; "both":
            candidates of both kinds.
        rows: candidates are compared on that many rows of each weight.
        finalists: how many candidates are compared with the layers' range rule.
        tokens: the block's output is compared for about this many tokens.
        clip: search ranges too; None: for layers with the range rule "minmax". The rules "mse" and "wls"
            choose a range for each group themselves, "wls" weighted with the inputs.

    Raises:
        ConfigError: a value that is out of range.
    """

    grid: int = 20
    duo_scaling: bool | Literal["both"] = "both"
    rows: int = 64
    finalists: int = 4
    tokens: int = 1024
    clip: bool | None = None

    name: ClassVar[str] = "awq"
    level: ClassVar[Literal["block"]] = "block"

    def __post_init__(self) -> None:
        """Check values."""
        counts = (self.grid, self.rows, self.finalists, self.tokens)
        flags = self.duo_scaling in (True, False, "both") and self.clip in (True, False, None)
        if not (flags and all(is_whole(value, 1) for value in counts)):
            names = "grid, rows, finalists and tokens are whole numbers from 1"
            msg = f'{self}: {names}; duo_scaling is True, False or "both", and clip True, False or None.'
            raise ConfigError(msg)

    @property
    def needs(self) -> InputNeeds:
        """Products of inputs: the error of a layer's output."""
        return InputNeeds(squares=True, hessian=True, samples=LOOKED_AT, tokens=self.tokens)

    def apply(self, scope: Scope) -> Applied:
        """See `Transform.apply`."""
        outcome = TransformOutcome(self.name, scope)
        notes, scales = self._scaled(scope, outcome)
        if self.clip is not False:
            clipped = clip_ranges(scope, scales, self.tokens, RULES if self.clip else ("minmax",))
            outcome.changed += clipped
            notes += [f"ranges clipped in {', '.join(clipped)}"] if clipped else []
        return outcome.applied("; ".join(notes))

    def _scaled(self, scope: Scope, outcome: TransformOutcome) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Fold the best scales into the weights.

        Returns:
            Notes for the report; and name of each layer → what its input channels are divided by now.
        """
        error = BlockError(scope, self.tokens) if outcome.sets else None
        notes: list[str] = []
        scales: dict[str, torch.Tensor] = {}
        for found in outcome.sets:
            scale = self._search(found)
            if scale is None:
                continue
            assert error is not None
            before, after = (error(found.rounded(s)) for s in (torch.ones_like(scale), scale))
            if after < before and outcome.fold(found, scale):
                notes.append(f"{found.link.producer} {before:.1e} → {after:.1e}")
                scales |= {
                    full(scope, found.link.consumers[i]): found.link.spread(scale, i) for i in found.targets
                }
        return [f"error of the block {', '.join(notes)}"] if notes else [], scales

    def _search(self, found: ScaleSet) -> torch.Tensor | None:
        """Return the best scale by the error of the layers' outputs; None for none at all."""
        one = torch.ones(found.link.size, dtype=torch.float32)
        candidates = [one, *self._candidates(found)]
        parts = [_Part(found, index, target, self.rows) for index, target in found.targets.items()]
        quick = [sum(part.error(s, "minmax") for part in parts) for s in candidates]
        order = sorted(range(1, len(candidates)), key=lambda i: quick[i])[: self.finalists]
        exact = {i: sum(part.error(candidates[i]) for part in parts) for i in (0, *order)}
        best = min(exact, key=lambda i: exact[i])
        return candidates[best] if best else None

    def _candidates(self, found: ScaleSet) -> Iterator[torch.Tensor]:
        a = found.gathered(lambda _, t: t.reached.mean_absolute, "mean")
        w = found.gathered(lambda _, t: _relative_weight(t), "mean")
        seen = found.link.read & (a > 0)
        if not bool(seen.any()):
            return
        families = {True: (True,), False: (False,), "both": (False, True)}[self.duo_scaling]
        for duo in families:
            for i in range(self.grid):
                r = i / self.grid
                scale = a.pow(r).clamp(min=1e-4) / (w.pow(1 - r) + 1e-4 if duo else 1.0)
                scale = scale / (scale[seen].max() * scale[seen].min()).sqrt()
                scale = torch.where(seen, scale, 1.0)
                if bool((scale != 1).any()) and bool(scale.isfinite().all()):
                    yield scale


def _relative_weight(target: Target) -> torch.Tensor:
    """Return the mean over rows of |w| over the largest of its group, shape [K]."""
    weight = weight_of(target).abs()
    groups = weight.reshape(weight.shape[0], -1, target.form.group(weight.shape[1]))
    return (groups / groups.amax(2, keepdim=True).clamp(min=1e-12)).reshape(weight.shape).mean(0)


class _Part:
    """Some rows of one layer of a set, and the products of its inputs."""

    def __init__(self, found: ScaleSet, index: int, target: Target, rows: int) -> None:
        weight = weight_of(target)
        if weight.shape[0] > rows:
            weight = weight[torch.linspace(0, weight.shape[0] - 1, rows, dtype=torch.float32).long()]
        self.link, self.index, self.target, self.weight = found.link, index, target, weight
        self.hessian = target.reached.hessian.float()

    def error(self, scale: torch.Tensor, rule: str | None = None) -> float:
        """Return the squared error of these rows' outputs."""
        error = self.weight - rounded(self.target, self.weight, self.link.spread(scale, self.index), rule)
        return float(((error @ self.hessian) * error).sum(dtype=torch.float64))
