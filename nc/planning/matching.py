"""Which rules match an operator, and which of them wins. Needs names and types only, no data.

Precedence is defined in this module only: exact name > pattern > type > global. Of two patterns, or two
types, the one declared last wins. A field that the most specific rule does not set takes its value from the
next rule of the same family of strategies. If no rule sets it, it has its default.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from nc.capture.naming import Operator
from nc.config import AnyConfig, QuantConfig, parts_of
from nc.errors import UnmatchedRuleError, UnmatchedTypeWarning
from nc.formats import OpSupport
from nc.formats.reasons import DecidingRule, Level
from nc.formats.rule_key import KIND_NAMES, ParsedKey, fused_names, glob_pattern, kind_of
from nc.graph.catalogue import CONVOLUTIONS
from nc.process.warn import warn

#: The source of a field that no rule sets.
DEFAULT = "default"
#: Kinds with ranges found in each call only where a rule asks for them, by type or name.
_ONLY_NAMED = frozenset({*CONVOLUTIONS, "matmul"})


class Named(Protocol):
    """What rules are checked against: a captured graph, or a model's own modules."""

    @property
    def operators(self) -> Sequence[Operator]:
        """What rules can match."""
        ...

    @property
    def submodules(self) -> Collection[str]:
        """Names of all modules."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A rule or configuration that matches an operator.

    Attributes:
        rule: level and key of the rule.
        config: its configuration.
    """

    rule: DecidingRule
    config: QuantConfig


def check_rules(config: AnyConfig, graph: Named, *, strict: bool = True) -> None:
    """Check a configuration against a model, whatever the backend.

    Args:
        config: the user's configuration with its local rules.
        graph: the captured model.
        strict: a rule whose name matches nothing is an error; False makes it a warning.

    Raises:
        UnmatchedRuleError: a rule's name or pattern matches no operator.
        ConfigError: values that contradict each other.
    """
    for part in parts_of(config):
        for each in (part, *(rule.config for rule in part.rules)):
            each.check_values({**each.defaults(), **each.given})
        for key in (*(part.white_list or ()), *(rule.key for rule in part.rules)):
            _check_matches(key, graph, strict)


def matches_of(
    op: Operator, config: AnyConfig, row: OpSupport | None, modules: Collection[str]
) -> list[Match]:
    """All rules that match an operator, the most specific first.

    Of equally specific rules the one declared last comes first.
    """
    found: list[Match] = []
    for part in parts_of(config):
        if part.white_list is None:
            found.append(Match(DecidingRule(Level.GLOBAL), part))
        for key in part.white_list or ():
            level = match_level(key, op, modules)
            if level is not None:
                found.append(Match(DecidingRule(level, key.text), part))
    for part in parts_of(config):
        for rule in part.rules:
            level = match_level(rule.key, op, modules)
            if level is not None:
                found.append(Match(DecidingRule(level, rule.key.text), rule.config))
    # of several global strategies, those with a kernel for this kind of operator come first
    order = {
        id(m): (m.rule.level, m.rule.level is not Level.GLOBAL or _can(m, op.kind, row), i)
        for i, m in enumerate(found)
    }
    return sorted(found, key=lambda m: order[id(m)], reverse=True)


def _can(match: Match, kind: str, row: OpSupport | None) -> bool:
    return has_kernel(match.config, row) and not only_named(match, kind)


def has_kernel(config: QuantConfig, row: OpSupport | None) -> bool:
    """Return whether the row of a capability table has a kernel for a strategy."""
    return row is not None and row.supports(config.family)


def only_named(match: Match, kind: str) -> bool:
    """Return whether a strategy is for operators of this kind only where a rule or the white list names them.

    Ranges that are found in each call suit linears and recurrent layers; others get them on request.
    """
    return match.config.family == "dynamic" and kind in _ONLY_NAMED and match.rule.level is Level.GLOBAL


def merged(matches: list[Match]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the value of each field, and the text of the rule that sets it."""
    first = matches[0].config
    # a rule that asks for fp32 does not say how to quantize
    levels = [m for m in matches if m.config.family == first.family and not m.config.is_float]
    values, sources = first.defaults(), {}
    for name, field in first.FIELDS.items():
        if field.outer:
            continue
        givers = [m for m in levels if name in m.config.given]
        if givers:
            given = [m.config.given[name] for m in givers]
            values[name] = given[0] if field.merge is None else field.merge(given)
        sources[name] = str(givers[0].rule) if givers else DEFAULT
    return values, sources


def match_level(key: ParsedKey, op: Operator, modules: Collection[str] = ()) -> Level | None:
    """Return the level at which a key matches an operator; None if it does not match.

    A string that is the name of one of the model's `modules` means this module, also if it is spelled like a
    type ("linear").
    """
    if not key.is_type and key.text in (op.name, op.module_name):
        return Level.NAME
    if _matches_type(key.text, op) and (key.is_type or key.text not in modules):
        return Level.TYPE
    if not key.is_type and re.fullmatch(key.text, op.name):
        return Level.PATTERN
    return None


def _matches_type(text: str, op: Operator) -> bool:
    anchor, *rest = fused_names(text)
    if rest and op.followed_by[: len(rest)] != tuple(rest):
        return False
    kind = kind_of(anchor)
    if kind is not None:
        return kind == op.kind
    return anchor == op.kind or anchor in (op.module_type, op.module_type.rpartition(".")[2])


def _check_matches(key: ParsedKey, graph: Named, strict: bool) -> None:
    if any(match_level(key, op, graph.submodules) is not None for op in graph.operators):
        return
    if key.names_type and (key.is_type or key.text not in graph.submodules):
        types = sorted(set(_types(graph, fused="&" in key.text)))
        text = f"Rule for type {key.text!r} matches no operator of this model; its types: {', '.join(types)}."
        warn(text, UnmatchedTypeWarning)
        return
    names = [op.name for op in graph.operators]
    if key.text in graph.submodules:
        pattern = re.escape(key.text) + r"\..*"
        inside = sum(name.startswith(f"{key.text}.") for name in names)
        hint = f"It is a module with {inside} operators inside; to mean all of them write {pattern!r}."
    else:
        near = difflib.get_close_matches(key.text, names, n=3, cutoff=0.0)
        hint = f"The closest names: {', '.join(near)}. describe(model, config, example_inputs) lists all."
        # globs, and beginnings of names as other tools take them
        for meant in (glob_pattern(key.text), f"{re.escape(key.text)}.*"):
            if any(re.fullmatch(meant, name) for name in names):
                hint = f"Rules are regular expressions for whole names: write {meant!r}. {hint}"
                break
    text = f"Rule {key.text!r} matches no operator of this model. {hint}"
    if strict:
        raise UnmatchedRuleError(text)
    warn(text, UnmatchedTypeWarning)


def _types(graph: Named, *, fused: bool) -> Iterator[str]:
    """Yield the types of the model's operators; if `fused`, with the types of the operators after them."""
    for op in graph.operators:
        if op.kind in KIND_NAMES:
            yield "&".join((KIND_NAMES[op.kind][0], *(op.followed_by if fused else ())))
