"""`nc.autoquant`: what is taken, with injected times, and the cache: hits, misses, damage."""

import copy
import functools
import json
import os

import pytest
import torch
from suites.reports import said
from torch import nn

import nc
from nc.errors import ArtefactError, BackendError, ConfigError, NCWarning
from nc.tuning import autoquant as choosing
from nc.tuning import identity
from nc.tuning import measure as measuring
from nc.tuning import search as searching
from nc.tuning.choices import Choices, Taken
from nc.tuning.front import Front, FrontPoint
from nc.tuning.mixed import FP32, float_config
from nc.tuning.solve import Cost
from nc.tuning.trials import Result

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
DYNAMIC, STATIC = nc.DynamicQuantConfig(), nc.StaticQuantConfig()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def calibrate(prepared):
    for seed in range(6):
        prepared(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)))


def modes(q_model):
    return {d.operator: d.spec.mode for d in q_model.graph.plan.quantized}


@pytest.fixture
def times(monkeypatch):
    """Milliseconds by what is int8 in a model ("static", "dynamic", "dynamic static"); fp32 takes 10."""
    found = {"static": 5.0, "dynamic": 6.0, "dynamic static": 7.0, "": 20.0}  # the last is bf16 alone

    def timed(model, entry, q_model):
        own = 10.0 if q_model is None else found[" ".join(sorted(set(modes(q_model).values())))]
        return measuring.Timed(10.0, own, (10.0 / own, 10.0 / own), "")

    monkeypatch.setattr(measuring, "timed", timed)
    return found


@pytest.fixture
def searches(monkeypatch):
    """The candidates of each search that was made."""
    made = []
    original = choosing.tune

    def noted(*args, **options):
        made.append(set(options["candidates"]))
        return original(*args, **options)

    monkeypatch.setattr(choosing, "tune", noted)
    return made


@pytest.mark.parametrize(("fastest", "slower"), [("static", "dynamic"), ("dynamic", "static")])
def test_the_fastest_precision_is_taken(model, times, fastest, slower):
    times.update({fastest: 4.0, slower: 8.0, "dynamic static": 9.0})
    found = nc.autoquant(model, X, run_fn=calibrate)
    assert modes(found) == {"0": fastest, "2": fastest}
    (note,) = [each for each in found.graph.applied if each.algorithm == "autoquant"]
    assert "is 2.50 times as fast as fp32" in note.text
    assert "1.25 × fp32" in note.text
    assert "autoquant: " in said(found.report())
    assert torch.allclose(found(X), model(X), atol=0.1)


def test_each_layer_gets_its_own_where_the_mixture_is_the_fastest(model, times, monkeypatch):
    times["dynamic static"] = 2.0
    costs = {
        "0": {FP32: Cost(0.0, 3.0), "int8 per row": Cost(1e-6, 2.0), "static int8": Cost(1e-5, 1.0)},
        "2": {FP32: Cost(0.0, 3.0), "int8 per row": Cost(1e-5, 1.0), "static int8": Cost(1e-6, 2.0)},
    }
    monkeypatch.setattr(
        searching,
        "groups_of",
        lambda *_: tuple(searching.Group((name,), name) for name in costs),
    )
    monkeypatch.setattr(searching, "table_of", lambda *_: list(costs.values()))
    found = nc.autoquant(model, X, run_fn=calibrate)
    assert modes(found) == {"0": "static", "2": "dynamic"}


@pytest.mark.parametrize(("ms", "quantized"), [(10.0 / 1.021, True), (10.0 / 1.019, False), (12.0, False)])
def test_a_model_that_gains_nothing_stays_as_it_is(model, times, ms, quantized):
    times.update({"static": ms, "dynamic": ms, "dynamic static": ms})
    if quantized:
        assert nc.autoquant(model, X) is not model
    else:
        with pytest.warns(
            NCWarning, match=r"leaves the model as it is: .* times as fast as fp32; int8 per row"
        ):
            assert nc.autoquant(model, X) is model


def test_a_model_that_is_not_accurate_enough_is_not_taken(model, times, monkeypatch):
    decibels = {"static": 20.0, "dynamic": 40.0, "dynamic static": 25.0, "": 0.0}  # the last is bf16 alone
    monkeypatch.setattr(
        searching.PreparedAuto,
        "sqnr_db",
        lambda _, q_model: decibels[" ".join(sorted(set(modes(q_model).values())))],
    )
    assert set(modes(nc.autoquant(model, X, run_fn=calibrate)).values()) == {"static"}
    for least, taken in ((40.0, {"dynamic"}), (15, {"static"})):
        found = nc.autoquant(model, X, run_fn=calibrate, min_sqnr_db=least)
        assert set(modes(found).values()) == taken
    with pytest.warns(NCWarning, match="there is nothing else with 41 dB; "):
        assert nc.autoquant(model, X, run_fn=calibrate, min_sqnr_db=41.0) is model


def test_without_data_no_layer_is_static(model, times, searches):
    nc.autoquant(model, X)
    nc.autoquant(model, X, run_fn=calibrate)
    assert searches == [{"int8 per row"}, {"int8 per row", "static int8"}]


def test_the_example_inputs_are_timed_and_not_the_data(model, times, monkeypatch):
    sizes, timed = [], measuring.timed
    monkeypatch.setattr(
        measuring, "timed", lambda *args: sizes.append(tuple(args[1][0][0].shape)) or timed(*args)
    )
    nc.autoquant(model, X[:2], run_fn=calibrate)
    assert set(sizes) == {(2, 32)}


def test_inputs_by_name_and_what_can_not_be_converted(times, monkeypatch):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 8)

        def forward(self, x, scale):
            return self.fc(x) * scale

    model = Named().eval()
    given = {"x": X, "scale": torch.tensor(2.0)}
    assert modes(nc.autoquant(model, given)) == {"fc": "dynamic"}

    def lowered(*_):
        msg = "no such kernel"
        raise BackendError(msg)

    monkeypatch.setattr(searching.PreparedModel, "lowered", lowered)
    with pytest.warns(NCWarning, match="nothing else; int8 per row could not be converted: no such kernel"):
        assert nc.autoquant(model, given) is model


def test_what_is_known_is_not_timed_again(model, times, tmp_path, monkeypatch):
    cache = tmp_path / "folder" / "autoquant.json"
    first = nc.autoquant(model, X, run_fn=calibrate, cache=cache)
    written = cache.read_bytes()
    assert [path.name for path in cache.parent.iterdir()] == ["autoquant.json"]

    def never(*_, **__):
        msg = "it was timed"
        raise AssertionError(msg)

    for module, name in ((choosing, "tune"), (measuring, "timed"), (measuring, "timed_rounds")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr("nc.api.preparation.finish.speed_verdict", never)
    monkeypatch.setattr("nc.api.auto.prepared.timed_rounds", never)
    again = nc.autoquant(model, X, run_fn=calibrate, cache=str(cache))
    assert modes(again) == modes(first)
    assert torch.equal(again(X), first(X))
    assert again.graph.applied[0] == first.graph.applied[0]
    assert cache.read_bytes() == written


def test_that_nothing_gains_is_known_too(model, times, searches, tmp_path):
    times.update(dict.fromkeys(times, 20.0))
    for _ in range(2):
        with pytest.warns(NCWarning, match="leaves the model as it is: int8 per row is 0.50 times as fast"):
            assert nc.autoquant(model, X, cache=tmp_path / "a.json") is model
    assert len(searches) == 1


def more_sets(detected):
    return (*detected(), "another")


def other_weights(model):
    other = copy.deepcopy(model)
    other[0].bias.data += 1
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        lambda patch: patch.setattr(identity.cpu, "model_name", lambda: "another"),
        lambda patch: patch.setattr(
            identity.cpu, "detected", functools.partial(more_sets, identity.cpu.detected)
        ),
        lambda patch: patch.setattr(identity, "__version__", "another"),
        lambda patch: patch.setattr(identity, "available_backends", lambda: {"another": ""}),
    ],
)
def test_another_machine_is_another_search(model, times, searches, tmp_path, monkeypatch, change):
    cache = tmp_path / "a.json"
    nc.autoquant(model, X, cache=cache)
    with monkeypatch.context() as patch:
        change(patch)
        nc.autoquant(model, X, cache=cache)
    assert len(searches) == 2
    nc.autoquant(model, X, cache=cache)
    assert len(searches) == 2
    assert len(json.loads(cache.read_text())["choices"]) == 2


def test_other_shapes_weights_and_limits_are_other_searches_and_other_values_are_not(
    model, times, searches, tmp_path
):
    cache = tmp_path / "a.json"
    for expected, (given, x, options) in enumerate(
        [
            (model, X, {}),
            (model, X[:4], {}),
            (other_weights(model), X, {}),
            (model, X, {"run_fn": calibrate}),
            (model, X, {"min_sqnr_db": 10.0}),
            (model, X, {"min_sqnr_db": 11.0}),
            (model, X + 1, {"min_sqnr_db": 11.0}),
        ],
        1,
    ):
        nc.autoquant(given, x, cache=cache, **options)
        assert len(searches) == expected
    nc.autoquant(model, X + 1, cache=cache)
    assert len(searches) == 7
    assert len(json.loads(cache.read_text())["choices"]) == 7


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"schema": 99, "choices": {}}', '{"schema": 1, "choices": 5}', "\x00\xff"]
)
def test_a_damaged_file_is_a_warning_measured_again_and_not_written(model, times, searches, tmp_path, text):
    """It may hold choices for other models, which a repair by hand or a newer nc brings back."""
    cache = tmp_path / "a.json"
    cache.write_bytes(text.encode("latin-1"))
    for count in (1, 2):
        with pytest.warns(NCWarning, match="is damaged, and all is measured again.*It stays as it is"):
            nc.autoquant(model, X, cache=cache)
        assert len(searches) == count
    assert cache.read_bytes() == text.encode("latin-1")


def test_another_json_file_is_no_cache(model, times, searches, tmp_path):
    cache = tmp_path / "package.json"
    cache.write_text('{"name": "mine"}')
    with pytest.raises(ArtefactError, match=r"package\.json' is another JSON file.*Choose another name"):
        nc.autoquant(model, X, cache=cache)
    assert searches == []
    assert cache.read_text() == '{"name": "mine"}'


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("config"),
        lambda entry: entry.update(config={"dynamic": {"typo": 1}}),
        lambda entry: entry.update(config=5),
        lambda entry: entry["key"].update(threads=999),
        lambda entry: entry.pop("why"),
        lambda entry: entry.clear(),
    ],
)
def test_a_damaged_entry_is_a_warning_and_others_stay(model, times, searches, tmp_path, damage):
    cache = tmp_path / "a.json"
    nc.autoquant(model, X, cache=cache)
    nc.autoquant(model, X[:4], cache=cache)
    document = json.loads(cache.read_text())
    name = next(name for name, each in document["choices"].items() if each["key"]["inputs"][0][1] == 8)
    damage(document["choices"][name])
    cache.write_text(json.dumps(document))
    with pytest.warns(NCWarning, match="An entry of .* is damaged, and is measured again"):
        nc.autoquant(model, X, cache=cache)
    assert len(searches) == 3
    nc.autoquant(model, X, cache=cache)
    nc.autoquant(model, X[:4], cache=cache)
    assert len(searches) == 3


def test_what_can_not_be_written_is_said(model, times, searches, tmp_path, monkeypatch):
    with pytest.raises(ArtefactError, match="is a directory"):
        nc.autoquant(model, X, cache=tmp_path)
    assert searches == []

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtefactError, match=r"a\.json cannot be written: No space left"):
        nc.autoquant(model, X, cache=tmp_path / "a.json")


def test_a_search_that_was_ended_is_used_and_not_kept(model, times, tmp_path, monkeypatch):
    cache = tmp_path / "a.json"
    with pytest.warns(NCWarning, match="The budget ended before all points were measured"):
        assert nc.autoquant(model, X, cache=cache, budget=1e-6) is model

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(searching.GraphSearch, "_front_between", interrupted)
    found = nc.autoquant(model, X, cache=cache)
    assert set(modes(found).values()) == {"dynamic"}
    assert "The search was ended by Ctrl-C." in found.graph.applied[0].text
    assert not cache.exists()


def test_auto_is_not_measured(model, times):
    phases = []
    nc.autoquant(model, X, progress=lambda each: phases.append(each.phase))
    assert phases[:2] == ["fp32", "int8 per row"]
    assert "auto" not in phases


def test_the_model_is_saved_and_loaded_and_the_users_is_not_changed(model, times, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = nc.autoquant(model, X)
    assert list(tmp_path.iterdir()) == []
    found.save("saved")
    assert torch.equal(nc.load("saved")(X), found(X))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("value", ["20", True, float("nan"), float("inf")])
def test_bad_limits(model, value):
    with pytest.raises(ConfigError, match="min_sqnr_db="):
        nc.autoquant(model, X, min_sqnr_db=value)


# ---- the choice alone ----


def point(name, ratio, sqnr_db, note=""):
    result = Result(
        metric=0.0, sqnr_db=sqnr_db, fp32_ratio=ratio, ms=10 / ratio, spread=(ratio, ratio), weight_bytes=1,
        note=note,
    )  # fmt: skip
    config = {"fp32": float_config(), "a": STATIC, "b": DYNAMIC}[name]
    return FrontPoint(name=name, config=config, result=result, drop=0.0)


@pytest.mark.parametrize(
    ("points", "least", "config"),
    [
        ([("a", 1.5, 30.0), ("b", 1.4, 40.0)], None, STATIC),
        ([("a", 1.5, 30.0), ("b", 1.4, 40.0)], 30.0, STATIC),
        ([("a", 1.5, 30.0), ("b", 1.4, 40.0)], 30.1, DYNAMIC),
        ([("a", 1.5, 30.0), ("b", 1.01, 40.0)], 30.1, None),
        ([("a", 1.5, None), ("b", 1.4, 40.0)], 99.0, STATIC),
        ([("a", 1.5, 30.0)], 31.0, None),
        ([], None, None),
    ],
)
def test_choices(points, least, config):
    front = Front(measured=(point("fp32", 1.0, None), *(point(*each) for each in points)))
    assert choosing.choose(front, least).config == config


def test_doubts_of_times_are_said():
    front = Front(measured=(point("fp32", 1.0, None), point("a", 1.5, 30.0, "this machine is busy")))
    assert choosing.choose(front, None).why.endswith("a: 1.50 × fp32, 30.0 dB (this machine is busy)")


def test_without_a_file_nothing_is_kept():
    nothing = Choices(None)
    nothing.keep({"a": 1}, Taken(None, "because"))
    assert nothing.find({"a": 1}) is None


def test_data_that_can_be_read_once_is_read_once(model, times):
    """As an iterator is."""
    calls = iter([torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(6)])
    times.update({"static": 4.0, "dynamic": 8.0, "dynamic static": 9.0})
    found = nc.autoquant(model, X, run_fn=lambda prepared: [prepared(batch) for batch in calls])
    assert modes(found) == {"0": "static", "2": "static"}
    assert torch.equal(found(X), nc.autoquant(model, X, run_fn=calibrate)(X))
