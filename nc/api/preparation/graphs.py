"""From a model to its graph, its plan and the engine that takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nc.algorithms import in_order, steps
from nc.algorithms.base import Algorithm
from nc.api.quantized import as_call
from nc.backends import choose_backend, first_that_can, precautions
from nc.backends.auto_order import kind_of_graph
from nc.backends.base import Backend
from nc.capture.capture import Graph, capture
from nc.config import AnyConfig, SmoothQuantConfig, outer_field, with_rules
from nc.errors import InputError
from nc.export import ExportedModel
from nc.graph.plan import INPUTS, Plan
from nc.graph.products import unknown_products, unknown_text
from nc.planning.layer_rules import with_low_bit
from nc.planning.matching import check_rules
from nc.planning.nothing import nothing_quantized
from nc.planning.rules import decide
from nc.planning.simulated import that_simulates
from nc.process.lock import LOCK
from nc.process.warn import warn
from nc.profiling.own_model import OwnModel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of `nc.prepare` beside model and configuration; its docstring says what they mean."""

    inplace: bool = False
    example_inputs: Any = None
    backend: str = "auto"
    dynamic_shapes: Any = None
    strict: bool = True
    placement: str = INPUTS


def own_model(model: torch.nn.Module, asked: Request) -> OwnModel | None:
    """Return the user's model, to be timed."""
    return None if isinstance(model, ExportedModel) else OwnModel(model, *as_call(asked.example_inputs))


def captured(model: torch.nn.Module, asked: Request, *, share_weights: bool) -> Graph:
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
        warn_of_training(model, inplace=asked.inplace)
        return capture(
            model,
            asked.example_inputs,
            asked.dynamic_shapes,
            share_weights=share_weights,
            precautions=precautions(),
        )


def decided(
    graph: Graph, model: torch.nn.Module, config: AnyConfig, asked: Request
) -> tuple[Plan, str, dict[str, str]]:
    """Return the plan, the name of its backend, and the others that "auto" passed over, and why."""
    check_rules(config, with_low_bit(graph, model), strict=asked.strict)
    backend, kind = that_simulates(asked.backend, config), kind_of_graph(graph.module)
    first = choose_backend(backend, kind).name

    def attempt(engine: Backend) -> Plan:
        return decide(config, graph, engine.capabilities(), asked.placement)

    return first_that_can(backend, first, attempt, model=kind)


def with_algorithms(plan: Plan, config: AnyConfig) -> tuple[Plan, tuple[Algorithm, ...]]:
    """Return the plan with its algorithms as part of it, and as objects."""
    smooths = any(isinstance(each, SmoothQuantConfig) for each in with_rules(config))
    algorithms = in_order(plan, outer_field(config, "pre"), outer_field(config, "post"), smooths=smooths)
    return dataclasses.replace(plan, algorithms=steps(algorithms)), algorithms


def refuse_nothing(plan: Plan, config: AnyConfig, *, strict: bool) -> None:
    """Raise, or warn, where a plan quantizes nothing."""
    nothing = nothing_quantized(plan, config)
    if nothing is not None and strict and nothing.error is not None:
        msg = f"{nothing.text} strict=False makes this error a warning."
        raise nothing.error(msg)
    if nothing is not None:
        warn(nothing.text)


def warn_of_unknown_products(plan: Plan) -> None:
    """Warn where most weights of a captured model are in products that nc does not know."""
    products = unknown_products(plan)
    if 2 * sum(product.size for product in products) > sum(plan.shares.weights.values()):
        msg = (
            f"Most weights of this model stay as they are. {unknown_text(products)}. nc.WeightOnlyConfig "
            "quantizes stacked experts."
        )
        warn(msg)


def warn_of_training(model: torch.nn.Module, *, inplace: bool) -> None:
    """Warn of a model in training mode."""
    if any(m.training for m in model.modules()):
        flags = "it stays in eval mode, because inplace=True" if inplace else "its own flags do not change"
        warn(f"The model is in training mode; it is quantized as in eval mode, and {flags}.")
