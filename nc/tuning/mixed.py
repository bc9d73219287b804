"""One configuration for a model whose operators follow different candidates."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping, Sequence

from nc.capture.capture import Graph
from nc.capture.naming import Operator
from nc.config import AnyConfig, QuantConfig, SmoothQuantConfig, StaticQuantConfig
from nc.formats import Capabilities
from nc.formats.rule_key import ParsedKey, parse_keys
from nc.graph.plan import Plan
from nc.planning.matching import Match, match_level, matches_of, merged

#: Name of the option that leaves operators alone.
FP32 = "fp32"


def float_config() -> StaticQuantConfig:
    """Return the configuration that leaves the whole model in fp32."""
    return StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")


def bf16_config() -> StaticQuantConfig:
    """Return the configuration that computes the whole model in bf16."""
    return StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCandidate:
    """What a candidate makes of a model.

    Attributes:
        config: the candidate.
        plan: its decisions.
        capabilities: of the engine that it is planned for.
    """

    config: AnyConfig
    plan: Plan
    capabilities: Capabilities


def mixed(graph: Graph, chosen: Mapping[str, str], options: Mapping[str, PlannedCandidate]) -> AnyConfig:
    """Return a configuration that gives each operator what one of the candidates gives it.

    The candidate that most operators follow is the outer one, whose algorithms apply; the others become rules
    by name.

    Args:
        graph: the captured model.
        chosen: operator → name of an option, or `FP32`.
        options: by name.
    """
    counts = collections.Counter(chosen.values())
    outer = max(options, key=lambda name: counts[name])
    config = copy.deepcopy(options[outer].config)
    operators = {each.name: each for each in graph.operators}
    ruled = [name for name, option in chosen.items() if option != outer]
    keys = parse_keys(ruled) if ruled else ()
    # a name may be a type's or a pattern too ("matmul", "a.b"): what it meets of the others gets its own rule
    ruled += [name for name in chosen if name not in ruled and _is_met(operators[name], keys, graph)]
    by_rule: dict[str, tuple[QuantConfig, list[str]]] = {}
    for name in ruled:
        option = chosen[name]
        rule = float_config() if option == FP32 else _rule(graph, operators[name], options[option])
        by_rule.setdefault(repr(rule), (rule, []))[1].append(name)
    for rule, names in by_rule.values():
        config.set_local(list(names), rule)
    return config


def _is_met(operator: Operator, keys: Sequence[ParsedKey], graph: Graph) -> bool:
    """Return whether one of the keys of rules matches an operator."""
    modules = frozenset(graph.submodules)
    return any(match_level(key, operator, modules) is not None for key in keys)


def _rule(graph: Graph, operator: Operator, option: PlannedCandidate) -> QuantConfig:
    """Return what a candidate says of an operator, with all fields, so that no other rule adds to it."""
    decision = option.plan[operator.name]
    if decision.spec.bf16:
        return bf16_config()
    if not decision.spec.quantized:
        return float_config()
    row = option.capabilities.row(operator.kind)
    matches = matches_of(operator, option.config, row, frozenset(graph.submodules))
    return resolved(matches, smooths=decision.spec.smooth is not None)


def resolved(matches: list[Match], *, smooths: bool = True) -> QuantConfig:
    """Return what a configuration says of an operator, from the rules that match it, the strongest first.

    Without `smooths` it is one that a candidate for SmoothQuant leaves as it is.
    """
    values, _ = merged(matches)
    kind = type(matches[0].config)
    if kind is SmoothQuantConfig and not smooths:
        kind = StaticQuantConfig
    fields = (name for name, field in kind.FIELDS.items() if name in values and not field.outer)
    return kind(**{name: values[name] for name in fields})
