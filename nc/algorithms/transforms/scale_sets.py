"""Sets of layers that share a scale per input channel, and what a scale costs.

The cost is the error of a layer, and of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from nc.algorithms.solvers.base import Problem
from nc.algorithms.solvers.rtn import RTN
from nc.algorithms.transforms.base import Scope, Target
from nc.algorithms.transforms.folding import Checked, NotEquivalentError, fold, rewrite, smallest
from nc.algorithms.transforms.structure import Link, links_of
from nc.graph.plan import Applied
from nc.modules.block_calls import BlockCall, called, first_tensor, fresh
from nc.modules.layers import Layer, layers_of
from nc.modules.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class ScaleSet:
    """The layers that read one norm or linear and will be quantized.

    Attributes:
        link: the producer and all its readers.
        targets: of the readers that will be quantized: position in `link.consumers` → target.
    """

    link: Link
    targets: Mapping[int, Target]

    def gathered(self, of: Callable[[int, Target], torch.Tensor], reduce: str) -> torch.Tensor:
        """Return values per output channel of the producer, from those per input channel of each layer.

        They are the mean or the largest over layers.
        """
        parts = torch.stack(
            [self.link.gather(of(i, target), i, reduce) for i, target in self.targets.items()]
        )
        return parts.mean(0) if reduce == "mean" else parts.amax(0)

    def rounded(self, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rounded weights by name in the block, if a scale divides the producer's channels."""
        return {
            self.link.consumers[index]: rounded(target, weight_of(target), self.link.spread(scale, index))
            for index, target in self.targets.items()
        }


def sets_of(scope: Scope) -> tuple[list[ScaleSet], list[str]]:
    """Return the sets of a block, in the order of `links_of`, and what was left alone, with the reason.

    A scale is for all that read a tensor. So a set with a layer that asks for the transform has all its
    layers, whatever those ask for: what a scale costs is measured for all of them. If calibration reached one
    of them with no token, that is not known, and there is no scale.
    """
    links, why = links_of(scope.module, smallest(scope.samples))
    left = _sentences(scope, why)
    found = []
    for link in links:
        targets = {
            i: t for i, name in enumerate(link.consumers) if (t := scope.targets.get(full(scope, name)))
        }
        if not any(target.asked for target in targets.values()):
            continue
        missed = [full(scope, link.consumers[i]) for i, t in targets.items() if not t.tokens]
        if not missed:
            found.append(ScaleSet(link, targets))
        elif len(missed) < len(targets):
            left.append(
                f"{full(scope, link.producer)} was left alone: no token that scales are fitted to reached "
                f"{missed[0]!r}"
            )
    return found, left


def _sentences(scope: Scope, why: Mapping[str, str]) -> list[str]:
    """Return a sentence per reason, with all norms that it is for."""
    names: dict[str, list[str]] = {}
    for name, text in why.items():
        names.setdefault(text, []).append(full(scope, name) if name else scope.prefix or "the model")
    return [f"{', '.join(some)} left alone: {text}" for text, some in names.items()]


def full(scope: Scope, name: str) -> str:
    """Name in the model of a module of the block."""
    return f"{scope.prefix}.{name}" if scope.prefix else name


def weight_of(target: Target) -> torch.Tensor:
    """Its weight, fp32, shape [N, K]."""
    return layers_of(target.module)[0].weight.float()


def divided(inputs: InputStatistics, scale: torch.Tensor) -> InputStatistics:
    """Return the statistics of inputs whose channels are divided by a scale of shape [K].

    The result has no statistics of the float model's inputs.
    """
    wide = scale.double()
    outer = None if inputs.outer is None else inputs.outer / wide.outer(wide)
    return InputStatistics(
        inputs.tokens, inputs.absolute / wide, inputs.squares / wide.square(), inputs.largest / scale, outer
    )


def rounded(
    target: Target, weight: torch.Tensor, scale: torch.Tensor, rule: str | None = None
) -> torch.Tensor:
    """Return `Q(W s) / s`: the weight with its columns scaled by `s`, rounded to nearest, and scaled back.

    Args:
        target: gives format, range rule and statistics.
        weight: W, fp32, some rows of the weight, shape [n, K].
        scale: s, fp32, shape [K].
        rule: a range rule; None: the target's.

    Returns:
        fp32, shape [n, K].
    """
    inputs = None if target.inputs is None else divided(target.inputs, scale)
    problem = Problem(
        name="", weight=weight * scale, form=target.form, rule=rule or target.rule, inputs=inputs
    )
    return RTN().solve(problem).dequantize() / scale


class BlockError:
    """The mean squared error of a block's output, over its mean square, with other weights in some layers.

    Args:
        scope: the block and its samples.
        tokens: whole samples are used until there are this many tokens.
    """

    def __init__(self, scope: Scope, tokens: int) -> None:
        self.module = scope.module
        self.layers: dict[str, Layer] = {layer.name: layer for layer in layers_of(scope.module)}
        self.samples: list[tuple[BlockCall, torch.Tensor, torch.Tensor | None]] = []
        count = 0
        keeps = scope.keeps or [None] * len(scope.samples)
        for call, keep in zip(scope.samples, keeps, strict=True):
            if count >= tokens:
                break
            with torch.no_grad():
                output = called(self.module, call)
            if keep is not None and output.shape[:2] != keep.shape:
                keep = None
            output = output if keep is None else output[keep]
            count += output.numel() // output.shape[-1]
            self.samples.append((call, output.double(), keep))
        self.total = sum(float(output.square().sum()) for _, output, _ in self.samples)

    def lost(self, index: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the squared error of one sample over the square of all; differentiable."""
        call, expected, keep = self.samples[index]
        values = {f"{n}.weight": self._stored(n, w) for n, w in weights.items()}
        output = first_tensor(torch.func.functional_call(self.module, values, *fresh(call)))
        output = output if keep is None else output[keep]
        error: torch.Tensor = (output.double() - expected).square().sum() / max(self.total, 1e-300)
        return error

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Return the error with these weights, by name in the block, each of shape [N, K]."""
        with torch.no_grad():
            return sum(float(self.lost(i, weights)) for i in range(len(self.samples)))

    def _stored(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        layer = self.layers[name]
        own: torch.Tensor = layer.module.weight  # type: ignore[assignment]
        return (weight.t() if layer.transposed else weight).to(own.dtype)


class TransformOutcome:
    """What a transform did to the sets of a block, for the report.

    Args:
        name: of the transform.
        scope: the block.

    Attributes:
        sets: of the block, see `sets_of`.
    """

    def __init__(self, name: str, scope: Scope) -> None:
        self.name, self.scope = name, scope
        self.changed: list[str] = []
        self.sets, self.undone = sets_of(scope)
        self.scaled = 0
        self.checked = Checked()

    def fold(self, found: ScaleSet, scale: torch.Tensor) -> bool:
        """Fold a scale into the weights, unless this would change what the block computes.

        Returns:
            Whether the scale was folded.
        """
        link = found.link
        try:
            checked = rewrite(
                self.scope.module, smallest(self.scope.samples), lambda wide: fold(wide, link, scale)
            )
        except NotEquivalentError as error:
            self.undone.append(f"{full(self.scope, link.producer)} was left alone: {error}")
            return False
        self.checked = checked if not self.scaled else self.checked.worst(checked)
        self.scaled += 1
        self.changed += [full(self.scope, name) for name in (link.producer, *link.consumers)]
        return True

    def applied(self, note: str = "") -> Applied:
        """Return a line of the report."""
        where = self.scope.prefix or "the model"
        if not self.sets:
            text = (
                f"{where}: nothing: no norm or linear feeds only linears that are quantized and reached by "
                "calibration"
            )
        else:
            text = f"{where}: {self.scaled} of {len(self.sets)} sets scaled" + (
                f", {self.checked}" if self.scaled else ""
            )
        parts = [text, *([note] if note else []), *self.undone]
        return Applied(self.name, tuple(dict.fromkeys(self.changed)), "; ".join(parts))
