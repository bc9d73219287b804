"""Which models `prepare` takes."""

from __future__ import annotations

from typing import Any

import torch

from nc.api.preparation.base import Preparation
from nc.api.quantized import QuantizedModel, ReferenceModule
from nc.config import ComposedConfig, QuantConfig
from nc.config.auto import AutoConfig
from nc.errors import InputError, StateError
from nc.formats.checks import check_callable, kind_of
from nc.process.lock import LOCK

#: What `metric` has to be.
METRIC = "a function that is called with a model and returns a number"
#: What holds a model as `module`.
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
#: A model that is one of these, or holds one, is quantized already.
_OURS = (Preparation, QuantizedModel, ReferenceModule)


def check_progress(progress: object) -> None:
    """Raise InputError for what is neither a function, nor True, False or None."""
    if not isinstance(progress, bool):
        check_callable("progress", progress, "a function that is told how far the work is, False or None")


def checked_model(model: Any) -> torch.nn.Module:
    """Return the model that `prepare` captures: what `torch.compile` or data parallelism wraps, without it.

    Raises:
        StateError: it is prepared or quantized already, or holds something that is.
        InputError: it is not a model, has values on another device or none yet, or another tool has quantized
            it.
    """
    while isinstance(model, _PARALLEL) or type(model).__module__.startswith("torch._dynamo."):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if isinstance(model, (Preparation, QuantizedModel)):
        msg = f"The model is a {type(model).__name__} already; call prepare() with the fp32 model."
        raise StateError(msg)
    inside = (
        next((m for m in model.modules() if isinstance(m, _OURS)), None)
        if isinstance(model, torch.nn.Module)
        else None
    )
    if inside is not None:
        msg = f"The model contains a {type(inside).__name__}; call prepare() with the fp32 model."
        raise StateError(msg)
    if not isinstance(model, torch.nn.Module):
        msg = f"Expected the model to be a torch.nn.Module, but got {type(model).__name__}."
        if isinstance(model, (QuantConfig, ComposedConfig, AutoConfig)):
            msg += " The model comes first, then the configuration."
        raise InputError(msg)
    lazy = next(
        (name for name, parameter in model.named_parameters() if torch.nn.parameter.is_lazy(parameter)), None
    )
    if lazy is not None:
        msg = (
            f"Parameter {lazy!r} has no value yet: call the model once, and load its trained weights, before "
            "prepare()."
        )
        raise InputError(msg)
    with LOCK:  # while another thread captures this model, its parameters are fake ones
        _check_other_tools(model)
        devices = {
            name: tensor.device for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
    for name, device in devices.items():
        if device.type == "meta":
            msg = f"Parameter {name!r} is on device meta, so it has no values: load the weights first."
            raise InputError(msg)
        if device.type != "cpu":
            msg = f"Parameter {name!r} is on device {device}; nc quantizes for CPUs only; call model.cpu()."
            raise InputError(msg)
    return model


def check_run_fn(run_fn: object) -> None:
    """Raise InputError for a `run_fn` that is not None and can't be called."""
    if run_fn is not None and not callable(run_fn):
        msg = (
            "Expected run_fn to be a function that is called with the prepared model, but got "
            f"{kind_of(run_fn)}. For a list of batches write run_fn=lambda prepared: [prepared(batch) for "
            "batch in batches]."
        )
        raise InputError(msg)


#: What torch.ao puts into models: quantized layers, those of training for quantization, observers.
_OF_TORCH_AO = (
    "torch.ao.nn.quantized.",
    "torch.ao.nn.intrinsic.quantized.",
    "torch.ao.nn.qat.",
    "torch.ao.nn.intrinsic.qat.",
    "torch.ao.quantization.observer.",
    "torch.ao.quantization.fake_quantize.",
)


def _check_other_tools(model: torch.nn.Module) -> None:
    """Raise InputError for a model that torch.ao or torchao has quantized, or prepared for that."""
    for name, module in model.named_modules():
        if f"{type(module).__module__}.".startswith(_OF_TORCH_AO):
            msg = (
                f"{name or 'The model'!r} is a {type(module).__name__} of torch.ao: the model is quantized "
                "already, or prepared for it. Call prepare() with the fp32 model."
            )
            raise InputError(msg)
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind.__module__.partition(".")[0] == "torchao":
            msg = (
                f"Parameter {name!r} is a {kind.__name__}, which is quantized already. Call prepare() with "
                "the fp32 model."
            )
            raise InputError(msg)
