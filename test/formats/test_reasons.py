"""Reasons and rules are values: they survive a plan's plain form."""

import json
import string

import pytest
from models import MLP
from torch import nn, randn

from nc import StaticQuantConfig, describe
from nc.formats.reasons import NO_RULE, WHITE_LIST, Cause, DecidingRule, Level, Reason
from nc.graph.plan import Plan


def plan():
    config = (
        StaticQuantConfig()
        .set_local("fc1", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
        .set_local(".*2", StaticQuantConfig())
    )
    return describe(MLP().eval(), config, randn(2, 16), backend="reference")


@pytest.mark.parametrize("cause", Cause)
def test_every_reason_survives_json(cause):
    names = [name for _, name, _, _ in string.Formatter().parse(cause.value) if name]
    reason = cause(**dict.fromkeys(names, "x{}'"))
    assert Reason.from_dict(json.loads(json.dumps(reason.to_dict()))) == reason
    assert str(reason).count("x{}'") == len(names)


@pytest.mark.parametrize(
    "rule",
    [
        NO_RULE,
        WHITE_LIST,
        DecidingRule(Level.GLOBAL),
        *(DecidingRule(level, "a'b\"\\d") for level in Level if level),
    ],
)
def test_every_rule_survives_json(rule):
    assert DecidingRule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


def test_a_plan_says_why_by_value():
    first, relu, second = (plan()[name] for name in ("fc1", "act", "fc2"))
    assert first.stays_for(Cause.ASKED)
    assert (first.decided.level, first.reason) == (Level.NAME, "fp32 was asked for")
    assert relu.stays_for(Cause.FOLLOWS)
    assert (second.decided.level, second.why) == (Level.PATTERN, None)
    assert Plan.from_dict(json.loads(json.dumps(plan().to_dict()))) == plan()


def test_a_rule_for_a_type_wins_over_the_global_one():
    config = StaticQuantConfig().set_local(nn.Linear, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    decided = describe(MLP().eval(), config, randn(2, 16), backend="reference")["fc1"].decided
    assert decided == DecidingRule(Level.TYPE, "Linear")
