"""The main functions: prepare, convert, quantize, describe."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc.api.model_checks import check_progress, check_run_fn, checked_model
from nc.api.preparation.base import Conversion, Preparation
from nc.api.preparation.graphs import Request
from nc.api.preparation.routes import prepared_by, route_of
from nc.api.quantized import QuantizedModel, as_call
from nc.backends.verify import check_option
from nc.config import AnyConfig
from nc.config.auto import AutoConfig, auto_or_config
from nc.errors import ConfigError, NotCalibratedError, StateError
from nc.graph.plan import INPUTS, PLACEMENTS, Plan
from nc.modules.layers import has_low_bit
from nc.planning.layer_plan import WeightPlan
from nc.process.progress import Progress, shown
from nc.process.torch_settings import check_default_device
from nc.reports.report import Report
from nc.reports.weight_report import WeightReport, weight_report

_NO_RUN_FN = (
    "quantize() got no run_fn, and this configuration needs calibration data. Give a function that calls the "
    "model which it is given with about a hundred typical inputs: run_fn=lambda prepared: [prepared(batch) "
    "for batch in batches]."
)
_NO_CALL = (
    "run_fn did not call the model that it was given, which is not the model that you gave to quantize()."
)


def prepare(
    model: torch.nn.Module,
    quant_config: AnyConfig | AutoConfig | dict[str, Any] | str,
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    dynamic_shapes: Any = None,
    strict: bool = True,
    placement: str = INPUTS,
) -> Preparation:
    """Capture a model and insert observers for calibration.

    With a `WeightOnlyConfig` nothing is captured: the result is a `PreparedWeights`, and `example_inputs` and
    `dynamic_shapes` are not used. `backend` says what computes the low-bit layers: one with kernels for them,
    "auto" or "reference".

    Args:
        model: a trained fp32 model on the CPU, or the result of `nc.export.export`. It is never changed, and
            is quantized as in eval mode.
        quant_config: a configuration, a sum of configurations, a dict from `to_dict`, or "auto": `convert`
            tries what suits the model and the CPU, and takes the fastest whose error is near the least one
            (`AutoConfig`).
        inplace: share the model's weights instead of copying them, and leave the model in eval mode. If you
            train the model afterwards, the prepared model changes too.
        example_inputs: one batch: a tensor, a tuple or list (positional), or a dict (keywords). Other batch
            sizes and lengths work later.
        backend: a name of `available_backends()`, or "auto": the first engine that can run here and has what
            the configuration asks for. If that engine cannot compute this model, `convert` tries the next
            one. For simulated formats "auto" is the reference.
        dynamic_shapes: as for `torch.export.export`, by argument name. With None, every dimension that the
            model does not fix is free, except the height and width of images in models with layer norm,
            attention or embeddings.
        strict: raise if a rule's name or pattern matches nothing, or if nothing in the model can be quantized
            as asked and another call would help: its dtype is bf16 or fp16, or `DynamicQuantConfig` is for
            none of its operators. False gives a warning.
        placement: "inputs": int8 operators read codes. "outputs": int8 convolutions and additions also give
            codes, whoever reads them. ONNX Runtime needs this for int8 convolutions (`export_onnx`); for
            other engines it costs accuracy and speed.

    Returns:
        A module with the model's signature and outputs. Call it with calibration data.

    Raises:
        InputError: example_inputs are missing or do not fit, or the model fails on them; or it computes in
            bf16 or fp16, see `strict`.
        CaptureError: the model cannot be captured as one graph.
        UnmatchedRuleError: a rule matches nothing.
        UnsupportedError: the backend has no kernel for a requested dtype; for "auto", no engine that can run
            here has one. Or there is no kernel for anything in the model, see `strict`.
        BackendUnavailableError: the backend cannot run here.
        StateError: the model is already prepared or converted, or torch's default device is not the CPU.
        ConfigError: no placement has that name.
    """
    check_option("placement", placement, PLACEMENTS)
    check_default_device("prepare")
    config = copy.deepcopy(auto_or_config(quant_config))  # later changes by the user have no effect here
    model = checked_model(model)
    asked = Request(
        inplace=inplace,
        example_inputs=example_inputs,
        backend=backend,
        dynamic_shapes=dynamic_shapes,
        strict=strict,
        placement=placement,
    )
    return prepared_by(model, config, asked)


def convert(
    model: Preparation,
    quant_config: AnyConfig | AutoConfig | dict[str, Any] | str | None = None,
    inplace: bool = True,
    *,
    backend: str | None = None,
    verify: str = "raise",
    verify_sizes: bool = True,
    isolate: str = "auto",
    compile: bool = False,
    padding: str = "skipped",
    measure: bool = True,
    guard: str = "warn",
    progress: Progress | bool | None = None,
) -> QuantizedModel | Any:
    """Convert a prepared model to an int8 model on an engine. The prepared model can be used again.

    With weight-only quantization the result is a model of the user's own class, whose layers hold low-bit
    weights.

    Args:
        model: the result of `prepare`, after calibration. Dynamic quantization needs no calibration.
        quant_config: the same configuration as for `prepare`, or None.
        inplace: for scripts written for Neural Compressor; it has no effect.
        backend: another backend than in `prepare`. With "auto" (here or in `prepare`), the next engine is
            used if one cannot compute this model, and the report says why.
        verify: "raise" or "warn" if the engine disagrees with the reference on the example inputs, or "off".
            Backend "native" compares each kernel by itself, given its own inputs; the others compare outputs.
        verify_sizes: compare for new input sizes too, in the first call with these sizes: on "native" a few
            places of what kernels make that were not compared for such sizes, on other engines the outputs of
            two samples. Kernels that are wrong are not used, with an `NCWarning`. Not with verify="off".
        isolate: run the first fused call in a child process: "auto" (only for unknown patterns), "always" or
            "never".
        compile: compile the fp32 operators between the int8 kernels of backend "native" with `torch.compile`;
            needs a C++ compiler.
        padding: of texts, on "native". "skipped": where the graph allows that, only rows of real tokens are
            computed, and those of padding are zeros in outputs; the report says why not. "computed".
        measure: time the quantized model and yours on the example inputs, for one or two seconds. The report
            begins with the result. The reference is never timed. Of weight-only quantization, single layers
            are timed, and it warns if they are slower.
        guard: what is done if int8 costs time by that measurement. "warn": the verdict names the operators,
            and the rule that leaves them in fp32. "undo": they are left in fp32, and so is the whole model
            where int8 is not 1.02 times as fast; the report says which and why. With "auto" it always acts.
        progress: called as `progress(done, total, name)` before each block of weight-only quantization, and
            before each configuration that "auto" tries. None: a bar in a terminal, a line that changes in a
            notebook, and a line a minute on stderr elsewhere. False: nothing is shown.

    Returns:
        A `QuantizedModel`; with weight-only quantization a module of the class of the user's model.

    Raises:
        StateError: not a prepared model, nothing was calibrated, or torch's default device is not the CPU.
        ConfigError: `quant_config` differs from that of `prepare`, or the backend has no `compile`.
        UnsupportedError: the other engine has no kernel for a requested dtype.
        VerificationError: the results of the engine differ from those of the reference.
        BackendUnavailableError: the engine cannot run here.
        BackendError: the engine failed; for "auto", every engine failed, and the message has all reasons.
    """
    if isinstance(model, QuantizedModel):
        msg = "The model is converted already; convert() expects the result of prepare()."
        raise StateError(msg)
    if not isinstance(model, Preparation):
        msg = f"convert() expects the result of prepare(), but got {type(model).__name__}."
        raise StateError(msg)
    if quant_config is not None and auto_or_config(quant_config) != model.quant_config:
        msg = (
            "convert() got another configuration than prepare(); leave it out here, or call prepare() again "
            "with this configuration."
        )
        raise ConfigError(msg)
    check_default_device("convert")
    check_progress(progress)
    check_option("guard", guard, ("warn", "undo"))
    asked = Conversion(
        backend=backend,
        verify=verify,
        verify_sizes=verify_sizes,
        isolate=isolate,
        compile=compile,
        padding=padding,
        measure=measure,
        guard=guard,
    )
    with shown(progress, "convert") as told:
        return model.convert(dataclasses.replace(asked, progress=told))


def quantize(
    model: torch.nn.Module,
    quant_config: AnyConfig | AutoConfig | dict[str, Any] | str = "auto",
    run_fn: Callable[..., Any] | None = None,
    run_args: Any = None,
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    dynamic_shapes: Any = None,
    strict: bool = True,
    placement: str = INPUTS,
    measure: bool = True,
    guard: str = "warn",
    progress: Progress | bool | None = None,
) -> QuantizedModel | Any:
    """Quantize a model: call `prepare`, `run_fn(prepared, *run_args)` and `convert`.

    Args:
        model: as for `prepare`.
        quant_config: the same; "auto", the default, tries what suits the model and the CPU, and takes the
            fastest whose error is near the least one.
        run_fn: calls the prepared model, which it is given, with calibration data: about a hundred typical
            inputs, no labels. Configurations that need no data, as `DynamicQuantConfig`, need none.
        run_args: further arguments of `run_fn`.
        inplace: as for `prepare`.
        example_inputs: one batch, as for `prepare`; `WeightOnlyConfig` needs none.
        backend: as for `prepare`.
        dynamic_shapes: as for `prepare`.
        strict: as for `prepare`.
        placement: as for `prepare`.
        measure: as for `convert`.
        guard: as for `convert`.
        progress: as for `convert`.

    Returns:
        A `QuantizedModel`; with weight-only quantization a module of the class of the user's model.

    Raises:
        StateError: `run_fn` is missing, or did not call the model that it was given.
        NCError: as `prepare` and `convert`.

    Example:
        >>> import torch
        >>> from nc import StaticQuantConfig, quantize
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
        >>> batches = [torch.randn(4, 8) for _ in range(8)]
        >>> q_model = quantize(
        ...     model,
        ...     StaticQuantConfig(),
        ...     run_fn=lambda prepared: [prepared(batch) for batch in batches],
        ...     example_inputs=batches[0],
        ...     measure=False,
        ... )
        >>> tuple(q_model(batches[0]).shape)
        (4, 8)
    """
    check_run_fn(run_fn)
    check_progress(progress)
    if run_fn is None and isinstance(auto_or_config(quant_config), AutoConfig):
        raise StateError(_NO_RUN_FN)
    prepared = prepare(
        model,
        quant_config,
        inplace,
        example_inputs,
        backend=backend,
        dynamic_shapes=dynamic_shapes,
        strict=strict,
        placement=placement,
    )
    if run_fn is not None:
        run_fn(prepared, *as_tuple(run_args))
    try:
        return convert(prepared, measure=measure, guard=guard, progress=progress)
    except NotCalibratedError as error:
        raise StateError(_NO_RUN_FN if run_fn is None else f"{error} {_NO_CALL}") from error


def as_tuple(args: Any) -> Sequence[Any]:
    """Return further arguments of a user's function, which may be one, in a row, or None."""
    return () if args is None else args if isinstance(args, (tuple, list)) else (args,)


def describe(
    model: torch.nn.Module,
    quant_config: AnyConfig | AutoConfig | dict[str, Any] | str,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    strict: bool = True,
    placement: str = INPUTS,
) -> Plan | WeightPlan:
    """Return the plan: how each operator will be quantized, and by which rule. Needs no calibration data.

    Arguments as for `prepare`.

    Returns:
        A `Plan`, of weight-only quantization a `WeightPlan`; `print` shows a table, `.to_dict()` gives plain
        values.

    Raises:
        NCError: as `prepare`.
    """
    check_option("placement", placement, PLACEMENTS)
    check_default_device("describe")
    config = auto_or_config(quant_config)
    model = checked_model(model)
    asked = Request(example_inputs=example_inputs, backend=backend, strict=strict, placement=placement)
    return route_of(model, config).plan(model, config, asked)


def report(
    model: torch.nn.Module, profile_inputs: Any = None, *, details: bool = False
) -> Report | WeightReport:
    """Return what runs, or is stored, for each layer; `print` shows what matters in 25 lines.

    Args:
        model: the result of `convert` or `load`.
        profile_inputs: a tensor, a tuple or list (positional) or a dict (keywords). Each kernel is timed on
            them: see `QuantizedModel.report`. A layer with low-bit weights is timed, and its rate compared
            with the read bandwidth of this machine, which is measured.
        details: let `print` show all layers and steps.

    Raises:
        StateError: nothing in the model is quantized.
    """
    if isinstance(model, QuantizedModel):
        return model.report(profile_inputs, details=details)
    if not has_low_bit(model):
        msg = (
            f"report() expects the result of convert() or load(), but this {type(model).__name__} has no "
            "quantized layer."
        )
        raise StateError(msg)
    call = None if profile_inputs is None else as_call(profile_inputs, "profile_inputs")
    return weight_report(model, call, detailed=details)
