"""What a report says first: the verdict, what is not int8 and why, and what to do next."""

import dataclasses

import pytest
import torch
from torch import nn

import nc
from nc.backends.verdict import OpCost, Verdict
from nc.calibration.diagnostics import KINDS
from nc.graph.accuracy import Accuracy
from nc.graph.qdq import Finding
from nc.reports.advice import next_steps, reason_lines

COSTS = tuple(OpCost(operators=(name,), engine_ms=ms, fp32_ms=1.0) for name, ms in (("0", 0.5), ("2", 3.0)))
SLOWER = Verdict(
    fp32_ms=2.0, engine_ms=3.5, calls=9, threads=1, costs=COSTS, losses=COSTS[1:], exclude=('"2"',)
)


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), *(nn.LayerNorm(32) for _ in range(4))]
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 32)
    return nc.quantize(
        model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, measure=False
    ).report()


def test_the_order_of_the_text(report):
    shown = dataclasses.replace(report, verdict=SLOWER, health=())
    parts = shown.text(details=True).split("\n\n")
    assert parts[0].startswith("SLOWER than fp32")
    assert parts[1].splitlines() == [
        "not int8, and why:",
        '- 5 x normalisation stays fp32: "1", "3", "4", … (2 more)',
    ]
    assert parts[2].splitlines() == [
        "what to do next:",
        '- config.exclude("2") leaves their operators in fp32',
    ]
    assert parts[3].startswith(f"backend {report.backend}: 2 of 2")
    assert parts[4].startswith("operator")
    assert "what to do" not in dataclasses.replace(report, health=()).text(details=True)
    assert max(map(len, shown.text(details=True).splitlines())) <= 80
    brief = str(shown)
    assert brief.index("2 of 2") < brief.index("SLOWER than fp32") < brief.index("not int8, and why")
    assert brief.index("not int8, and why") < brief.index('- config.exclude("2") leaves')


def test_what_was_asked_for_comes_first(report):
    first, *others = report.ops
    assert (first.asked, first.ran) == ("int8", "int8")
    failed = dataclasses.replace(first, ran="fp32", reason="no kernel")
    unsaid = dataclasses.replace(first, operator="x", ran="unknown")
    plain = dataclasses.replace(first, operator="y", asked="fp32", ran="fp32")
    lines = reason_lines([*others, failed, unsaid, plain])
    assert lines[:2] == ['1 x no kernel: "0"', '1 x the engine does not say: "x"']
    assert len(lines) == 3


def test_findings_have_steps(report):
    found = tuple(Finding(kind, name, 0.5, "text") for kind in KINDS for name in ("a", "b"))
    steps = next_steps(dataclasses.replace(report, health=found))
    assert [step.split(":")[0] for step in steps] == [
        'calibrate with data that reaches "a" (1 more',
        "calibrate with more data",
        'try act_algo="minmax" or "auto"',
        'config.exclude("a") leaves it in fp32',
    ]
    hopeless = dataclasses.replace(report, health=found, accuracy=Accuracy(sqnr_db=3.0))
    assert next_steps(hopeless)[:2] == [
        'config.exclude("a", "b") leaves them in fp32',
        'other ways out: nc.SmoothQuantConfig(), nc.DynamicQuantConfig(act_granularity="per_token"), '
        "calibration data like real inputs",
    ]
    assert str(hopeless).startswith("HOPELESS accuracy: 3.0 dB")
    assert str(hopeless).index("config.exclude") > str(hopeless).index("what to do next")
    assert next_steps(dataclasses.replace(report, health=())) == []
