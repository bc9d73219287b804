"""Ranges that are smaller than the weights need, where the layers' outputs lose less by it.

This is AWQ's clip search on the layers of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from nc.algorithms.solvers.base import Problem
from nc.algorithms.solvers.rtn import RTN
from nc.algorithms.transforms.base import Scope, Target
from nc.algorithms.transforms.scale_sets import BlockError, divided, weight_of
from nc.modules.statistics import InputStatistics, weighted_loss
from nc.numerics import clipping

#: Last parts of names of layers that make queries or keys: the softmax amplifies their error, so AWQ leaves
#: their ranges alone.
_QUERIES_AND_KEYS = re.compile(r"(^|_)(w?q|w?k|w?qkv|query|key|c_attn)(_|$)", re.IGNORECASE)


def clip_ranges(
    scope: Scope, scales: Mapping[str, torch.Tensor], tokens: int, rules: tuple[str, ...]
) -> list[str]:
    """Search the ranges of a block's layers and put those into `scope.clips` that lose less.

    See `nc.numerics.clipping` for the search.

    A layer's whole ranges stay if the error of its output, or that of the block's, is not less with the
    others.

    Args:
        scope: the block; its weights are scaled already.
        scales: of layers whose inputs were divided since statistics were collected, by name: the scale of
            each input channel.
        tokens: the block's output is compared for about this many.
        rules: range rules; layers with another one are left alone.

    Returns:
        Names of the layers.
    """
    names = [
        name
        for name, t in scope.targets.items()
        if t.asked and t.inputs is not None and t.inputs.tokens and t.rule in rules
    ]
    found: list[str] = []
    error = None
    for name in names:
        if _QUERIES_AND_KEYS.search(name.rpartition(".")[2]):
            continue
        target = scope.targets[name]
        inputs = target.reached if name not in scales else divided(target.reached, scales[name])
        weight = weight_of(target)
        clip = clipping.search(weight, target.form, inputs.hessian.float(), target.rule, inputs.mean_square)
        if bool((clip == 1).all()):
            continue
        before, after = (_rounded(target, weight, inputs, part) for part in (None, clip))
        if weighted_loss(weight, after, inputs) >= weighted_loss(weight, before, inputs):
            continue
        error = error or BlockError(scope, tokens)
        inside = name.removeprefix(f"{scope.prefix}.") if scope.prefix else name
        if error({inside: after}) < error({inside: before}):
            scope.clips[name] = clip
            found.append(name)
    return found


def _rounded(
    target: Target, weight: torch.Tensor, inputs: InputStatistics, clip: torch.Tensor | None
) -> torch.Tensor:
    return (
        RTN()
        .solve(Problem(name="", weight=weight, form=target.form, rule=target.rule, inputs=inputs, clip=clip))
        .dequantize()
    )
