"""What the user asks for: frozen configurations with `set_local` rules, and their JSON form.

A configuration knows nothing of models: rules are kept as keys (a name, a pattern or a type) and `rules.resolve` matches them.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nc.errors import ConfigError, PatternError, UnknownFieldError, UnsupportedError
from nc.observers import ALGORITHMS, RangeAlgorithm, register_algorithm
from nc.spec import FLOAT, OpSpec, TensorSpec

SCHEMA_VERSION = 1

#: Names by which the kinds of operators are known; the first is the one shown.
KIND_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("Linear", "linear", "addmm"),
    "conv1d": ("Conv1d", "conv1d"),
    "conv2d": ("Conv2d", "conv2d"),
    "conv3d": ("Conv3d", "conv3d"),
    "conv_transpose1d": ("ConvTranspose1d", "conv_transpose1d"),
    "conv_transpose2d": ("ConvTranspose2d", "conv_transpose2d"),
    "conv_transpose3d": ("ConvTranspose3d", "conv_transpose3d"),
    "matmul": ("matmul", "bmm", "mm", "baddbmm", "__matmul__"),
    "add": ("add", "iadd", "__add__", "__iadd__", "add_"),
}
_KIND_OF_NAME = {name: kind for kind, names in KIND_NAMES.items() for name in names}

_W_DTYPES = ("int8", "fp32")
_ACT_DTYPES = ("uint8", "int8", "fp32")
_GRANULARITIES = ("per_tensor", "per_channel")
_W_ALGOS = ("minmax", "mse")
_PRECISIONS = ("bf16", "fp16", "fp32", "int8", "uint8")

RuleKey = str | type | Callable[..., Any]


def kind_of(name: str) -> str | None:
    """The operator kind behind a type name such as "Linear" or "matmul"; None when it is not one."""
    return _KIND_OF_NAME.get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One `set_local` entry.

    Attributes:
        key: an operator name, a regular expression for names, or a type name.
        is_type: the key came as a class or function, so it can only be a type.
        config: what the matching operators get.
    """

    key: str
    is_type: bool
    config: StaticQuantConfig


@dataclasses.dataclass(frozen=True, init=False, eq=True)
class StaticQuantConfig:
    """Static int8 quantization: activation ranges come from calibration.

    Args:
        w_dtype: "int8", or "fp32" to leave the operator alone.
        w_sym: symmetric weights (the CPU kernels ignore a weight zero point, so False is refused).
        w_granularity: "per_channel" (output channels) or "per_tensor".
        w_algo: "minmax", or "mse" (the clipped range with the least error).
        act_dtype: "uint8", "int8", or "fp32" to leave the operator alone.
        act_sym: symmetric activations (zero point 128 for uint8, 0 for int8).
        act_granularity: "per_tensor".
        act_algo: "minmax", "moving_average", "percentile", "mse", "kl" (docs/calibration.md says when to use which), or a
            `RangeAlgorithm` of your own, which from then on is known by its name.
        excluded_precisions: precisions that nothing in the model may use, e.g. `("bf16",)`; kept for the float remainder.
        bias_correction: take the mean error that quantization causes in each output channel, measured on the first calibration
            samples, out of the biases; read from the outer configuration only.
        percentile: how much of the data the range covers, in percent, for `act_algo="percentile"`: above 50, up to 100.

    Raises:
        UnknownFieldError: a field that does not exist; names the nearest one.
        ConfigError: a value that does not exist, or fields that contradict each other.
        UnsupportedError: a legal value that no backend implements.

    Example:
        >>> config = StaticQuantConfig(act_sym=True)
        >>> _ = config.set_local("classifier", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    """

    w_dtype: str = "int8"
    w_sym: bool = True
    w_granularity: str = "per_channel"
    w_algo: str = "minmax"
    act_dtype: str = "uint8"
    act_sym: bool = False
    act_granularity: str = "per_tensor"
    act_algo: str = "minmax"
    excluded_precisions: tuple[str, ...] = ()
    bias_correction: bool = True
    percentile: float = 99.999
    #: replaced, never changed in place, by `set_local`: a snapshot stays what it was
    rules: tuple[Rule, ...] = dataclasses.field(default=(), repr=False)

    __hash__ = None  # type: ignore[assignment]  # set_local changes the value, so a hash could go stale

    def __init__(self, *args: Any, **fields: Any) -> None:
        """See the class; fields are positional in the order listed, or keywords."""
        names = _field_names()
        if len(args) > len(names):
            msg = f"StaticQuantConfig takes at most {len(names)} values ({', '.join(names)}), but got {len(args)}."
            raise UnknownFieldError(msg)
        given = dict(zip(names, args, strict=False))
        for name, value in fields.items():
            if name in given:
                msg = f"StaticQuantConfig got two values for {name!r}."
                raise UnknownFieldError(msg)
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
                msg = f"StaticQuantConfig has no field {name!r}; did you mean {near!r}? Its fields: {', '.join(names)}."
                raise UnknownFieldError(msg)
            given[name] = value
        for field in dataclasses.fields(StaticQuantConfig):
            value = given.get(field.name, field.default)
            if field.name == "excluded_precisions":
                value = _precisions(value)
            if field.name == "act_algo" and isinstance(value, RangeAlgorithm):
                register_algorithm(value)
                value = value.name
            object.__setattr__(self, field.name, value)
        self._check()

    def _check(self) -> None:
        _one_of("w_dtype", self.w_dtype, _W_DTYPES)
        _one_of("act_dtype", self.act_dtype, _ACT_DTYPES)
        _one_of("w_granularity", self.w_granularity, _GRANULARITIES)
        _one_of("act_granularity", self.act_granularity, _GRANULARITIES)
        _one_of("w_algo", self.w_algo, _W_ALGOS)
        _one_of("act_algo", self.act_algo, tuple(ALGORITHMS))
        if isinstance(self.percentile, bool) or not isinstance(self.percentile, (int, float)) or not 50.0 < self.percentile <= 100.0:
            msg = f"Expected percentile to be a number above 50 and up to 100, but got {self.percentile!r}."
            raise ConfigError(msg)
        for name in ("w_sym", "act_sym", "bias_correction"):
            if not isinstance(getattr(self, name), bool):
                msg = f"Expected {name} to be True or False, but got {getattr(self, name)!r}."
                raise ConfigError(msg)
        for precision in self.excluded_precisions:
            _one_of("excluded_precisions", precision, _PRECISIONS)
        if (self.w_dtype == "fp32") != (self.act_dtype == "fp32"):
            msg = (
                f"w_dtype={self.w_dtype!r} contradicts act_dtype={self.act_dtype!r}: static quantization needs both as integers, "
                'the fallback to fp32 needs both as "fp32".'
            )
            raise ConfigError(msg)
        for dtype in (self.w_dtype, self.act_dtype):
            if dtype in self.excluded_precisions:
                msg = f"dtype {dtype!r} is asked for and is in excluded_precisions={self.excluded_precisions} too."
                raise ConfigError(msg)
        if self.act_granularity == "per_channel":
            msg = 'act_granularity="per_channel": no CPU kernel takes one scale per activation channel; use "per_tensor".'
            raise UnsupportedError(msg)
        if not self.w_sym:
            msg = "w_sym=False: CPU kernels ignore a weight zero point and would compute wrong numbers; use w_sym=True."
            raise UnsupportedError(msg)

    @property
    def is_float(self) -> bool:
        """Whether this configuration leaves operators in fp32."""
        return self.act_dtype == "fp32"

    def spec(self) -> OpSpec:
        """What one operator gets under this configuration."""
        if self.is_float:
            return FLOAT
        percentile = float(self.percentile) if self.act_algo == "percentile" else None
        activation = TensorSpec(dtype=self.act_dtype, symmetric=self.act_sym, algo=self.act_algo, percentile=percentile)
        weight = TensorSpec(dtype=self.w_dtype, symmetric=self.w_sym, granularity=self.w_granularity, algo=self.w_algo, narrow=True)
        return OpSpec(activation=activation, weight=weight)

    def set_local(self, key: RuleKey | Iterable[RuleKey], config: StaticQuantConfig) -> StaticQuantConfig:
        """Give operators a configuration of their own; returns `self`, so that calls chain.

        Args:
            key: an operator name, a regular expression (matches the whole name), a type (`torch.nn.Linear`, "Linear",
                `torch.matmul`, "add"), or a list of those. Exact names win over patterns, patterns over types, types over the
                global values; among patterns the last one declared wins.
            config: the configuration for what matches; its own local rules must be empty.

        Raises:
            ConfigError: `config` is not a configuration, or has local rules.
            PatternError: the key is neither a name nor a valid regular expression.
        """
        if not isinstance(config, StaticQuantConfig):
            msg = f"set_local({_key_text(key)!r}, …) expects a StaticQuantConfig, but got {type(config).__name__}."
            raise ConfigError(msg)
        if config.rules:
            msg = f"set_local({_key_text(key)!r}, …): the local configuration has local rules of its own; set them on the outer one."
            raise ConfigError(msg)
        keys = list(key) if isinstance(key, (list, tuple, set, frozenset)) else [key]
        # a copy: local rules that `config` gets later are none of this one's
        added = tuple(_rule(k, copy.copy(config)) for k in keys)
        replaced = {(r.key, r.is_type) for r in added}
        kept = tuple(r for r in self.rules if (r.key, r.is_type) not in replaced)
        object.__setattr__(self, "rules", kept + added)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Total, versioned form of plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "algorithm": "static",
            "global": self._fields(),
            "local": [{"key": r.key, "is_type": r.is_type, "config": r.config._fields()} for r in self.rules],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StaticQuantConfig:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a key is unknown or missing, or the schema is newer than this package.
        """
        if not isinstance(data, dict):
            msg = f"Expected a configuration as a dict, but got {type(data).__name__}."
            raise ConfigError(msg)
        unknown = set(data) - {"schema_version", "algorithm", "global", "local"}
        if unknown or "global" not in data:
            msg = f"Expected the keys schema_version, algorithm, global and local, but got {sorted(map(str, data))}."
            raise ConfigError(msg)
        if data.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION or data.get("algorithm", "static") != "static":
            msg = (
                f"Expected schema_version {SCHEMA_VERSION} and algorithm 'static', but got {data.get('schema_version')!r} and "
                f"{data.get('algorithm')!r}."
            )
            raise ConfigError(msg)
        config = cls(**_fields_of(data["global"]))
        entries = data.get("local", [])
        if not isinstance(entries, (list, tuple)):
            msg = f"Expected local to be a list of rules, but got {type(entries).__name__}."
            raise ConfigError(msg)
        for entry in entries:
            known = isinstance(entry, dict) and {"key", "config"} <= set(entry) <= {"key", "is_type", "config"}
            if not known or not isinstance(entry["key"], str):
                msg = f"Expected a local rule as {{key, is_type, config}}, its key a string, but got {entry!r}."
                raise ConfigError(msg)
            rule = Rule(entry["key"], bool(entry.get("is_type", False)), cls(**_fields_of(entry["config"])))
            if not rule.is_type:
                _check_pattern(rule.key)
            object.__setattr__(config, "rules", (*config.rules, rule))
        return config

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> StaticQuantConfig:
        """The inverse of `to_json`.

        Raises:
            ConfigError: not JSON, or not a configuration.
        """
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            msg = f"The configuration is not valid JSON: {error}."
            raise ConfigError(msg) from error

    def to_json_file(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json_file(cls, path: str | Path) -> StaticQuantConfig:
        """Read what `to_json_file` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def _fields(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _field_names()}
        values["excluded_precisions"] = list(self.excluded_precisions)
        return values


def get_default_static_config() -> StaticQuantConfig:
    """`StaticQuantConfig()`: int8 weights per output channel, uint8 affine activations, min-max ranges."""
    return StaticQuantConfig()


def _field_names() -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(StaticQuantConfig) if f.name != "rules")


def _fields_of(data: object) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        msg = f"Expected the fields of a configuration as a dict by name, but got {data!r}."
        raise ConfigError(msg)
    return data


def _precisions(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list, set, frozenset)):
        msg = f"Expected excluded_precisions to be names out of {', '.join(map(repr, _PRECISIONS))}, but got {value!r}."
        raise ConfigError(msg)
    return tuple(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        msg = f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {value!r}."
        raise ConfigError(msg)


def _rule(key: object, config: StaticQuantConfig) -> Rule:
    if isinstance(key, str):
        _check_pattern(key)
        return Rule(key, False, config)
    if isinstance(key, type):
        name = key.__name__
        return Rule(name if kind_of(name) else f"{key.__module__}.{key.__qualname__}", True, config)
    name = getattr(key, "__name__", None)
    if callable(key) and name is not None:
        if kind_of(name) is None:
            msg = f"No rule can be made for function {name!r}; functions with a kind: {', '.join(sorted(_KIND_OF_NAME))}."
            raise ConfigError(msg)
        return Rule(name, True, config)
    msg = f"Expected the key of a rule to be a name, a pattern, a type or a list of those, but got {key!r}."
    raise ConfigError(msg)


def _check_pattern(key: str) -> None:
    try:
        re.compile(key)
    except re.error as error:
        msg = f"Rule {key!r} is not a valid regular expression: {error}. Escape special characters to mean them literally."
        raise PatternError(msg) from error


def _key_text(key: object) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", str(key))
