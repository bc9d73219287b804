"""Layers with low-bit candidates: which belong together, what they take, one configuration for all."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.config import AnyConfig, QuantConfig
from nc.modules.layers import memory_of
from nc.nn import QuantEmbedding, QuantLinear
from nc.numerics.packed_weight import parts_of
from nc.planning.layer_plan import WeightPlan
from nc.planning.layer_rules import named_layers, plan_layers
from nc.planning.matching import matches_of
from nc.process.modes import evaluating
from nc.tuning.identity import Call, copied
from nc.tuning.mixed import resolved


def joined(
    model: torch.nn.Module, chosen: Mapping[str, str], candidates: Mapping[str, AnyConfig]
) -> AnyConfig | None:
    """Return one configuration that gives each layer what its candidate gives it.

    The candidate that most layers follow is the outer one; the others become rules by name. None where these
    rules meet other layers too.

    Args:
        model: the float model.
        chosen: layer → name of a candidate.
        candidates: by name.
    """
    counts = {name: sum(each == name for each in chosen.values()) for name in candidates}
    outer = max(counts, key=lambda name: counts[name])
    config = copy.deepcopy(candidates[outer])
    modules = named_layers(model)
    operators = {operator.name: operator for operator in modules.operators}
    by_rule: dict[str, tuple[QuantConfig, list[str]]] = {}
    for layer, option in chosen.items():
        matches = matches_of(operators[layer], candidates[option], None, modules.submodules)
        if option != outer and matches:
            rule = resolved(matches)
            by_rule.setdefault(repr(rule), (rule, []))[1].append(layer)
    for rule, names in by_rule.values():
        config.set_local(list(names), rule)
    plan = plan_layers(config, model, strict=False)
    plans = {name: plan_layers(candidates[name], model, strict=False) for name in set(chosen.values())}
    alike = all(_same(plan, plans[option], layer) for layer, option in chosen.items())
    return config if alike else None


def _same(plan: WeightPlan, other: WeightPlan, layer: str) -> bool:
    """Return whether two plans make the same of a layer."""
    one, two = plan[layer], other[layer]
    return (one.form, one.rule, one.solver, one.act_dtype, one.transforms) == (
        two.form,
        two.rule,
        two.solver,
        two.act_dtype,
        two.transforms,
    )


def weight_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the weight of a layer."""
    weight: torch.Tensor = model.get_submodule(name).weight  # type: ignore[assignment]
    return weight


def size_of_plan(plan: WeightPlan, model: torch.nn.Module, layers: Sequence[str]) -> float:
    """Return the bytes of some layers' weights by a plan."""
    size = 0.0
    for name in layers:
        decision, weight = plan[name], weight_of(model, name)
        if decision.form is None:
            size += weight.numel() * weight.element_size()
        else:
            parts = parts_of(decision.form, decision.shape).values()
            size += sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)
    return size


def stored(module: torch.nn.Module) -> float:
    """Return the bytes of a layer's weight as it is stored."""
    if isinstance(module, (QuantLinear, QuantEmbedding)):
        return module.packed.bytes
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.numel() * weight.element_size()


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of all weights; what shares memory counts once."""
    low_bit = [m for m in model.modules() if isinstance(m, (QuantLinear, QuantEmbedding))]
    inside = {id(t) for m in low_bit for t in (*m.parameters(), *m.buffers())}
    floats = {memory_of(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside}
    packed = {memory_of(part.codes): part.bytes for part in (m.packed for m in low_bit)}
    return sum(t.numel() * t.element_size() for t in floats.values()) + sum(packed.values())


@torch.no_grad()
def groups_of_layers(model: torch.nn.Module, call: Call, layers: Sequence[str]) -> list[list[str]]:
    """Return the layers that read one tensor together, in order; those that are not called stay alone."""
    place: dict[str, Any] = {name: name for name in layers}
    alive = []  # a tensor that is freed would lend its address to another one

    def note(name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            source = next(iter((*args, *kwargs.values())), None)
            if isinstance(source, torch.Tensor):
                alive.append(source)
                place[name] = (source.data_ptr(), source.shape)

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True) for name in layers
    ]
    try:
        args, kwargs = copied(call)
        with evaluating(model):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[Any, list[str]] = {}
    for name in layers:
        found.setdefault(place[name], []).append(name)
    return list(found.values())
