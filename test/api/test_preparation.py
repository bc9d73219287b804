"""What `prepare` returns does the same things for each kind of configuration."""

import pytest
import torch
from torch import nn

import nc
from nc.api.preparation.base import Conversion, Preparation
from nc.graph.plan import Plan
from nc.planning.layer_plan import WeightPlan

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
LOW_BIT = nc.WeightOnlyConfig(group_size=32, solver=nc.GPTQ())
CONFIGS = {
    "captured": (nc.StaticQuantConfig(), Plan),
    "weights": (LOW_BIT, WeightPlan),
    "mixed": (nc.StaticQuantConfig().set_local("0", LOW_BIT), WeightPlan),
}


def prepared(config):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    return model, nc.prepare(model, config, example_inputs=X, backend="reference")


@pytest.mark.parametrize("name", CONFIGS)
class TestEveryKind:
    def test_it_returns_what_the_float_model_returns(self, name):
        model, found = prepared(CONFIGS[name][0])
        assert isinstance(found, Preparation)
        torch.testing.assert_close(found(X), model(X))

    def test_it_has_the_plan_and_the_configuration(self, name):
        config, kind = CONFIGS[name]
        _, found = prepared(config)
        assert found.quant_config == config
        assert isinstance(found.plan, kind)
        assert "0" in str(found.plan)

    def test_what_it_has_seen_can_be_saved_loaded_and_merged(self, name, tmp_path):
        config, _ = CONFIGS[name]
        _, whole = prepared(config)
        whole(X[:32])
        whole(X[32:])
        parts = [prepared(config)[1] for _ in range(2)]
        for part, batch in zip(parts, X.split(32), strict=True):
            part(batch)
        parts[1].statistics.save(tmp_path / "seen.safetensors")
        parts[0].statistics.merge(tmp_path / "seen.safetensors")
        _, loaded = prepared(config)
        parts[0].statistics.save(tmp_path / "both.safetensors")
        loaded.statistics.load(tmp_path / "both.safetensors")
        expected = whole.convert(Conversion(measure=False))(X)
        assert torch.equal(parts[0].convert(Conversion(measure=False))(X), expected)
        assert torch.equal(nc.convert(loaded, measure=False)(X), expected)

    def test_it_is_refused_as_a_model(self, name):
        _, found = prepared(CONFIGS[name][0])
        with pytest.raises(nc.StateError, match=f"The model is a {type(found).__name__} already"):
            nc.prepare(found, nc.StaticQuantConfig(), example_inputs=X)
        with pytest.raises(nc.StateError, match=f"The model contains a {type(found).__name__}"):
            nc.describe(nn.Sequential(found), nc.StaticQuantConfig(), X)
