"""`nc check`: what passes, what does not, and what noise may not decide."""

import json
import random
import statistics

import pytest
import torch
from click.testing import CliRunner

import nc
from nc.cli import gate
from nc.cli.inputs import RequestError
from nc.cli.main import main

MODELS = """
import torch
import nc


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x, scale):
        return self.linear(x) * scale


def make():
    torch.manual_seed(0)
    return Rows()


def nothing():
    return None


def other():
    return torch.nn.Linear(3, 3)


def per_sample(model):
    x, scale = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)), torch.ones(1)
    expected = make()(x, scale)
    return (1 - (model(x, scale) - expected).abs().mean(1) / expected.abs().mean(1)).tolist()


def one_number(model):
    return sum(per_sample(model)) / 50


def bad(model):
    return float("nan")


def failing(model):
    raise ValueError("no data here")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the user's module and two artefacts, the second with ranges that are far too large."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "gate_models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import gate_models

        example = {"x": torch.randn(32, 64), "scale": torch.ones(1)}
        for name, factor in (("good", 1), ("bad", 300)):
            data = {**example, "x": factor * example["x"]}
            config = nc.StaticQuantConfig(post=())
            prepared = nc.prepare(gate_models.make().eval(), config, example_inputs=example)
            prepared(**data)
            with pytest.warns(nc.NCWarning) if factor > 1 else pytest.MonkeyPatch.context():
                nc.save(nc.convert(prepared, measure=False), folder / name)
        yield folder


def check(place, monkeypatch, *words):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    return CliRunner().invoke(main, ["check", *map(str, words), "--seconds", "0.2"])


def told(done):
    return json.loads(done.stdout.splitlines()[-1])


FP32, METRIC = ("--fp32", "gate_models:make"), ("--metric", "gate_models:per_sample")


def test_a_good_artefact_passes(place, monkeypatch):
    done = check(place, monkeypatch, "good", *FP32, *METRIC, "--max-drop", 0.05)
    assert done.exit_code == 0, done.output
    result = told(done)
    assert (result["passed"], result["reasons"]) == (True, [])
    assert result["fp32"]["other_metric"] == pytest.approx(1)
    low, high = result["fp32"]["drop_interval"]
    assert 0 < low < result["fp32"]["drop"] < high < 0.05
    assert result["fp32"]["drop"] == pytest.approx(1 - result["fp32"]["metric"])
    assert min(result["fp32"]["ms"], result["fp32"]["other_ms"], result["fp32"]["speedup"]) > 0
    assert len(done.stdout.splitlines()) == 1


def test_a_worse_one_does_not(place, monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    done = check(place, monkeypatch, "bad", *FP32, *METRIC, "--baseline", "good", "--html", page)
    assert done.exit_code == 1
    result = told(done)
    assert [reason.split(" the ")[0] for reason in result["reasons"]] == ["against fp32", "against baseline"]
    assert "Must not be published" in page.read_text(encoding="utf-8")
    assert "All operators" in page.read_text(encoding="utf-8")


def test_a_better_one_than_the_baseline_passes(place, monkeypatch):
    done = check(place, monkeypatch, "good", "--baseline", "bad", *METRIC)
    assert done.exit_code == 0, done.output
    assert told(done)["baseline"]["drop"] < 0
    assert "fp32" not in told(done)


@pytest.mark.parametrize("least", [0.0, 1000.0])
def test_speed(place, monkeypatch, least):
    done = check(place, monkeypatch, "good", *FP32, "--min-speedup", least)
    assert done.exit_code == (1 if least else 0)
    assert told(done)["fp32"]["metric"] is None
    assert (f"less than {least:.2f}" in str(told(done)["reasons"])) == bool(least)


def test_one_number_is_compared_as_it_is(place, monkeypatch):
    done = check(place, monkeypatch, "good", *FP32, "--metric", "gate_models:one_number", "--max-drop", 0.05)
    assert done.exit_code == 0, done.output
    low, high = told(done)["fp32"]["drop_interval"]
    assert low == high == told(done)["fp32"]["drop"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("good",), "Give --fp32, --baseline, or both"),
        (("good", *FP32), "Nothing is asked of the artefact"),
        (("good", *FP32, "--max-drop", 0.1, "--min-speedup", 1), "--max-drop is of a metric"),
        (("good", "--fp32", "gate_models:other", "--min-speedup", 1), "fp32 fails on the example inputs"),
        (("good", "--baseline", "good", "--min-speedup", 2), "give --fp32"),
        (("good", *FP32, "--min-baseline-speedup", 1), "needs --baseline"),
        (("nowhere", *FP32, *METRIC), "nowhere"),
        (("good", *FP32, "--metric", "gate_models:absent"), "absent"),
        (("good", *FP32, "--metric", "gate_models"), "Expected PKG.MODULE:FUNCTION"),
        (("good", *FP32, "--metric", "gate_models:bad"), "expected a finite number"),
        (("good", *FP32, "--metric", "gate_models:failing"), "no data here"),
        (("good", "--fp32", "gate_models:nothing", *METRIC), "to return a torch.nn.Module"),
    ],
)
def test_bad_calls_are_one_line_and_exit_code_2(place, monkeypatch, words, says):
    done = check(place, monkeypatch, *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("nc: error")]) == 1


def test_intervals_of_paired_scores_hold_the_truth():
    """In 95 of 100 draws; scores of single samples differ far more than the models do."""
    held = 0
    for seed in range(300):
        chance = random.Random(seed)
        others = [chance.gauss(0.5, 1) for _ in range(60)]
        ours = [score - 0.1 + chance.gauss(0, 0.2) for score in others]
        drop, (low, high) = gate.drop_of(ours, others)
        assert drop == pytest.approx(statistics.fmean(others) - statistics.fmean(ours))
        assert high - low < 0.2  # not paired it would be .7
        held += low <= 0.1 <= high
    assert 270 <= held <= 297


def test_quantiles_of_student_by_its_table():
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 1000: 1.962}
    for freedom, value in known.items():
        assert gate.student(freedom) == pytest.approx(value, rel=2e-3)


def test_few_samples_have_wide_intervals():
    held = 0
    for seed in range(400):
        chance = random.Random(seed)
        ours = [chance.gauss(0, 1) for _ in range(4)]
        _, (low, high) = gate.drop_of(ours, [0.0] * 4)
        held += low <= 0 <= high
    assert 365 <= held <= 392  # 1.96 standard errors would hold it in 330


def test_scores_are_paired():
    with pytest.raises(RequestError, match="gave 2 scores for one model and 3"):
        gate.drop_of([1, 2], [1, 2, 3])


def of(interval, speedups):
    return gate.AgainstOne(
        what="fp32", metric=0.5, other_metric=0.6, drop=0.1, drop_interval=interval, speedup=1.4,
        speedup_interval=speedups, ms=1.0, other_ms=1.4, doubt="",
    )  # fmt: skip


def test_noise_fails_nothing():
    assert of((0.005, 0.2), (1.2, 1.6)).why_not(0.01, 1.5) == []
    assert of((0.02, 0.2), (1.2, 1.6)).why_not(0.01, 1.5) == [
        "against fp32 the metric drops by 0.1 (0.02 to 0.2), more than 0.01"
    ]
    assert of((0.0, 0.2), (1.2, 1.45)).why_not(0.01, 1.5) == [
        "1.40 times as fast as fp32 (1.20 to 1.45), less than 1.50"
    ]
    assert len(of((0.02, 0.2), None).why_not(0.01, 1.5)) == 2
