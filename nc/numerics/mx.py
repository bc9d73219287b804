"""The shared exponent of blocks in the OCP Microscaling (MX) formats.

They are powers of two in E8M0, chosen from the largest magnitude of a block.

Exponents come from the bits of a number, never from a logarithm in floating point, which errs next to powers
of two. Four modes (OCP MX Specification 1.0, section 6.3, is "floor"; the others are those of torchao's
`ScaleCalculationMode`):

* floor: `floor(log2 amax) - emax`: a block's largest elements may saturate.
* ceil: `ceil(log2 amax) - emax`: they do not, but up to one bit is lost.
* even: amax is rounded to the mantissa of the element first, then as floor.
* rceil: `ceil(log2(amax / largest))`: the least power of two with which nothing saturates.

emax is the exponent of the largest element. Exponents are clamped to [-127, 127]; a block of zeros has -127,
one with NaN or an infinity has the code of NaN.
"""

from __future__ import annotations

import math

import torch

from nc.formats import SCALE_MODES, DType

MODES = SCALE_MODES
NAN_CODE = 255
_BIAS = 127
_MANTISSA = 23  # bits of fp32


def shared_codes(amax: torch.Tensor, dtype: DType, mode: str = "floor") -> torch.Tensor:
    """Return the E8M0 codes of the scales of blocks.

    Args:
        amax: the largest magnitude of each block, any shape; compared as fp32.
        dtype: of the elements. An integer dtype of b bits counts as the format whose largest value is that of
            the dtype.
        mode: one of `MODES`.

    Returns:
        uint8 codes e + 127 of the shape of `amax`; 255 for NaN.
    """
    amax = amax.float()
    emax = _floor_log2(dtype.largest)
    if mode == "even":
        half = 1 << (_MANTISSA - mantissa_bits(dtype) - 1)
        exponent = ((amax.view(torch.int32) + half) >> _MANTISSA) - _BIAS - emax
    else:
        # float64 holds every fp32 number as a normal one, and tells amax from a power of two times the
        # largest element
        ratio = amax.double() / dtype.largest if mode == "rceil" else amax.double()
        fraction, above = torch.frexp(ratio)  # a fraction in [0.5, 1)
        exponent = above - 1
        if mode != "floor":
            exponent = exponent + (fraction != 0.5)  # a power of two
        exponent = exponent - (0 if mode == "rceil" else emax)
    exponent = torch.where(amax == 0, -_BIAS, exponent.clamp(-_BIAS, _BIAS))
    return torch.where(amax.isfinite(), exponent + _BIAS, NAN_CODE).to(torch.uint8)


def scales(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 scales of E8M0 codes: 2^(code - 127), NaN for 255."""
    return codes.view(torch.float8_e8m0fnu).float()


def mantissa_bits(dtype: DType) -> int:
    """Return the bits after the leading 1 of the largest values of a format."""
    emax = _floor_log2(dtype.largest)
    if dtype.kind == "integer":
        return emax
    return math.ceil(math.log2(sum(2.0**emax <= value <= dtype.largest for value in dtype.values)))


def _floor_log2(value: float) -> int:
    return math.frexp(value)[1] - 1
