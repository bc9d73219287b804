"""How one tensor of an operator is simulated in a number format, and how all tensors of an operator are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nc.errors import ConfigError
from nc.formats.dtypes import dtype
from nc.formats.granularities import Granularity
from nc.formats.tensor_format import ROUND_METHODS, SCALE_ROUNDINGS, TensorFormat

#: The tensors of an operator, as configurations name them.
ROLES = ("weight", "input", "output", "bias")
GRANULARITIES = ("per_tensor", "per_channel", "per_token", "per_group", "per_block")
#: Names that other tools have for scale types.
_SCALE_ALIASES = {
    "float": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "pof2": "power_of_two",
}
#: Range algorithms for constants; activations with one range have those of `nc.observers`, other activations
#: "minmax".
_OF_CONSTANTS = ("minmax", "mse")
#: Fields with a name out of a list.
_CHOICES = (("granularity", GRANULARITIES), ("round_method", ROUND_METHODS), ("scale_type", SCALE_ROUNDINGS))

#: Whether something is wrong with a spec, and the text that says so.
_Rule = tuple[bool, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeTensorSpec:
    """How one tensor is simulated: it gets the values that its codes stand for.

    A field that is None has the value of the next rule.

    Attributes:
        dtype: name of the number format, a key of `nc.formats.DTYPES`. No rule gives one by default.
        granularity: which elements share a scale: "per_tensor" (the default), "per_channel" (one per index of
            `axis`), "per_token" (one per row of the last dimension), "per_group" (one per `group_size`
            neighbours along `axis`) or "per_block" (one per block of `block_size` in the last dimensions).
        axis: of the channels, or the axis along which groups are; by default the output channels of a weight,
            the channels of an activation (the last dimension of linears and embeddings, 1 for convolutions),
            for groups of a weight its input channels.
        group_size: number of neighbours.
        block_size: sizes of a block.
        symmetric: without a zero point (signed) or with the one in the middle (unsigned). Default: True.
        round_method: "half_even" (the default), "half_away", "floor" or "stochastic".
        scale_type: what scales are rounded to: "fp32" (the default), "fp16", "bf16", "e4m3", "power_of_two"
            (the next one above, so that nothing is clipped) or "e8m0" (the shared exponent of the OCP MX
            formats).
        tensor_scale: scales of type "e4m3" are relative to one more fp32 scale of the whole tensor, as in
            NVFP4. Default: False.
        observer: how the range is found: of activations any `act_algo`, of constants "minmax" (the default)
            or "mse".
        percentile: for observer "percentile".
        dynamic: of an activation, the range is found in each call. Default: False.
        seed: of stochastic rounding. The same shape always gets the same random numbers. Default: 0.

    Raises:
        ConfigError: a value that does not exist.
    """

    dtype: str | None = None
    granularity: str | None = None
    axis: int | None = None
    group_size: int | None = None
    block_size: Sequence[int] | None = None
    symmetric: bool | None = None
    round_method: str | None = None
    scale_type: str | None = None
    tensor_scale: bool | None = None
    observer: str | None = None
    percentile: float | None = None
    dynamic: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check each value alone."""
        if self.dtype is not None:
            dtype(self.dtype)
        if isinstance(self.block_size, int):
            _refuse(
                "block_size", "whole numbers from 1, one for each of the last dimensions", self.block_size
            )
        if self.block_size is not None:
            object.__setattr__(self, "block_size", tuple(self.block_size))
        object.__setattr__(self, "scale_type", _SCALE_ALIASES.get(str(self.scale_type), self.scale_type))
        for name, known in _CHOICES:
            value = getattr(self, name)
            if value is not None and value not in known:
                _refuse(name, f"one of {', '.join(map(repr, known))}", value)
        for name in ("symmetric", "tensor_scale", "dynamic"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                _refuse(name, "True or False", getattr(self, name))
        _check_whole("axis", self.axis)
        _check_whole("group_size", self.group_size, least=1)
        _check_whole("seed", self.seed)
        if self.percentile is not None and not (
            isinstance(self.percentile, (int, float)) and 50 < self.percentile <= 100
        ):
            _refuse("percentile", "a number above 50, up to 100", self.percentile)
        if any(not _is_int(size) or size < 1 for size in self.block_size or ()):
            _refuse("block_size", "whole numbers from 1", self.block_size)

    def over(self, below: FakeTensorSpec) -> FakeTensorSpec:
        """Return this spec, with the values of a less specific one where it has none."""
        return replace(below, **self.to_dict())

    def resolved(self, role: str, kind: str) -> TensorFormat:
        """Return the format of one tensor of an operator, with all defaults filled in.

        Args:
            role: one of `ROLES`.
            kind: of the operator, "linear", "conv2d", "embedding", ….

        Raises:
            ConfigError: values that contradict each other, or that this tensor can't have.
        """
        spec = FakeTensorSpec(**{**_DEFAULTS, **self.to_dict()})
        found = _contradiction(spec, role)
        if found:
            msg = f"{role}: {found}"
            raise ConfigError(msg)
        values = spec.to_dict()
        axis = spec.axis
        if axis is None and spec.granularity in ("per_channel", "per_group"):
            axis = _default_axis(role, kind, spec.granularity == "per_group")
        shape = {"per_group": (spec.group_size,), "per_block": spec.block_size}.get(str(spec.granularity), ())
        is_along_axis = spec.granularity in ("per_channel", "per_group")
        return TensorFormat(
            dtype=dtype(values["dtype"]),
            granularity=Granularity(values["granularity"], axis if is_along_axis else None, shape),  # type: ignore[arg-type] # checked above
            scale_dtype=values["scale_type"],
            algo=values["observer"],
            percentile=spec.percentile,
            **{
                name: values[name]
                for name in ("symmetric", "tensor_scale", "dynamic", "round_method", "seed")
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values that are not None, plain."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeSpec:
    """What is simulated of one operator: a format for each role, None for what stays fp32."""

    weight: TensorFormat | None = None
    input: TensorFormat | None = None
    output: TensorFormat | None = None
    bias: TensorFormat | None = None

    @property
    def roles(self) -> dict[str, TensorFormat]:
        """The formats by role."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: form for role, form in found.items() if form is not None}

    def __str__(self) -> str:
        """All roles with their formats."""
        return ", ".join(f"{role} {form}" for role, form in self.roles.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {role: form.to_dict() for role, form in self.roles.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FakeSpec:
        """Return the inverse of `to_dict`."""
        return cls(**{role: TensorFormat.from_dict(values) for role, values in data.items()})


_DEFAULTS: dict[str, Any] = {
    "granularity": "per_tensor",
    "symmetric": True,
    "round_method": "half_even",
    "scale_type": "fp32",
    "tensor_scale": False,
    "observer": "minmax",
    "dynamic": False,
    "seed": 0,
}


def _default_axis(role: str, kind: str, grouped: bool) -> int:
    """Return the axis of channels, or of the input channels where a weight is `grouped`."""
    if role == "bias":
        return 0
    if role != "weight":
        return 1 if kind.startswith("conv") else -1
    outputs = 1 if kind.startswith("conv_transpose") else 0
    return (1 - outputs if kind.startswith("conv") else -1) if grouped else outputs


def _contradiction(spec: FakeTensorSpec, role: str) -> str:
    """Return what is wrong with a spec whose defaults are filled in; "" if nothing is."""
    of_ranges = _range_of_constant if role in ("weight", "bias") else _range_of_activation
    # each rule may rely on those before it
    rules = itertools.chain(_codes(spec), of_ranges(spec), _observer(spec))
    return next((text for wrong, text in rules if wrong), "")


def _codes(spec: FakeTensorSpec) -> Iterator[_Rule]:
    """Yield the rules for the number format, what shares a scale, and the scale."""
    yield spec.dtype is None, "no rule gives its dtype; name one, or leave the role out."
    if spec.granularity == "per_group":
        yield spec.group_size is None, "granularity='per_group' needs group_size."
    if spec.granularity == "per_block":
        yield spec.block_size is None, "granularity='per_block' needs block_size."
    if not spec.symmetric:
        is_float = dtype(str(spec.dtype)).kind == "float"
        yield is_float, f"{spec.dtype} is a floating-point format and has no zero point; use symmetric=True."
        is_mx = spec.scale_type == "e8m0"
        yield is_mx, "scale_type='e8m0' is the scale of MX formats, which have no zero point."
    yield bool(spec.tensor_scale) and spec.scale_type != "e4m3", "tensor_scale=True is for scale_type='e4m3'."


def _range_of_constant(spec: FakeTensorSpec) -> Iterator[_Rule]:
    """Yield the rules for the range of a weight or bias."""
    yield bool(spec.dynamic), "dynamic=True is for inputs and outputs; this is a constant."
    yield spec.granularity == "per_token", "granularity='per_token' is for activations; use 'per_channel'."
    is_known = spec.observer in _OF_CONSTANTS
    yield not is_known, f"observer={spec.observer!r} is for activations; constants: minmax, mse."
    yield spec.observer == "mse" and not spec.symmetric, "observer='mse' of a constant needs symmetric=True."


def _range_of_activation(spec: FakeTensorSpec) -> Iterator[_Rule]:
    """Yield the rules for the range of an input or output."""
    is_minmax = spec.observer == "minmax"
    if spec.dynamic:
        yield not is_minmax, f"observer={spec.observer!r} needs calibration; dynamic ranges are minmax."
        return
    of_shape = f"granularity={spec.granularity!r} depends on the data's shape"
    yield (
        spec.granularity in ("per_token", "per_block"),
        f"{of_shape}, so its ranges can't come from calibration; use dynamic=True.",
    )
    yield (
        spec.granularity != "per_tensor" and not is_minmax,
        f"observer={spec.observer!r} finds one range for the whole tensor; {spec.granularity} has minmax.",
    )


def _observer(spec: FakeTensorSpec) -> Iterator[_Rule]:
    """Yield the rules for the range algorithm alone."""
    lacks_percentile = spec.observer == "percentile" and spec.percentile is None
    yield lacks_percentile, "observer='percentile' needs percentile, for example 99.99."
    yield spec.observer == "auto", "observer='auto' searches int8 operators; name the algorithm."
    yield (
        spec.observer == "kl" and dtype(str(spec.dtype)).kind == "float",
        "observer='kl' counts evenly spaced levels, which a floating-point format has not.",
    )


def _is_int(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _check_whole(name: str, value: int | None, *, least: int | None = None) -> None:
    """Raise ConfigError where a value is neither None nor a whole number, from `least` if that is given."""
    is_too_small = least is not None and _is_int(value) and value is not None and value < least
    if not _is_int(value) or is_too_small:
        _refuse(name, "a whole number" if least is None else f"a whole number from {least}", value)


def _refuse(name: str, expected: str, value: object) -> None:
    msg = f"Expected {name} of a FakeTensorSpec to be {expected}, but got {value!r}."
    raise ConfigError(msg)
