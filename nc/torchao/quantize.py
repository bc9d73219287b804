"""torchao's front door: quantize a model in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from nc.api.workflow import quantize
from nc.config import WeightOnlyConfig
from nc.config.alternatives import single
from nc.errors import ConfigError
from nc.modules.layers import layers_of
from nc.weights.experts import separated


def quantize_(
    model: torch.nn.Module,
    config: WeightOnlyConfig,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    **options: Any,
) -> None:
    """Quantize the weights of a model in place, as `nc.quantize(model, config, inplace=True)`.

    Args:
        model: its linears, and embeddings if the configuration asks for them, are replaced by modules with
            low-bit weights.
        config: a `WeightOnlyConfig`. Other strategies give a new model: `nc.quantize`.
        filter_fn: `(module, name) -> bool`: False leaves a layer float, whatever the configuration says. True
            leaves it to the configuration, which quantizes embeddings and the output head only if they are
            asked for. Of a mixture of experts whose weights are stacked it sees each expert as a linear.
        options: `run_fn`, `run_args` and `progress` of `nc.quantize`, for configurations that need data.

    Raises:
        ConfigError: another kind of configuration, or `filter_fn` selects no layer.
        NCError: as `nc.quantize`.

    Example:
        >>> from nc import WeightOnlyConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64,
        8)).eval()
        >>> quantize_(model, WeightOnlyConfig("int4", group_size=32), lambda module, name: name != "2")
        >>> type(model[0]).__name__, type(model[2]).__name__
        ('QuantLinear', 'Linear')
    """
    if not isinstance(single(config), WeightOnlyConfig):
        msg = (
            f"quantize_() takes a WeightOnlyConfig, but got {type(config).__name__}; nc.quantize() takes "
            "all, and gives a new model."
        )
        raise ConfigError(msg)
    if filter_fn is not None:
        layers = layers_of(separated(model))
        yours = dict(model.named_modules())  # a stack's experts are not among them yet
        others = [
            layer.name for layer in layers if not filter_fn(yours.get(layer.name, layer.module), layer.name)
        ]
        if len(others) == len(layers):
            msg = f"filter_fn selects none of the {len(layers)} layers that can be quantized."
            raise ConfigError(msg)
        config = copy.copy(config)
        if others:
            config.exclude(*others)
    quantize(model, config, inplace=True, **options)
