"""`nc.tune` with `target_bits`: so many bits on average, for the layers that need them."""

import concurrent.futures
import dataclasses
import json
import math

import pytest
import torch
from suites.small_llama import small_llama
from torch import nn

import nc
from nc.errors import ConfigError, NCWarning, StateError
from nc.tuning.distance import closeness
from nc.tuning.low_bit import LowBitSearch
from nc.tuning.low_bit_costs import LayerCosts
from nc.tuning.run import Run


@pytest.fixture(scope="module")
def model():
    return small_llama()


DATA = [torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(i)) for i in range(8)]


def run_fn(prepared):
    for ids in DATA:
        prepared(input_ids=ids)


CANDIDATES = {
    f"int{bits}": nc.WeightOnlyConfig(f"int{bits}", group_size=32, scale_dtype="fp16") for bits in (2, 4, 8)
}


def tuned(model, **more):
    options = {"target_bits": 4.5, "candidates": CANDIDATES, "points": 4, "budget": "10min", **more}
    return nc.tune(model, {"input_ids": DATA[0]}, run_fn, **options)


@pytest.fixture(scope="module")
def front(model):
    return tuned(model)


def test_the_target_is_met_and_better_than_layers_taken_by_lot(front):
    points = {point.name: point for point in front.measured}
    assert points["fp32"].metric == 0.0
    assert points["int4"].result.bits == pytest.approx(4.5)
    mixed = [point for point in front.measured if "bits" in point.name]
    target = mixed[0]  # it comes before those around it
    assert 4.3 < target.result.bits <= 4.5
    assert len(mixed) == 4
    for point in mixed:
        # layers taken by lot would lie on the line between two widths, as their errors add up
        low, high = ("int2", "int4") if point.result.bits < 4.5 else ("int4", "int8")
        x = [points[name].result.bits for name in (low, high)]
        y = [points[name].metric for name in (low, high)]
        line = y[0] + (y[1] - y[0]) * (point.result.bits - x[0]) / (x[1] - x[0])
        assert point.metric > 0.75 * line  # it is negative
    assert list(points)[1:4] == ["int4", "int2", "int8"]  # the nearest to the target come first


def test_bits_and_bytes_are_those_of_the_stored_model(model, front, tmp_path):
    for point in front.measured[1:]:
        q_model = nc.quantize(model, point.config, run_fn, measure=False)
        report = nc.report(q_model)
        count = sum(layer.shape[0] * layer.shape[1] for layer in report.quantized)
        assert 8 * sum(layer.size for layer in report.quantized) / count == pytest.approx(point.result.bits)
        others = sum(p.numel() for p in model.parameters()) - count
        stored = sum(layer.size for layer in report.quantized)
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        assert point.weight_bytes == stored + 4 * others + buffers
        # one of four calls, the second and the sixth, is held out
        held = [((), {"input_ids": DATA[1]}), ((), {"input_ids": DATA[5]})]
        assert closeness(model, q_model, held) == pytest.approx(point.metric, rel=1e-4)


def test_the_front_is_one_of_size(front, tmp_path):
    sizes = [point.weight_bytes for point in front.points]
    assert sizes == sorted(sizes)
    assert front.points[-1].name == "fp32"
    assert "no other point is better in metric and size" in str(front)
    front.save(tmp_path / "front.html")
    assert "Accuracy and size" in (tmp_path / "front.html").read_text(encoding="utf-8")
    for call in (lambda: front.most_accurate(), lambda: front.most_accurate(max_ms=1, max_bits=4)):
        with pytest.raises(ConfigError, match="max_ms= or max_bits="):
            call()


def formats(model, point):
    """The formats of each block's layers that read one tensor."""
    plan = nc.prepare(model, point.config).plan
    return [
        {str(plan[f"model.layers.{block}.{name}_proj"].form) for name in names}
        for block in range(2)
        for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up"))
    ]


def test_layers_that_read_one_tensor_have_one_format_where_that_is_asked(model, front):
    fused = tuned(model, fused=True)
    assert any("bits" in point.name for point in fused.measured)
    assert all(len(found) == 1 for point in fused.measured[1:] for found in formats(model, point))
    assert any(len(found) > 1 for point in front.measured[1:] for found in formats(model, point))


@pytest.mark.parametrize("options", [{"fused": 1}, {"fused": None}, {"fused": True, "target_bits": None}])
def test_one_format_is_for_target_bits(model, options):
    with pytest.raises(ConfigError, match="fused="):
        tuned(model, **options)


def test_a_target_below_all_candidates_is_said(model):
    front = tuned(model, target_bits=1.0, points=1)
    assert any("No assignment has 1 bits on average; the least is 2.50" in note for note in front.notes)


def test_transforms_are_not_mixed(model):
    candidates = {**CANDIDATES, "awq": nc.AWQConfig(bits=4, group_size=32)}
    front = tuned(model, candidates=candidates, points=9)
    assert any("awq has transforms" in note for note in front.notes)
    assert "awq" in [point.name for point in front.measured]
    for point in front.measured:
        if "bits" in point.name:
            assert not nc.prepare(model, point.config).plan.transforms


def test_a_metric_of_the_user_and_an_executor(model):
    def metric(given):
        with torch.no_grad():
            return float(given(input_ids=DATA[0]).logits.mean())

    here = tuned(model, metric=metric, points=2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        there = tuned(model, metric=metric, points=2, executor=pool)
    # in whatever order: the fastest comes first, and times differ
    assert {(p.name, p.metric) for p in here.measured} == {(p.name, p.metric) for p in there.measured}


def test_few_calls_judge_too_and_that_is_said(model):
    front = nc.tune(
        model,
        {"input_ids": DATA[0]},
        lambda prepared: prepared(input_ids=DATA[0]),
        candidates=CANDIDATES,
        target_bits=3,
        points=1,
    )
    assert any("too few calls to hold some out" in note for note in front.notes)


@pytest.mark.parametrize("target", [0, -1, True, "4", float("inf"), float("nan")])
def test_targets_that_are_none(model, target):
    with pytest.raises(ConfigError, match="target_bits"):
        tuned(model, target_bits=target)


def test_candidates_of_the_other_kind_are_typed_errors(model):
    with pytest.raises(ConfigError, match="static is not for weights alone, as target_bits= asks for"):
        tuned(model, candidates={"static": nc.StaticQuantConfig()})
    with pytest.raises(ConfigError, match="int4 quantizes weights alone, which needs target_bits="):
        tuned(model, candidates={"int4": CANDIDATES["int4"]}, target_bits=None)


def test_default_candidates_fit_the_layers():
    odd = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    data = [torch.randn(8, 48) for _ in range(8)]

    def calibrate(prepared):
        for batch in data:
            prepared(batch)

    front = nc.tune(odd, data[0], calibrate, target_bits=5, points=2)
    names = [point.name for point in front.measured]
    assert sorted(names[:7]) == ["fp32", *(f"int{bits}" for bits in (2, 3, 4, 5, 6, 8))]
    assert front.measured[0].metric == 1.0
    assert all(point.metric < 1 for point in front.measured[1:])


class Experts(nn.Module):
    """The second expert is never called, the third layer reads its weight by itself."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.read = nn.Linear(32, 8)

    def forward(self, x):
        return nn.functional.linear(self.experts[0](x).relu(), self.read.weight, self.read.bias)


def test_layers_that_calibration_tells_nothing_of_have_the_most_bits():
    torch.manual_seed(0)
    model = Experts().eval()
    data = [torch.randn(8, 32) for _ in range(8)]

    def calibrate(prepared):
        for batch in data:
            prepared(batch)

    front = nc.tune(model, data[0], calibrate, candidates=CANDIDATES, target_bits=7, points=1)
    assert any("tells nothing of 2 layers" in n and "experts.1" in n and "read" in n for n in front.notes)
    (point,) = (p for p in front.measured if "bits" in p.name)
    plan = nc.prepare(model, point.config).plan
    assert [str(plan[name].form.dtype) for name in ("experts.1", "read")] == ["int8", "int8"]


def test_run_fn_in_inference_mode(model):
    def calibrate(prepared):
        with torch.inference_mode():
            for ids in DATA:
                prepared(input_ids=ids.clone())

    front = nc.tune(
        model, {"input_ids": DATA[0]}, calibrate, candidates=CANDIDATES, target_bits=4.5, points=1
    )
    assert len(front.measured) == 5


def test_nothing_to_calibrate_with_and_nothing_to_quantize(model):
    with pytest.raises(StateError, match="run_fn did not call"):
        nc.tune(model, {"input_ids": DATA[0]}, lambda _: None, candidates=CANDIDATES, target_bits=4)
    empty = {"none": nc.WeightOnlyConfig("int4", group_size=32).exclude(nn.Linear)}
    with pytest.raises(ConfigError, match="none of them quantizes a layer"):
        tuned(model, candidates=empty)


def test_trials_are_of_the_layers_that_bits_are_averaged_over(model, tmp_path):
    one = tuned(model, points=1, target_bits=4.5, trials=tmp_path)
    few = {"few": nc.WeightOnlyConfig("int4", group_size=32, white_list=["model.layers.0.mlp.up_proj"])}
    alone = tuned(model, candidates=few, points=1, target_bits=8, trials=tmp_path)
    both = tuned(model, candidates={**few, **CANDIDATES}, points=9, target_bits=8, trials=tmp_path)
    assert {p.name: p.result.bits for p in alone.measured}["few"] == pytest.approx(5.0)
    assert {p.name: p.result.bits for p in both.measured}["few"] > 20
    assert one.measured[0].result.bits == 32


# ---- estimates ----

COSTS = LayerCosts(
    noise={"a": {"x": 1.0, "y": 4.0}, "b": {"x": 3.0, "y": 12.0}},
    sizes={"a": {"x": 10.0, "y": 5.0}, "b": {"x": 10.0, "y": 5.0}},
)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_candidates_without_numbers_are_not_mixed(value):
    costs = dataclasses.replace(COSTS, noise={"a": {"x": 1.0, "y": value}, "b": {"x": 3.0, "y": 1.0}})
    kept = {"noise": {"a": {"x": 1.0}, "b": {"x": 3.0}}, "sizes": {"a": {"x": 10.0}, "b": {"x": 10.0}}}
    assert dataclasses.asdict(costs.finite()) == kept
    assert COSTS.finite() == COSTS
    assert dataclasses.replace(COSTS, noise={"a": dict.fromkeys("xy", value)}).finite().sizes == {}


def test_a_search_goes_on_without_converting_again(model, tmp_path, monkeypatch):
    first = tuned(model, trials=tmp_path, points=2)

    def never(*_):
        pytest.fail("it was converted again")

    monkeypatch.setattr(LowBitSearch, "_converted", never)
    again = tuned(model, trials=tmp_path, points=2)
    assert [p.to_dict() for p in again.measured] == [p.to_dict() for p in first.measured]
    (kept,) = (path for path in tmp_path.iterdir() if '"estimates"' in path.read_text())
    monkeypatch.undo()
    document = json.loads(kept.read_text())
    for wrong in (
        {},
        {**document["result"], "sizes": {"head": {"int4": 1.0}}},
        {**document["result"], "noise": [1]},
    ):
        kept.write_text(json.dumps({**document, "result": wrong}))
        with pytest.warns(NCWarning, match="is damaged, and is measured again"):
            mended = tuned(model, trials=tmp_path, points=2)
        assert [p.name for p in mended.measured] == [p.name for p in first.measured]
        assert json.loads(kept.read_text()) == document


def test_candidates_take_half_of_the_budget_at_most(model, monkeypatch):
    more = {**CANDIDATES, "int3": nc.WeightOnlyConfig("int3", group_size=32, scale_dtype="fp16")}
    monkeypatch.setattr(Run, "spent", lambda _: 0.6)
    front = tuned(model, candidates=more, points=1)
    assert [point.name for point in front.measured][:4] == ["fp32", "int4", "int3", "int2"]
    assert "Half of the budget went into candidates; left out: int8." in front.notes
    assert any("bits" in point.name for point in front.measured)
