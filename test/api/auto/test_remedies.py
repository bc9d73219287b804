"""How the few operators that add most of the error are mended."""

import pytest
import torch
from models import graph_of
from torch import nn

import nc
from nc.api.auto import prepared as module_under_test
from nc.api.auto.remedies import ways
from nc.api.preparation import finish
from nc.backends import get_backend
from nc.planning.rules import decide
from nc.profiling.load import Load


class Mixed(nn.Module):
    """A linear whose rows differ in size by five decades, and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.last = (
            nn.Conv1d(16, 16, 3, padding=1),
            nn.Linear(24, 32, bias=False),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        x = self.conv(x)
        sizes = 10.0 ** -torch.arange(16.0).fmod(5)
        x = self.first(x * sizes[:, None])
        return self.last(x / (x.abs().amax(-1, keepdim=True) + 1e-9))


def plan_of(config):
    graph = graph_of(Mixed().eval(), torch.randn(4, 16, 24))
    return decide(config, graph, get_backend("reference").capabilities())


def test_static_linears_get_ranges_per_row_first():
    found = list(ways(plan_of(nc.StaticQuantConfig()), ["conv", "first"], bf16=True))
    assert [(way.name, way.operators) for way in found] == [
        ("with ranges per row", ("first",)),
        ("in bf16", ("conv", "first")),
        ("in float", ("conv", "first")),
    ]


def test_dynamic_ones_have_them_and_cpus_without_bf16_do_not_use_it():
    found = list(ways(plan_of(nc.DynamicQuantConfig()), ["first"], bf16=False))
    assert [way.name for way in found] == ["in float"]


@pytest.mark.parametrize("config", [nc.StaticQuantConfig(), nc.StaticQuantConfig() + nc.DynamicQuantConfig()])
def test_a_way_changes_its_operators_and_no_others(config):
    before = repr(config)
    way, *_ = ways(plan_of(nc.StaticQuantConfig()), ["first"], bf16=False)
    plan = plan_of(way.put_into(config))
    modes = {d.operator: d.spec.mode for d in plan.quantized}
    assert modes == {**{d.operator: d.spec.mode for d in plan_of(config).quantized}, "first": "dynamic"}
    assert repr(config) == before


def test_a_way_that_the_engine_has_no_kernel_for_is_none():
    way, *_ = ways(plan_of(nc.StaticQuantConfig()), ["first"], bf16=False)
    assert way.is_in(plan_of(way.put_into(nc.StaticQuantConfig())))
    assert not way.is_in(plan_of(nc.StaticQuantConfig()))
    assert not way.is_in(plan_of(nc.StaticQuantConfig().exclude("first")))


def converted(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("NC_MAX_ISA", "avx2")  # which has no bf16
    model, batches = Mixed().eval(), [torch.randn(16, 16, 24) for _ in range(3)]
    quiet = Load(seconds=1.0, share=1.0)

    def timed(calls, *_):
        return [dict.fromkeys(calls, 1.0)], 1, quiet

    monkeypatch.setattr(module_under_test, "timed_rounds", timed)
    monkeypatch.setattr(module_under_test, "candidates", lambda kinds, post=(): of_static(post))
    monkeypatch.setattr(finish, "speed_verdict", lambda *_, **__: None)
    monkeypatch.setattr(finish, "_with_times", lambda graph, _: graph.applied)
    prepared = nc.prepare(model, "auto", example_inputs=batches[0], backend="native")
    for batch in batches:
        prepared(batch)
    q_model = nc.convert(prepared)
    return q_model, next(a.text for a in q_model.graph.applied if a.algorithm == "auto")


def test_ranges_per_row_mend_a_linear(monkeypatch):
    """The convolution stays as it is, and nothing is left in float."""
    q_model, text = converted(monkeypatch)
    assert "first with ranges per row" in text
    assert {d.operator: d.spec.mode for d in q_model.graph.plan.quantized}["first"] == "dynamic"
    assert {op.ran for op in q_model.report().ops if op.kind in ("linear", "conv1d")} == {"int8"}


def test_what_helps_too_little_is_not_done(monkeypatch):
    monkeypatch.setattr(module_under_test, "LEAST_MENDED", 1e9)
    q_model, text = converted(monkeypatch)
    assert "first with ranges per row" in text
    assert "dB without algorithms, too little" in text
    assert text.endswith("first: left as it is")
    assert {d.spec.mode for d in q_model.graph.plan.quantized} == {"static"}


def of_static(post):
    return (module_under_test.Candidate("static", nc.StaticQuantConfig(post=tuple(post))),)
