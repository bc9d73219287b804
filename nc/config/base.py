"""Configurations as values: fields, `set_local` rules, sums of strategies, and their dict and JSON form.

A configuration does not depend on a model: it stores rules as keys, and `rules.resolve` matches them. A field
that was not given has its default. In a local configuration such a field takes the value of the next rule
that matches, or of the outer configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from nc.config.alternatives import Alternatives, all_of, alternatives, single
from nc.config.document import (
    SCHEMA_VERSION,
    Document,
    as_list,
    check_is_dict,
    check_keys,
    check_schema,
    fields_of,
    key_from,
    keys_from,
)
from nc.config.fields import ConfigField
from nc.errors import ConfigError, UnknownFieldError, UnsupportedError
from nc.formats import Mode
from nc.formats.checks import kind_of, require
from nc.formats.rule_key import ParsedKey, RuleKey, key_text, parse_keys

#: Dtypes that mean "not quantized".
_FLOATS = frozenset({"fp32", "bf16"})


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One `set_local` entry: a key, and the configuration for operators that match it."""

    key: ParsedKey
    config: QuantConfig


class QuantConfig(Document):
    """Base class of the configurations of all strategies; use one of its subclasses.

    Attributes:
        given: the fields that were given, by name.
        white_list: keys of the operators to which the configuration's own fields apply; None means all.
        rules: local configurations, in the order of the calls of `set_local`.
    """

    algorithm: ClassVar[str] = ""
    #: The name in dictionaries written for Neural Compressor.
    alias: ClassVar[str] = ""
    FIELDS: ClassVar[Mapping[str, ConfigField]] = {}
    #: A rule takes missing fields only from rules and configurations of the same family.
    family: ClassVar[Mode]

    given: Mapping[str, Any]
    white_list: tuple[ParsedKey, ...] | None
    rules: tuple[Rule, ...]

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Return `Alternatives` where a field that takes no list has one: `act_sym=[True, False]`."""
        first = list(inspect.signature(cls.__init__).parameters.values())[1]
        # a subclass may have its own parameters first
        are_fields = first.kind is first.VAR_POSITIONAL
        make = cls if are_fields else functools.partial(cls, *args)
        takes = {name: functools.partial(field.takes, name) for name, field in cls.FIELDS.items()}
        found = alternatives(make, cls.__name__, takes, args if are_fields else (), fields)
        return super().__new__(cls) if found is None else found

    def __init__(self, *args: Any, white_list: Any = "*", **fields: Any) -> None:
        """See the subclass; fields may be given by position, in the order listed, or by keyword."""
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
        given = {
            name: self.FIELDS[name].taken(name, value) for name, value in given.items() if value is not None
        }
        self.check_values({**self.defaults(), **given})
        self.__dict__.update(given=given, white_list=_white_list(white_list), rules=())

    @classmethod
    def _check_name(cls, name: str) -> None:
        if name not in cls.FIELDS:
            near = difflib.get_close_matches(name, cls.FIELDS, n=1, cutoff=0.0)[0]
            msg = (
                f"{cls.__name__} has no field {name!r}; did you mean {near!r}? Its fields: "
                f"{', '.join(cls.FIELDS)}."
            )
            raise UnknownFieldError(msg)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each field."""
        return {name: field.default for name, field in cls.FIELDS.items()}

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Raise ConfigError or UnsupportedError for values that contradict each other.

        Values that no backend implements are refused too.
        """
        w_dtype, act_dtype = values["w_dtype"], values["act_dtype"]
        check_excluded(values)
        if w_dtype != act_dtype and not {w_dtype, act_dtype}.isdisjoint(_FLOATS):
            msg = (
                f"w_dtype={w_dtype!r} contradicts act_dtype={act_dtype!r}: for quantization both must be "
                "integers, for fp32 "
                'both must be "fp32", for bf16 both "bf16".'
            )
            raise ConfigError(msg)
        if values["act_granularity"] == "per_channel":
            msg = (
                'act_granularity="per_channel": no CPU kernel takes one scale per activation channel; use '
                '"per_tensor".'
            )
            raise UnsupportedError(msg)
        if not values["w_sym"]:
            msg = (
                "w_sym=False: CPU kernels ignore a weight zero point and would compute wrong numbers; use "
                "w_sym=True."
            )
            raise UnsupportedError(msg)

    @classmethod
    def check_local(
        cls, where: str, given: dict[str, Any], around: Mapping[str, Any]
    ) -> dict[str, Any]:  # for subclasses
        """Return the fields of a local configuration, checked.

        Args:
            where: the call, for messages.
            given: its fields, without those for whole models.
            around: the fields of the outer configuration.

        Raises:
            ConfigError: a value means something for whole models only.
        """
        return given

    # ---- a value ----

    def __getattr__(self, name: str) -> Any:
        """Return a field: the value given, or its default."""
        if name in type(self).FIELDS and "given" in self.__dict__:
            return self.given.get(name, self.FIELDS[name].default)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; None removes the value.

        Contradictions between fields are checked when the configuration is used.
        """
        if name == "white_list":
            self.__dict__["white_list"] = _white_list(value)
            return
        self._check_name(name)
        others = {k: v for k, v in self.given.items() if k != name}
        self.__dict__["given"] = (
            others if value is None else {**others, name: self.FIELDS[name].taken(name, value)}
        )

    def __eq__(self, other: object) -> bool:
        """Two configurations are equal if they have the same class, given fields, white list and rules."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Return the same for all configurations of a class.

        `set_local` changes a configuration, and its hash must not change.
        """
        return hash(type(self))

    def __repr__(self) -> str:
        """Return the given fields, white list and rules."""
        values = [f"{name}={value!r}" for name, value in self.given.items()]
        if self.white_list is not None:
            values.append(f"white_list={[key.text for key in self.white_list]}")
        rules = "".join(f".set_local({rule.key.text!r}, {rule.config!r})" for rule in self.rules)
        return f"{type(self).__name__}({', '.join(values)}){rules}"

    @property
    def is_float(self) -> bool:
        """Whether this configuration leaves operators in fp32 or bf16."""
        return self.w_dtype in _FLOATS

    # ---- rules ----

    def set_local(self, key: RuleKey | list[RuleKey], config: QuantConfig) -> Any:
        """Add a rule: operators that match `key` use `config`. Returns `self`, so that calls can be chained.

        Args:
            key: an operator name, a regular expression (matches the whole name), a type (`torch.nn.Linear`,
                "Linear", `torch.matmul`, "add", "Conv2d&relu" for convolutions followed by a relu), or a list
                of these. Exact names have priority over patterns, patterns over types, types over the global
                values; of several patterns the last one declared wins.
            config: the configuration for these operators, of any strategy. Missing fields come from the next
                rule that matches.

        Raises:
            ConfigError: `config` is not a configuration, or has rules, a white list, or a field for whole
                models only.
            PatternError: the key is neither a name nor a valid regular expression.
        """
        added = tuple(Rule(k, _local(key, config, self.given)) for k in parse_keys(key))
        self.__dict__["rules"] = _with_rules(self.rules, added)
        return self

    def exclude(self, *keys: RuleKey) -> Any:
        """Leave operators in fp32: the same as `set_local` with `w_dtype="fp32", act_dtype="fp32"`.

        Returns `self`.
        """
        return self.set_local(
            [key for each in keys for key in (each if isinstance(each, (list, tuple)) else (each,))],
            self.all_float(),
        )

    @classmethod
    def all_float(cls) -> QuantConfig:
        """Return the configuration that leaves operators in fp32."""
        return cls(w_dtype="fp32", act_dtype="fp32")

    def __add__(self, other: AnyConfig) -> ComposedConfig:
        """Both strategies for one model; see `ComposedConfig`."""
        return ComposedConfig(self) + other

    # ---- plain values ----

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of plain values with a version; fields that were not given are left out."""
        document = {"schema_version": SCHEMA_VERSION, "algorithm": self.algorithm, "global": self._plain()}
        if self.white_list is not None:
            document["white_list"] = [dataclasses.asdict(key) for key in self.white_list]
        return {**document, "local": _rules_to_list(self.rules)}

    def _plain(self) -> dict[str, Any]:
        return {name: self.FIELDS[name].encode(value) for name, value in self.given.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Invert `to_dict`.

        Also accepts Neural Compressor's forms: the fields, or {"global": fields, "local": {key: fields}}.

        Raises:
            ConfigError: a key is unknown or missing, or the schema is newer than this package.
        """
        check_is_dict(data)
        if set(data) == {cls.alias}:  # Neural Compressor's form
            return cls.from_dict(data[cls.alias])
        if not {"schema_version", "algorithm", "global", "local"} & set(data):
            return cls(**fields_of(data))
        check_schema(data, cls.algorithm)
        required = set() if isinstance(data.get("local"), dict) else {"global"}
        check_keys(data, required, optional={"schema_version", "algorithm", "global", "local", "white_list"})
        made = cls(**fields_of(data.get("global", {})))
        for config in all_of(made):
            if "white_list" in data:
                config.__dict__["white_list"] = keys_from(data["white_list"])
            config.__dict__["rules"] = _rules_from(data.get("local", []), cls)
        return made


class ComposedConfig(Document):
    """Several strategies for one model.

    An example is `StaticQuantConfig(white_list=[torch.nn.Conv2d]) +
    DynamicQuantConfig(white_list=["Linear"])`.

    If two parts apply to all operators, the later one gets the operators for which it has a kernel:
    `StaticQuantConfig() + DynamicQuantConfig()` is dynamic for linears and recurrent layers, static for the
    rest.

    Attributes:
        parts: copies of the configurations that were added.
    """

    algorithm: ClassVar[str] = "composed"

    def __init__(self, *parts: QuantConfig) -> None:
        self.parts = tuple(copy.copy(part) for part in parts)

    def __add__(self, other: AnyConfig) -> ComposedConfig:
        """Add a part.

        Raises:
            ConfigError: `other` is not a configuration, or two different parts of one class apply to all
                operators.
        """
        if not isinstance(single(other), (QuantConfig, ComposedConfig)):
            msg = f"Only configurations can be added, but got {type(other).__name__}."
            raise ConfigError(msg)
        added = parts_of(other)
        for mine, theirs in ((m, t) for m in self.parts for t in added):
            if (
                type(mine) is type(theirs)
                and mine.white_list is None
                and theirs.white_list is None
                and mine.given != theirs.given
            ):
                msg = (
                    f"Both sides have a {type(mine).__name__} for all operators, and they differ: {mine!r} "
                    f"and {theirs!r}. Limit one of them to some operators with white_list=[…] or set_local."
                )
                raise ConfigError(msg)
        return ComposedConfig(*self.parts, *added)

    def set_local(self, key: RuleKey | list[RuleKey], config: QuantConfig) -> ComposedConfig:
        """As `QuantConfig.set_local`; the rule comes after the rules of all parts."""
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
        """Return the sum."""
        return " + ".join(map(repr, self.parts))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of plain values with a version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "algorithm": self.algorithm,
            "parts": [part.to_dict() for part in self.parts],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ComposedConfig:
        """Return the inverse of `to_dict`; raises ConfigError like `QuantConfig.from_dict`."""
        check_is_dict(data)
        check_schema(data, cls.algorithm)
        check_keys(data, required={"parts", "algorithm"}, optional={"schema_version"})
        if not isinstance(data["parts"], (list, tuple)) or not data["parts"]:
            msg = f"Expected parts to be a list of configurations, but got {data['parts']!r}."
            raise ConfigError(msg)
        first, *others = (config_from(entry) for entry in data["parts"])
        composed = ComposedConfig(*parts_of(first))
        for other in others:
            composed = composed + other
        return composed


AnyConfig = QuantConfig | ComposedConfig


def strategies() -> dict[str, type[QuantConfig]]:
    """Return the class of each strategy by its name."""
    return {cls.algorithm: cls for cls in QuantConfig.__subclasses__()}


def parts_of(config: AnyConfig) -> tuple[QuantConfig, ...]:
    """Return the parts of a sum; a single configuration is its own only part."""
    return config.parts if isinstance(config, ComposedConfig) else (config,)


def outer_field(config: AnyConfig, name: str) -> tuple[Any, ...]:
    """Return a field for whole models (`pre`, `post`).

    It has the values of all parts that have it, each once, in order.
    """
    values = [value for part in parts_of(config) if name in part.FIELDS for value in getattr(part, name)]
    return tuple(dict.fromkeys(values))


def with_rules(config: AnyConfig) -> list[QuantConfig]:
    """Return the parts of a configuration, and the configurations of their rules."""
    return [each for part in parts_of(config) for each in (part, *(rule.config for rule in part.rules))]


def is_simulated(config: AnyConfig) -> bool:
    """Return whether a part or a rule of a configuration asks for formats that are simulated."""
    return any(
        each.family == "fake_quant" and any(value not in _FLOATS for value in each.given.values())
        for each in with_rules(config)
    )


def is_weight_only(config: AnyConfig) -> bool:
    """Return whether all parts and rules of a configuration are weight-only."""
    return all(each.family == "weight_only" for each in with_rules(config))


def has_weight_only(config: AnyConfig) -> bool:
    """Return whether a part or a rule of a configuration is weight-only."""
    return any(each.family == "weight_only" for each in with_rules(config))


#: What is asked for by the name of a dtype.
_MEANT = {"int8": '"auto" or StaticQuantConfig()', "int4": 'WeightOnlyConfig("int4")'}


def config_from(value: object) -> AnyConfig:
    """Return a configuration from one, from the result of `to_dict`, or from Neural Compressor's form.

    That form is {"static_quant": {…}}.

    Raises:
        ConfigError: it is none of these, or has several values for a field.
    """
    config: AnyConfig = single(read(value))
    return config


def read(value: object) -> AnyConfig | Alternatives:
    """Return the same, also with several values for a field.

    Raises:
        ConfigError: as `config_from`.
    """
    if isinstance(value, (QuantConfig, ComposedConfig, Alternatives)):
        return value
    if isinstance(value, type) and issubclass(value, QuantConfig):
        msg = (
            f"Expected quant_config to be a configuration, but got the class {value.__name__}: write "
            f"{value.__name__}()."
        )
        raise ConfigError(msg)
    if isinstance(value, dict) and value.get("algorithm") == ComposedConfig.algorithm:
        return ComposedConfig.from_dict(value)
    if isinstance(value, dict) and "global" in value:
        algorithm = value.get("algorithm", "static")
        require(
            isinstance(algorithm, str) and algorithm in strategies(),
            "algorithm",
            f"one of {', '.join(strategies())}",
            algorithm,
        )
        config: QuantConfig = strategies()[algorithm].from_dict(value)
        return config
    names = {name: cls for cls in strategies().values() for name in (cls.alias, cls.algorithm)}
    if isinstance(value, dict) and value and set(value) <= set(names):
        first, *others = (names[name].from_dict(fields or {"global": {}}) for name, fields in value.items())
        total: AnyConfig = first
        for other in others:
            total = total + other
        return total
    raise _not_a_config(value)


def _not_a_config(value: object) -> ConfigError:
    """Return the error for what is not a configuration."""
    is_model = hasattr(value, "forward")
    got = kind_of(value) if is_model else repr(value)
    msg = (
        "Expected quant_config to be a configuration "
        f'({", ".join(cls.__name__ for cls in strategies().values())}), "auto", or a dict such as '
        f'{{"static_quant": {{…}}}}, but got {got:.80}.'
    )
    if is_model:
        msg += " The model comes first, then the configuration."
    elif isinstance(value, str) and value in _MEANT:
        msg += f" Did you mean {_MEANT[value]}?"
    return ConfigError(msg)


def check_excluded(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a dtype is asked for and also excluded."""
    excluded = values["excluded_precisions"]
    for name in (values["w_dtype"], values["act_dtype"]):
        if name in excluded:
            msg = f"dtype {name!r} is asked for, but excluded_precisions={excluded} excludes it."
            raise ConfigError(msg)


def _local(key: object, config: object, around: Mapping[str, Any] | None = None) -> QuantConfig:
    """Return a checked copy, so that later changes of `config` have no effect on the rule.

    It may repeat what `around`, the outer configuration's fields, says of the whole model.
    """
    where = f"set_local({key_text(key)!r}, …)"
    config = single(config)
    if not isinstance(config, QuantConfig):
        msg = f"{where} expects a configuration, e.g. StaticQuantConfig(), but got {type(config).__name__}."
        raise ConfigError(msg)
    if config.rules or config.white_list is not None:
        what = "local rules" if config.rules else "a white list"
        msg = f"{where}: the local configuration has {what}; set them on the outer one."
        raise ConfigError(msg)
    around = around or {}
    whole = [name for name in config.given if config.FIELDS[name].outer]
    outer = next((name for name in whole if name not in around or around[name] != config.given[name]), None)
    if outer is not None:
        msg = f"{where}: {outer} applies to whole models; give it to the outer configuration."
        raise ConfigError(msg)
    local = copy.copy(config)
    given = {name: value for name, value in config.given.items() if name not in whole}
    local.__dict__["given"] = config.check_local(where, given, around)
    return local


def _with_rules(rules: tuple[Rule, ...], added: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Add rules; a key that is set again moves to the end."""
    replaced = {rule.key for rule in added}
    return (*(rule for rule in rules if rule.key not in replaced), *added)


def _white_list(value: Any) -> tuple[ParsedKey, ...] | None:
    if value == "*":
        return None
    keys = () if value is None else parse_keys([value] if isinstance(value, str) else value)
    return tuple(dict.fromkeys(keys))


def _rules_to_list(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [
        {
            "key": r.key.text,
            "is_type": r.key.is_type,
            "algorithm": r.config.algorithm,
            "config": r.config._plain(),
        }
        for r in rules
    ]


def _rules_from(entries: object, cls: type[QuantConfig]) -> tuple[Rule, ...]:
    if isinstance(entries, dict):  # Neural Compressor's form
        return tuple(
            Rule(key, _local(key.text, cls(**fields_of(fields))))
            for text, fields in entries.items()
            for key in parse_keys(text)
        )
    return tuple(_rule_from(entry, cls) for entry in as_list(entries, "local"))


def _rule_from(entry: object, cls: type[QuantConfig]) -> Rule:
    names = {"key", "is_type", "algorithm", "config"}
    known = (
        isinstance(entry, dict)
        and {"key", "config"} <= set(entry) <= names
        and isinstance(entry["key"], str)
        and entry.get("algorithm", cls.algorithm) in list(strategies())  # it may be anything
    )
    if not isinstance(entry, dict) or not known:
        msg = (
            f"Expected a local rule as {{key, is_type, algorithm, config}}, its key a string, but got "
            f"{entry!r}."
        )
        raise ConfigError(msg)
    strategy = strategies()[entry.get("algorithm", cls.algorithm)]
    return Rule(key_from(entry), _local(entry["key"], strategy(**fields_of(entry["config"]))))
