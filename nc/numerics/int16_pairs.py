"""Weights for kernels that add two products in 16 bits, with saturation: CPUs without VNNI (`vpmaddubsw`).

Such a kernel multiplies two neighbouring unsigned 8-bit activations with two signed 8-bit weights and adds
the products before it widens them. 255 * (a + b) fits 16 bits if a + b is 128 at most, for weights of the
same sign. 7-bit weights guarantee this for every pair. Here only the pairs that exceed the limit are clipped,
so that the other weights keep 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

#: 255 * 128 = 32640 < 2^15.
PAIR_LIMIT = 128
_LIMIT = 127
#: A sum with it has no fractional digits.
_TO_UNITS = 1.5 * 2**23
#: A little less than a half: what is halfway is rounded towards zero, for numbers below 256.
_HALF = 0.5 - 2**-9
#: Values that stay in the cache; weights of `quantize_pairs` that one thread takes at a time.
_PART, _CACHED = 2**18, 2**16
#: Factors of the scale that are tried: with a larger scale fewer pairs must be clipped.
_STRETCH = tuple(1 + i / 8 for i in range(9))


def largest_pair(codes: torch.Tensor) -> int:
    """Return the largest sum, without its sign, of those codes of a pair that have one sign.

    Of two codes with different signs that is the larger one, which is larger than their sum. So it is the
    largest code or sum of a pair.

    Args:
        codes: whole numbers of any dtype, shape [..., n]; entries 2i and 2i + 1 of the last dimension are a
            pair.
    """
    if not codes.numel():
        return 0
    return max(_largest_sum(codes), *(abs(int(end)) for end in codes.aminmax()))


def fit(codes: torch.Tensor, limit: int) -> bool:
    """Return whether `largest_pair` is at most a limit; one code alone, of int8, is at most 128."""
    if codes.dtype is not torch.int8 or limit < PAIR_LIMIT:
        return largest_pair(codes) <= limit
    return not codes.numel() or _largest_sum(codes) <= limit


def _largest_sum(codes: torch.Tensor) -> int:
    """Return the largest sum of a pair, without its sign."""
    even = torch.nn.functional.pad(codes, (0, 1)) if codes.shape[-1] % 2 else codes
    if even.dtype is torch.int8:
        return max(map(abs, _extremes_of_int8(even.flatten())))
    return max(abs(int(end)) for end in even.float().reshape(*even.shape[:-1], -1, 2).sum(-1).aminmax())


def _extremes_of_int8(codes: torch.Tensor) -> Iterator[int]:
    """Yield the least and the largest sums of parts of the pairs, which stay in the cache.

    `load` looks at all weights of a model.
    """
    pairs = (codes.clone() if codes.storage_offset() % 2 else codes).view(torch.int16)
    for part in torch.split(pairs, _PART):
        second = part >> 8
        sums = part ^ 128  # 256 * second + first + 128
        sums.sub_(second, alpha=255)
        yield from (int(end) - 128 for end in sums.aminmax())


def limit_pairs(values: torch.Tensor) -> torch.Tensor:
    """Codes of values that are in units of the scale.

    Args:
        values: float, shape [..., n]; entries 2i and 2i + 1 of the last dimension are a pair.

    Returns:
        Whole numbers from -127 to 127, of the same shape and dtype. No pair of the same sign sums to more
        than 128: both weights of such a pair are reduced equally.
    """
    codes = values.round().clamp_(-_LIMIT, _LIMIT)
    pairs = values.shape[-1] // 2 * 2
    _reduce(codes[..., 0:pairs:2], codes[..., 1:pairs:2])
    return codes


def _reduce(first: torch.Tensor, second: torch.Tensor) -> None:
    """Reduce the codes of pairs whose sum is beyond the limit, in place; such codes have one sign."""
    total = first + second
    excess = total - total.clamp(-PAIR_LIMIT, PAIR_LIMIT)
    rest = _round_(excess * _HALF)  # the smaller half of an odd number
    second.sub_(rest)
    first.sub_(excess.sub_(rest))


def _round_(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest, ties to even, in place; values below 2^22.

    `torch.round` starts all threads for a few values, and waits for them on a busy machine.
    """
    return values.add_(_TO_UNITS).sub_(_TO_UNITS)


def quantize_pairs(
    weight: torch.Tensor, shrink: Sequence[float] = (), norm: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales.

    Each channel has the range, of the whole one and some that are wider, with the least error.

    Args:
        weight: fp32, shape [channels, m, n]; pairs are along the last dimension.
        shrink: narrower ranges to try too, as parts of the whole one.
        norm: the error is the sum of |w - w^|^norm.

    Returns:
        Codes, fp32, of the shape of `weight`; scales, fp32, shape [channels].
    """
    amax = weight.abs().amax((1, 2)).double()
    whole = torch.where(amax < 2.0**-100, torch.ones_like(amax), amax / _LIMIT)
    tried = [(whole * factor).float()[:, None] for factor in (*_STRETCH, *shrink)]
    flat, odd = weight.flatten(1), weight.shape[2] % 2
    if odd:  # its last column has no neighbour
        flat = torch.nn.functional.pad(weight, (0, 1)).flatten(1)
    codes, scales = torch.empty_like(flat), torch.empty_like(tried[0])
    rows = max(1, _CACHED // max(1, flat.shape[1]))
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        codes[part], scales[part] = _best_of_rows(flat[part], [scale[part] for scale in tried], norm)
    codes = codes.reshape(*weight.shape[:2], weight.shape[2] + odd)[..., : weight.shape[2]]
    return codes, scales[:, 0]


def _best_of_rows(
    rows: torch.Tensor, scales: Sequence[torch.Tensor], norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale of each row, of those scales that leave it the least error.

    Args:
        rows: few enough for the cache, shape [n, columns], columns even.
        scales: to try, each of shape [n, 1].
        norm: as for `quantize_pairs`.
    """
    halves = rows[:, 0::2].contiguous(), rows[:, 1::2].contiguous()
    best, chosen, least = None, None, None
    for scale in scales:
        codes = [_round_((half / scale).clamp_(-_LIMIT, _LIMIT)) for half in halves]
        _reduce(*codes)
        errors = [_power((c * scale).sub_(half), norm) for c, half in zip(codes, halves, strict=True)]
        error = errors[0] + errors[1]
        if best is None or chosen is None or least is None:
            best, chosen, least = codes, scale, error
            continue
        better = error < least
        best = [torch.where(better, new, old) for new, old in zip(codes, best, strict=True)]
        chosen, least = torch.where(better, scale, chosen), torch.where(better, error, least)
    assert best is not None
    assert chosen is not None
    return torch.stack(best, 2).reshape(rows.shape), chosen


def _power(error: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the sum of |e|^norm of each row, [n, 1]."""
    powers = error.square_() if norm == 2.0 else error.abs_().pow_(norm)
    return powers.sum(1, keepdim=True)
