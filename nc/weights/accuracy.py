"""How far a model with low-bit weights is from the float model.

It is measured in the first call of the prepared model, and layer by layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.calibration.costly import HOPELESS_DB
from nc.modules.block_calls import Sample, fresh, is_cache
from nc.modules.layers import is_low_bit
from nc.numerics.metrics import worst_sqnr_db

#: So many values of each output are kept, evenly spaced: logits of a large vocabulary are larger than some
#: models.
_VALUES = 2**18


@dataclasses.dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call of a prepared model.

    Attributes:
        sample: its inputs.
        outputs: values of the float tensors among its outputs, without padding.
    """

    sample: Sample
    outputs: tuple[torch.Tensor, ...]


def first_call(sample: Sample, output: Any) -> FirstCall:
    """Return what is kept of a call and of its output."""
    return FirstCall(sample, _values(output, sample.keep))


def goes_on(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call goes on where others stopped.

    Samples are kept without caches, so it can't be made again.
    """
    return (
        any(is_cache(leaf) for leaf in pytree.tree_leaves((args, kwargs), is_leaf=is_cache))
        or kwargs.get("past_key_values") is not None
    )


def accuracy_db(model: torch.nn.Module, first: FirstCall) -> float | None:
    """SQNR in dB of the worst output of a call against the float model's.

    It is None where outputs have no values, or other sizes.

    Args:
        model: the quantized model, in eval mode.
        first: the call of the float model.
    """
    args, kwargs = fresh(first.sample.call)
    with torch.no_grad():
        values = _values(model(*args, **kwargs), first.sample.keep)
    if [v.shape for v in values] != [v.shape for v in first.outputs]:
        return None
    decibels = worst_sqnr_db(first.outputs, values)
    return None if decibels == math.inf and not any(v.numel() for v in values) else decibels


def hopeless_layers(model: torch.nn.Module) -> list[tuple[str, float]]:
    """Return the low-bit layers whose output has less than `HOPELESS_DB` against the float layer's.

    They come as (name, dB), the worst first.
    """
    found = [
        (name, module.result.loss)
        for name, module in model.named_modules()
        if is_low_bit(module) and module.result is not None
    ]
    return sorted(
        ((name, -10 * math.log10(loss)) for name, loss in found if loss > 10 ** (-HOPELESS_DB / 10)),
        key=lambda each: each[1],
    )


def hopeless_text(decibels: float | None, layers: Sequence[tuple[str, float]]) -> str:
    """Return what to say of a model that is far from the float one.

    It is "" for one that is not, as far as is known.

    Args:
        decibels: of its outputs in a call; None where they were not compared.
        layers: those that are hopeless by themselves, the worst first.
    """
    if decibels is not None and decibels >= HOPELESS_DB or (decibels is None and not layers):
        return ""
    worst = ", ".join(f"{name} ({db:.1f} dB)" for name, db in layers[:3])
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    alone = f"layers below {HOPELESS_DB:.0f} dB by themselves: {worst}{more}"
    if decibels is None:
        first = f"HOPELESS {alone}"
    else:
        whole = (
            f"HOPELESS accuracy: {decibels:.1f} dB against the float model in the first call of the prepared "
            "model"
        )
        first = f"{whole}; {alone}" if layers else whole
    return (
        f"{first}\nways out: w_dtype with more bits, a smaller group_size, solver=nc.GPTQ() with data; for "
        "single layers config.set_local()"
    )


def _values(output: Any, keep: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(output, is_leaf=is_cache)
        if type(leaf) is torch.Tensor and leaf.is_floating_point()
    ]
    return tuple(
        _some(t if keep is None or t.shape[:2] != keep.shape else t[keep]) for t in tensors if not t.is_nested
    )


def _some(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, math.ceil(flat.numel() / _VALUES))].to(torch.float32, copy=True)
