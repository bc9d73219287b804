"""What costs time is undone."""

import dataclasses

import pytest
import torch
from suites.reports import said
from torch import nn

import nc
from nc.api.preparation import finish
from nc.backends.verdict import OpCost, Verdict


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def verdict(ratio, *slow, doubt=""):
    costs = tuple(OpCost(operators=(name,), engine_ms=3.0, fp32_ms=1.0) for name in slow)
    return Verdict(
        fp32_ms=10.0 * ratio, engine_ms=10.0, calls=9, threads=1, costs=costs, losses=costs, rounds=9,
        round_ratio=ratio, doubt=doubt,
    )  # fmt: skip


def converted(monkeypatch, verdicts, guard="undo"):
    """Convert a model of two linears; `verdicts`: by the number of int8 operators."""
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    prepared = nc.prepare(Two().eval(), nc.StaticQuantConfig(), example_inputs=x, backend="native")
    prepared(x)
    monkeypatch.setattr(
        finish, "speed_verdict", lambda _, graph, *a, **k: verdicts[len(graph.plan.quantized)]
    )
    q_model = nc.convert(prepared, guard=guard)
    return q_model, {op.operator: op for op in q_model.report().ops if op.kind == "linear"}


def test_the_operators_that_lose_are_in_fp32(monkeypatch):
    q_model, ops = converted(monkeypatch, {2: verdict(1.5, "second"), 1: verdict(1.9), 0: verdict(1.0)})
    assert (ops["first"].ran, ops["second"].ran) == ("int8", "fp32")
    assert ops["second"].reason == "int8 takes 3.00 ms, fp32 1.00 ms: undone by measurement"
    assert q_model.verdict.ratio == 1.9
    assert "1 int8 operators that cost time are in fp32" in said(q_model.report())


def test_they_stay_where_the_whole_is_no_faster_without_them(monkeypatch):
    q_model, ops = converted(monkeypatch, {2: verdict(1.5, "second"), 1: verdict(1.4), 0: verdict(1.0)})
    assert {op.ran for op in ops.values()} == {"int8"}
    assert q_model.verdict.ratio == 1.5


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.01])
def test_where_nothing_is_gained_all_is_in_fp32(monkeypatch, ratio, recwarn):
    q_model, ops = converted(monkeypatch, {2: verdict(ratio), 0: verdict(1.0)})
    assert {op.ran for op in ops.values()} == {"fp32"}
    assert f"in int8 the model is {ratio:.2f} times as fast" in ops["first"].reason
    assert f"int8 is {ratio:.2f} times as fast as fp32: all is in fp32" in said(q_model.report())
    assert any("Nothing is quantized" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("guard", ["undo", "warn"])
def test_in_doubt_and_without_being_asked_it_stays(monkeypatch, guard):
    doubt = "this machine is busy" if guard == "undo" else ""
    _, ops = converted(monkeypatch, {2: verdict(0.7, "second", doubt=doubt)}, guard)
    assert {op.ran for op in ops.values()} == {"int8"}


def test_the_line_is_in_the_artefact(monkeypatch, tmp_path):
    q_model, _ = converted(monkeypatch, {2: verdict(0.5), 0: verdict(1.0)})
    nc.save(q_model, tmp_path / "model")
    loaded = nc.load(tmp_path / "model")
    assert "all is in fp32" in said(loaded.report())
    x = torch.randn(4, 32)
    torch.testing.assert_close(loaded(x), q_model(x))


def test_other_words_are_refused():
    prepared = nc.prepare(Two().eval(), nc.StaticQuantConfig(), example_inputs=torch.randn(2, 32))
    with pytest.raises(nc.ConfigError, match="guard"):
        nc.convert(prepared, guard="never")


def test_verdicts_are_values():
    assert dataclasses.replace(verdict(1.5), doubt="x").certain is False
