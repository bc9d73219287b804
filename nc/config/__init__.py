"""What the user asks for."""

from nc.config.base import AnyConfig, ComposedConfig, QuantConfig, config_from, outer_field, parts_of
from nc.config.fake_quant import FakeQuantConfig
from nc.config.strategies import (
    DynamicQuantConfig,
    INT8StaticQuantConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    WeightOnlyConfig,
    get_default_dynamic_config,
    get_default_sq_config,
    get_default_static_config,
    weight_format,
)

__all__ = [
    "AnyConfig",
    "ComposedConfig",
    "DynamicQuantConfig",
    "FakeQuantConfig",
    "INT8StaticQuantConfig",
    "QuantConfig",
    "SmoothQuantConfig",
    "StaticQuantConfig",
    "WeightOnlyConfig",
    "config_from",
    "get_default_dynamic_config",
    "get_default_sq_config",
    "get_default_static_config",
    "outer_field",
    "parts_of",
    "weight_format",
]
