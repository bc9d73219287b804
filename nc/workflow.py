"""The front door: prepare, convert, quantize, describe."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch

from nc.algorithms import in_order, steps
from nc.algorithms.base import Algorithm
from nc.backends import choose_backend, engine_options, first_that_computes
from nc.backends.base import Backend, EngineModel, lower
from nc.backends.profiling.verdict import measure as speed_verdict
from nc.backends.reference import NAME as REFERENCE
from nc.capture.capture import Graph, capture
from nc.config import AnyConfig, config_from, outer_field
from nc.errors import ConfigError, InputError, NCWarning, StateError
from nc.export import ExportedModel
from nc.global_lock import LOCK
from nc.graph.qdq import QDQGraph
from nc.plan import Plan
from nc.planning.rules import resolve
from nc.prepared import PreparedModel
from nc.quantized import QuantizedModel, ReferenceModule


def prepare(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    dynamic_shapes: Any = None,
    strict: bool = True,
) -> PreparedModel:
    """Capture a model and put observers where it will be quantized.

    Args:
        model: a trained fp32 model on the CPU, or what `nc.export.export` made of it; never changed, quantized as in eval mode.
        quant_config: what to quantize to: a configuration, a sum of several, or a dict as `to_dict` gives it.
        inplace: let the result share the model's weights instead of copying them, and leave the model in eval mode. Training it
            afterwards would then change the prepared model too.
        example_inputs: one batch: a tensor, a tuple or list (positional), or a dict (keywords). Other batch sizes and lengths work later.
        backend: the engine to plan for: "ipex", "native", "reference", a registered one, or "auto": the first that can run here. When
            that one can't compute this model, `convert` goes on to the next.
        dynamic_shapes: as for `torch.export.export`, by argument name; None frees every dimension that the model leaves free, but not
            height and width of images for models with tokens (layer norm, attention, embeddings).
        strict: a rule whose name matches nothing raises; False makes it a warning.

    Returns:
        A module with the model's signature and outputs, to be called with calibration data.

    Raises:
        InputError: example_inputs are missing or do not fit, or the model fails on them.
        CaptureError: the model can't be captured as one graph.
        UnmatchedRuleError: a rule matches nothing.
        UnsupportedError: the backend has no kernel for a dtype that was asked for.
        BackendUnavailableError: the backend can't run here.
        StateError: the model was prepared or converted already.
    """
    config = copy.deepcopy(config_from(quant_config))  # what the user does to it later changes nothing here
    _check_model(model)
    engine = choose_backend(backend)
    engine.start()
    graph = _capture(model, example_inputs, dynamic_shapes, inplace=inplace)
    capabilities = engine.capabilities()
    plan, algorithms = _with_algorithms(resolve(config, graph, capabilities, strict=strict), config)
    if inplace:
        model.eval()
    return PreparedModel(graph, plan, capabilities, engine.name, config, algorithms, asked=backend)


def convert(
    model: PreparedModel,
    quant_config: AnyConfig | dict[str, Any] | None = None,
    inplace: bool = True,
    *,
    backend: str | None = None,
    verify: str = "raise",
    isolate: str = "auto",
    compile: bool = False,  # noqa: A002
    measure: bool = True,
) -> QuantizedModel:
    """Turn a prepared model into an int8 model on an engine; the prepared model stays usable.

    Args:
        model: what `prepare` returned, after calibration; dynamic quantization needs none.
        quant_config: the configuration that `prepare` was given, or None; another one would need another preparation.
        inplace: for scripts written for Neural Compressor; the prepared model stays as it is in either case.
        backend: another engine than the one planned for. Where `prepare` was given "auto", or this is it, an engine that can't compute
            this model gives way to the next one; the report then says why.
        verify: "raise" or "warn" when the engine disagrees with the reference on the example inputs, or "off".
        isolate: first fused run in a child process: "auto" (unfamiliar graphs), "always" or "never".
        measure: time the engine against the captured fp32 model, on the example inputs and for at most about a second; the report begins
            with the result. The reference, which simulates, is never timed.
        compile: hand what stays fp32 between the kernels of backend "native" to `torch.compile`; needs a C++ compiler.

    Raises:
        StateError: not a prepared model, or nothing was calibrated.
        ConfigError: `quant_config` is not the one that `prepare` was given, or the backend has no `compile`.
        UnsupportedError: the other engine has no kernel for a dtype that was asked for.
        VerificationError: the engine computes something else than the reference.
        BackendUnavailableError: the engine can't run here.
        BackendError: it fails; for "auto", every engine does, and the message has all reasons.
    """
    if isinstance(model, QuantizedModel):
        msg = "The model is converted already; convert() takes what prepare() returned."
        raise StateError(msg)
    if not isinstance(model, PreparedModel):
        msg = f"convert() takes what prepare() returned, but got {type(model).__name__}."
        raise StateError(msg)
    if quant_config is not None and config_from(quant_config) != model.quant_config:
        msg = "convert() got another configuration than prepare(); leave it out here, or prepare the model again with this one."
        raise ConfigError(msg)
    asked, first = (model.asked, model.backend) if backend is None else (backend, choose_backend(backend).name)

    def attempt(engine: Backend) -> tuple[QDQGraph, EngineModel]:
        engine.start()
        graph = model.quantized_graph(engine.capabilities())
        return graph, lower(engine, graph, verify=verify, **engine_options(engine, isolate=isolate, compile=compile))

    (graph, lowered), name, chosen = first_that_computes(asked, first, attempt)
    verdict = speed_verdict(model.graph.module, graph, lowered) if measure and name != REFERENCE else None
    return QuantizedModel(graph, lowered, name, chosen, verdict)


def quantize(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    run_fn: Callable[..., Any] | None = None,
    run_args: Any = None,
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    measure: bool = True,
    **options: Any,
) -> QuantizedModel:
    """`prepare`, `run_fn(prepared, *run_args)`, `convert` in one. Dynamic quantization needs no `run_fn`.

    `measure` is convert's, `options` are prepare's.

    Example:
        >>> import torch
        >>> from nc import StaticQuantConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> x = torch.randn(4, 8)
        >>> q = quantize(model, StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference")
        >>> tuple(q(x).shape)
        (4, 8)
    """
    prepared = prepare(model, quant_config, inplace, example_inputs, **options)
    if run_fn is not None:
        args = () if run_args is None else run_args if isinstance(run_args, (tuple, list)) else (run_args,)
        run_fn(prepared, *args)
    return convert(prepared, measure=measure)


def describe(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    strict: bool = True,
) -> Plan:
    """The plan before any data: every operator, what it will be quantized to, and by which rule.

    Returns:
        A `Plan`; `print` shows a table, `.to_dict()` gives plain values. Raises what `prepare` raises.
    """
    config = config_from(quant_config)
    _check_model(model)
    engine: Backend = choose_backend(backend)
    graph = _capture(model, example_inputs, None, share_weights=True)
    return _with_algorithms(resolve(config, graph, engine.capabilities(), strict=strict), config)[0]


def _with_algorithms(plan: Plan, config: AnyConfig) -> tuple[Plan, tuple[Algorithm, ...]]:
    """The plan with its algorithms as part of it, and as objects."""
    algorithms = in_order(plan, outer_field(config, "pre"), outer_field(config, "post"))
    return dataclasses.replace(plan, algorithms=steps(algorithms)), algorithms


#: A model that is one of these, or holds one, is quantized already.
_OURS = (PreparedModel, QuantizedModel, ReferenceModule)


def _check_model(model: object) -> None:
    if isinstance(model, (PreparedModel, QuantizedModel)):
        msg = f"The model is a {type(model).__name__} already; give prepare() the fp32 model."
        raise StateError(msg)
    inside = next((m for m in model.modules() if isinstance(m, _OURS)), None) if isinstance(model, torch.nn.Module) else None
    if inside is not None:
        msg = f"The model holds a {type(inside).__name__}; give prepare() the fp32 model."
        raise StateError(msg)
    if not isinstance(model, torch.nn.Module):
        msg = f"Expected the model to be a torch.nn.Module, but got {type(model).__name__}."
        raise InputError(msg)
    with LOCK:  # while another thread captures this model, its parameters are fake ones
        devices = {name: tensor.device for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, device in devices.items():
        if device.type != "cpu":
            msg = f"Parameter {name!r} is on device {device}; this is quantization for CPUs, call model.cpu()."
            raise InputError(msg)


def _capture(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any, *, inplace: bool = False, share_weights: bool = False
) -> Graph:
    if isinstance(model, ExportedModel):
        return model.own_graph()
    with LOCK:  # capture in another thread switches the same flags for a while
        if any(m.training for m in model.modules()):
            flags = "it stays in eval mode, since inplace=True" if inplace else "its own flags stay as they are"
            warnings.warn(f"The model is in training mode; it is quantized as in eval mode, and {flags}.", NCWarning, stacklevel=3)
        return capture(model, example_inputs, dynamic_shapes, share_weights=share_weights or inplace)
