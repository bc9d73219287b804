"""From a model and what is asked of it to a model under calibration."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from nc.algorithms import in_order, steps
from nc.algorithms.base import Algorithm
from nc.api.auto.prepared import PreparedAuto
from nc.api.preparation.base import Preparation
from nc.api.preparation.captured import PreparedModel
from nc.api.preparation.combined import PreparedCombined
from nc.api.preparation.weights import PreparedWeights
from nc.api.quantized import as_call
from nc.backends import choose_backend, first_that_can, get_backend, precautions
from nc.backends.auto_order import kind_of_graph
from nc.backends.base import Backend
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.capture.capture import Graph, capture
from nc.config import AnyConfig, SmoothQuantConfig, has_weight_only, is_weight_only, outer_field, with_rules
from nc.config.auto import AutoConfig
from nc.errors import InputError
from nc.export import ExportedModel
from nc.graph.catalogue import kind_of_node
from nc.graph.plan import Plan
from nc.graph.products import unknown_products, unknown_text
from nc.modules.layers import has_low_bit
from nc.planning.layer_plan import WeightPlan, others_text
from nc.planning.layer_rules import name_low_bit, plan_layers, with_low_bit
from nc.planning.matching import check_rules
from nc.planning.nothing import nothing_quantized
from nc.planning.rules import decide
from nc.planning.simulated import that_simulates
from nc.process.lock import LOCK
from nc.process.warn import warn
from nc.profiling.own_model import OwnModel
from nc.weights.experts import separated


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of `nc.prepare` beside the model; its docstring says what they mean."""

    config: AnyConfig
    inplace: bool
    example_inputs: Any
    backend: str
    dynamic_shapes: Any
    strict: bool
    placement: str


def preparation(model: torch.nn.Module, asked: Request) -> Preparation:
    """Return the model under calibration: its layers alone, a captured graph, or both in sequence."""
    if is_weight_only(asked.config):
        return _layers(model, asked)
    if has_weight_only(asked.config) and not has_low_bit(model):
        return _layers_then_graph(model, asked)
    return _graph(model, asked)


def plan_of(model: torch.nn.Module, asked: Request) -> Plan | WeightPlan:
    """Return the plan that `preparation` would make."""
    config = asked.config
    if is_weight_only(config):
        return plan_layers(config, separated(model), strict=asked.strict)
    choose_backend(that_simulates(asked.backend, config))  # refused before the work, not after it
    graph = _captured(model, asked, share_weights=True)
    plan, _, _ = _decided(graph, model, asked)
    if has_weight_only(config) and not has_low_bit(model):
        plan = name_low_bit(plan, plan_layers(config, model, check=False))
    return _with_algorithms(plan, config)[0]


def _layers(model: torch.nn.Module, asked: Request) -> PreparedWeights:
    """Return the preparation of a weight-only configuration."""
    _warn_of_training(model, inplace=asked.inplace)
    low_bit_engine(asked.backend)
    layers = plan_layers(asked.config, separated(model), strict=asked.strict)
    _warn_of_float_weights(layers)
    stacks = {d.operator.rpartition(".")[0] for d in layers.quantized}
    model = separated(
        model, inplace=asked.inplace, names=stacks
    )  # not before: an error leaves the model as it is
    return PreparedWeights(model, layers, asked.config, inplace=asked.inplace, asked=asked.backend)


def _layers_then_graph(model: torch.nn.Module, asked: Request) -> PreparedCombined | PreparedModel:
    """Return the preparation of a configuration that is weight-only in part."""
    low_bit = PreparedWeights(
        model, plan_layers(asked.config, model, check=False), asked.config, inplace=asked.inplace
    )
    if not low_bit.plan.quantized:
        return _graph(model, asked)
    if not low_bit.plan.needs_data:
        return _graph(low_bit.quantized(), asked)
    return PreparedCombined(low_bit, functools.partial(_graph, asked=asked))


def _graph(model: torch.nn.Module, asked: Request) -> PreparedModel:
    """Return the preparation of a captured model."""
    engine = choose_backend(that_simulates(asked.backend, asked.config))
    engine.start()
    graph = _captured(model, asked, share_weights=asked.inplace)
    prepared = _of_graph(graph, model, asked)
    _refuse_nothing(prepared.plan, asked.config, strict=asked.strict)
    _warn_of_unknown_products(prepared.plan)
    if asked.inplace:
        model.eval()
    return prepared


def _of_graph(graph: Graph, model: torch.nn.Module, asked: Request) -> PreparedModel:
    """Return the preparation of a graph; nothing is said of a plan that quantizes nothing."""
    plan, name, failed = _decided(graph, model, asked)
    engine = get_backend(name)
    engine.start()
    plan, algorithms = _with_algorithms(plan, asked.config)
    return PreparedModel(
        graph,
        plan,
        engine.capabilities(),
        name,
        asked.config,
        algorithms,
        asked=asked.backend,
        failed=failed,
        own=_own(model, asked),
    )


def _own(model: torch.nn.Module, asked: Request) -> OwnModel | None:
    """Return the user's model, to be timed."""
    return None if isinstance(model, ExportedModel) else OwnModel(model, *as_call(asked.example_inputs))


def automatic(
    model: torch.nn.Module,
    config: AutoConfig,
    asked: Request,
    others: Mapping[str, AnyConfig] | None = None,
) -> PreparedAuto:
    """Return the preparation of a model whose configuration is chosen by measurement; `asked` has none.

    `others` are configurations whose preparations share its calibration.
    """
    choose_backend(asked.backend).start()
    graph = _captured(model, asked, share_weights=asked.inplace)

    def make(candidate: AnyConfig) -> PreparedModel:
        return _of_graph(graph, model, dataclasses.replace(asked, config=candidate, strict=False))

    kinds = {kind for kind in map(kind_of_node, graph.module.graph.nodes) if kind is not None}
    prepared = PreparedAuto(graph, config, make, frozenset(kinds), _own(model, asked), others)
    first = next(iter(prepared.models.values()))
    _refuse_nothing(first.plan, first.quant_config, strict=asked.strict)
    _warn_of_unknown_products(first.plan)
    if asked.inplace:
        model.eval()
    return prepared


def _captured(model: torch.nn.Module, asked: Request, *, share_weights: bool) -> Graph:
    """Return the graph of a model.

    Raises:
        InputError: a part of it is TorchScript.
    """
    if isinstance(model, ExportedModel):
        return model.own_graph()
    script = next(
        (name or "The model" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)),
        None,
    )
    if script is not None:
        msg = (
            f"{script} is TorchScript, which can't be captured; call prepare() with the torch.nn.Module that "
            "it was made from."
        )
        raise InputError(msg)
    with LOCK:  # capture in another thread switches the same flags for a while
        _warn_of_training(model, inplace=asked.inplace)
        return capture(
            model,
            asked.example_inputs,
            asked.dynamic_shapes,
            share_weights=share_weights,
            precautions=precautions(),
        )


def _decided(graph: Graph, model: torch.nn.Module, asked: Request) -> tuple[Plan, str, dict[str, str]]:
    """Return the plan, the name of its backend, and the others that "auto" passed over, and why."""
    check_rules(asked.config, with_low_bit(graph, model), strict=asked.strict)
    backend, kind = that_simulates(asked.backend, asked.config), kind_of_graph(graph.module)
    first = choose_backend(backend, kind).name

    def attempt(engine: Backend) -> Plan:
        return decide(asked.config, graph, engine.capabilities(), asked.placement)

    return first_that_can(backend, first, attempt, model=kind)


def _with_algorithms(plan: Plan, config: AnyConfig) -> tuple[Plan, tuple[Algorithm, ...]]:
    """Return the plan with its algorithms as part of it, and as objects."""
    smooths = any(isinstance(each, SmoothQuantConfig) for each in with_rules(config))
    algorithms = in_order(plan, outer_field(config, "pre"), outer_field(config, "post"), smooths=smooths)
    return dataclasses.replace(plan, algorithms=steps(algorithms)), algorithms


def _refuse_nothing(plan: Plan, config: AnyConfig, *, strict: bool) -> None:
    """Raise, or warn, where a plan quantizes nothing."""
    nothing = nothing_quantized(plan, config)
    if nothing is not None and strict and nothing.error is not None:
        msg = f"{nothing.text} strict=False makes this error a warning."
        raise nothing.error(msg)
    if nothing is not None:
        warn(nothing.text)


def _warn_of_float_weights(plan: WeightPlan) -> None:
    """Most of a model, or all of it, stays float: users would take it for quantized."""
    count, others = (
        sum(math.prod(shape) for shape in shapes)
        for shapes in ([d.shape for d in plan.quantized], [s for _, s in plan.others])
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
        msg = (
            f"Most weights of this model stay as they are. {unknown_text(products)}. nc.WeightOnlyConfig "
            "quantizes stacked experts."
        )
        warn(msg)


def _warn_of_training(model: torch.nn.Module, *, inplace: bool) -> None:
    if any(m.training for m in model.modules()):
        flags = "it stays in eval mode, because inplace=True" if inplace else "its own flags do not change"
        warn(f"The model is in training mode; it is quantized as in eval mode, and {flags}.")
