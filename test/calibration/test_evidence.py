"""What a conversion keeps for its report: right numbers, saved, and absent in old artefacts."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

import nc
from nc.calibration import evidence as module
from nc.config.document import plain_values
from nc.graph.evidence import Evidence
from nc.numerics.metrics import sqnr_db
from nc.reports.page_pictures import configuration, pictures
from nc.reports.report_page import page_of

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 20, 32)


def made(config=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
    with torch.no_grad():
        model[0].weight[3] = 40.0
    config = config or nc.StaticQuantConfig()
    options = {"backend": "reference", **options}
    return model, nc.quantize(model, config, lambda m: m(X), example_inputs=X, **options)


def test_cumulative_and_local_errors():
    model, q = made()
    points = {point.operator: point for point in q.graph.evidence.depth}
    assert list(points) == ["1", "3"]
    with torch.no_grad():
        assert points["3"].cumulative_db == pytest.approx(sqnr_db(model(X), q.reference(X)), abs=0.06)
    assert points["1"].local_db == points["1"].cumulative_db  # nothing in front of it is quantized
    _, alone = made(nc.StaticQuantConfig(post=()).exclude("1"))
    _, both = made(nc.StaticQuantConfig(post=()))
    (last,) = alone.graph.evidence.depth
    assert last.local_db == pytest.approx(both.graph.evidence.depth[1].local_db, abs=0.06)
    assert both.graph.evidence.depth[1].cumulative_db < last.cumulative_db


@pytest.mark.parametrize(("algorithm", "data"), [("minmax", "example inputs"), ("kl", "calibration")])
def test_ranges(algorithm, data):
    _, q = made(nc.StaticQuantConfig(act_algo=algorithm))
    views = q.graph.evidence.ranges
    assert {view.operator for view in views} == {"1", "3"}
    assert {view.data for view in views} == {data}
    assert [view.db for view in views] == sorted(view.db for view in views)
    for view in views:
        assert sum(view.counts) == X.shape[0] * (32 if view.operator == "1" else 48)
        assert set(view.others) == {"minmax", "percentile", "mse", algorithm}
        found = view.others[algorithm]
        assert view.chosen[1] == pytest.approx(found[1], abs=0.05 * (view.high - view.low))
        assert view.chosen[0] == pytest.approx(found[0], abs=0.05 * (view.high - view.low))


def test_channels_before_and_after_smoothing():
    model, q = made(nc.SmoothQuantConfig(alpha=0.5))
    views = {view.operator: view for view in q.graph.evidence.channels}
    with torch.no_grad():
        expected = model[0](X).abs().amax(0).sort(descending=True)[0]
    view = views["1"]
    assert (view.channels, len(view.before)) == (32, 32)
    torch.testing.assert_close(torch.tensor(view.before), expected, rtol=1e-3, atol=0)
    assert max(view.after) < 0.5 * max(view.before)
    assert made()[1].graph.evidence.channels == ()


def test_it_is_saved_and_old_artefacts_have_none(tmp_path):
    _, q = made(nc.SmoothQuantConfig(alpha=0.5))
    nc.save(q, tmp_path / "m")
    assert nc.load(tmp_path / "m", backend="reference").graph.evidence == q.graph.evidence
    document = q.graph.evidence.to_dict()
    assert nc.SmoothQuantConfig.from_dict(document["config"]).to_dict() == document["config"]
    old = dataclasses.replace(q.report(), evidence=None)
    words = ("Error along the depth", "The worst ranges", "Channels with", "Configuration")
    assert all(word in page_of(q.report()) for word in words)
    assert not any(word in page_of(old) for word in words)
    assert pictures(None) == configuration(None) == ""


def test_what_is_too_large_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "MOST_MULTIPLY_ADDS", 10.0)
    found = made()[1].graph.evidence
    assert (found.depth, found.ranges, found.channels) == ((), (), ())
    assert "multiply-adds" in found.missing
    assert "were not computed: the example inputs" in pictures(found)


def test_a_configuration_with_objects_of_the_users_own_is_not_kept():
    class Own:
        def to_dict(self):
            return {"post": [object()]}

    assert plain_values(Own()) is None
    assert plain_values(nc.StaticQuantConfig()) == nc.StaticQuantConfig().to_dict()


@pytest.mark.parametrize(
    "path", [("depth", 0, "local_db"), ("ranges", 0, "others"), ("channels", 0, "operator"), ("config",)]
)
@pytest.mark.parametrize("value", [7j, "nan", float("nan"), [1], True])
def test_other_values_are_refused(path, value):
    document = json.loads(json.dumps(made(nc.SmoothQuantConfig(alpha=0.5))[1].graph.evidence.to_dict()))
    assert Evidence.from_dict(document).to_dict()["missing"] == ""
    broken = copy.deepcopy(document)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = 5 if isinstance(value, str) and path == ("channels", 0, "operator") else value
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        Evidence.from_dict(broken)


def test_without_measurements_the_configuration_alone_is_kept():
    _, q = made(measure=False)
    assert q.graph.evidence.config == plain_values(nc.StaticQuantConfig())
    assert (q.graph.evidence.depth, q.graph.evidence.ranges) == ((), ())
    assert q.graph.evidence.missing == "measure=False"
    assert "were not computed: measure=False" in pictures(q.graph.evidence)


def test_values_that_are_no_numbers_keep_nothing_from_being_saved(tmp_path):
    class Logarithm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(torch.log(x.relu()))

    torch.manual_seed(0)
    zeros, good = torch.zeros(4, 8), torch.rand(16, 8) + 0.5
    config = nc.SmoothQuantConfig(alpha=0.5)
    q = nc.quantize(Logarithm().eval(), config, lambda m: m(good), example_inputs=zeros, backend="reference")
    q.save(tmp_path / "q")
    assert nc.load(tmp_path / "q", backend="reference").graph.evidence.channels == ()


def test_what_goes_wrong_with_the_pictures_is_said_there(monkeypatch):
    from nc.api.preparation import captured

    def failing(*_):
        msg = "no such thing"
        raise RuntimeError(msg)

    monkeypatch.setattr(captured, "evidence_of", failing)
    _, q = made()
    assert "were not computed: RuntimeError: no such thing" in pictures(q.graph.evidence)
