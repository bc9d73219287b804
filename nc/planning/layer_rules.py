"""Rules for weight-only quantization: a configuration and a model's modules → a `WeightPlan`.

No data, no capture.

Precedence is that of `nc.planning.matching`; here the operators are modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from nc.algorithms.transforms import Transform
from nc.capture.naming import Operator
from nc.config import AnyConfig, WeightOnlyConfig, outer_field, parts_of, weight_format
from nc.errors import ConfigError, InputError
from nc.formats import FLOAT, TensorFormat
from nc.formats.reasons import WHITE_LIST, Cause, Level, Reason
from nc.graph.plan import Plan
from nc.modules.layers import Layer, has_low_bit, is_low_bit, layers_of, other_weights, readable
from nc.nn import QuantLinear
from nc.planning.layer_plan import LayerDecision, WeightPlan
from nc.planning.matching import Named, check_rules, matches_of, merged


@dataclasses.dataclass(frozen=True, slots=True)
class Modules:
    """A model's layers as operators that rules can match.

    Attributes:
        operators: one per linear and embedding.
        submodules: names of all modules.
    """

    operators: tuple[Operator, ...]
    submodules: frozenset[str]


def named_layers(model: torch.nn.Module) -> Modules:
    """Return a model's layers as operators that rules can match."""
    return Modules(
        tuple(map(_operator, layers_of(model))), frozenset(name for name, _ in model.named_modules())
    )


def with_low_bit(graph: Named, model: torch.nn.Module) -> Named:
    """Return what rules can match in a captured model.

    These are its operators, and the modules whose weights are in few bits already.
    """
    found = {name: module for name, module in model.named_modules() if is_low_bit(module)}
    if not found:
        return graph
    kinds = {
        name: "linear" if isinstance(module, QuantLinear) else "embedding" for name, module in found.items()
    }
    operators = [Operator(name, name, kind, "", "", quantizable=True) for name, kind in kinds.items()]
    return Modules((*graph.operators, *operators), frozenset(graph.submodules))


def name_low_bit(plan: Plan, layers: WeightPlan) -> Plan:
    """Return the plan of a captured float model, in which layers that will get low-bit weights say so."""
    forms = {d.operator: str(d.form) for d in layers.quantized}
    named = tuple(
        dataclasses.replace(d, spec=FLOAT, why=Cause.LOW_BIT(dtype=forms[d.operator]))
        if d.operator in forms
        else d
        for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=named)


def plan_layers(
    config: AnyConfig, model: torch.nn.Module, *, strict: bool = True, check: bool = True
) -> WeightPlan:
    """Decide for every linear and embedding.

    Args:
        config: any; layers that a rule gives to another strategy than `WeightOnlyConfig` stay float here.
        model: the float model.
        strict: raise if a rule's name or pattern matches nothing; False gives a warning.
        check: False leaves out that check.

    Raises:
        UnmatchedRuleError: a rule matches nothing.
        ConfigError: values contradict each other, or groups do not cover a layer; names the layer and sizes
            that do.
        InputError: a weight that is to be quantized holds NaN or infinite values, or no layer can be
            quantized.
    """
    model = readable(model)
    layers = layers_of(model)
    modules = named_layers(model)
    named = {op.name: op for op in modules.operators}
    if check:
        check_rules(config, modules, strict=strict)
    if any(not layer.name for layer in layers):
        msg = (
            f"The model is itself a {type(model).__name__}, which can't be replaced inside of anything. Give "
            "torch.nn.Sequential(model)."
        )
        raise InputError(msg)
    if not layers and has_low_bit(model):
        count = sum(map(is_low_bit, model.modules()))
        msg = (
            f"All linears and embeddings of the model ({count}) have low-bit weights already; call prepare() "
            "with the float model."
        )
        raise InputError(msg)
    if not layers:
        msg = (
            "The model has no torch.nn.Linear, Conv1D (transformers) or torch.nn.Embedding; weight-only "
            "quantization is for these."
        )
        raise InputError(msg)
    decisions = [_decide(layer, named[layer.name], config, modules.submodules) for layer in layers]
    _check_groups(decisions)
    for decision, layer in zip(decisions, layers, strict=True):
        here = (
            decision.form is not None and not layer.weight.is_meta
        )  # solvers look at those that are loaded later
        if here and not bool(layer.weight.isfinite().all()):
            msg = (
                f"'{layer.name}.weight' holds NaN or infinite values, which have no codes. Repair it, or "
                f"leave the layer alone: config.exclude({layer.name!r})."
            )
            raise InputError(msg)
    return WeightPlan(
        decisions=tuple(decisions), transforms=_transforms(decisions, config), others=other_weights(model)
    )


def _transforms(decisions: Iterable[LayerDecision], config: AnyConfig) -> tuple[Transform, ...]:
    """Return the transforms that the plan uses: those of the outer configuration in its order, then others.

    A transform of the outer configuration is used if it is for whole models or a layer asks for it.
    """
    asked = dict.fromkeys(t for d in decisions if d.form is not None for t in d.transforms)
    outer = [t for t in outer_field(config, "transforms") if t.level == "model" or t in asked]
    return tuple(dict.fromkeys((*outer, *asked)))


def _operator(layer: Layer) -> Operator:
    return Operator(layer.name, layer.name, layer.kind, layer.module_type, "", layer.why is None, layer.why)


def _decide(layer: Layer, op: Operator, config: AnyConfig, modules: frozenset[str]) -> LayerDecision:
    base: dict[str, Any] = {
        "operator": layer.name,
        "kind": layer.kind,
        "module_type": layer.module_type,
        "shape": layer.shape,
    }
    matches = matches_of(op, config, None, modules)
    if layer.why is not None:
        return LayerDecision(**base, why=layer.why)
    if not matches:
        return LayerDecision(**base, decided=WHITE_LIST, why=Cause.NOT_LISTED())
    chosen = matches[0]
    base["decided"] = chosen.rule
    if not isinstance(chosen.config, WeightOnlyConfig):
        return LayerDecision(**base, why=Cause.OTHER_STRATEGY(strategy=type(chosen.config).__name__))
    if chosen.config.is_float:
        return LayerDecision(**base, why=Cause.ASKED(dtype=chosen.config.w_dtype))
    named = chosen.rule.level in (Level.NAME, Level.PATTERN) or (
        layer.kind == "embedding" and chosen.rule.level is Level.TYPE
    )
    dtype_name, why = _own_dtype(layer, config, named=named)
    if why is not None:
        return LayerDecision(**base, why=why)
    values, sources = merged(matches)
    base["fields"] = tuple((name, str(values[name]), source) for name, source in sources.items())
    try:
        form = weight_format(values, dtype_name)
    except ConfigError as error:
        msg = f"Layer {layer.name!r} (rule: {chosen.rule}): {error}"
        raise ConfigError(msg) from error
    base["transforms"] = tuple(t for t in values["transforms"] if t.level != "model")
    return LayerDecision(
        **base, form=form, rule=values["w_algo"], solver=values["solver"], act_dtype=values["act_dtype"]
    )


def _own_dtype(layer: Layer, config: AnyConfig, *, named: bool) -> tuple[str | None, Reason | None]:
    """Return the dtype that `lm_head` or `embedding` gives a layer, and why it stays float if they give none.

    A rule that names it wins.
    """
    field = "lm_head" if layer.head else "embedding" if layer.kind == "embedding" else None
    if field is None or named:
        return None, None
    asked = next(
        (
            getattr(part, field)
            for part in parts_of(config)
            if isinstance(part, WeightOnlyConfig) and getattr(part, field)
        ),
        None,
    )
    return asked, None if asked else Cause.OUTPUT_HEAD() if layer.head else Cause.EMBEDDING()


def _check_groups(decisions: Iterable[LayerDecision]) -> None:
    """Raise ConfigError if a group size does not divide the input channels of a layer.

    The error names the size that fits all layers.
    """
    asked = [d for d in decisions if d.form is not None]
    wrong = [
        d for d in asked if d.form is not None and d.form.group_size != -1 and d.shape[1] % d.form.group_size
    ]
    if not wrong:
        return
    first = wrong[0]
    form: TensorFormat = first.form  # type: ignore[assignment]
    same = [d for d in asked if d.form is not None and d.form.group_size == form.group_size]
    fits = max(size for size in range(1, form.group_size) if all(d.shape[1] % size == 0 for d in same))
    try:
        form.group(first.shape[1])
    except ConfigError as error:
        others = f" (and of {len(wrong) - 1} others)" if len(wrong) > 1 else ""
        whole = (
            f" group_size={fits} fits all layers; group_size=-1 gives one scale per output channel."
            if fits >= 8
            else ""
        )
        rule = f"config.set_local({first.operator!r}, WeightOnlyConfig(group_size=…))"
        msg = f"Layer {first.operator!r}{others}, rule {first.decided}: {error}{whole} For one layer: {rule}."
        raise ConfigError(msg) from error
