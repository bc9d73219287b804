"""What the report says about a calibration.

Clipped values, ranges that still grew, dead channels, operators that never ran.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import MLP, Attention, Function, ResidualCNN, prepared_for
from torch import nn
from torch.nn import functional as F

from nc import ArtefactCorruptError, CalibrationError, StaticQuantConfig, convert, load, prepare, save
from nc.algorithms.dead_channels import POSITIONS
from nc.calibration.diagnostics import GROWTH, KINDS, SATURATION, late_growth, saturation
from nc.calibration.statistics import decode, encode, read
from nc.formats import QParams, TensorFormat
from nc.observers import ALGORITHMS, Observer
from nc.observers.base import Seen

AFFINE, SYMMETRIC = TensorFormat(dtype="uint8", symmetric=False), TensorFormat(dtype="int8", symmetric=True)


def converted(model, batches, config=None):
    batches = list(batches)
    prepared = prepare(
        model.eval(), config or StaticQuantConfig(), example_inputs=batches[0], backend="reference"
    )
    for batch in batches:
        prepared(batch)
    return convert(prepared)


def findings(q, kind):
    assert {f.kind for f in q.report().health} <= set(KINDS)
    return {f.operator: f for f in q.report().health if f.kind == kind}


def seen(*batches):
    result = Seen()
    for low, high in batches:
        result = result.then(Seen(1, ((1, low, high),)))
    return result


def codes(low, high, spec=AFFINE):
    """The range low..high, low <= 0 <= high."""
    if spec.symmetric:
        return QParams(scale=torch.tensor(high / 127), zero_point=torch.tensor(0), spec=spec)
    scale = (high - low) / 255
    return QParams(scale=torch.tensor(scale), zero_point=torch.tensor(round(-low / scale)), spec=spec)


def observed(data, algo="mse"):
    observer = Observer(ALGORITHMS[algo].statistic, "fc")
    for x in data:
        observer(x)
    return observer


# ---- how extremes grew ----

EXTREMES = st.tuples(st.integers(-5, 5), st.integers(-5, 5)).map(
    lambda ends: (float(min(ends)), float(max(ends)))
)


@given(st.lists(EXTREMES, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_growth_of_merged_runs_is_that_of_one_run(batches, i, j):
    i, j = sorted((i, j))
    whole = seen(*batches)
    assert seen(*batches[:i]).then(seen(*batches[i:j])).then(seen(*batches[j:])) == whole
    assert whole.batches == len(batches)
    for n in range(1, len(batches) + 1):
        assert whole.extremes(n) == (min(low for low, _ in batches[:n]), max(high for _, high in batches[:n]))


def test_only_batches_that_bring_something_new_are_kept():
    assert seen((0, 1), (0, 1), (0.5, 0.7), (-1, 0), (0, 1)).growth == ((1, 0, 1), (4, -1, 1))
    observer = observed(torch.randn(1000, 5))
    assert observer.batches == 1000
    assert len(observer.seen.growth) < 40


def test_an_unknown_past_stays_unknown():
    past = Seen(5)
    for both in (past.then(seen((0, 1))), seen((0, 1)).then(past)):
        assert (both.batches, both.growth, both.extremes(6)) == (6, (), None)
    assert Seen().then(past) == past.then(Seen()) == past


def test_a_batch_that_fails_leaves_no_trace():
    model = Function(lambda self, x: self.b(1 / self.a(x)), a=nn.Linear(1, 1, bias=False), b=nn.Linear(1, 1))
    prepared = prepared_for(model, torch.ones(2, 1))
    before = {key: o.seen for key, o in prepared.observers.items()}
    with pytest.raises(CalibrationError):
        prepared(torch.tensor([[0.0], [9.0]]))
    assert {key: o.seen for key, o in prepared.observers.items()} == before
    assert [s.batches for s in before.values()] == [1, 1]


def test_growth_is_saved(tmp_path):
    prepared = prepared_for(MLP(), torch.randn(4, 16), batches=3)
    prepared.statistics.save(tmp_path / "s")
    found = prepared.statistics.collected()
    assert read(tmp_path / "s").seen == decode(encode(found), "").seen == found.seen
    assert all(s.growth for s in found.seen.values())


# ---- a range that still grew ----


def test_growth_in_the_last_tenth():
    flat, wide = (-1.0, 1.0), (-1.0, 3.0)
    assert late_growth(seen(*[flat] * 18, *[wide] * 2), codes(-1, 3)) == pytest.approx(0.5, abs=0.01)
    assert late_growth(seen(*[flat] * 17, *[wide] * 3), codes(-1, 3)) == 0  # the 18th brought it
    assert late_growth(seen(*[flat] * 28, wide), codes(-1, 3)) == pytest.approx(
        0.5, abs=0.01
    )  # 2 of 29 batches
    assert late_growth(seen(*[flat] * 9, wide), codes(-1, 3)) == pytest.approx(0.5, abs=0.01)
    assert late_growth(seen(*[flat] * 8, wide), codes(-1, 3)) is None  # 9 batches have no last tenth
    assert late_growth(Seen(20), codes(-1, 3)) is None
    assert late_growth(seen(*[(0.0, 0.0)] * 20), codes(-1, 1)) == 0


def test_growth_counts_where_codes_notice_it():
    data = seen(*[(-1.0, 3.0)] * 19, (-2.0, 3.0))
    assert late_growth(data, codes(-2, 3)) == pytest.approx(0.2, abs=0.01)
    assert late_growth(data, codes(-3, 3, SYMMETRIC)) == 0  # both sides have the width of the larger
    assert late_growth(data, codes(-1, 2)) == pytest.approx(0, abs=1e-6)  # what is cut off anyway
    positive = seen(*[(5.0, 6.0)] * 19, (5.0, 6.1))
    assert late_growth(positive, codes(0, 6.1)) == pytest.approx(0.1 / 6.1, abs=1e-3)  # a range holds 0


def test_data_that_grows_late_is_found_and_data_that_does_not_is_not():
    data = torch.randn(8, 16).repeat(20, 1, 1)  # every batch has the same extremes
    assert findings(converted(MLP(), data), "still_growing") == {}
    data[-1, 0, 0] = 30.0
    found = findings(converted(MLP(), data), "still_growing")
    assert found["fc1"].value > 0.5
    assert found["fc1"].text.endswith(
        "of the range of its input came in the last 2 of 20 batches: use more data"
    )
    clipped = findings(
        converted(MLP(), data, StaticQuantConfig(act_algo="percentile", percentile=90.0)), "still_growing"
    )
    assert "fc1" not in clipped


# ---- values outside of the range ----


@pytest.mark.parametrize("spec", [AFFINE, SYMMETRIC])
@pytest.mark.parametrize("end", [0.5, 1.0, 2.5])
def test_saturation_is_the_share_of_values_that_clip(spec, end):
    data = torch.randn(10, 10000)
    observer, qparams = observed(data), codes(-end, end, spec)
    step = float(qparams.scale)
    truth = float((data.abs() > end + step / 2).double().mean())
    assert saturation(observer.state, observer.seen, qparams) == pytest.approx(
        truth, abs=0.01
    )  # the values of half a bin on each side


def test_saturation_without_a_histogram():
    data = torch.randn(10, 1000)
    for algo in ("minmax", "moving_average"):
        observer = observed(data, algo)
        assert saturation(observer.state, observer.seen, codes(-9, 9)) == 0
        assert (
            saturation(observer.state, observer.seen, codes(-1, 1)) is None
        )  # it clips, nobody knows how much


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_model_that_is_well_calibrated_has_no_findings(algo):
    torch.manual_seed(0)
    q = converted(ResidualCNN(), torch.randn(20, 8, 3, 8, 8), StaticQuantConfig(act_algo=algo))
    assert [f for f in q.report().health if f.kind != "dead_channels"] == []


def test_percentiles_that_cut_a_lot_are_found():
    config = StaticQuantConfig(act_algo="percentile", percentile=98.0)
    found = findings(converted(MLP(), torch.randn(8, 64, 16), config), "saturation")
    assert found["fc1"].value == pytest.approx(0.02, rel=0.2)
    assert (
        found["fc1"].text == f"{found['fc1'].value:.2%} of the values of its input are outside its int8 range"
    )
    config = StaticQuantConfig(act_algo="percentile", percentile=99.95)
    assert findings(converted(MLP(), torch.randn(8, 64, 16), config), "saturation") == {}


def test_a_tensor_with_several_readers_is_one_finding():
    config = StaticQuantConfig(act_algo="percentile", percentile=90.0)
    health = converted(Attention().eval(), torch.randn(4, 16, 8, 32), config).report().health
    operators = [f.operator for f in health if f.kind == "saturation"]
    assert operators.count("query") == 1
    assert not {"key", "value"} & set(operators)  # they read what query reads
    matmuls = [
        (f.operator, "its second input" in f.text)
        for f in health
        if f.kind == "saturation" and "matmul" in f.operator
    ]
    assert len(set(matmuls)) == len(matmuls)
    assert {is_second for _, is_second in matmuls} == {False, True}, health


# ---- channels that carry nothing ----


def stack(layer, activation=None):
    return nn.Sequential(
        layer, activation or nn.ReLU(), nn.Conv2d(8, 4, 1) if layer.weight.dim() == 4 else nn.Linear(8, 4)
    )


LAYERS = {
    "linear": (lambda: nn.Linear(16, 8), (64, 16)),
    "conv": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 2, stride=2), (2, 3, 6, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_channels_that_a_relu_makes_zero(kind):
    build, shape = LAYERS[kind]
    activation = {"conv": nn.ReLU(inplace=True), "depthwise": nn.ReLU6()}.get(kind)
    layer = build()
    with torch.no_grad():
        layer.bias[:] = 0.5
        layer.bias[torch.tensor([2, 5])] = -100.0
    found = findings(converted(stack(layer, activation), torch.randn(3, *shape)), "dead_channels")
    assert found["0"].value == 2 / 8
    assert (
        "2 of 8 output channels carry nothing: 0 with all weights 0, 2 never above 0 before the ReLU at"
        in found["0"].text
    )
    assert list(found) == ["0"]


@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_channels_whose_weights_are_zero(build, shape):
    layer = build()
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    with torch.no_grad():
        layer.weight.transpose(0, axis)[3] = 0
        layer.bias[:] = 1.0
    found = findings(converted(stack(layer, nn.GELU()), torch.randn(3, *shape)), "dead_channels")
    assert (found["0"].value, found["0"].text) == (
        1 / 8,
        "1 of 8 output channels carry nothing: 1 with all weights 0",
    )


def test_weights_that_one_scale_per_tensor_rounds_to_zero():
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight[1] *= 1e-4
    data = torch.randn(3, 64, 16)
    found = findings(
        converted(stack(layer, nn.GELU()), data, StaticQuantConfig(w_granularity="per_tensor")),
        "dead_channels",
    )
    assert found["0"].text.endswith("1 with all weights 0")
    assert findings(converted(stack(layer, nn.GELU()), data), "dead_channels") == {}


def test_a_channel_that_is_both_counts_once():
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.bias[:] = 1.0
        layer.bias[:3] = -100.0
        layer.weight[0] = 0
    found = findings(converted(stack(layer), torch.randn(3, 64, 16)), "dead_channels")["0"]
    assert found.value == 3 / 8
    assert "1 with all weights 0, 2 never above 0" in found.text


def dead_behind(activation, batches, **options):
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.bias[:4] = -100.0
    return "0" in findings(
        converted(stack(layer, activation), batches, StaticQuantConfig(**options)), "dead_channels"
    )


def test_negative_channels_are_alive_where_no_relu_follows():
    data = torch.randn(3, 64, 16)
    assert dead_behind(nn.ReLU(), data)
    assert not any(
        dead_behind(activation, data)
        for activation in (nn.Identity(), nn.LeakyReLU(), nn.Hardtanh(), nn.GELU())
    )


def test_two_readers_only_one_of_which_is_a_relu():
    model = Function(
        lambda self, x: self.b(F.relu(y := self.a(x)) + y), a=nn.Linear(16, 8), b=nn.Linear(8, 4)
    )
    with torch.no_grad():
        model.a.bias[:] = -100.0
    assert findings(converted(model, torch.randn(3, 64, 16)), "dead_channels") == {}


def test_a_few_positions_prove_nothing():
    assert not dead_behind(nn.ReLU(), torch.randn(1, POSITIONS - 1, 16))
    assert dead_behind(nn.ReLU(), torch.randn(1, POSITIONS, 16))
    assert dead_behind(nn.ReLU(), torch.randn(POSITIONS, 1, 16))
    assert dead_behind(
        nn.ReLU(), torch.randn(3, 64, 16), post=()
    )  # the watch runs without bias correction too


def test_one_batch_that_is_above_zero_makes_a_channel_alive():
    data = torch.randn(6, 16, 16)
    assert dead_behind(nn.ReLU(), data)
    data[-1, 0] *= 1e4
    data[-1, 1] = -data[-1, 0]  # each channel is above 0 at one of the two
    assert not dead_behind(nn.ReLU(), data)


# ---- operators that never ran, and where findings are shown ----


class Empty(nn.Module):
    """The second linear never gets a row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x), self.b(x[:, :0])


def sick():
    """Something of every kind."""
    model = Empty()
    with torch.no_grad():
        model.a.weight[:3] = 0
    data = torch.rand(20, 64, 8) * 2 - 1
    data[-1] *= 10  # a twentieth of the values: the 99th percentile lies near 8
    return converted(model, data[:, :, None], StaticQuantConfig(act_algo="percentile", percentile=99.0))


def test_all_kinds_in_order_in_the_report_and_the_artefact(tmp_path):
    q = sick()
    report = q.report()
    assert [(f.kind, f.operator) for f in report.health] == [
        ("never_ran", "b"), ("still_growing", "a"), ("saturation", "a"), ("dead_channels", "a"),
    ]  # fmt: skip
    assert report.health[0].text == "never executed during calibration: use data that reaches it"
    for finding, least in zip(report.health, (1, GROWTH, SATURATION, 0), strict=True):
        assert least < finding.value <= 1 or finding.value == least == 1
        assert f"\nhealth: {finding.operator}: {finding.text}\n" in f"{report.summary()}\n"
    assert json.loads(json.dumps(report.to_dict()["health"]))[3]["value"] == 3 / 8
    save(q, tmp_path / "q")
    assert load(tmp_path / "q", backend="reference").report().health == report.health


def test_the_worst_is_shown_and_the_others_are_counted():
    layers = [nn.Linear(8, 8) for _ in range(4)]
    with torch.no_grad():
        for layer, dead in zip(layers, (1, 4, 2, 4), strict=True):
            layer.weight[:dead] = 0
    report = converted(nn.Sequential(*layers), torch.randn(2, 4, 8)).report()
    assert [f.operator for f in report.health] == ["1", "3", "2", "0"]
    lines = [line for line in report.summary().splitlines() if line.startswith("health")]
    assert lines == [
        "health: 1: 4 of 8 output channels carry nothing: 4 with all weights 0 (3 more: report.health)"
    ]


def test_health_of_damaged_artefacts(tmp_path):
    from suites.artefacts import forge

    for change in (
        lambda d: d["health"].append({"kind": "saturation"}),
        lambda d: d["health"].append(3),
        lambda d: d.pop("health"),
    ):
        save(sick(), tmp_path / "bad")
        forge(tmp_path / "bad", change)
        with pytest.raises(ArtefactCorruptError):
            load(tmp_path / "bad", backend="reference")


def test_looking_changes_nothing():
    torch.manual_seed(0)
    model, data = MLP().eval(), torch.randn(4, 64, 16)
    prepared = prepared_for(model, data[0])
    before = prepared.graph.module.code
    first, second = convert(prepared), convert(prepared)
    assert prepared.graph.module.code == before
    assert "watch" not in first.graph.module.code
    assert torch.equal(first(data[1]), second(data[1]))
    assert first.report().health == second.report().health
