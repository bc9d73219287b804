"""What the user asks for: configurations with `set_local` rules, their composition, and their JSON form.

A configuration knows nothing of models: rules are kept as keys and `rules.resolve` matches them. A field that was not given reads as its
default; in a local configuration it takes the value of the level above.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nc.algorithms import POST, PRE
from nc.errors import ConfigError, UnknownFieldError, UnsupportedError
from nc.fields import Field, flag, number, one_of, precisions, range_algorithm, ratio_or_auto, transforms
from nc.keys import Key, RuleKey, check_pattern, key_text, parse_keys

SCHEMA_VERSION = 1

_WEIGHTS = {
    "w_dtype": Field("int8", one_of("int8", "fp32")),
    "w_sym": Field(True, flag),
    "w_granularity": Field("per_channel", one_of("per_channel", "per_tensor")),
    "w_algo": Field("minmax", one_of("minmax", "mse")),
}
_STATIC = {
    **_WEIGHTS,
    "act_dtype": Field("uint8", one_of("uint8", "int8", "fp32", "bf16")),
    "act_sym": Field(False, flag),
    "act_granularity": Field("per_tensor", one_of("per_tensor", "per_channel")),
    "act_algo": Field("minmax", range_algorithm),
    "excluded_precisions": Field((), precisions),
    "percentile": Field(99.999, number(50.0, 100.0)),
    "pre": Field((), transforms(PRE), outer=True),
    "post": Field((POST["bias_correction"](),), transforms(POST), outer=True),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One `set_local` entry: what the operators that match a key get."""

    key: Key
    config: QuantConfig


class QuantConfig:
    """What the configurations of all strategies have in common; use one of its subclasses.

    Attributes:
        given: the fields that were given, by name.
        white_list: keys of the only operators that the configuration's own fields hold for; None: they hold for all.
        rules: local configurations, in the order in which they were declared.
    """

    algorithm: ClassVar[str] = ""
    #: The name in dictionaries that were written for Neural Compressor.
    alias: ClassVar[str] = ""
    FIELDS: ClassVar[Mapping[str, Field]] = {}
    #: Strategies with equal families pass values of fields on from level to level.
    family: ClassVar[str] = ""

    given: Mapping[str, Any]
    white_list: tuple[Key, ...] | None
    rules: tuple[Rule, ...]

    def __init__(self, *args: Any, white_list: Any = "*", **fields: Any) -> None:
        """See the subclass; fields are positional in the order listed, or keywords."""
        names, title = tuple(self.FIELDS), type(self).__name__
        if len(args) > len(names):
            msg = f"{title} takes at most {len(names)} values ({', '.join(names)}), but got {len(args)}."
            raise UnknownFieldError(msg)
        given = dict(zip(names, args, strict=False))
        for name, value in fields.items():
            if name in given:
                msg = f"{title} got two values for {name!r}."
                raise UnknownFieldError(msg)
            self._check_name(name)
            given[name] = value
        given = {name: self.FIELDS[name].check(name, value) for name, value in given.items() if value is not None}
        self.check_values({**self.defaults(), **given})
        self.__dict__.update(given=given, white_list=_white_list(white_list), rules=())

    @classmethod
    def _check_name(cls, name: str) -> None:
        if name not in cls.FIELDS:
            near = difflib.get_close_matches(name, cls.FIELDS, n=1, cutoff=0.0)[0]
            msg = f"{cls.__name__} has no field {name!r}; did you mean {near!r}? Its fields: {', '.join(cls.FIELDS)}."
            raise UnknownFieldError(msg)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The value of each field that nobody gave."""
        return {name: field.default for name, field in cls.FIELDS.items()}

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Raise ConfigError or UnsupportedError for values that are legal each, but not together, or that nothing implements."""
        w_dtype, act_dtype, excluded = values["w_dtype"], values["act_dtype"], values["excluded_precisions"]
        if (w_dtype == "fp32") != (act_dtype == "fp32"):
            msg = (
                f"w_dtype={w_dtype!r} contradicts act_dtype={act_dtype!r}: quantization needs both as integers, the fallback to fp32 needs "
                'both as "fp32".'
            )
            raise ConfigError(msg)
        for dtype in (w_dtype, act_dtype):
            if dtype in excluded:
                msg = f"dtype {dtype!r} is asked for and is in excluded_precisions={excluded} too."
                raise ConfigError(msg)
        if values["act_granularity"] == "per_channel":
            msg = 'act_granularity="per_channel": no CPU kernel takes one scale per activation channel; use "per_tensor".'
            raise UnsupportedError(msg)
        if act_dtype == "bf16":
            msg = 'act_dtype="bf16": no backend computes in bf16 yet; use "uint8", "int8", or "fp32" to leave the operator alone.'
            raise UnsupportedError(msg)
        if not values["w_sym"]:
            msg = "w_sym=False: CPU kernels ignore a weight zero point and would compute wrong numbers; use w_sym=True."
            raise UnsupportedError(msg)

    # ---- a value ----

    def __getattr__(self, name: str) -> Any:
        """A field: the value given, or its default."""
        if name in type(self).FIELDS and "given" in self.__dict__:
            return self.given.get(name, self.FIELDS[name].default)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give a field another value, checked as at construction; None takes it back."""
        self._check_name(name)
        others = {k: v for k, v in self.given.items() if k != name}
        self.__dict__["given"] = type(self)(**others, **{name: value}).given

    def __eq__(self, other: object) -> bool:
        """Equal are configurations of one class that were given the same: one can stand for the other, as a local one too."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """One number per class: `set_local` changes a configuration, and the hash of a dictionary's key must not change."""
        return hash(type(self))

    def __repr__(self) -> str:
        """What was given."""
        values = [f"{name}={value!r}" for name, value in self.given.items()]
        if self.white_list is not None:
            values.append(f"white_list={[key.text for key in self.white_list]}")
        rules = "".join(f".set_local({rule.key.text!r}, {rule.config!r})" for rule in self.rules)
        return f"{type(self).__name__}({', '.join(values)}){rules}"

    @property
    def is_float(self) -> bool:
        """Whether this configuration leaves operators in fp32."""
        return self.act_dtype == "fp32"

    # ---- rules ----

    def set_local(self, key: RuleKey | list[RuleKey], config: QuantConfig) -> Any:
        """Give operators a configuration of their own; returns `self`, so that calls chain.

        Args:
            key: an operator name, a regular expression (matches the whole name), a type (`torch.nn.Linear`, "Linear", `torch.matmul`,
                "add", "Conv2d&relu" for convolutions that a relu follows), or a list of those. Exact names win over patterns, patterns
                over types, types over the global values; among patterns the last one declared wins.
            config: the configuration for what matches, of any strategy. Fields that it was not given defer to the level above.

        Raises:
            ConfigError: `config` is not a configuration, or has rules or a white list of its own, or a field for whole models only.
            PatternError: the key is neither a name nor a valid regular expression.
        """
        added = tuple(Rule(k, _local(key, config)) for k in parse_keys(key))
        self.__dict__["rules"] = _with_rules(self.rules, added)
        return self

    def exclude(self, *keys: RuleKey) -> Any:
        """Leave operators in fp32: short for `set_local(keys, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))`; returns `self`."""
        return self.set_local(list(keys), StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))

    def __add__(self, other: AnyConfig) -> ComposedConfig:
        """Both strategies for one model; see `ComposedConfig`."""
        return ComposedConfig(self) + other

    # ---- plain values ----

    def to_dict(self) -> dict[str, Any]:
        """Total, versioned form of plain values; fields that were not given are left out."""
        document = {"schema_version": SCHEMA_VERSION, "algorithm": self.algorithm, "global": self._plain()}
        if self.white_list is not None:
            document["white_list"] = [dataclasses.asdict(key) for key in self.white_list]
        return {**document, "local": _rules_to_list(self.rules)}

    def _plain(self) -> dict[str, Any]:
        return {name: self.FIELDS[name].encode(value) for name, value in self.given.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The inverse of `to_dict`; takes Neural Compressor's forms too: the fields, or {"global": fields, "local": {key: fields}}.

        Raises:
            ConfigError: a key is unknown or missing, or the schema is newer than this package.
        """
        _check_is_dict(data)
        if not {"schema_version", "algorithm", "global", "local"} & set(data):
            return cls(**data)
        required = set() if isinstance(data.get("local"), dict) else {"global"}
        _check_keys(data, required, optional={"schema_version", "algorithm", "global", "local", "white_list"})
        _check_schema(data, cls.algorithm)
        config = cls(**_fields_of(data.get("global", {})))
        if "white_list" in data:
            config.__dict__["white_list"] = _keys_from(data["white_list"])
        config.__dict__["rules"] = _rules_from(data.get("local", []), cls)
        return config

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Any:
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
    def from_json_file(cls, path: str | Path) -> Any:
        """Read what `to_json_file` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


class StaticQuantConfig(QuantConfig):
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
        percentile: how much of the data the range covers, in percent, for `act_algo="percentile"`: above 50, up to 100.
        pre: what is done to the fp32 model first, in this order: `Equalization()`, `BiasAbsorption()`.
        post: what is done to the quantized model last: `BiasCorrection()`, by default.
        white_list: names, patterns or types of the only operators that these values hold for; all others stay fp32. "*": all.

    Raises:
        UnknownFieldError: a field that does not exist; names the nearest one.
        ConfigError: a value that does not exist, or fields that contradict each other.
        UnsupportedError: a legal value that no backend implements.

    Example:
        >>> config = StaticQuantConfig(act_sym=True)
        >>> _ = config.set_local("classifier", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    """

    algorithm, alias, family = "static", "static_quant", "static"
    FIELDS = _STATIC


#: Neural Compressor's name of the class behind its `StaticQuantConfig`.
INT8StaticQuantConfig = StaticQuantConfig


class SmoothQuantConfig(QuantConfig):
    """Static quantization after SmoothQuant (arXiv 2211.10438): outliers of activation channels move into the weights of linears.

    Args:
        alpha: how much of the difficulty moves, 0 to 1: `s = max|X|^alpha / max|W|^(1 - alpha)` per channel; "auto" tries
            `alpha_min` to `alpha_max` for each linear and keeps the one with the least output error.
        folding: put 1/s into the normalisation or linear in front where nothing else reads that; else, and where there is none, a
            multiplication stands in front of the linear.
        scale_sharing: linears that read one tensor share one s; always so where s is folded.
        init_alpha: the alpha that "auto" starts from: what it keeps where no other one is better.
        alpha_min: lowest alpha that "auto" tries.
        alpha_max: highest alpha that "auto" tries.
        alpha_step: distance between those.
        shared_criterion: how the errors of linears that share one s are combined, and their weights: "max", "min" or "mean".
        do_blockwise: "auto" compares the outputs of whole blocks (what ends in one residual addition) instead of single linears.
        auto_alpha_args: the last six as a dict, as Neural Compressor writes it.

    The other arguments, and the errors, are those of `StaticQuantConfig`.
    """

    algorithm, alias, family = "smooth", "smooth_quant", "static"
    FIELDS = {
        **{name: field for name, field in _STATIC.items() if name not in ("percentile", "pre", "post")},
        "alpha": Field(0.5, ratio_or_auto),
        "folding": Field(False, flag),
        "scale_sharing": Field(False, flag),
        "init_alpha": Field(0.5, number(0.0, 1.0, closed=True)),
        "alpha_min": Field(0.0, number(0.0, 1.0, closed=True)),
        "alpha_max": Field(1.0, number(0.0, 1.0, closed=True)),
        "alpha_step": Field(0.1, number(0.0, 1.0)),
        "shared_criterion": Field("max", one_of("max", "min", "mean")),
        "do_blockwise": Field(False, flag),
        **{name: _STATIC[name] for name in ("percentile", "pre", "post")},
    }

    def __init__(self, *args: Any, auto_alpha_args: Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(*args, **{**(auto_alpha_args or {}), **fields})

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """As for all strategies, and the limits of alpha."""
        super().check_values(values)
        if values["alpha_min"] > values["alpha_max"]:
            msg = f"alpha_min={values['alpha_min']} is above alpha_max={values['alpha_max']}."
            raise ConfigError(msg)


class DynamicQuantConfig(QuantConfig):
    """Dynamic int8 quantization: int8 weights, activation ranges found anew in each call. Needs no calibration.

    Args:
        w_dtype: "int8", or "fp32" to leave the operator alone.
        w_sym: symmetric weights; False is refused, as for static quantization.
        w_granularity: "per_channel" (output channels) or "per_tensor".
        w_algo: "minmax" or "mse".
        act_dtype: "uint8", "int8" (the same numbers: both have 256 levels around a zero point), or "fp32".
        act_sym: symmetric activations.
        act_granularity: "per_token" (each row has its range) or "per_tensor".
        act_algo: "minmax".
        excluded_precisions: as for static quantization.
        skip_slow: leave operators in fp32 that would be slower in int8, because they are small (docs/dynamic.md).
        pre: as for static quantization.
        white_list: as for static quantization.
    """

    algorithm, alias, family = "dynamic", "pt2e_dynamic_quant", "dynamic"
    FIELDS = {
        **_WEIGHTS,
        "act_dtype": Field("uint8", one_of("uint8", "int8", "fp32")),
        "act_sym": Field(False, flag),
        "act_granularity": Field("per_token", one_of("per_token", "per_tensor")),
        "act_algo": Field("minmax", one_of("minmax")),
        "excluded_precisions": Field((), precisions),
        "skip_slow": Field(False, flag),
        "pre": _STATIC["pre"],
    }


class ComposedConfig:
    """Several strategies for one model: `StaticQuantConfig(white_list=[torch.nn.Conv2d]) + DynamicQuantConfig(white_list=["Linear"])`.

    Where two parts hold for all operators, the later one gets those that it has a kernel for: `StaticQuantConfig() +
    DynamicQuantConfig()` is dynamic for linears and recurrent layers, static for the rest.

    Attributes:
        parts: copies of the configurations that were added.
    """

    algorithm: ClassVar[str] = "composed"

    def __init__(self, *parts: QuantConfig) -> None:
        self.parts = tuple(copy.copy(part) for part in parts)

    def __add__(self, other: AnyConfig) -> ComposedConfig:
        """One more part.

        Raises:
            ConfigError: `other` is no configuration, or both say for all operators what one strategy is to do, and differ.
        """
        if not isinstance(other, (QuantConfig, ComposedConfig)):
            msg = f"Only configurations can be added, but got {type(other).__name__}."
            raise ConfigError(msg)
        added = parts_of(other)
        for mine, theirs in ((m, t) for m in self.parts for t in added):
            if type(mine) is type(theirs) and mine.white_list is None and theirs.white_list is None and mine.given != theirs.given:
                msg = (
                    f"Both sides say what {type(mine).__name__} is to do with all operators, and they differ: {mine!r} and {theirs!r}. Say "
                    "which operators one of them is for: white_list=[…], or set_local."
                )
                raise ConfigError(msg)
        return ComposedConfig(*self.parts, *added)

    def set_local(self, key: RuleKey | list[RuleKey], config: QuantConfig) -> ComposedConfig:
        """As `QuantConfig.set_local`; behind the rules of all parts."""
        self.parts = (*self.parts[:-1], copy.copy(self.parts[-1]).set_local(key, config))
        return self

    def exclude(self, *keys: RuleKey) -> ComposedConfig:
        """As `QuantConfig.exclude`."""
        self.parts = (*self.parts[:-1], copy.copy(self.parts[-1]).exclude(*keys))
        return self

    def __eq__(self, other: object) -> bool:
        """Equal parts in the same order."""
        return isinstance(other, ComposedConfig) and self.parts == other.parts

    def __hash__(self) -> int:
        """As for a single configuration."""
        return hash(ComposedConfig)

    def __repr__(self) -> str:
        """The sum."""
        return " + ".join(map(repr, self.parts))

    def to_dict(self) -> dict[str, Any]:
        """Total, versioned form of plain values."""
        return {"schema_version": SCHEMA_VERSION, "algorithm": self.algorithm, "parts": [part.to_dict() for part in self.parts]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ComposedConfig:
        """The inverse of `to_dict`; raises ConfigError like `QuantConfig.from_dict`."""
        _check_is_dict(data)
        _check_keys(data, required={"parts", "algorithm"}, optional={"schema_version"})
        _check_schema(data, cls.algorithm)
        if not isinstance(data["parts"], (list, tuple)) or not data["parts"]:
            msg = f"Expected parts to be a list of configurations, but got {data['parts']!r}."
            raise ConfigError(msg)
        return cls(*(part for entry in data["parts"] for part in parts_of(config_from(entry))))

    to_json, from_json = QuantConfig.to_json, classmethod(QuantConfig.from_json.__func__)
    to_json_file, from_json_file = QuantConfig.to_json_file, classmethod(QuantConfig.from_json_file.__func__)


AnyConfig = QuantConfig | ComposedConfig
_STRATEGIES: dict[str, type[QuantConfig]] = {cls.algorithm: cls for cls in (StaticQuantConfig, DynamicQuantConfig, SmoothQuantConfig)}


def parts_of(config: AnyConfig) -> tuple[QuantConfig, ...]:
    """The configurations that were added up; a single one is its own only part."""
    return config.parts if isinstance(config, ComposedConfig) else (config,)


def outer_field(config: AnyConfig, name: str) -> tuple[Any, ...]:
    """A field for whole models (`pre`, `post`): the values of all parts that have it, each once, in order."""
    values = [value for part in parts_of(config) if name in part.FIELDS for value in getattr(part, name)]
    return tuple(dict.fromkeys(values))


def config_from(value: object) -> AnyConfig:
    """A configuration from itself, from what its `to_dict` returned, or from Neural Compressor's form {"static_quant": {…}}.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, (QuantConfig, ComposedConfig)):
        return value
    if isinstance(value, dict) and value.get("algorithm") == ComposedConfig.algorithm:
        return ComposedConfig.from_dict(value)
    if isinstance(value, dict) and "global" in value:
        return _STRATEGIES.get(value.get("algorithm"), StaticQuantConfig).from_dict(value)
    names = {name: cls for cls in _STRATEGIES.values() for name in (cls.alias, cls.algorithm)}
    if isinstance(value, dict) and value and set(value) <= set(names):
        parts = [names[name].from_dict(fields or {"global": {}}) for name, fields in value.items()]
        return parts[0] if len(parts) == 1 else ComposedConfig(*parts)
    msg = (
        f"Expected quant_config to be a configuration ({', '.join(cls.__name__ for cls in _STRATEGIES.values())}) or a dict such as "
        f'{{"static_quant": {{…}}}}, but got {value!r:.80}.'
    )
    raise ConfigError(msg)


def get_default_static_config() -> StaticQuantConfig:
    """`StaticQuantConfig()`: int8 weights per output channel, uint8 affine activations, min-max ranges."""
    return StaticQuantConfig()


def get_default_dynamic_config() -> DynamicQuantConfig:
    """`DynamicQuantConfig()`: int8 weights per output channel, uint8 affine activations per token."""
    return DynamicQuantConfig()


def get_default_sq_config() -> SmoothQuantConfig:
    """`SmoothQuantConfig()`: alpha 0.5, then static quantization."""
    return SmoothQuantConfig()


def _local(key: object, config: object) -> QuantConfig:
    """A copy: rules and values that `config` gets later are none of this one's."""
    where = f"set_local({key_text(key)!r}, …)"
    if not isinstance(config, QuantConfig):
        msg = f"{where} expects a configuration, e.g. StaticQuantConfig(), but got {type(config).__name__}."
        raise ConfigError(msg)
    if config.rules or config.white_list is not None:
        what = "local rules" if config.rules else "a white list"
        msg = f"{where}: the local configuration has {what} of its own; set them on the outer one."
        raise ConfigError(msg)
    outer = next((name for name in config.given if config.FIELDS[name].outer), None)
    if outer is not None:
        msg = f"{where}: {outer} holds for whole models; give it to the outer configuration."
        raise ConfigError(msg)
    return copy.copy(config)


def _with_rules(rules: tuple[Rule, ...], added: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A key that is set again moves to the end."""
    replaced = {rule.key for rule in added}
    return (*(rule for rule in rules if rule.key not in replaced), *added)


def _white_list(value: Any) -> tuple[Key, ...] | None:
    if value == "*":
        return None
    keys = () if value is None else parse_keys([value] if isinstance(value, str) else value)
    return tuple(dict.fromkeys(keys))


def _rules_to_list(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [{"key": r.key.text, "is_type": r.key.is_type, "algorithm": r.config.algorithm, "config": r.config._plain()} for r in rules]


def _rules_from(entries: object, cls: type[QuantConfig]) -> tuple[Rule, ...]:
    if isinstance(entries, dict):  # Neural Compressor's form
        return tuple(Rule(key, _local(key.text, cls(**_fields_of(fields)))) for text, fields in entries.items() for key in parse_keys(text))
    return tuple(_rule_from(entry, cls) for entry in _list(entries, "local"))


def _rule_from(entry: object, cls: type[QuantConfig]) -> Rule:
    known = isinstance(entry, dict) and {"key", "config"} <= set(entry) <= {"key", "is_type", "algorithm", "config"}
    if not known or not isinstance(entry["key"], str) or entry.get("algorithm", cls.algorithm) not in _STRATEGIES:
        msg = f"Expected a local rule as {{key, is_type, algorithm, config}}, its key a string, but got {entry!r}."
        raise ConfigError(msg)
    strategy = _STRATEGIES[entry.get("algorithm", cls.algorithm)]
    return Rule(_key_from(entry), _local(entry["key"], strategy(**_fields_of(entry["config"]))))


def _key_from(entry: Mapping[str, Any]) -> Key:
    text, is_type = entry.get("text", entry.get("key")), bool(entry.get("is_type", False))
    if not is_type:
        check_pattern(text)
    return Key(text, is_type)


def _keys_from(entries: object) -> tuple[Key, ...]:
    for entry in _list(entries, "white_list"):
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str) or not set(entry) <= {"text", "is_type"}:
            msg = f"Expected a key of the white list as {{text, is_type}}, but got {entry!r}."
            raise ConfigError(msg)
    return tuple(_key_from(entry) for entry in entries)


def _list(value: object, name: str) -> Iterator[Any]:
    if not isinstance(value, (list, tuple)):
        msg = f"Expected {name} to be a list, but got {type(value).__name__}."
        raise ConfigError(msg)
    return iter(value)


def _check_is_dict(data: object) -> None:
    if not isinstance(data, dict):
        msg = f"Expected a configuration as a dict, but got {type(data).__name__}."
        raise ConfigError(msg)
    if not data:
        msg = "Expected a configuration as a dict, but got an empty one."
        raise ConfigError(msg)


def _check_keys(data: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    if not required <= set(data) <= required | optional:
        msg = f"Expected the keys {', '.join(sorted(required | optional))}, but got {sorted(map(str, data))}."
        raise ConfigError(msg)


def _check_schema(data: Mapping[str, Any], algorithm: str) -> None:
    version, name = data.get("schema_version", SCHEMA_VERSION), data.get("algorithm", algorithm)
    if version != SCHEMA_VERSION or name != algorithm:
        msg = f"Expected schema_version {SCHEMA_VERSION} and algorithm {algorithm!r}, but got {version!r} and {name!r}."
        raise ConfigError(msg)


def _fields_of(data: object) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        msg = f"Expected the fields of a configuration as a dict by name, but got {data!r}."
        raise ConfigError(msg)
    return data
