"""The dtypes that tensors can be quantized to, as values.

Sources of the floating-point formats:

* fp8_e4m3 and fp8_e5m2: OCP 8-bit Floating Point Specification (OFP8) 1.0, arXiv 2209.05433. torch calls the
  first float8_e4m3fn.
* fp4_e2m1, fp6_e2m3 and fp6_e3m2: OCP Microscaling Formats (MX) Specification 1.0, section 5.3. They have no
  infinities and no NaN.
* mxint8: the same, section 5.3.4: whole multiples of 2^-6. Code -128 stands for -2, but is never chosen, so
  that the range is symmetric.
* nf4: QLoRA, arXiv 2305.14314, appendix E.
* af4 and af4_32: "NF4 Isn't Information Theoretically Optimal (and that's Good)", arXiv 2306.06965: the
  values with the least expected absolute error of normal weights, which depend on how many weights share a
  scale: af4 is for groups of 64, af4_32 for groups of 32.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from nc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DType:
    """A number format with a few bits.

    Attributes:
        name: as configurations, reports and artefacts write it, e.g. "int4".
        bits: of one code.
        kind: "integer" (a code minus the zero point is a whole number of scales) or "float" (a code
            encodes a value of the format).
        quant_min: lowest code.
        quant_max: highest code.
        storage: the torch dtype of a tensor of codes, one element per code.
        values: of floats the value of each code, in the order of the codes; codes of NaN and infinities have
            those. Empty for integers.
    """

    name: str
    bits: int
    kind: Literal["integer", "float"]
    quant_min: int
    quant_max: int
    storage: torch.dtype
    values: tuple[float, ...] = field(default=(), compare=False, repr=False)  # the name says which they are

    @property
    def signed(self) -> bool:
        """Whether it has values below 0 without a zero point."""
        return self.kind == "float" or self.quant_min < 0

    @property
    def largest(self) -> float:
        """The largest finite value of a code with zero point 0.

        A symmetric scale is the largest weight divided by this.

        Values of a format below minus this (only mxint8 has one, -2) are decoded, but never chosen.
        """
        return max(filter(math.isfinite, self.values), default=self.quant_max)

    def __str__(self) -> str:
        """Its name."""
        return self.name


def _integer(bits: int, *, signed: bool) -> DType:
    low = -(2 ** (bits - 1)) if signed else 0
    storage = torch.int8 if signed else torch.uint8
    return DType(f"{'int' if signed else 'uint'}{bits}", bits, "integer", low, low + 2**bits - 1, storage)


def _table(name: str, values: tuple[float, ...], storage: torch.dtype = torch.uint8) -> DType:
    return DType(name, (len(values) - 1).bit_length(), "float", 0, len(values) - 1, storage, values)


def _float(
    exponent: int, mantissa: int, storage: torch.dtype = torch.uint8, special: tuple[float, ...] = ()
) -> DType:
    """Return a format of one sign bit, then the bits of the exponent, then those of the mantissa.

    Args:
        exponent: number of its bits.
        mantissa: number of its bits.
        storage: torch's dtype of the format, if it has one.
        special: what the last positive codes stand for, and with the other sign the last negative ones: NaN
            or infinity.
    """
    bias, steps = 2 ** (exponent - 1) - 1, 2**mantissa
    # exponent 0 is subnormal: the same step as exponent 1, without the leading 1
    positive = [
        (m + steps * (e > 0)) / steps * 2.0 ** (max(e, 1) - bias)
        for e in range(2**exponent)
        for m in range(steps)
    ]
    positive[len(positive) - len(special) :] = special
    return _table(
        f"fp{1 + exponent + mantissa}_e{exponent}m{mantissa}",
        (*positive, *(-value for value in positive)),
        storage,
    )


_NF4 = _table(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)

_AF4 = _table(
    "af4",
    (
        *(-1.0, -0.69441008, -0.51243739, -0.3736951, -0.25607552, -0.14982478, -0.04934812, 0.0),
        *(0.04273164, 0.12934483, 0.21961274, 0.31675666, 0.42563882, 0.55496234, 0.72424863, 1.0),
    ),
)
_AF4_32 = _table(
    "af4_32",
    (
        *(-1.0, -0.72380075, -0.54068711, -0.3963985, -0.2723577, -0.15956821, -0.05258802, 0.0),
        *(0.04554747, 0.13780891, 0.23375854, 0.33656744, 0.4508456, 0.58437857, 0.75299116, 1.0),
    ),
)
_MXINT8 = _table(
    "mxint8", tuple((code - 256 * (code > 127)) / 64 for code in range(256))
)  # the codes are in two's complement

_ALL = (
    *(_integer(bits, signed=signed) for signed in (False, True) for bits in range(2, 9)),
    _float(2, 1),
    _float(2, 3),
    _float(3, 2),
    _float(4, 3, torch.float8_e4m3fn, (math.nan,)),
    _float(5, 2, torch.float8_e5m2, (math.inf, math.nan, math.nan, math.nan)),
    _NF4,
    _AF4,
    _AF4_32,
    _MXINT8,
)

#: All dtypes by name. An entry here makes a dtype known; which operators take it is in the capability tables
#: of backends.
DTYPES: dict[str, DType] = {d.name: d for d in _ALL}

INT8, UINT8 = DTYPES["int8"], DTYPES["uint8"]


def dtype(name: str) -> DType:
    """Return the dtype of that name.

    Raises:
        ConfigError: there is none; names the nearest ones.
    """
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(str(name), DTYPES, n=3, cutoff=0.0)
        msg = (
            f"There is no dtype {name!r} to quantize to; the nearest names: {', '.join(near)}. All: "
            f"{', '.join(DTYPES)}."
        )
        raise ConfigError(msg)
    return found
