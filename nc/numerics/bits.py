"""Codes of 1 to 8 bits, packed without gaps.

Each row is a stream of bits, the lowest bit of the first code first.

So two 4-bit codes make a byte, the first one in its low half; three bytes hold eight 3-bit codes.
"""

from __future__ import annotations

import math
import sys

import torch

#: Bits that divide 8 → the dtype that holds the codes of one byte side by side, one per byte, on a machine
#: with the low byte first.
_WIDE = {4: torch.int16, 2: torch.int32, 1: torch.int64} if sys.byteorder == "little" else {}


def packed_size(count: int, bits: int) -> int:
    """Bytes of a row of `count` codes."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows.

    Args:
        codes: uint8, shape [rows, count], each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, shape [rows, ceil(count * bits / 8)]; the bits after the last code are 0.
    """
    if bits == 8:
        return codes.contiguous()
    rows, count = codes.shape
    if not codes.numel():  # torch calls it contiguous whatever its strides are, and takes no wider view of it
        return codes.new_empty(rows, packed_size(count, bits))
    period = 8 // math.gcd(bits, 8)  # codes that fill whole bytes
    padded = (
        torch.nn.functional.pad(codes, (0, -count % period)).contiguous()
        if count % period
        else codes.contiguous()
    )
    wide = _WIDE.get(bits)
    if wide is not None:
        # code i of a byte is at bit 8 i of a wide number, and moves to bit `bits * i`
        # flat, because a contiguous tensor may have any stride along a dimension of length 1, which `view`
        # refuses
        together = padded.reshape(-1).view(wide).reshape(rows, padded.shape[1] // period)
        packed = together.clone()
        for i in range(1, period):
            packed |= together >> ((8 - bits) * i)
        return packed.to(torch.uint8)
    parts = padded.reshape(rows, padded.shape[1] // period, period)
    found = torch.zeros(rows, parts.shape[1], period * bits // 8, dtype=torch.uint8, device=parts.device)
    for i in range(period):
        byte, shift = divmod(i * bits, 8)
        found[..., byte] |= parts[..., i] << shift
        if shift + bits > 8:
            found[..., byte + 1] |= parts[..., i] >> (8 - shift)
    return found.flatten(1)[:, : packed_size(count, bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the inverse of `pack`: uint8, shape [rows, count]."""
    if bits == 8:
        return packed
    rows = packed.shape[0]
    if not packed.numel():
        return packed.new_empty(rows, count)
    period = 8 // math.gcd(bits, 8)
    mask = 2**bits - 1
    wide = _WIDE.get(bits)
    if wide is not None:
        together = packed.to(wide)
        spread = together.clone()
        for i in range(1, period):
            spread |= together << ((8 - bits) * i)
        spread &= sum(mask << (8 * i) for i in range(period))
        return (
            spread.reshape(-1)
            .view(torch.uint8)
            .reshape(rows, packed.shape[1] * period)[:, :count]
            .contiguous()
        )
    size = period * bits // 8
    groups = -(-count // period)
    padded = torch.nn.functional.pad(packed, (0, groups * size - packed.shape[1])).reshape(rows, groups, size)
    codes = torch.empty(rows, groups, period, dtype=torch.uint8, device=packed.device)
    for i in range(period):
        byte, shift = divmod(i * bits, 8)
        low = padded[..., byte] >> shift
        if shift + bits > 8:
            low = low | (padded[..., byte + 1] << (8 - shift))
        codes[..., i] = low & mask
    return codes.flatten(1)[:, :count].contiguous()
