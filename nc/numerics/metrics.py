"""Measures of the difference of two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

#: Values that are looked at together.
_PART = 2**16


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB: `10 log10(sum r^2 / sum (r - v)^2)`, computed in float64.

    Equal tensors give +inf; a non-finite difference gives -inf. Values equal on both sides (also both -inf,
    as masks are) don't count as noise.
    """
    return decibels(*powers(reference, value))


def powers(reference: torch.Tensor, value: torch.Tensor) -> tuple[float, float]:
    """Return the powers of the signal and of the noise in `sqnr_db`; those of parts of a tensor add up."""
    signal = noise = 0.0
    reference, value = reference.flatten(), value.reshape(reference.shape).flatten()
    # logits of a vocabulary are hundreds of megabytes; parts of them stay in the cache
    for start in range(0, len(reference), _PART):
        r, v = (each[start : start + _PART].double() for each in (reference, value))
        difference = r - v
        of_part = torch.dot(r, r).item(), torch.dot(difference, difference).item()
        if not all(map(math.isfinite, of_part)):
            of_part = _powers_of_any(r, v)
        signal, noise = signal + of_part[0], noise + of_part[1]
    return signal, noise


def _powers_of_any(r: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """Return the powers where values may be infinite or NaN."""
    signal = torch.where(r.isfinite(), r, 0.0).square().sum().item()
    return signal, torch.where(r != v, r - v, 0.0).square().sum().item()


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two powers in dB: +inf without noise, -inf without a signal or a finite noise."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if math.isfinite(noise) and signal > 0.0 else -math.inf


def relative_error(decibels: float) -> float:
    """Return the root of an error's power relative to the signal's: 0.01 for 40 dB."""
    return float(10 ** (-decibels / 20))


def worst_sqnr_db(expected: Sequence[Any], got: Sequence[Any]) -> float:
    """Return the smallest `sqnr_db` over the float tensors of two flat output lists.

    It is +inf when there are none.
    """
    pairs = [
        (e, g)
        for e, g in zip(expected, got, strict=True)
        if isinstance(e, torch.Tensor) and e.is_floating_point() and e.numel()
    ]
    return min((sqnr_db(e, g) for e, g in pairs), default=math.inf)


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of the rows of two [n, d] tensors, as a float64 tensor of shape [n]."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)
