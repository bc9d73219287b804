"""act_algo="auto".

The algorithm that is chosen is the one with the least output error, computed here by hand in float64.
"""

import numpy as np
import pytest
import torch
from models import call
from torch import nn

from nc import StateError, StaticQuantConfig, available_backends, convert, prepare
from nc.calibration.statistics import Samples
from nc.numerics.metrics import sqnr_db
from nc.observers.auto import CANDIDATES

ENGINES = [name for name, why in available_backends().items() if name in ("ipex", "reference") and not why]
FIXED = {name: StaticQuantConfig(act_algo=name, post=()) for name in CANDIDATES}
AUTO = StaticQuantConfig(act_algo="auto", post=())


def heavy_tailed(batches=3, rows=16, width=24, spike=60.0):
    data = [torch.randn(rows, width) for _ in range(batches)]
    data[0][0, 0] = spike
    return data


def prepared(model, config, batches, backend="reference"):
    p = prepare(model.eval(), config, example_inputs=batches[0], backend=backend)
    for batch in batches:
        call(p, batch)
    return p


def scale_of(q):
    return next((n.args[1], n.args[2]) for n in q.graph.module.graph.nodes if n.name.startswith("quantize"))


def output_error(x, weight, scale, zero_point):
    """By hand: sixth powers of the errors of one linear's output, float64."""
    codes = np.clip(np.round(x / np.float32(scale)) + zero_point, 0, 255)
    return (((codes - zero_point) * scale - x) @ weight.T).__pow__(6).sum()


@pytest.mark.parametrize("important", [True, False], ids=["the outlier matters", "the outlier does not"])
def test_the_least_output_error_wins(important):
    model, batches = nn.Sequential(nn.Linear(24, 8, bias=False)), heavy_tailed(batches=1, rows=2000)
    with torch.no_grad():
        model[0].weight[:, 0] = 3.0 if important else 0.0
    x, w = batches[0].double().numpy(), model[0].weight.detach().double().numpy()
    errors = {
        name: output_error(x, w, *scale_of(convert(prepared(model, config, batches))))
        for name, config in FIXED.items()
    }
    q = convert(prepared(model, AUTO, batches))
    (change,) = [str(a) for a in q.report().algorithms if a.algorithm == "range_search"]
    name = change.removeprefix("range_search: ").removesuffix(" for 1 tensors")
    assert errors[name] <= min(errors.values()) * 1.001  # of ranges that differ by a hair, either
    assert scale_of(q) == scale_of(convert(prepared(model, FIXED[name], batches)))
    assert 255 * scale_of(q)[0] > 55 or not important  # an outlier that counts is not clipped
    assert change in q.report().summary()


def test_a_tensor_that_several_operators_read_has_one_range():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(24, 8), nn.Linear(24, 8)

        def forward(self, x):
            return self.a(x), self.b(x)

    batches = heavy_tailed()
    q = convert(prepared(Two(), AUTO, batches))
    assert sum(n.name.startswith("quantize_per_tensor") for n in q.graph.module.graph.nodes) == 1


@pytest.mark.parametrize("backend", ENGINES)
def test_no_worse_than_the_worst_and_mixed_with_others(backend):
    model, batches = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8)), heavy_tailed()
    x = torch.cat(batches[1:])
    noise = {
        name: sqnr_db(model(x), convert(prepared(model, c, batches, backend))(x))
        for name, c in {**FIXED, "auto": AUTO}.items()
    }
    assert noise["auto"] >= min(noise[name] for name in CANDIDATES) - 0.1
    mixed = StaticQuantConfig(act_algo="auto").set_local("2", StaticQuantConfig(act_algo="minmax"))
    q = convert(prepared(model, mixed, batches, backend))
    assert q.report().algorithms[0].text.endswith("for 1 tensors")


def test_statistics_of_today_serve_auto_tomorrow(tmp_path):
    model, batches = nn.Sequential(nn.Linear(24, 8)), heavy_tailed()
    prepared(model, StaticQuantConfig(act_algo="kl", post=()), batches).statistics.save(tmp_path / "s")
    tomorrow = prepare(model, AUTO, example_inputs=batches[0], backend="reference")
    tomorrow.statistics.load(tmp_path / "s")
    assert scale_of(convert(tomorrow)) == scale_of(convert(prepared(model, AUTO, batches)))


def test_without_samples_there_is_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(Samples, "has_room", lambda self, inputs: False)
    with pytest.raises(StateError, match='act_algo="auto" compares outputs.*smaller batches'):
        convert(prepared(nn.Sequential(nn.Linear(24, 8)), AUTO, heavy_tailed()))


def test_pools_with_two_results():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    assert sqnr_db(call(model, x), convert(prepared(model, AUTO, [x]))(x)) > 30
