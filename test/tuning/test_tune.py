"""The whole search, on a small transformer block and a small convolutional network."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

import nc
from nc.config import with_rules
from nc.errors import ConfigError, InputError, NCWarning
from nc.numerics.metrics import sqnr_db
from nc.tuning import measure as measuring
from nc.tuning import search as searching
from nc.tuning import tune as tuning


class Block(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(size, 2 * size),
            nn.Linear(2 * size, size),
            nn.LayerNorm(size),
        )

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


DATA = [torch.randn(32, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)]
CANDIDATES = {"static": nc.StaticQuantConfig(post=()), "rows": nc.DynamicQuantConfig()}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(32, 8)).eval()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS", 0.02)


def calibrate(prepared):
    for batch in DATA:
        prepared(batch)


def tuned(model, **options):
    given = {"candidates": CANDIDATES, "points": 4, **options}
    return nc.tune(model, DATA[0], calibrate, **given)


@pytest.fixture(scope="module")
def front(model):
    patch = pytest.MonkeyPatch()
    patch.setattr(measuring, "SECONDS", 0.02)
    yield tuned(model)
    patch.undo()


def test_what_is_always_measured_and_what_lies_between(front):
    names = [point.name for point in front.measured]
    assert names[0] == "fp32"
    assert {"static", "rows", "auto"} <= set(names)
    mixes = [point for point in front.measured if point.estimated is not None]
    assert mixes
    assert all(point.result.fp32_ratio > 0 and point.ms > 0 for point in front.measured)
    assert (front.measured[0].drop, front.measured[0].metric) == (0.0, 1.0)
    assert str(front)


def test_a_measured_error_is_that_of_the_model_that_its_configuration_gives(front, model):
    """Brute force: the share of the outputs' power that is wrong, on other data."""
    others = torch.randn(256, 32, generator=torch.Generator().manual_seed(9))
    mixes = [point for point in front.measured if point.estimated is not None]
    for point in mixes[:3]:
        q = nc.quantize(model, point.config, calibrate, example_inputs=DATA[0], measure=False)
        asked = {d.operator: d.spec.mode for d in q.graph.plan.quantized}
        count = sum(
            int(part.split()[0]) for part in point.name.split(", ") if part.split()[1] not in ("fp32", "bf16")
        )
        assert count <= len(asked)
        with torch.no_grad():
            db = sqnr_db(model(others), q(others))
        assert point.result.sqnr_db == pytest.approx(db, abs=3)


def test_estimates_rank_as_measurements_do(front):
    mixes = [point for point in front.measured if point.estimated is not None]
    for one, other in itertools.combinations(mixes, 2):
        if one.estimated[0] < other.estimated[0] / 4:
            assert one.metric > other.metric


def test_a_metric_is_asked_and_drops_are_counted_from_fp32(model):
    asked = []

    def metric(given):
        asked.append(given)
        return 0.5 if given is model else 0.4

    front = tuned(model, metric=metric, points=1)
    assert asked[0] is model
    assert len(asked) == len(front.measured)
    assert [round(point.drop, 6) for point in front.measured[1:]] == [0.1] * (len(front.measured) - 1)
    assert front.fastest(max_drop=0.05).name == "fp32"


def test_a_model_in_training_mode_is_judged_as_in_eval_mode_and_stays_in_it(model):
    modes = []
    with pytest.warns(NCWarning, match="training mode"):
        tuned(model.train(), metric=lambda given: float(modes.append(given.training) or 1), points=1)
    assert not any(modes)
    assert model.training
    model.eval()


def test_assignments_with_the_same_counts_are_points_of_their_own(front):
    names = [point.name for point in front.measured]
    configs = [json.dumps(point.config.to_dict(), sort_keys=True) for point in front.measured]
    assert len(set(names)) == len(names)
    assert len(set(configs)) == len(configs)


def test_trials_are_taken_again_and_one_of_another_metric_is_not(model, tmp_path):
    first = tuned(model, trials=tmp_path / "trials")
    files = {path.name: path.read_bytes() for path in (tmp_path / "trials").iterdir()}
    assert len(files) == len(first.measured)
    assert all(json.loads(text)["key"]["threads"] == torch.get_num_threads() for text in files.values())
    asked = []

    def metric(given):
        asked.append(given)
        return 1.0

    tuned(model, trials=tmp_path / "trials", metric=metric, points=1)
    assert any(given is model for given in asked)  # fp32's too: nothing of another metric is taken
    again = tuned(model, trials=tmp_path / "trials")
    known = {point.name: point.result for point in first.measured}
    fixed = ["fp32", "static", "rows", "auto"]
    assert [known[name] for name in fixed] == [p.result for p in again.measured if p.name in fixed]
    assert {name: (tmp_path / "trials" / name).read_bytes() for name in files} == files


def test_ctrl_c_gives_the_front_so_far(model):
    calls = []

    def metric(given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 1.0

    front = tuned(model, metric=metric)
    assert [point.name for point in front.measured] == ["fp32", "static"]
    assert front.notes == ("The search was ended by Ctrl-C.",)


def test_a_budget_ends_the_search(model):
    front = tuned(model, budget=1e-6)
    assert [point.name for point in front.measured] == ["fp32"]
    assert front.notes == ("The budget ended before all points were measured.",)


def test_progress_has_all_that_is_needed(model):
    seen = []
    tuned(model, points=1, progress=seen.append)
    assert seen[0].phase == "fp32"
    assert (seen[0].best, seen[-1].best is None) == (None, False)
    assert [each.done for each in seen] == list(range(len(seen)))
    assert all(0 < each.seconds_left <= 1800 for each in seen)
    assert "s left] fp32" in str(seen[0])


def test_a_mix_of_sizes_comes_from_the_data(model):
    sizes = []
    original = measuring.timed

    def noted(own, entry, q_model):
        sizes.append(tuple(entry[0][0].shape))
        return original(own, entry, q_model)

    def uneven(prepared):
        for rows in (4, 8, 4, 16):
            prepared(torch.randn(rows, 32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "timed", noted)
        nc.tune(model, DATA[0], uneven, candidates=CANDIDATES, points=1, budget=1e-6)
        assert sizes[0] == (4, 32)
        assert set(sizes) == {(4, 32), (8, 32), (16, 32)}
        sizes.clear()
        nc.tune(
            model, DATA[0], uneven, candidates=CANDIDATES, points=1, budget=1e-6, mix=[torch.randn(2, 32)]
        )
        assert sizes == [(2, 32)]


def test_convolutions_and_default_candidates():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    batches = [torch.randn(8, 3, 16, 16) for _ in range(4)]
    front = nc.tune(model, batches[0], lambda m: [m(b) for b in batches], points=2)
    assert {"fp32", "static", "auto"} <= {point.name for point in front.measured}
    assert min(point.metric for point in front.measured) > 0.9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "soon"}, "budget='soon'"),
        ({"budget": 0}, "budget=0"),
        ({"budget": True}, "budget=True"),
        ({"points": 0}, "points=0"),
        ({"points": 2.5}, r"points=2\.5"),
        ({"candidates": {}}, "none was given"),
        ({"candidates": {"fp32": nc.StaticQuantConfig()}}, "fp32 is always measured"),
        ({"candidates": [5]}, "5"),
        ({"candidates": {"low": nc.WeightOnlyConfig("int4")}}, "low quantizes weights alone"),
    ],
)
def test_bad_arguments(model, options, says):
    with pytest.raises(ConfigError, match=says):
        tuned(model, **options)


@pytest.mark.parametrize("value", [None, math.nan, "much", math.inf])
def test_a_metric_that_is_no_number(model, value):
    with pytest.raises(InputError, match="expected a finite number"):
        tuned(model, metric=lambda _: value)


def test_budgets():
    assert [tuning._seconds(text) for text in ("90s", "30min", "2h", " 1.5 h ", 7)] == [
        90,
        1800,
        7200,
        5400,
        7,
    ]


def test_the_users_model_and_folder_stay_as_they_are(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "SECONDS", 0.01)
        tuned(model, points=1)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


def test_a_candidate_that_can_not_be_converted_is_said(model, monkeypatch):
    original = searching.PreparedModel.lowered

    def failing(self, asked):
        if self.plan.quantized and all(d.spec.mode == "dynamic" for d in self.plan.quantized):
            msg = "no such kernel"
            raise nc.BackendError(msg)
        return original(self, asked)

    monkeypatch.setattr(searching.PreparedModel, "lowered", failing)
    front = tuned(model, points=1)
    assert "rows could not be converted: no such kernel" in front.notes
    assert "rows" not in {point.name for point in front.measured}


def test_a_model_whose_outputs_are_no_numbers_is_left_out(model, monkeypatch):
    original = searching.PreparedAuto.sqnr_db
    static = lambda q: all(d.spec.mode == "static" for d in q.graph.plan.quantized)  # noqa: E731

    def of_some(self, q):
        return math.nan if static(q) else original(self, q)

    monkeypatch.setattr(searching.PreparedAuto, "sqnr_db", of_some)
    front = tuned(model, points=1)
    assert "static is left out: its outputs on calibration data hold NaN or infinite values" in front.notes
    assert "static" not in {point.name for point in front.measured}
    assert "rows" in {point.name for point in front.measured}


def test_what_was_not_calibrated_is_left_out_and_said(model, monkeypatch):
    original = searching.PreparedModel.unseen
    mixed = lambda self: bool(self.quant_config.to_dict().get("local"))  # noqa: E731
    monkeypatch.setattr(
        searching.PreparedModel, "unseen", lambda self: ("0.up",) if mixed(self) else original(self)
    )
    front = tuned(model)
    assert all(point.estimated is None or not point.config.to_dict()["local"] for point in front.measured)
    assert any(note.endswith("is left out: 0.up were not calibrated for it.") for note in front.notes)


def test_a_preparation_knows_what_it_has_not_seen(model):
    one, other = (
        nc.prepare(model, nc.StaticQuantConfig(act_algo=a), example_inputs=DATA[0]) for a in ("minmax", "kl")
    )
    assert one.unseen() == ()
    one.observed = other.observed
    assert "0.up" in one.unseen()


def test_candidates_that_are_the_same_are_said(model):
    front = tuned(
        model, points=1, candidates={"one": nc.DynamicQuantConfig(), "two": nc.DynamicQuantConfig()}
    )
    assert "two is the same configuration as one." in front.notes


def test_no_point_meets_a_time(front):
    with pytest.warns(NCWarning, match="No measured point meets max_ms=0"):
        front.most_accurate(max_ms=0)


def test_candidates_are_as_given_also_in_mixtures(model):
    """Names of the user's are not those of what "auto" tries, whose algorithms are others."""
    wanted = nc.StaticQuantConfig(act_sym=True)
    # so many that some have a static operator, however times turn out on a busy machine
    front = tuned(model, candidates={"static": wanted, "rows": CANDIDATES["rows"]}, points=10)
    mixed = [point for point in front.measured if " static" in point.name]
    assert mixed
    for point in mixed:
        parts = [part for part in with_rules(point.config) if type(part) is nc.StaticQuantConfig]
        quantized = [part for part in parts if not part.is_float]
        assert all(part.act_sym for part in quantized)


ASKED, LABELS = [], np.zeros(4)


def reads_labels(given):
    ASKED.append(given)
    return float(LABELS.sum())


def kept(model, folder, metric, **options):
    """A front without mixtures, which depend on times, and how often the metric was called for it."""
    ASKED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching.GraphSearch, "_front_between", lambda *_, **__: None)
        front = tuned(model, metric=metric, trials=folder, points=1, automatically=False, **options)
    assert {point.metric for point in front.measured} == {front.measured[0].metric}  # nothing old beside new
    return front, len(ASKED)


def test_a_metric_whose_data_changed_is_asked_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LABELS", np.zeros(4))
    first, asked = kept(model, tmp_path, reads_labels)
    assert asked == len(first.measured)
    again, asked = kept(model, tmp_path, reads_labels)
    assert (asked, again.measured[0].metric) == (0, 0.0)
    LABELS[0] = 1.0
    changed, asked = kept(model, tmp_path, reads_labels)
    assert (asked, changed.measured[0].metric) == (len(first.measured), 1.0)


def test_a_metric_that_cannot_be_told_apart_is_asked_each_time(model, tmp_path):
    numbers = (float(i) for i in range(1000))

    def metric(given):
        ASKED.append(given)
        return 0.0 * next(numbers)

    for _ in range(2):
        with pytest.warns(NCWarning, match=r"keeps nothing .* builtins\.generator \(metric's numbers\)\. If"):
            front, asked = kept(model, tmp_path, metric)
        assert asked == len(front.measured)
        assert any("metric_id=" in note for note in front.notes)
        assert not list(tmp_path.iterdir())
    for name, again in (("v1", False), ("v1", True), ("v2", False)):
        front, asked = kept(model, tmp_path, metric, metric_id=name)
        assert asked == (0 if again else len(front.measured))
        assert not front.notes


@pytest.mark.parametrize(("metric", "name"), [(None, "v1"), (reads_labels, 3), (reads_labels, "")])
def test_a_word_for_the_metric_is_a_text(model, metric, name):
    with pytest.raises(ConfigError, match="metric_id="):
        tuned(model, metric=metric, metric_id=name)
