"""What all builders of the sweep share: the type of inputs, and models as training leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Inputs = Callable[[int], Any]  # batch size → what `example_inputs` takes


class NotBuilt(Exception):  # a finding, not an error
    """The sweep could not make the model small, or could not call it; says why."""


def images(size: int, channels: int = 3) -> Inputs:
    """Return inputs of image models."""
    return lambda batch: torch.randn(batch, channels, size, size)


def settled(model: torch.nn.Module) -> torch.nn.Module:
    """Set eval mode, batch norms as after training, and parameters that would hide the layers behind them.

    Statistics and weights of the batch norms are as after training. Layer scales begin at 1e-6 and last
    projections of residual branches at zero: with those, a model is hardly more than its skip connections,
    and its output would say nothing about its int8 operators.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.1, generator=generator)
                module.running_var.uniform_(0.8, 1.25, generator=generator)
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
    return model.eval()


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if not parameter.is_floating_point() or not parameter.numel():
        return
    if not torch.isfinite(parameter).all() or (
        parameter.dim() >= 2 and not parameter.any()
    ):  # torch.empty, or zeros
        parameter.normal_(0, 0.02, generator=generator)
    elif (
        name.endswith("weight") and parameter.dim() == 1 and not parameter.any()
    ):  # zero_init_last of residual branches
        parameter.fill_(0.5)
    elif 0 < parameter.abs().max() < 1e-3:  # layer scales, and heads that begin near zero
        parameter.mul_(0.1 / parameter.abs().max())
