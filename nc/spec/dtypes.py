"""The dtypes that tensors can be quantized to, as values."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

import torch

from nc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DType:
    """A number format with a few bits.

    Attributes:
        name: as configurations, reports and artefacts write it, e.g. "int4".
        bits: of one code.
        kind: "integer" (a code minus the zero point is a whole number of scales) or "float" (a code stands for a value of the format).
        quant_min: of integers the lowest code, of floats the lowest finite value.
        quant_max: of integers the highest code, of floats the highest finite value.
        storage: the torch dtype of a tensor of codes, one element per code.
    """

    name: str
    bits: int
    kind: Literal["integer", "float"]
    quant_min: int
    quant_max: int
    storage: torch.dtype

    @property
    def signed(self) -> bool:
        """Whether there are codes below 0."""
        return self.quant_min < 0

    def __str__(self) -> str:
        """Its name."""
        return self.name


def _integer(bits: int, *, signed: bool) -> DType:
    low = -(2 ** (bits - 1)) if signed else 0
    storage = torch.int8 if signed else torch.uint8
    return DType(f"{'int' if signed else 'uint'}{bits}", bits, "integer", low, low + 2**bits - 1, storage)


#: All dtypes by name. An entry here makes a dtype known; which operators take it is in the capability tables of backends.
DTYPES: dict[str, DType] = {d.name: d for d in (_integer(bits, signed=signed) for signed in (False, True) for bits in range(2, 9))}

INT8, UINT8 = DTYPES["int8"], DTYPES["uint8"]


def dtype(name: str) -> DType:
    """The dtype of that name.

    Raises:
        ConfigError: there is none; names the nearest ones.
    """
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(str(name), DTYPES, n=3, cutoff=0.0)
        msg = f"There is no dtype {name!r} to quantize to; the nearest names: {', '.join(near)}. All: {', '.join(DTYPES)}."
        raise ConfigError(msg)
    return found
