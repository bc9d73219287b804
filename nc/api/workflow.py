"""The main functions: prepare, convert, quantize, describe."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from nc.algorithms import in_order, steps
from nc.algorithms.base import Algorithm
from nc.algorithms.inputs.layers import has_low_bit
from nc.api.mixed import PreparedMixed
from nc.api.quantized import QuantizedModel, ReferenceModule, as_call
from nc.api.report import Report, hopeless_text
from nc.api.weight_report import WeightReport, weight_report
from nc.api.weight_verdict import measure as low_bit_verdict
from nc.api.weight_verdict import warn_if_slower
from nc.backends import choose_backend, engine_options, first_that_can, get_backend, precautions, why_chosen
from nc.backends.auto_order import kind_of_model
from nc.backends.base import Backend, EngineModel, lower
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.backends.low_bit.engine import set_backend
from nc.backends.profiling.own_model import OwnModel
from nc.backends.profiling.verdict import Verdict
from nc.backends.profiling.verdict import measure as speed_verdict
from nc.backends.reference import NAME as REFERENCE
from nc.backends.verify import check_option
from nc.calibration.costly import HOPELESS_DB
from nc.capture.capture import Graph, capture
from nc.config import AnyConfig, QuantConfig, SmoothQuantConfig, WeightOnlyConfig, config_from, is_simulated, outer_field, parts_of
from nc.errors import ConfigError, InputError, StateError
from nc.export import ExportedModel
from nc.graph.catalogue import kind_of_node
from nc.graph.plan import INPUTS, PLACEMENTS, Plan
from nc.graph.products import unknown_products, unknown_text
from nc.graph.qdq import QDQGraph
from nc.observed.prepared import PreparedModel
from nc.planning.layer_plan import WeightPlan, others_text
from nc.planning.layer_rules import name_low_bit, plan_layers, with_low_bit
from nc.planning.matching import check_rules
from nc.planning.nothing import nothing_quantized
from nc.planning.rules import decide
from nc.process.lock import LOCK
from nc.process.torch_settings import check_default_device
from nc.process.warn import warn
from nc.weights.accuracy import accuracy_db, hopeless_layers
from nc.weights.accuracy import hopeless_text as low_bit_hopeless_text
from nc.weights.driver import Progress
from nc.weights.experts import separated
from nc.weights.prepared import PreparedWeights


def prepare(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    dynamic_shapes: Any = None,
    strict: bool = True,
    placement: str = INPUTS,
) -> PreparedModel | PreparedWeights | PreparedMixed:
    """Capture a model and insert observers for calibration.

    With a `WeightOnlyConfig` nothing is captured: the result is a `PreparedWeights`, and `example_inputs` and `dynamic_shapes` are not
    used. `backend` says what computes the low-bit layers: one with kernels for them, "auto" or "reference".

    Args:
        model: a trained fp32 model on the CPU, or the result of `nc.export.export`. It is never changed, and is quantized as in eval mode.
        quant_config: a configuration, a sum of configurations, or a dict from `to_dict`.
        inplace: share the model's weights instead of copying them, and leave the model in eval mode. If you train the model
            afterwards, the prepared model changes too.
        example_inputs: one batch: a tensor, a tuple or list (positional), or a dict (keywords). Other batch sizes and lengths work later.
        backend: a name of `available_backends()`, or "auto": the first engine that can run here and has what the configuration asks for.
            If that engine cannot compute this model, `convert` tries the next one. For simulated formats "auto" is the reference.
        dynamic_shapes: as for `torch.export.export`, by argument name. With None, every dimension that the model does not fix is free,
            except the height and width of images in models with layer norm, attention or embeddings.
        strict: raise if a rule's name or pattern matches nothing, or if nothing in the model can be quantized as asked and another call
            would help: its dtype is bf16 or fp16, or `DynamicQuantConfig` is for none of its operators. False gives a warning.
        placement: "inputs": int8 operators read codes. "outputs": int8 convolutions and additions also give codes, whoever reads them. ONNX
            Runtime needs this for int8 convolutions (`export_onnx`); for other engines it costs accuracy and speed.

    Returns:
        A module with the model's signature and outputs. Call it with calibration data.

    Raises:
        InputError: example_inputs are missing or do not fit, or the model fails on them; or it computes in bf16 or fp16, see `strict`.
        CaptureError: the model cannot be captured as one graph.
        UnmatchedRuleError: a rule matches nothing.
        UnsupportedError: the backend has no kernel for a requested dtype; for "auto", no engine that can run here has one. Or there is no
            kernel for anything in the model, see `strict`.
        BackendUnavailableError: the backend cannot run here.
        StateError: the model is already prepared or converted, or torch's default device is not the CPU.
        ConfigError: no placement has that name.
    """
    check_option("placement", placement, PLACEMENTS)
    check_default_device("prepare")
    config = copy.deepcopy(config_from(quant_config))  # later changes by the user have no effect here
    _check_model(model)
    if weight_only(config):
        _warn_of_training(model, inplace=inplace)
        low_bit_engine(backend)
        layers = plan_layers(config, separated(model), strict=strict)
        _warn_of_float_weights(layers)
        stacks = {d.operator.rpartition(".")[0] for d in layers.quantized}
        model = separated(model, inplace=inplace, names=stacks)  # not before: an error leaves the model as it is
        return PreparedWeights(model, layers, config, inplace=inplace, asked=backend)
    if has_weight_only(config) and not has_low_bit(model):
        low_bit = PreparedWeights(model, plan_layers(config, model, check=False), config, inplace=inplace)
        options = {"backend": backend, "dynamic_shapes": dynamic_shapes, "strict": strict, "placement": placement}
        mixed = PreparedMixed(low_bit, lambda m: prepare(m, config, inplace, example_inputs, **options))
        if low_bit.plan.quantized:
            return mixed if low_bit.plan.needs_data else mixed.graph_part()
    asked, backend = backend, _that_simulates(backend, config)
    engine = choose_backend(backend)
    engine.start()
    graph = _capture(model, example_inputs, dynamic_shapes, inplace=inplace)
    check_rules(config, with_low_bit(graph, model), strict=strict)
    kind = _kind_of(graph)
    first = choose_backend(backend, kind).name
    plan, name, failed = first_that_can(backend, first, lambda e: decide(config, graph, e.capabilities(), placement), model=kind)
    if name != engine.name:
        engine = get_backend(name)
        engine.start()
    _refuse_nothing(plan, config, strict=strict)
    _warn_of_unknown_products(plan)
    plan, algorithms = _with_algorithms(plan, config)
    if inplace:
        model.eval()
    own = None if isinstance(model, ExportedModel) else OwnModel(model, *as_call(example_inputs))
    return PreparedModel(graph, plan, engine.capabilities(), name, config, algorithms, asked=asked, failed=failed, own=own)


def convert(
    model: PreparedModel | PreparedWeights | PreparedMixed,
    quant_config: AnyConfig | dict[str, Any] | None = None,
    inplace: bool = True,
    *,
    backend: str | None = None,
    verify: str = "raise",
    verify_sizes: bool = True,
    isolate: str = "auto",
    compile: bool = False,  # noqa: A002
    measure: bool = True,
    progress: Progress | None = None,
) -> Any:
    """Convert a prepared model to an int8 model on an engine. The prepared model can be used again.

    With weight-only quantization the result is a model of the user's own class, whose layers hold low-bit weights.

    Args:
        model: the result of `prepare`, after calibration. Dynamic quantization needs no calibration.
        quant_config: the same configuration as for `prepare`, or None.
        inplace: for scripts written for Neural Compressor; it has no effect.
        backend: another backend than in `prepare`. With "auto" (here or in `prepare`), the next engine is used if one cannot compute
            this model, and the report says why.
        verify: "raise" or "warn" if the engine disagrees with the reference on the example inputs, or "off". Backend "native" compares
            each kernel by itself, given its own inputs; the others compare outputs.
        verify_sizes: compare for new input sizes too, in the first call with these sizes, which takes longer by one call of the reference.
            Kernels that are wrong are not used, with an `NCWarning`. Not with verify="off".
        isolate: run the first fused call in a child process: "auto" (only for unknown patterns), "always" or "never".
        compile: compile the fp32 operators between the int8 kernels of backend "native" with `torch.compile`; needs a C++ compiler.
        measure: time the quantized model and yours on the example inputs, for about a second. The report begins with the result. The
            reference is never timed. Of weight-only quantization, single layers are timed, and it warns if they are slower.
        progress: for weight-only quantization, called as `progress(done, total, name)` before each block.

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
    if not isinstance(model, (PreparedModel, PreparedWeights, PreparedMixed)):
        msg = f"convert() expects the result of prepare(), but got {type(model).__name__}."
        raise StateError(msg)
    if quant_config is not None and config_from(quant_config) != model.quant_config:
        msg = "convert() got another configuration than prepare(); leave it out here, or call prepare() again with this configuration."
        raise ConfigError(msg)
    check_default_device("convert")
    if isinstance(model, PreparedWeights):
        name = backend or model.asked
        low_bit_engine(name)  # refused before the work, not after it
        low_bit = set_backend(model.quantized(progress), name)
        _warn_of_low_bit(low_bit, model)
        verdict = low_bit_verdict(low_bit) if measure else None
        if verdict is not None:
            low_bit.__dict__["nc_verdict"] = verdict
            warn_if_slower(verdict)
        return low_bit
    if isinstance(model, PreparedMixed):
        prepared = model.calibrated(progress)
        options: dict[str, Any] = {"verify_sizes": verify_sizes, "isolate": isolate, "compile": compile}
        return convert(prepared, backend=backend, verify=verify, measure=measure, **options)
    kind = _kind_of(model.graph)
    asked, first, before = model.asked, model.backend, model.failed
    if backend is not None:
        asked, first, before = backend, choose_backend(_that_simulates(backend, model.quant_config), kind).name, {}

    def attempt(engine: Backend) -> tuple[QDQGraph, EngineModel]:
        engine.start()
        graph = model.quantized_graph(engine.capabilities())
        options = engine_options(engine, verify_sizes=verify_sizes, isolate=isolate, compile=compile)
        return graph, lower(engine, graph, verify=verify, **options)

    engine_name = _that_simulates(asked, model.quant_config)
    (graph, lowered), name, failed = first_that_can(engine_name, first, attempt, before, kind)
    chosen = why_chosen(asked, name, failed, kind) if engine_name == asked else _SIMULATED
    q_model = QuantizedModel(graph, lowered, name, chosen)
    if measure and name != REFERENCE:
        # a model that fills lists or caches is another one in each call of the same arguments
        own = None if graph.signature.effects.after is not None else model.own
        q_model.verdict = speed_verdict(model.graph.module, graph, lowered, own=own, quantized=q_model)
    _warn_of_result(model.plan, model.quant_config, graph, q_model.verdict)
    return q_model


def quantize(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    run_fn: Callable[..., Any] | None = None,
    run_args: Any = None,
    inplace: bool = False,
    example_inputs: Any = None,
    *,
    measure: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Call `prepare`, `run_fn(prepared, *run_args)` and `convert`. Dynamic quantization needs no `run_fn`.

    `measure` and `progress` are passed to `convert`, `options` are passed to `prepare`.

    Example:
        >>> import torch
        >>> from nc import StaticQuantConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> x = torch.randn(4, 8)
        >>> q = quantize(model, StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference")
        >>> tuple(q(x).shape)
        (4, 8)
    """
    if run_fn is not None and not callable(run_fn):
        msg = (
            f"Expected run_fn to be a function that is called with the prepared model, but got a {type(run_fn).__name__}. For a list of "
            "batches write run_fn=lambda prepared: [prepared(batch) for batch in batches]."
        )
        raise InputError(msg)
    prepared = prepare(model, quant_config, inplace, example_inputs, **options)
    if run_fn is not None:
        args = () if run_args is None else run_args if isinstance(run_args, (tuple, list)) else (run_args,)
        run_fn(prepared, *args)
    return convert(prepared, measure=measure, progress=progress)


def _kind_of(graph: Graph) -> str:
    """Return what kind of model it is, for the order of engines."""
    return kind_of_model(map(kind_of_node, graph.module.graph.nodes))


def describe(
    model: torch.nn.Module,
    quant_config: AnyConfig | dict[str, Any],
    example_inputs: Any = None,
    *,
    backend: str = "auto",
    strict: bool = True,
    placement: str = INPUTS,
) -> Plan | WeightPlan:
    """Return the plan: how each operator will be quantized, and by which rule. Needs no calibration data. Arguments as for `prepare`.

    Returns:
        A `Plan`, of weight-only quantization a `WeightPlan`; `print` shows a table, `.to_dict()` gives plain values.

    Raises:
        NCError: as `prepare`.
    """
    check_option("placement", placement, PLACEMENTS)
    check_default_device("describe")
    config = config_from(quant_config)
    _check_model(model)
    if weight_only(config):
        return plan_layers(config, separated(model), strict=strict)
    backend = _that_simulates(backend, config)
    choose_backend(backend)  # refused before the work, not after it
    graph = _capture(model, example_inputs, None, share_weights=True)
    check_rules(config, with_low_bit(graph, model), strict=strict)
    kind = _kind_of(graph)
    first = choose_backend(backend, kind).name
    plan, _, _ = first_that_can(backend, first, lambda e: decide(config, graph, e.capabilities(), placement), model=kind)
    if has_weight_only(config) and not has_low_bit(model):
        plan = name_low_bit(plan, plan_layers(config, model, check=False))
    return _with_algorithms(plan, config)[0]


def report(model: torch.nn.Module, **options: Any) -> Report | WeightReport:
    """Return what runs, or is stored, for each layer; `print` shows a table.

    Args:
        model: the result of `convert` or `load`.
        options: those of `QuantizedModel.report`. With `profile_inputs`, each layer with low-bit weights is timed on them, and its rate
            compared with the read bandwidth of this machine, which is measured.

    Raises:
        StateError: nothing in the model is quantized.
    """
    if isinstance(model, QuantizedModel):
        return model.report(**options)
    if not isinstance(model, torch.nn.Module) or not has_low_bit(model):
        msg = f"report() expects the result of convert() or load(), but this {type(model).__name__} has no quantized layer."
        raise StateError(msg)
    inputs = options.pop("profile_inputs", None)
    if options:
        msg = f"report() of a model with low-bit weights has no option {', '.join(options)}; it has profile_inputs."
        raise ConfigError(msg)
    return weight_report(model, None if inputs is None else as_call(inputs))


def _with_algorithms(plan: Plan, config: AnyConfig) -> tuple[Plan, tuple[Algorithm, ...]]:
    """Return the plan with its algorithms as part of it, and as objects."""
    smooths = any(isinstance(each, SmoothQuantConfig) for each in _with_rules(config))
    algorithms = in_order(plan, outer_field(config, "pre"), outer_field(config, "post"), smooths=smooths)
    return dataclasses.replace(plan, algorithms=steps(algorithms)), algorithms


#: Why "auto" takes the reference.
_SIMULATED = '"auto" takes the reference, because the configuration simulates number formats: it computes them in fp32, slowly'


def _that_simulates(backend: str, config: AnyConfig) -> str:
    """Return the backend that is asked for; for "auto" the reference, if the configuration simulates formats, which no engine does."""
    return REFERENCE if backend == "auto" and is_simulated(config) else backend


#: A model that is one of these, or holds one, is quantized already.
_OURS = (PreparedModel, PreparedWeights, PreparedMixed, QuantizedModel, ReferenceModule)


def weight_only(config: AnyConfig) -> bool:
    """Whether all parts and rules of a configuration are weight-only."""
    return all(isinstance(each, WeightOnlyConfig) for each in _with_rules(config))


def has_weight_only(config: AnyConfig) -> bool:
    """Whether a part or a rule of a configuration is weight-only."""
    return any(isinstance(each, WeightOnlyConfig) for each in _with_rules(config))


def _with_rules(config: AnyConfig) -> list[QuantConfig]:
    """All parts of a configuration and the local ones of their rules."""
    return [each for part in parts_of(config) for each in (part, *(rule.config for rule in part.rules))]


def _check_model(model: object) -> None:
    if isinstance(model, (PreparedModel, PreparedWeights, PreparedMixed, QuantizedModel)):
        msg = f"The model is a {type(model).__name__} already; call prepare() with the fp32 model."
        raise StateError(msg)
    inside = next((m for m in model.modules() if isinstance(m, _OURS)), None) if isinstance(model, torch.nn.Module) else None
    if inside is not None:
        msg = f"The model contains a {type(inside).__name__}; call prepare() with the fp32 model."
        raise StateError(msg)
    if not isinstance(model, torch.nn.Module):
        msg = f"Expected the model to be a torch.nn.Module, but got {type(model).__name__}."
        raise InputError(msg)
    lazy = next((name for name, parameter in model.named_parameters() if torch.nn.parameter.is_lazy(parameter)), None)
    if lazy is not None:
        msg = f"Parameter {lazy!r} has no value yet: call the model once, and load its trained weights, before prepare()."
        raise InputError(msg)
    _check_other_tools(model)
    with LOCK:  # while another thread captures this model, its parameters are fake ones
        devices = {name: tensor.device for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, device in devices.items():
        if device.type != "cpu":
            msg = f"Parameter {name!r} is on device {device}; nc quantizes for CPUs only; call model.cpu()."
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
                f"{name or 'The model'!r} is a {type(module).__name__} of torch.ao: the model is quantized already, or prepared for it. "
                "Call prepare() with the fp32 model."
            )
            raise InputError(msg)
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind.__module__.partition(".")[0] == "torchao":
            msg = f"Parameter {name!r} is a {kind.__name__}, which is quantized already. Call prepare() with the fp32 model."
            raise InputError(msg)


def _warn_of_float_weights(plan: WeightPlan) -> None:
    """Most of a model, or all of it, stays float: users would take it for quantized."""
    count, others = (
        sum(math.prod(shape) for shape in shapes) for shapes in ([d.shape for d in plan.quantized], [s for _, s in plan.others])
    )
    if not count:
        reasons = "; ".join(dict.fromkeys(d.reason for d in plan.decisions))
        warn(f"No layer gets a low-bit weight: {reasons}.")
    elif others > count:
        warn(f"Most weights of this model stay as they are. {others_text(plan.others)}.")


def _warn_of_unknown_products(plan: Plan) -> None:
    """As above, for captured models."""
    products = unknown_products(plan)
    if 2 * sum(product.size for product in products) > sum(plan.shares.weights.values()):
        msg = f"Most weights of this model stay as they are. {unknown_text(products)}. nc.WeightOnlyConfig quantizes stacked experts."
        warn(msg)


def _refuse_nothing(plan: Plan, config: AnyConfig, *, strict: bool) -> None:
    """Raise, or warn, where a plan quantizes nothing."""
    nothing = nothing_quantized(plan, config)
    if nothing is not None and strict and nothing.error is not None:
        msg = f"{nothing.text} strict=False makes this error a warning."
        raise nothing.error(msg)
    if nothing is not None:
        warn(nothing.text)


def _warn_of_result(planned: Plan, config: AnyConfig, graph: QDQGraph, verdict: Verdict | None) -> None:
    """Warn of a model in which nothing is quantized any more, which is far from fp32, or slower than it."""
    nothing = nothing_quantized(graph.plan, config) if planned.quantized else None
    if nothing is not None:
        warn(nothing.text)
    if graph.sqnr_vs_fp32_db < HOPELESS_DB:
        warn(hopeless_text(graph.sqnr_vs_fp32_db, graph.health))
    if graph.plan.quantized and verdict is not None and verdict.certain and round(verdict.ratio, 2) < 1:
        warn(str(verdict))


def _warn_of_low_bit(model: torch.nn.Module, prepared: PreparedWeights) -> None:
    """Compare the outputs of a model with low-bit weights with the float model's, if that was called; warn where it is far from it."""
    decibels = None
    if prepared.first is not None:
        try:
            decibels = accuracy_db(model, prepared.first)
        except Exception as error:  # noqa: BLE001 - any model can raise anything; what was quantized is kept
            warn(f"The quantized model fails on the inputs of the first call of the prepared model: {type(error).__name__}: {error}")
    model.__dict__["nc_sqnr_db"] = decibels
    hopeless = low_bit_hopeless_text(decibels, hopeless_layers(model))
    if hopeless:
        warn(hopeless)


def _warn_of_training(model: torch.nn.Module, *, inplace: bool) -> None:
    if any(m.training for m in model.modules()):
        flags = "it stays in eval mode, because inplace=True" if inplace else "its own flags do not change"
        warn(f"The model is in training mode; it is quantized as in eval mode, and {flags}.")


def _capture(
    model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any, *, inplace: bool = False, share_weights: bool = False
) -> Graph:
    if isinstance(model, ExportedModel):
        return model.own_graph()
    script = next((name or "The model" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if script is not None:
        msg = f"{script} is TorchScript, which can't be captured; call prepare() with the torch.nn.Module that it was made from."
        raise InputError(msg)
    with LOCK:  # capture in another thread switches the same flags for a while
        _warn_of_training(model, inplace=inplace)
        return capture(model, example_inputs, dynamic_shapes, share_weights=share_weights or inplace, precautions=precautions())
