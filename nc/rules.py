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
from nc.spec import FLOAT, Capabilities

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
    useless = useless_adds(graph.module, asked, keep=explicit)
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
        return Decision(**base, rule=label, reason=f"backend {capabilities.backend!r} has no int8 kernel for {op.kind}")
    spec = chosen.spec(reduce_range=capabilities.reduce_range)
    if spec.activation is not None and spec.activation.dtype not in row.activations:
        msg = (
            f"Operator {op.name!r} ({op.kind}): act_dtype={spec.activation.dtype!r} (rule: {label}) has no kernel on backend "
            f"{capabilities.backend!r}; legal there: {', '.join(row.activations)}."
        )
        raise UnsupportedError(msg)
    return Decision(**base, spec=spec if row.weights else dataclasses.replace(spec, weight=None), rule=label)


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
