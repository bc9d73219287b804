"""`config="auto"`: the configuration is chosen by measurement."""

from __future__ import annotations

import dataclasses
from typing import Any

from nc.config.base import AnyConfig
from nc.config.document import Document
from nc.config.neural_compressor import config_from
from nc.errors import ConfigError
from nc.formats.checks import is_number

NAME = "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class AutoConfig(Document):
    """Try what suits the model and the CPU, and take the fastest whose error is near the least one.

    Accuracy comes before speed: below `min_sqnr_db` operators go to float until it is reached, whatever that
    costs. `"auto"` is the same with the default values.

    Attributes:
        error_factor: how many times the power of the least error the chosen one may have; at least 1. From
            40 dB on it is 2 if less is given.
        least_gain: how many times as fast as fp32, and as bf16 where the CPU has it, int8 has to be; else
            the model is delivered in that precision.
        min_sqnr_db: least SQNR of the worst output against fp32, in dB, on calibration data that is held out.
            Below it the operators that add most of the error stay in float, whatever is known of times, until
            it is reached or all are in fp32; the report begins with the reason. None: any.

    Raises:
        ConfigError: a value that is out of range.
    """

    error_factor: float = 1.2
    least_gain: float = 1.02
    min_sqnr_db: float | None = 20.0

    def __post_init__(self) -> None:
        """Check values."""
        for name in ("error_factor", "least_gain"):
            value = getattr(self, name)
            if not is_number(value) or value < (1 if name == "error_factor" else 0):
                msg = f"AutoConfig: {name}={value!r} is out of range; see its docstring."
                raise ConfigError(msg)
        if self.min_sqnr_db is not None and not is_number(self.min_sqnr_db):
            msg = f"AutoConfig: min_sqnr_db={self.min_sqnr_db!r}: expected a number of dB, or None."
            raise ConfigError(msg)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `auto_or_config`."""
        return {NAME: dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AutoConfig:
        """Return the inverse of `to_dict`; raises ConfigError."""
        found = auto_or_config(data)
        if not isinstance(found, AutoConfig):
            msg = f"Expected the configuration of an AutoConfig, but got that of a {type(found).__name__}."
            raise ConfigError(msg)
        return found


def auto_or_config(value: object) -> AnyConfig | AutoConfig:
    """Return what `config_from` returns, and an `AutoConfig` for "auto" and the dict of one.

    Raises:
        ConfigError: it is nothing of that kind.
    """
    if isinstance(value, AutoConfig):
        return value
    if value == NAME:
        return AutoConfig()
    if isinstance(value, dict) and set(value) == {NAME} and isinstance(value[NAME], dict):
        try:
            return AutoConfig(**value[NAME])
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(AutoConfig))
            msg = f"AutoConfig has the fields {known}, but got {', '.join(map(repr, value[NAME]))}."
            raise ConfigError(msg) from error
    return config_from(value)
