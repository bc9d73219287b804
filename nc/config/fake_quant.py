"""Simulation of any number format at any tensor of an operator."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from nc.config.base import QuantConfig
from nc.config.fields import Check, ConfigField
from nc.errors import ConfigError, UnknownFieldError
from nc.formats import DTYPES, FakeTensorSpec
from nc.formats.checks import require
from nc.formats.fake_spec import ROLES
from nc.observers import ALGORITHMS

#: The value of a role that stays fp32, whatever less specific rules say.
OFF = "fp32"


def _role(name: str, value: Any) -> FakeTensorSpec | str:
    """Return a spec, the name of a dtype, "fp32", or the plain form of a spec."""
    if isinstance(value, FakeTensorSpec):
        known = (None, *ALGORITHMS)
        require(
            value.observer in known,
            f"observer of {name}",
            f"one of {', '.join(map(repr, ALGORITHMS))}",
            value.observer,
        )
        return value
    if isinstance(value, str) and value == OFF:
        return value
    if isinstance(value, str):
        require(value in DTYPES, name, f'a FakeTensorSpec, "{OFF}", or one of {", ".join(DTYPES)}', value)
        return FakeTensorSpec(dtype=value)
    if isinstance(value, Mapping):
        names = [f.name for f in dataclasses.fields(FakeTensorSpec)]
        for key in value:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
                msg = f"{name}: a FakeTensorSpec has no field {key!r}; did you mean {near!r}?"
                raise UnknownFieldError(msg)
        return _role(name, FakeTensorSpec(**value))
    msg = f'Expected {name} to be a FakeTensorSpec, the name of a dtype, or "{OFF}", but got {value!r}.'
    raise ConfigError(msg)


def _merged(values: Sequence[FakeTensorSpec | str]) -> FakeTensorSpec | str:
    """One spec of those of several rules, the most specific first.

    What is less specific than "fp32" does not count.
    """
    found: FakeTensorSpec | None = None
    for value in values:
        if isinstance(value, str):
            return value if found is None else found
        found = value if found is None else found.over(value)
    return OFF if found is None else found


class FakeQuantConfig(QuantConfig):
    """Simulation of number formats on the reference backend, to know the accuracy before a kernel exists.

    Linears, convolutions and embeddings get the values that the codes of a format stand for, and compute in
    fp32. Each role takes a `FakeTensorSpec`, or the name of a dtype. A role that is not given, or a field of
    its spec, has the value of the next rule that matches; a role that no rule gives stays fp32. "fp32"
    switches a role off. A role that an operator does not have (the input of an embedding, a bias) is passed
    over.

    Args:
        weight: the constant weight.
        input: the activation that is read.
        output: the result.
        bias: the constant bias.
        white_list: names, patterns or types of the operators to which these values apply; all others stay
            fp32. "*" means all.

    Raises:
        UnknownFieldError: a field that does not exist; the message has the nearest name.
        ConfigError: a value that does not exist, or values that contradict each other.

    Example:
        >>> int4 = FakeTensorSpec(dtype="int4", granularity="per_group", group_size=32)
        >>> config = FakeQuantConfig(weight=int4, input=FakeTensorSpec(dtype="fp8_e4m3", dynamic=True))
        >>> _ = config.set_local("classifier", FakeQuantConfig(weight=FakeTensorSpec(group_size=16),
        input="fp32"))
    """

    algorithm, alias, family = "fake_quant", "fake_quant", "fake_quant"
    FIELDS = {
        role: ConfigField(
            None,
            Check(_role, f'`FakeTensorSpec(…)`, a dict of its fields, a dtype, `"{OFF}"`'),
            merge=_merged,
        )
        for role in ROLES
    }

    #: What operators compute in that this configuration leaves alone.
    w_dtype = OFF

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Nothing: specs check their own values; what rules give together is checked for each operator."""

    @property
    def is_float(self) -> bool:
        """Whether this configuration leaves all roles in fp32."""
        return all(self.given.get(role) == OFF for role in ROLES)

    @classmethod
    def all_float(cls) -> FakeQuantConfig:
        """Return the configuration that leaves operators in fp32."""
        return cls(**dict.fromkeys(ROLES, OFF))

    def _plain(self) -> dict[str, Any]:
        return {
            role: value if isinstance(value, str) else value.to_dict() for role, value in self.given.items()
        }
