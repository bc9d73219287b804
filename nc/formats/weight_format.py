"""How a low-bit weight is stored: number format, groups, zero points and the format of the scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nc.errors import ConfigError
from nc.formats.dtypes import DType, dtype

#: Storage formats of scales → the torch dtype that holds one.
SCALE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}


#: How a power of two is chosen as the scale of a group; see `nc.numerics.mx`.
SCALE_MODES = ("floor", "ceil", "even", "rceil")


@dataclass(frozen=True, slots=True)
class DoubleQuant:
    """Scales that are codes themselves: `scale = code * outer_scale`, as in GGUF's k-quants.

    All are positive.

    Attributes:
        bits: of one code, 1 to 8.
        group_size: at most so many neighbouring scales of a row share one outer scale; -1: all of a row.
            Where it does not divide their number, outer scales are shared by fewer, as evenly as can be.
        outer_dtype: storage format of the outer scales, "fp32", "fp16" or "bf16".
    """

    bits: int = 8
    group_size: int = 256
    outer_dtype: str = "fp32"

    def __post_init__(self) -> None:
        """Raise ConfigError for what can't be."""
        if self.bits not in range(1, 9) or not (
            self.group_size == -1 or (isinstance(self.group_size, int) and self.group_size > 0)
        ):
            msg = (
                f"DoubleQuant(bits={self.bits}, group_size={self.group_size}): bits is 1 to 8, group_size at "
                "least 1, or -1 for a row."
            )
            raise ConfigError(msg)
        if self.outer_dtype not in ("fp32", "fp16", "bf16"):
            msg = f"There is no outer_dtype {self.outer_dtype!r}; there are fp32, fp16, bf16."
            raise ConfigError(msg)

    def outer_count(self, scales: int) -> int:
        """Return the number of outer scales of a row with so many scales."""
        return 1 if self.group_size == -1 else -(-scales // self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """The format of a weight of shape [N, K] with K input channels in groups.

    An integer weight is `(code - zero) * scale` with codes from 0 to 2^bits - 1. Where `symmetric`, zero is
    2^(bits - 1) and is not stored. A weight in a floating-point format is `value(code) * scale`.

    Attributes:
        dtype: of the codes; a name is looked up.
        group_size: number of neighbouring input channels that share a scale; -1: all of a row.
        symmetric: without zero points.
        scale_dtype: storage format of the scales, a key of `SCALE_DTYPES`.
        double_quant: how scales are quantized themselves, or None.
        float_zero: instead of an integer zero point each group has a minimum of the scale's format: `code *
            scale + minimum`.
        tensor_scale: one more fp32 scale for the whole tensor, by which all scales are multiplied (NVFP4).
        scale_mode: with scale_dtype "e8m0", how range rule "minmax" chooses the power of two: one of
            `SCALE_MODES`.
    """

    dtype: DType
    group_size: int = -1
    symmetric: bool = True
    scale_dtype: str = "fp32"
    double_quant: DoubleQuant | None = None
    float_zero: bool = False
    tensor_scale: bool = False
    scale_mode: str = "floor"

    def __post_init__(self) -> None:
        """Look up the dtype; raises ConfigError for what can't be."""
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", dtype(self.dtype))
        if self.dtype.kind == "float" and (not self.symmetric or self.float_zero):
            msg = f"{self.dtype} is a floating-point format and has no zero point; use w_sym=True."
            raise ConfigError(msg)
        if self.scale_dtype not in SCALE_DTYPES:
            msg = f"There is no scale_dtype {self.scale_dtype!r}; there are {', '.join(SCALE_DTYPES)}."
            raise ConfigError(msg)
        if self.scale_mode not in SCALE_MODES:
            msg = f"There is no scale_mode {self.scale_mode!r}; there are {', '.join(SCALE_MODES)}."
            raise ConfigError(msg)
        if self.float_zero and self.symmetric:
            msg = (
                "float_zero stores a minimum for each group, a symmetric format stores none; use "
                "w_sym=False with it."
            )
            raise ConfigError(msg)
        if self.float_zero and self.scale_dtype in ("e8m0", "e4m3") and self.double_quant is None:
            msg = (
                f"float_zero stores minima as scales, and {self.scale_dtype} is too coarse for them; use "
                "scale_dtype fp32, fp16 or bf16."
            )
            raise ConfigError(msg)
        if self.tensor_scale and (self.double_quant is not None or self.float_zero):
            msg = (
                "tensor_scale is one more scale for scales that are stored as they are; it goes with "
                "neither double_quant nor float_zero."
            )
            raise ConfigError(msg)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.dtype.bits

    @property
    def middle(self) -> int:
        """The code of 0 of a symmetric integer weight."""
        return int(2 ** (self.bits - 1))

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_dtype == "e8m0" and self.double_quant is None

    @property
    def two_levels(self) -> bool:
        """Whether scales are multiplied by outer scales."""
        return self.tensor_scale or self.double_quant is not None

    def group(self, inputs: int) -> int:
        """Return the number of elements of a group in a row of `inputs`.

        Raises:
            ConfigError: groups do not cover the row; names the nearest sizes that do.
        """
        if self.group_size == -1:
            return inputs
        if inputs % self.group_size:
            msg = (
                f"group_size={self.group_size} does not divide the {inputs} input channels; "
                f"{nearest_text(inputs, self.group_size)}."
            )
            raise ConfigError(msg)
        return self.group_size

    def bits_per_weight(self, inputs: int, outputs: int = 0) -> float:
        """Return the stored bits per weight of a weight with `inputs` input channels.

        Scales and zero points are included.

        Args:
            inputs: K.
            outputs: N; only a `tensor_scale` depends on it (0: it is left out).
        """
        group = self.group(inputs)
        scale_bits = float(SCALE_DTYPES[self.scale_dtype].itemsize * 8)
        if self.double_quant is not None:
            outer_bits = SCALE_DTYPES[self.double_quant.outer_dtype].itemsize * 8
            groups = inputs // group
            scale_bits = (
                8 + outer_bits * self.double_quant.outer_count(groups) / groups
            )  # a code takes one byte
        zero_bits = 0.0 if self.symmetric else scale_bits if self.float_zero else float(self.bits)
        tensor = 32 / (inputs * outputs) if self.tensor_scale and outputs else 0.0
        return self.bits + (scale_bits + zero_bits) / group + tensor

    def __str__(self) -> str:
        """Short form for tables, e.g. "int4 sym g64 fp16"."""
        parts = [str(self.dtype)]
        if self.dtype.kind == "integer":
            parts.append("sym" if self.symmetric else "float zero" if self.float_zero else "asym")
        parts.append("row" if self.group_size == -1 else f"g{self.group_size}")
        parts.append(
            self.scale_dtype if self.double_quant is None else f"{self.double_quant.bits}-bit scales"
        )
        if self.tensor_scale:
            parts.append("tensor scale")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        double = self.double_quant
        return {
            "dtype": str(self.dtype),
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "scale_dtype": self.scale_dtype,
            "double_quant": None
            if double is None
            else {"bits": double.bits, "group_size": double.group_size, "outer_dtype": double.outer_dtype},
            "float_zero": self.float_zero,
            "tensor_scale": self.tensor_scale,
            "scale_mode": self.scale_mode,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WeightFormat:
        """Return the inverse of `to_dict`."""
        double = data["double_quant"]
        return cls(
            **{
                **data,
                "dtype": dtype(data["dtype"]),
                "double_quant": None if double is None else DoubleQuant(**double),
            }
        )


def _microscaling(element: str) -> WeightFormat:
    return WeightFormat(dtype=dtype(element), group_size=32, scale_dtype="e8m0")


#: Formats that have a name: those of the OCP Microscaling Specification 1.0 (section 5.2), and NVIDIA's
#: NVFP4.
PRESETS: dict[str, WeightFormat] = {
    "mxfp8_e4m3": _microscaling("fp8_e4m3"),
    "mxfp8_e5m2": _microscaling("fp8_e5m2"),
    "mxfp6_e2m3": _microscaling("fp6_e2m3"),
    "mxfp6_e3m2": _microscaling("fp6_e3m2"),
    "mxfp4": _microscaling("fp4_e2m1"),
    "mxint8": _microscaling("mxint8"),
    "nvfp4": WeightFormat(dtype=dtype("fp4_e2m1"), group_size=16, scale_dtype="e4m3", tensor_scale=True),
}


def nearest_text(size: int, part: int) -> str:
    """Return the nearest divisors of `size` around `part`, as text."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    found = [*[d for d in divisors if d < part][-2:], *[d for d in divisors if d > part][:2]]
    return f"the nearest sizes that do: {', '.join(map(str, found))}"
