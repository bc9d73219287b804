"""`nc check`: what passes, what does not, and what noise may not decide."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import nc
from nc.api import artefact
from nc.api.artefact import load
from nc.api.quantized import QuantizedModel
from nc.cli import check as check_command
from nc.cli import gate
from nc.cli.inputs import RequestError
from nc.cli.main import main
from nc.cli.shell import CRASH

MODELS = """
import os

import numpy as np
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


def leaving(model):
    raise SystemExit(0)


def ending(model):
    os._exit(0)


def killed(model):
    os.kill(os.getpid(), 9)


class Rude(BaseException):
    def __str__(self):
        raise ValueError("no text either")


def rude(model):
    raise Rude


def huge(model):
    return 10**400


def endless(model):
    return 10**6000


def far_apart(model):
    return [1.7e308, -1.7e308] if isinstance(model, Rows) else [-1.7e308, 1.7e308]


def text(model):
    return "0.9"


def odd_letters(model):
    raise ValueError("\\udc80 \\x1b[31m " + 10000 * "x")


def noisy(model):
    print("not JSON")
    return per_sample(model)


def as_numpy(model):
    return np.array(per_sample(model))


def as_numpy_numbers(model):
    return [np.float32(score) for score in per_sample(model)]


def as_one_numpy_number(model):
    return np.float64(one_number(model))


def as_array_without_dimensions(model):
    return np.array(one_number(model))


def as_tensor(model):
    return torch.tensor(per_sample(model), requires_grad=True)


def as_tensors_without_dimensions(model):
    return tuple(torch.tensor(score) for score in per_sample(model))


class Leaving(Rows):
    def forward(self, x, scale):
        raise SystemExit(0)


def make_leaving():
    return Leaving()


def leave():
    raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the user's module and two artefacts, the second with ranges that are far too large."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "gate_models.py").write_text(MODELS)
    (folder / "gate_leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import gate_models

        example = {"x": torch.randn(32, 64), "scale": torch.ones(1)}
        for name, factor in (("good", 1), ("bad", 300)):
            data = {**example, "x": factor * example["x"]}
            config = nc.StaticQuantConfig(post=())
            prepared = nc.prepare(gate_models.make().eval(), config, example_inputs=example)
            prepared(**data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", nc.NCWarning)  # of the ranges of the bad one
                nc.save(nc.convert(prepared, measure=False), folder / name)
        yield folder


def check(place, monkeypatch, *words):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    seconds = () if "--seconds" in words else ("--seconds", 0.2)
    return CliRunner().invoke(main, ["check", *map(str, (*words, *seconds))])


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
        *(
            (
                ("good", *FP32, *METRIC, "--baseline", "good", limit, value),
                f"{limit} {float(value)}: expected a",
            )
            for limit in ("--max-drop", "--min-speedup", "--min-baseline-speedup", "--seconds")
            for value in ("nan", "inf", "-inf", "-0.1")
        ),
        (("good", *FP32, *METRIC, "--seconds", 0.01), "expected at least 0.1"),
        (("good", *FP32, "--metric", "gate_leaves:scores"), "gate_leaves:scores: SystemExit: 0"),
        (("good", "--fp32", "gate_leaves:make", *METRIC), "gate_leaves:make: SystemExit: 0"),
        (("good", "--fp32", "gate_models:leave", *METRIC), "gate_models:leave: SystemExit: 0"),
        (
            ("good", "--fp32", "gate_models:make_leaving", "--min-speedup", 1),
            "of the artefact: SystemExit: 0",
        ),
        (("good", *FP32, "--metric", "gate_models:leaving"), "The metric failed: SystemExit: 0"),
        (("good", *FP32, "--metric", "gate_models:rude"), "The metric failed: Rude;"),
        (("good", *FP32, "--metric", "gate_models:huge"), "expected a finite number"),
        (("good", *FP32, "--metric", "gate_models:endless"), "a value of type int"),
        (("good", *FP32, "--metric", "gate_models:far_apart"), "not finite numbers"),
        (("good", *FP32, "--metric", "gate_models:text"), "gave '0.9': expected a finite number"),
        (("good", *FP32, "--metric", "gate_models:odd_letters"), r"\udc80 \x1b[31m xxx"),
        (("good", *FP32, *METRIC, "--html", "good/model.json"), "expected a name that ends in .html"),
        (("good", *FP32, *METRIC, "--html", "mine.html"), "not a page of nc"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(place, monkeypatch, words, says):
    (place / "mine.html").write_text("<p>mine</p>", encoding="utf-8")
    before = (place / "good" / "model.json").read_bytes()
    done = check(place, monkeypatch, *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("nc: error")]
    assert len(line) < 2000
    (told_line,) = done.stdout.splitlines()
    result = json.loads(told_line)
    assert (result["outcome"], result["passed"]) == ("error", False)
    assert result["reasons"] == [line.removeprefix("nc: error: ")]
    assert (place / "mine.html").read_text(encoding="utf-8") == "<p>mine</p>"
    assert (place / "good" / "model.json").read_bytes() == before


@pytest.mark.parametrize(
    ("metric", "code", "says"),
    [("ending", 2, "exit code 0, as os._exit"), ("killed", 2, "signal 9"), ("per_sample", 0, None)],
)
def test_the_users_code_can_not_end_the_command_with_a_verdict(place, metric, code, says):
    words = ("good", *FP32, "--metric", f"gate_models:{metric}", "--max-drop", "1", "--seconds", "0.2")
    done = subprocess.run(
        [sys.executable, "-m", "nc", "check", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(Path(nc.__file__).parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["passed"] == (code == 0)
    assert says is None or (says in line and says in done.stderr)


def test_a_defect_of_nc_has_a_code_of_its_own(place, monkeypatch):
    def broken(*_):
        return {}["no such thing"]

    monkeypatch.setattr(gate, "against", broken)
    done = check(place, monkeypatch, "good", *FP32, *METRIC)
    assert done.exit_code == 70
    assert "Traceback" in done.stderr
    assert "nc: defect of nc" in done.stderr
    assert told(done) == {"outcome": "error", "passed": False, "reasons": ["KeyError: 'no such thing'"]}


@pytest.mark.parametrize(
    "words", [(*FP32, "--min-speedup", 1), ("--baseline", "good", "--min-baseline-speedup", 0.5)]
)
@pytest.mark.parametrize("broken", ["engine", "timing"])
def test_a_defect_while_models_are_timed_is_one_of_nc(place, monkeypatch, broken, words):
    """Of the calls, the first ones go well."""
    calls, forward = [], QuantizedModel.forward

    def fails_later(self, *args, **kwargs):
        calls.append(1)
        return {}["no such plan"] if len(calls) > 3 else forward(self, *args, **kwargs)

    if broken == "engine":
        monkeypatch.setattr(QuantizedModel, "forward", fails_later)
    else:
        monkeypatch.setattr(gate, "compare", lambda *_: {}["no such plan"])
    done = check(place, monkeypatch, "good", *words)
    assert done.exit_code == CRASH, done.output
    assert told(done)["reasons"] == ["KeyError: 'no such plan'"]


def test_a_float_model_that_fails_later_is_no_defect_of_nc(place, monkeypatch):
    import gate_models

    calls, forward = [], gate_models.Rows.forward

    def fails_later(self, *args, **kwargs):
        calls.append(1)
        return {}["no such user"] if len(calls) > 3 else forward(self, *args, **kwargs)

    monkeypatch.setattr(gate_models.Rows, "forward", fails_later)
    done = check(place, monkeypatch, "good", *FP32, "--min-speedup", 1)
    assert done.exit_code == 2, done.output
    assert "fp32 fails on the example inputs of the artefact: KeyError: 'no such user'" in done.stderr


def test_ctrl_c_is_no_verdict(place, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "scores", stopped)
    done = check(place, monkeypatch, "good", *FP32, *METRIC)
    assert (done.exit_code, done.stdout) == (130, "")


@pytest.mark.parametrize("kind", ["numpy", "numpy_numbers", "tensor", "tensors_without_dimensions"])
def test_scores_of_numpy_and_torch_are_those_of_lists(place, monkeypatch, kind):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(place))
        import gate_models

        model = gate_models.Rows()
        with torch.no_grad():
            expected = gate_models.per_sample(model)
        assert gate.scores(getattr(gate_models, f"as_{kind}"), model) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["one_numpy_number", "array_without_dimensions"])
def test_one_number_may_be_one_of_numpy(place, monkeypatch, kind):
    done = check(place, monkeypatch, "good", *FP32, "--metric", f"gate_models:as_{kind}", "--max-drop", 0.05)
    assert done.exit_code == 0, done.output
    assert 0 < told(done)["fp32"]["drop"] < 0.05


def test_what_the_metric_prints_is_not_in_the_result(place, monkeypatch):
    done = check(place, monkeypatch, "good", *FP32, "--metric", "gate_models:noisy", "--max-drop", 0.05)
    assert len(done.stdout.splitlines()) == 1
    assert "not JSON" in done.stderr


@pytest.mark.parametrize(("asked", "code"), [("pass", 0), ("fail", 3)])
def test_what_is_not_decided_is_said_and_can_fail(place, monkeypatch, asked, code, tmp_path):
    monkeypatch.setattr(gate, "against", lambda *_: of((0.005, 0.2), (1.2, 52.0)))
    page = tmp_path / "page.html"
    words = ("good", *FP32, *METRIC, "--min-speedup", 1.1, "--inconclusive", asked, "--html", page)
    done = check(place, monkeypatch, *words)
    assert done.exit_code == code
    result = told(done)
    assert (result["outcome"], result["passed"]) == ("inconclusive", asked == "pass")
    assert [reason.partition(":")[0] for reason in result["reasons"]] == [
        "against fp32 the metric drops by 0.005 to 0.2, and 0.01 is between them",
        "1.20 to 52.00 times as fast as fp32 is too wide to tell",
    ]
    assert "nc: warning: inconclusive" in done.stderr
    assert "Not decided" in page.read_text(encoding="utf-8")
    assert check(place, monkeypatch, *words).exit_code == code  # an earlier page of nc is replaced


@pytest.mark.parametrize("asked", ["pass", "fail"])
def test_a_missed_limit_is_missed_whatever_else_is_not_decided(place, monkeypatch, asked):
    monkeypatch.setattr(gate, "against", lambda *_: of((0.02, 0.2), (1.2, 52.0)))
    done = check(place, monkeypatch, "good", *FP32, *METRIC, "--min-speedup", 1.5, "--inconclusive", asked)
    assert (done.exit_code, told(done)["outcome"]) == (1, "fail")


def test_the_result_is_json_without_infinity(place, monkeypatch):
    def exact(folder):
        q_model = load(folder)
        object.__setattr__(q_model.graph, "sqnr_vs_fp32_db", math.inf)
        return q_model

    def refused(text):
        raise AssertionError(text)

    monkeypatch.setattr(artefact, "load", exact)
    done = check(place, monkeypatch, "good", *FP32, *METRIC, "--max-drop", 0.05)
    assert json.loads(done.stdout, parse_constant=refused)["sqnr_vs_fp32_db"] is None


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


def test_the_table_of_the_documents_has_the_codes_of_the_code():
    assert {code for _, code, outcome in check_command.PATHS if outcome == "error"} == {2, CRASH}
    assert {(outcome, code) for _, code, outcome in check_command.PATHS if code in (0, 1, 3)} == {
        ("pass", 0), ("fail", 1), ("inconclusive", 0), ("inconclusive", 3),
    }  # fmt: skip


def test_scores_are_paired():
    with pytest.raises(RequestError, match="gave 2 scores for one model and 3"):
        gate.drop_of([1, 2], [1, 2, 3])


def of(interval, speedups):
    return gate.AgainstOne(
        what="fp32", metric=0.5, other_metric=0.6, drop=0.1, drop_interval=interval, speedup=1.4,
        speedup_interval=speedups, ms=1.0, other_ms=1.4, doubt="",
    )  # fmt: skip


def test_what_is_between_is_not_decided():
    assert of((0.005, 0.2), (1.2, 1.6)).undecided(0.3, 1.1) == []
    assert len(of((0.005, 0.2), (1.2, 1.6)).undecided(0.01, 1.5)) == 2
    assert of((0.02, 0.2), (1.2, 1.45)).undecided(0.01, 1.5) == []  # both are missed
    assert len(of(None, (1.2, 52.0)).undecided(0.01, 0.5)) == 1
    assert len(of(None, None).undecided(0.01, 1.3)) == 1
    assert len(of(None, None).undecided(0.01, 1.5)) == 1
    assert of(None, None).undecided(0.01, None) == []


def test_noise_fails_nothing():
    assert of((0.005, 0.2), (1.2, 1.6)).why_not(0.01, 1.5) == []
    assert of((0.02, 0.2), (1.2, 1.6)).why_not(0.01, 1.5) == [
        "against fp32 the metric drops by 0.1 (0.02 to 0.2), more than 0.01"
    ]
    assert of((0.0, 0.2), (1.2, 1.45)).why_not(0.01, 1.5) == [
        "1.40 times as fast as fp32 (1.20 to 1.45), less than 1.50"
    ]
    assert len(of((0.02, 0.2), None).why_not(0.01, 1.5)) == 1  # of too few rounds nothing is known
