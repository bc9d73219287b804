"""How far a quantized model is from the float one: in nats for logits, for others in parts of the power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.numerics.metrics import powers
from nc.process.modes import evaluating
from nc.tuning.identity import Call, copied


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Return the logits of what a model returns, classes last; None where it names none.

    A single number is a score and no distribution; logits of pictures have their classes elsewhere.
    """
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(found, torch.Tensor) or found.dim() not in (2, 3) or found.shape[-1] < 2:
        return None
    return found


def kept_positions(call: Call, logits: torch.Tensor) -> torch.Tensor:
    """Return which rows of logits are not padding: True for all if the call has no mask for them."""
    mask = call[1].get("attention_mask")
    shape = logits.shape[:-1]
    if isinstance(mask, torch.Tensor) and mask.shape == shape:
        return mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=logits.device)


def floats_of(outputs: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of what a model returns."""
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


@torch.no_grad()
def none_lost(model: torch.nn.Module, call: Call) -> float:
    """Return `closeness` of the float model itself."""
    args, kwargs = copied(call)
    with evaluating(model):
        outputs = model(*args, **kwargs)
    return 1.0 if logits_of(outputs) is None else 0.0


@torch.no_grad()
def closeness(model: torch.nn.Module, q_model: torch.nn.Module, calls: Sequence[Call]) -> float:
    """Return the negative KL divergence per row of logits in nats; else the part of the power that is right.

    Args:
        model: the float model.
        q_model: the quantized one.
        calls: to judge by.
    """
    divergence = rows = lost = power = 0.0
    for call in calls:
        (args, kwargs), (again, named) = copied(call), copied(call)  # models may write into their inputs
        with evaluating(model):
            right, got = model(*args, **kwargs), q_model(*again, **named)
        logits, own = logits_of(right), logits_of(got)
        if logits is not None and own is not None:
            keep = kept_positions(call, logits)
            a, b = logits.float()[keep].log_softmax(-1), own.float()[keep].log_softmax(-1)
            both = torch.where(a.isneginf(), 0.0, a.exp() * (a - b))  # what can't happen adds nothing
            divergence += float(both.sum(dtype=torch.float64))
            rows += len(a)
        else:
            for a, b in zip(floats_of(right), floats_of(got), strict=True):
                signal, noise = powers(a, b)
                power, lost = power + signal, lost + noise
    return -divergence / rows if rows else 1 - lost / max(power, 1e-300)
