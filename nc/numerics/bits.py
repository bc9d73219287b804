"""Codes of 1 to 8 bits, packed without gaps: each row is a stream of bits, the lowest bit of the first code first.

So two 4-bit codes make a byte, the first one in its low half; three bytes hold eight 3-bit codes.
"""

from __future__ import annotations

import torch


def packed_size(count: int, bits: int) -> int:
    """Bytes of a row of `count` codes."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed rows.

    Args:
        codes: uint8, shape [rows, count], each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, shape [rows, ceil(count * bits / 8)]; the bits behind the last code are 0.
    """
    if bits == 8:
        return codes.contiguous()
    rows, count = codes.shape
    period = 8 // _gcd(bits)  # codes that fill whole bytes
    padded = torch.nn.functional.pad(codes, (0, -count % period)).reshape(rows, -1, period)
    packed = torch.zeros(rows, padded.shape[1], period * bits // 8, dtype=torch.uint8)
    for i in range(period):
        byte, shift = divmod(i * bits, 8)
        packed[..., byte] |= padded[..., i] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= padded[..., i] >> (8 - shift)
    return packed.reshape(rows, -1)[:, : packed_size(count, bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack`: uint8, shape [rows, count]."""
    if bits == 8:
        return packed
    rows = packed.shape[0]
    period = 8 // _gcd(bits)
    size = period * bits // 8
    groups = -(-count // period)
    padded = torch.nn.functional.pad(packed, (0, groups * size - packed.shape[1])).reshape(rows, groups, size)
    codes = torch.empty(rows, groups, period, dtype=torch.uint8)
    mask = 2**bits - 1
    for i in range(period):
        byte, shift = divmod(i * bits, 8)
        low = padded[..., byte] >> shift
        if shift + bits > 8:
            low = low | (padded[..., byte + 1] << (8 - shift))
        codes[..., i] = low & mask
    return codes.reshape(rows, -1)[:, :count].contiguous()


def _gcd(bits: int) -> int:
    return next(d for d in (8, 4, 2, 1) if bits % d == 0 and 8 % d == 0)
