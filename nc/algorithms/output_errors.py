"""How far outputs are from those of the fp32 graph, and which changes make them worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from nc.numerics.mean_error import square_errors

#: Square errors of one tensor: over all its rows, and over those that differ.
Errors = tuple[float, float]
#: Errors that are larger by less than this are not worse: 0.05 dB. That is what the mean of 85 samples of
#: pure noise adds to the others.
TOLERANCE = 10**0.005
#: Values of one tensor over all batches that errors are compared at; of more, evenly spaced positions.
_JUDGED = 2**19


def is_worse(before: Sequence[Errors], after: Sequence[Errors]) -> bool:
    """Return whether one tensor has a larger error, over all its rows or over those that differ."""
    pairs = [pair for one, other in zip(before, after, strict=True) for pair in zip(one, other, strict=True)]
    return any(a > TOLERANCE * b for b, a in pairs)


def errors_of_outputs(expected: Sequence[tuple[Any, ...]], got: Sequence[tuple[Any, ...]]) -> list[Errors]:
    """Return the errors of each float output.

    Args:
        expected: flat outputs, one tuple for each batch.
        got: the same, computed in another way.
    """
    outputs = zip(zip(*expected, strict=True), zip(*got, strict=True), strict=True)
    return [errors_of(e, g) for e, g in outputs if _is_float(e[0])]


def errors_of(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Errors:
    """`square_errors` of a tensor over all batches."""
    limit = _JUDGED // len(got)
    pairs = [(rows_of(e, limit)[0], rows_of(g, limit)[0]) for e, g in zip(expected, got, strict=True)]
    widths = {e.shape[1] for e, _ in pairs}
    found = [(0.0, 0.0)]
    for width in widths:
        parts = [(e, g) for e, g in pairs if e.shape[1] == width]
        found.append(square_errors(torch.cat([e for e, _ in parts]), torch.cat([g for _, g in parts])))
    return math.fsum(a for a, _ in found), math.fsum(b for _, b in found)


def rows_of(value: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors of a tensor's last dimension and the index in the first dimension of each.

    There are about `limit` values in them.
    """
    value = value if value.dim() > 1 else value.reshape(1, -1)
    flat = value.flatten(0, -2)  # a last dimension without elements has rows too
    count = len(flat)
    step = max(1, math.ceil(flat.numel() / max(1, limit)))
    while count > 1 and math.gcd(step, count) > 1 and step < count:
        step += 1  # no row or column of a picture is left out
    return flat[::step].float(), torch.arange(0, count, step) // max(1, count // max(1, value.shape[0]))


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def harmless(
    names: Sequence[str], errors: Callable[[Collection[str]], Sequence[Errors]], trials: int
) -> list[str]:
    """Return as many changes as make no output worse: all, or halves of them, and halves of these.

    Args:
        names: of the changes, in execution order.
        errors: of the model's outputs with some of the changes.
        trials: how often outputs are computed at most, but for those without any change.
    """
    kept: list[str] = []
    least = errors(())
    open_ = [list(names)] if names else []
    while open_ and trials:
        part = open_.pop(0)
        found = errors({*kept, *part})
        trials -= 1
        if not is_worse(least, found):
            kept, least = [*kept, *part], found
        elif len(part) > 1:
            half = (len(part) + 1) // 2
            open_[:0] = [part[:half], part[half:]]
    return [name for name in names if name in kept]
