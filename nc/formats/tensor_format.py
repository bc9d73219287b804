"""How a tensor is quantized: one value for weights and activations, for integer and floating-point codes.

It is the same value whether an engine computes with the codes or the reference simulates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nc.errors import ConfigError
from nc.formats.dtypes import DType, dtype
from nc.formats.granularities import PER_TENSOR, Granularity, granularity, input_groups

#: Storage formats of scales → the torch dtype that holds one.
SCALE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
#: What scales can be rounded to: one of these formats, or a power of two, which fp32 holds.
SCALE_ROUNDINGS = (*SCALE_DTYPES, "power_of_two")
#: How a power of two is chosen as the scale of a group; see `nc.numerics.mx`.
SCALE_MODES = ("floor", "ceil", "even", "rceil")
#: What is done with a value between two values of a format; ties go to the even code, or away from 0.
ROUND_METHODS = ("half_even", "half_away", "floor", "stochastic")


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
class TensorFormat:
    """How one tensor is quantized: its codes, its scales, and how its range is found.

    A code stands for `(code - zero_point) * scale`, or for `value(code) * scale` in a floating-point format.
    Low-bit weights of shape [N, K] are stored as codes from 0 to 2^bits - 1, see `middle`.

    Attributes:
        dtype: of the codes; a name is looked up.
        granularity: which elements share a scale; a text is looked up.
        symmetric: the zero point is fixed: 0 of signed codes, the middle of unsigned ones. It is not stored.
        float_zero: instead of an integer zero point each group has a minimum of the scale's format: `code *
            scale + minimum`.
        scale_dtype: format that scales are rounded to, one of `SCALE_ROUNDINGS`; weights store it.
        scale_mode: with scale_dtype "e8m0", how range rule "minmax" chooses the power of two: one of
            `SCALE_MODES`.
        double_quant: how scales are quantized themselves, or None.
        tensor_scale: one more fp32 scale for the whole tensor, by which all scales are multiplied (NVFP4).
        narrow: leave out the lowest code, so that the range is symmetric around 0 (weights: [-127, 127]).
        reduce_range: use the 7 bits around the middle of the codes; see `Capabilities.narrow_sums`.
        paired: codes of neighbouring input channels of a weight are small enough for their products to be
            added in 16 bits; see `nc.numerics.int16_pairs`.
        algo: how its range is found, see `nc.observers`; of simulated constants "minmax" or "mse".
        percentile: how much of the data the range covers, in percent, where `algo` is or tries "percentile".
        dynamic: its range is found anew in each call.
        round_method: one of `ROUND_METHODS`.
        seed: of stochastic rounding. The same shape always gets the same random numbers.

    Raises:
        ConfigError: a value that does not exist, or values that contradict each other.
    """

    dtype: DType
    granularity: Granularity = PER_TENSOR
    symmetric: bool = True
    float_zero: bool = False
    scale_dtype: str = "fp32"
    scale_mode: str = "floor"
    double_quant: DoubleQuant | None = None
    tensor_scale: bool = False
    narrow: bool = False
    reduce_range: bool = False
    paired: bool = False
    algo: str = "minmax"
    percentile: float | None = None
    dynamic: bool = False
    round_method: str = "half_even"
    seed: int = 0

    def __post_init__(self) -> None:
        """Look up the dtype and the granularity if they were given by name, and check all values."""
        if not isinstance(self.dtype, DType):
            object.__setattr__(self, "dtype", dtype(self.dtype))
        if not isinstance(self.granularity, Granularity):
            object.__setattr__(self, "granularity", granularity(self.granularity))
        wrong = next(_contradictions(self), None)
        if wrong is not None:
            raise ConfigError(wrong)

    @property
    def quant_min(self) -> int:
        """Lowest code in use."""
        return self._range()[0] + self.narrow

    @property
    def quant_max(self) -> int:
        """Highest code in use."""
        return self._range()[1]

    def _range(self) -> tuple[int, int]:
        low, high = self.dtype.quant_min, self.dtype.quant_max
        quarter = (high - low + 1) // 4
        return (low + quarter, high - quarter) if self.reduce_range else (low, high)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.dtype.bits

    @property
    def middle(self) -> int:
        """The stored code of 0 of a symmetric integer weight with a low-bit format."""
        return int(2 ** (self.bits - 1))

    @property
    def scale_storage(self) -> torch.dtype:
        """The torch dtype that holds a scale that is not quantized itself."""
        return SCALE_DTYPES.get(self.scale_dtype, torch.float32)

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_dtype == "e8m0" and self.double_quant is None

    @property
    def two_levels(self) -> bool:
        """Whether scales are multiplied by outer scales."""
        return self.tensor_scale or self.double_quant is not None

    @property
    def group_size(self) -> int:
        """The number of neighbours in a row that share a scale; -1: all."""
        return self.granularity.shape[0] if self.granularity.name == "per_group" else -1

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
        scale_bits = float(self.scale_storage.itemsize * 8)
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
        """Return the short form for tables, e.g. "uint8 affine" or "int4 sym per_group 64 fp16 scales"."""
        integer, shared = self.dtype.kind == "integer", self.granularity != PER_TENSOR
        zero = "sym" if self.symmetric else "float zero" if self.float_zero else "affine"
        algo = f"{self.algo} {self.percentile:g}" if self.algo == "percentile" else self.algo
        scales = self.scale_dtype if self.double_quant is None else f"{self.double_quant.bits}-bit"
        parts = {
            str(self.dtype): True,
            zero: integer,
            str(self.granularity): shared,
            f"{scales} scales": scales != "fp32",
            "tensor scale": self.tensor_scale,
            "7-bit": self.reduce_range,
            "paired": self.paired,
            "dynamic": self.dynamic,
            self.round_method: self.round_method != "half_even",
            algo: self.algo != "minmax",
        }
        return " ".join(text for text, shown in parts.items() if shown)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values of the dtype, the granularity, and all fields that are not as by default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}
        double = self.double_quant
        if double is not None:
            changed["double_quant"] = {
                "bits": double.bits,
                "group_size": double.group_size,
                "outer_dtype": double.outer_dtype,
            }
        return {**changed, "dtype": str(self.dtype), "granularity": str(self.granularity)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorFormat:
        """Return the inverse of `to_dict`; it reads what earlier versions wrote, too."""
        values = {_EARLIER.get(name, name): value for name, value in data.items()}
        group = values.pop("group_size", None)
        if "granularity" not in values:  # of a low-bit weight
            values["granularity"] = input_groups(-1 if group is None else group)
        elif values["granularity"] in ("per_group", "per_block", "per_channel") and values.keys() & _PARTS:
            values["granularity"] = _from_parts(values, group)
        for name in _PARTS:
            values.pop(name, None)
        double = values.get("double_quant")
        return cls(**{**values, "double_quant": None if double is None else DoubleQuant(**double)})


#: Names that earlier versions gave to fields.
_EARLIER = {"scale_type": "scale_dtype", "observer": "algo"}
#: Fields of which earlier versions made the granularity of simulated tensors.
_PARTS = ("axis", "group_size", "block_size")


def _from_parts(values: Mapping[str, Any], group: int | None) -> Granularity:
    """Return the granularity that earlier versions wrote in several fields."""
    parts = {
        "per_channel": (),
        "per_group": () if group is None else (group,),
        "per_block": tuple(values.get("block_size") or ()),
    }
    return Granularity(values["granularity"], values.get("axis"), parts[values["granularity"]])


def _contradictions(form: TensorFormat) -> Iterator[str]:
    """Yield what is wrong with a format."""
    for name, known in (
        ("scale_dtype", SCALE_ROUNDINGS),
        ("scale_mode", SCALE_MODES),
        ("round_method", ROUND_METHODS),
    ):
        value = getattr(form, name)
        if value not in known:
            yield f"There is no {name} {value!r}; there are {', '.join(known)}."
    if form.dtype.kind == "float":
        if not form.symmetric or form.float_zero:
            yield f"{form.dtype} is a floating-point format and has no zero point; use symmetric=True."
        if form.narrow or form.reduce_range or form.paired:
            yield f"{form.dtype} is a floating-point format, of which all codes are used."
    if form.float_zero:
        if form.symmetric:
            yield (
                "float_zero stores a minimum for each group, a symmetric format stores none; use "
                "symmetric=False."
            )
        if form.scale_dtype in ("e8m0", "e4m3") and form.double_quant is None:
            yield (
                f"float_zero stores minima as scales, and {form.scale_dtype} is too coarse for them; use "
                "scale_dtype fp32, fp16 or bf16."
            )
    if form.tensor_scale and (form.double_quant is not None or form.float_zero):
        yield (
            "tensor_scale is one more scale for scales that are stored as they are; it goes with neither "
            "double_quant nor float_zero."
        )


def low_bit(*, group_size: int = -1, **fields: Any) -> TensorFormat:
    """Return the format of a weight of shape [N, K] with K input channels in groups.

    Args:
        group_size: number of neighbouring input channels that share a scale; -1: all of a row.
        fields: the other fields of `TensorFormat`.
    """
    return TensorFormat(granularity=input_groups(group_size), **fields)


def _microscaling(element: str) -> TensorFormat:
    return low_bit(dtype=dtype(element), group_size=32, scale_dtype="e8m0")


#: Formats that have a name: those of the OCP Microscaling Specification 1.0 (section 5.2), and NVIDIA's
#: NVFP4.
PRESETS: dict[str, TensorFormat] = {
    "mxfp8_e4m3": _microscaling("fp8_e4m3"),
    "mxfp8_e5m2": _microscaling("fp8_e5m2"),
    "mxfp6_e2m3": _microscaling("fp6_e2m3"),
    "mxfp6_e3m2": _microscaling("fp6_e3m2"),
    "mxfp4": _microscaling("fp4_e2m1"),
    "mxint8": _microscaling("mxint8"),
    "nvfp4": low_bit(dtype=dtype("fp4_e2m1"), group_size=16, scale_dtype="e4m3", tensor_scale=True),
}


def nearest_text(size: int, part: int) -> str:
    """Return the nearest divisors of `size` around `part`, as text."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    found = [*[d for d in divisors if d < part][-2:], *[d for d in divisors if d > part][:2]]
    return f"the nearest sizes that do: {', '.join(map(str, found))}"
