"""What was done to a model is known from its low-bit layers.

Nothing is attached to the user's own modules.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import nc
from nc.nn import QuantLinear
from nc.nn.origin import QuantizationRun
from nc.weights.history import history_of

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.small = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.small(self.b(self.a(x).relu()).relu())


def quantized(config=None, measure=True):
    torch.manual_seed(1)
    prepared = nc.prepare(Net().eval(), config or nc.WeightOnlyConfig(group_size=32).exclude("small"))
    prepared(X)
    return nc.convert(prepared, measure=measure)


def test_the_users_module_has_no_attributes_of_nc():
    q = quantized()
    assert set(vars(q)) == set(vars(Net()))
    assert history_of(q).sqnr_db > 10
    assert history_of(q).verdict is not None


def test_a_model_that_is_not_changed_in_place_keeps_its_layers():
    model = Net().eval()
    before = dict(model.named_modules())
    nc.quantize(model, nc.WeightOnlyConfig(group_size=32))
    assert dict(model.named_modules()) == before
    assert history_of(model) == QuantizationRun()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_have_the_same_report(copied):
    q = quantized()
    assert nc.report(copied(q)).to_dict() == nc.report(q).to_dict()
    assert "outputs in the first call of the prepared model" in nc.report(copied(q)).text(details=True)


def test_layers_of_one_run_share_it_also_in_a_copy():
    for q in (quantized(), copy.deepcopy(quantized())):
        assert q.a.origin.run is q.b.origin.run
        assert (q.a.origin.name, q.b.origin.name) == ("a", "b")


def test_a_model_that_holds_a_quantized_one_reports_it_under_its_own_names():
    q = quantized()
    report = nc.report(nn.ModuleDict({"inner": q, "other": nn.Linear(8, 8)}))
    assert [layer.operator for layer in report.layers] == ["inner.a", "inner.b", "inner.small"]
    assert [layer.note for layer in report.layers] == [layer.note for layer in nc.report(q).layers]
    assert (report.sqnr_db, report.verdict) == (None, None)  # of the inner model


def test_a_part_of_a_quantized_model_reports_its_layers():
    q = nn.Sequential(nn.ReLU(), Net()).eval()
    q = nc.quantize(q, nc.WeightOnlyConfig(group_size=32).exclude("1.small"))
    names = [layer.operator for layer in nc.report(q[1]).layers]
    assert names == ["a", "b", "small"]
    assert [decision["operator"] for decision in history_of(q[1]).plan["decisions"]] == names


def test_two_runs_are_put_together():
    first = quantized(nc.WeightOnlyConfig(group_size=32, transforms=[nc.AWQ()]), measure=False)
    second = quantized(nc.WeightOnlyConfig(group_size=32, w_dtype="int8"), measure=False)
    both = history_of(nn.Sequential(first, second))
    assert [(a.text, a.operators) for a in both.applied] == [
        (a.text, tuple(f"0.{name}" for name in a.operators)) for a in history_of(first).applied
    ]
    assert both.applied
    assert [d["operator"] for d in both.plan["decisions"]] == [
        f"{i}.{name}" for i in (0, 1) for name in ("a", "b", "small")
    ]
    assert both.config == {}
    same = history_of(
        nn.Sequential(second, quantized(nc.WeightOnlyConfig(group_size=32, w_dtype="int8"), measure=False))
    )
    assert same.config == history_of(second).config


def test_a_second_run_leaves_the_layers_of_the_first_with_theirs():
    q = quantized(nc.WeightOnlyConfig(group_size=32).exclude("b").exclude("small"), measure=False)
    again = nc.quantize(q, nc.WeightOnlyConfig(group_size=32, w_dtype="int8"), measure=False)
    assert isinstance(again.b, QuantLinear)
    assert again.a.origin.run == q.a.origin.run != again.b.origin.run
    assert again.b.origin.run == again.small.origin.run


def test_layers_from_files_of_other_tools_have_no_history(tmp_path):
    q = quantized(nc.WeightOnlyConfig(group_size=32, scale_dtype="fp16").exclude("small"))
    nc.export_weights(q, tmp_path / "gptq", "gptq")
    read = nc.import_weights(tmp_path / "gptq", model=Net())
    assert history_of(read) == QuantizationRun()
    assert [layer.note for layer in nc.report(read).layers] == ["", ""]
