"""resolve(config, graph, capabilities) → Plan: which rule applies to which operator. Pure; needs no data.

Precedence, written here and nowhere else: exact name > pattern (the last one declared wins) > type (the last one declared wins) >
global.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings

from nc.config import KIND_NAMES, Rule, StaticQuantConfig, kind_of
from nc.errors import UnmatchedRuleError, UnmatchedTypeWarning, UnsupportedError
from nc.graph.capture import Graph
from nc.graph.dataflow import useless_adds
from nc.graph.naming import Operator
from nc.plan import Decision, Plan
from nc.spec import FLOAT, Capabilities, OpSpec, OpSupport

_LEVELS = ("type", "pattern", "name")


def resolve(config: StaticQuantConfig, graph: Graph, capabilities: Capabilities, *, strict: bool = True) -> Plan:
    """Decide for every operator.

    Args:
        config: the user's configuration with its local rules.
        graph: the captured model.
        capabilities: what the backend can run.
        strict: a rule whose name matches nothing is an error; False makes it a warning.

    Raises:
        UnmatchedRuleError: a rule's name or pattern matches no operator.
        UnsupportedError: a rule asks an operator for a dtype that the backend lacks; names operator, field and legal values.
    """
    for rule in config.rules:
        _check_matches(rule, graph, strict)
    decisions = [_decide(op, config, capabilities) for op in graph.operators]
    asked = {d.operator for d in decisions if d.spec.quantized}
    # a rule that names the operator or its type asks for it explicitly; only the global default gives way
    explicit = {d.operator for d in decisions if d.rule != "global"}
    useless = useless_adds(graph.module, asked, keep=explicit, fused_add=capabilities.fused_add)
    decisions = [dataclasses.replace(d, spec=FLOAT, reason=useless[d.operator]) if d.operator in useless else d for d in decisions]
    return Plan(decisions=tuple(decisions), backend=capabilities.backend, isa=capabilities.isa)


def _decide(op: Operator, config: StaticQuantConfig, capabilities: Capabilities) -> Decision:
    chosen, label = _rule_for(op, config)
    base = {"operator": op.name, "kind": op.kind, "module_type": op.module_type}
    if not op.quantizable:
        reason = op.reason or "follows its neighbours"
        return Decision(**base, reason=reason)
    if chosen.is_float:
        return Decision(**base, rule=label, reason="fp32 was asked for")
    row = capabilities.row(op.kind)
    if row is None:
        return Decision(**base, rule=label, reason=_no_kernel(op.kind, capabilities))
    spec = chosen.spec()
    _check_dtype(op.name, spec, row, label, capabilities)
    if not row.weights:
        spec = dataclasses.replace(spec, weight=None)
    return Decision(**base, spec=_reduced(spec, op.kind, capabilities), rule=label)


def fit(plan: Plan, capabilities: Capabilities) -> Plan:
    """The plan for another backend than the one it was made for; the same calibration serves both.

    Raises:
        UnsupportedError: an operator's activation dtype has no kernel there.
    """
    if plan.backend == capabilities.backend:
        return plan
    decisions = []
    for d in plan.decisions:
        row = capabilities.row(d.kind)
        if not d.spec.quantized:
            decisions.append(d)
        elif row is None:
            decisions.append(dataclasses.replace(d, spec=FLOAT, reason=_no_kernel(d.kind, capabilities)))
        else:
            _check_dtype(d.operator, d.spec, row, d.rule, capabilities)
            decisions.append(dataclasses.replace(d, spec=_reduced(d.spec, d.kind, capabilities)))
    return Plan(decisions=tuple(decisions), backend=capabilities.backend, isa=capabilities.isa)


def _no_kernel(kind: str, capabilities: Capabilities) -> str:
    return f"backend {capabilities.backend!r} has no int8 kernel for {kind}"


def _check_dtype(operator: str, spec: OpSpec, row: OpSupport, rule: str, capabilities: Capabilities) -> None:
    if spec.activation is not None and spec.activation.dtype not in row.activations:
        msg = (
            f"Operator {operator!r} ({row.kind}): act_dtype={spec.activation.dtype!r} (rule: {rule}) has no kernel on backend "
            f"{capabilities.backend!r}; legal there: {', '.join(row.activations)}."
        )
        raise UnsupportedError(msg)


def _reduced(spec: OpSpec, kind: str, capabilities: Capabilities) -> OpSpec:
    """7 bits for the right-hand side where this CPU needs it."""
    if spec.activation is None or (kind, spec.activation.dtype) not in capabilities.seven_bit:
        return spec
    if spec.weight is not None:
        return dataclasses.replace(spec, weight=dataclasses.replace(spec.weight, reduce_range=True))
    return dataclasses.replace(spec, right=dataclasses.replace(spec.activation, reduce_range=True))


def _rule_for(op: Operator, config: StaticQuantConfig) -> tuple[StaticQuantConfig, str]:
    best: tuple[int, StaticQuantConfig, str] = (-1, config, "global")
    for rule in config.rules:
        level = match_level(rule, op)
        if level is not None and _LEVELS.index(level) >= best[0]:
            best = (_LEVELS.index(level), rule.config, f"{level} {rule.key!r}")
    return best[1], best[2]


def match_level(rule: Rule, op: Operator) -> str | None:
    """How a rule matches an operator: "name", "pattern", "type", or None when it does not."""
    if not rule.is_type and rule.key in (op.name, op.module_name):
        return "name"
    if _matches_type(rule.key, op):
        return "type"
    if not rule.is_type and re.fullmatch(rule.key, op.name):
        return "pattern"
    return None


def _matches_type(key: str, op: Operator) -> bool:
    kind = kind_of(key)
    if kind is not None:
        return kind == op.kind
    return key == op.kind or key in (op.module_type, op.module_type.rpartition(".")[2])


def _check_matches(rule: Rule, graph: Graph, strict: bool) -> None:
    if any(match_level(rule, op) for op in graph.operators):
        return
    if rule.is_type or kind_of(rule.key) is not None:
        types = sorted({KIND_NAMES[op.kind][0] for op in graph.operators if op.kind in KIND_NAMES})
        text = f"Rule for type {rule.key!r} matches no operator of this model; its types: {', '.join(types)}."
        warnings.warn(text, UnmatchedTypeWarning, stacklevel=4)
        return
    names = [op.name for op in graph.operators]
    if rule.key in graph.submodules:
        pattern = re.escape(rule.key) + r"\..*"
        inside = sum(name.startswith(f"{rule.key}.") for name in names)
        hint = f"It is a module with {inside} operators inside; to mean all of them write {pattern!r}."
    else:
        near = difflib.get_close_matches(rule.key, names, n=3, cutoff=0.0)
        hint = f"The closest names: {', '.join(near)}. describe(model, config, example_inputs) lists all."
    text = f"Rule {rule.key!r} matches no operator of this model. {hint}"
    if strict:
        raise UnmatchedRuleError(text)
    warnings.warn(text, UnmatchedTypeWarning, stacklevel=4)
