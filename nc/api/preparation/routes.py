"""The routes from a model to a model under calibration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nc.api.auto.prepared import PreparedAuto
from nc.api.preparation.base import Preparation
from nc.api.preparation.captured import PreparedModel
from nc.api.preparation.combined import PreparedCombined
from nc.api.preparation.graphs import (
    Request,
    captured,
    decided,
    own_model,
    refuse_nothing,
    warn_of_training,
    warn_of_unknown_products,
    with_algorithms,
)
from nc.api.preparation.weights import PreparedWeights, warn_of_float_weights
from nc.backends import choose_backend, get_backend
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.capture.capture import Graph
from nc.config import AnyConfig, has_weight_only, is_weight_only
from nc.config.auto import AutoConfig
from nc.graph.catalogue import kind_of_node
from nc.graph.plan import Plan
from nc.modules.layers import has_low_bit
from nc.planning.layer_plan import WeightPlan
from nc.planning.layer_rules import name_low_bit, plan_layers
from nc.planning.simulated import that_simulates
from nc.weights.experts import separated


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One route from a model to a model under calibration. Both functions take the configuration, too.

    Attributes:
        prepare: returns the model under calibration.
        plan: returns the plan that it would have; needs no data, and changes nothing.
    """

    prepare: Callable[[torch.nn.Module, Any, Request], Preparation]
    plan: Callable[[torch.nn.Module, Any, Request], Plan | WeightPlan]


def route_of(model: torch.nn.Module, config: AnyConfig | AutoConfig) -> Route:
    """Return the route of a model with a configuration."""
    if isinstance(config, AutoConfig):
        return Route(automatic, lambda *asked: automatic(*asked).plan)
    if is_weight_only(config):
        return Route(_layers, _plan_of_layers)
    if has_weight_only(config) and not has_low_bit(model):
        return Route(_layers_then_graph, _plan_of_both)
    return Route(_graph, _plan_of_graph)


def prepared_by(model: torch.nn.Module, config: AnyConfig | AutoConfig, asked: Request) -> Preparation:
    """Return the model under calibration, by its route."""
    return route_of(model, config).prepare(model, config, asked)


def _layers(model: torch.nn.Module, config: AnyConfig, asked: Request) -> PreparedWeights:
    """Return the preparation of a weight-only configuration."""
    warn_of_training(model, inplace=asked.inplace)
    low_bit_engine(asked.backend)
    layers = _plan_of_layers(model, config, asked)
    warn_of_float_weights(layers)
    stacks = {d.operator.rpartition(".")[0] for d in layers.quantized}
    model = separated(
        model, inplace=asked.inplace, names=stacks
    )  # not before: an error leaves the model as it is
    return PreparedWeights(model, layers, config, inplace=asked.inplace, asked=asked.backend)


def _layers_then_graph(
    model: torch.nn.Module, config: AnyConfig, asked: Request
) -> PreparedCombined | PreparedModel:
    """Return the preparation of a configuration that is weight-only in part."""
    low_bit = PreparedWeights(model, plan_layers(config, model, check=False), config, inplace=asked.inplace)
    if not low_bit.plan.quantized:
        return _graph(model, config, asked)
    if not low_bit.plan.needs_data:
        return _graph(low_bit.quantized(), config, asked)
    return PreparedCombined(low_bit, functools.partial(_graph, config=config, asked=asked))


def _plan_of_layers(model: torch.nn.Module, config: AnyConfig, asked: Request) -> WeightPlan:
    """Return the plan of a weight-only configuration."""
    return plan_layers(config, separated(model), strict=asked.strict)


def _plan_of_graph(model: torch.nn.Module, config: AnyConfig, asked: Request) -> Plan:
    """Return the plan of a captured model."""
    return with_algorithms(_plan(model, config, asked), config)[0]


def _plan_of_both(model: torch.nn.Module, config: AnyConfig, asked: Request) -> Plan:
    """Return the plan of a captured model that names its low-bit layers."""
    plan = name_low_bit(_plan(model, config, asked), plan_layers(config, model, check=False))
    return with_algorithms(plan, config)[0]


def _plan(model: torch.nn.Module, config: AnyConfig, asked: Request) -> Plan:
    choose_backend(that_simulates(asked.backend, config))  # refused before the work, not after it
    plan, _, _ = decided(captured(model, asked, share_weights=True), model, config, asked)
    return plan


def _graph(model: torch.nn.Module, config: AnyConfig, asked: Request) -> PreparedModel:
    """Return the preparation of a captured model."""
    engine = choose_backend(that_simulates(asked.backend, config))
    engine.start()
    graph = captured(model, asked, share_weights=asked.inplace)
    prepared = _of_graph(graph, model, config, asked)
    refuse_nothing(prepared.plan, config, strict=asked.strict)
    warn_of_unknown_products(prepared.plan)
    if asked.inplace:
        model.eval()
    return prepared


def _of_graph(graph: Graph, model: torch.nn.Module, config: AnyConfig, asked: Request) -> PreparedModel:
    """Return the preparation of a graph; nothing is said of a plan that quantizes nothing."""
    plan, name, failed = decided(graph, model, config, asked)
    engine = get_backend(name)
    engine.start()
    plan, algorithms = with_algorithms(plan, config)
    return PreparedModel(
        graph,
        plan,
        engine.capabilities(),
        name,
        config,
        algorithms,
        asked=asked.backend,
        failed=failed,
        own=own_model(model, asked),
    )


def automatic(
    model: torch.nn.Module,
    config: AutoConfig,
    asked: Request,
    others: Mapping[str, AnyConfig] | None = None,
) -> PreparedAuto:
    """Return the preparation of a model whose configuration is chosen by measurement.

    `others` are configurations whose preparations share its calibration.
    """
    choose_backend(asked.backend).start()
    graph = captured(model, asked, share_weights=asked.inplace)

    def make(candidate: AnyConfig) -> PreparedModel:
        return _of_graph(graph, model, candidate, dataclasses.replace(asked, strict=False))

    kinds = {kind for kind in map(kind_of_node, graph.module.graph.nodes) if kind is not None}
    prepared = PreparedAuto(graph, config, make, frozenset(kinds), own_model(model, asked), others)
    first = next(iter(prepared.models.values()))
    refuse_nothing(first.plan, first.quant_config, strict=asked.strict)
    warn_of_unknown_products(first.plan)
    if asked.inplace:
        model.eval()
    return prepared
