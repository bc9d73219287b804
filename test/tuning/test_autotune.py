"""Neural Compressor's `autotune`: order, tolerance, the best where none is good enough, and what fails."""

import math

import pytest
import torch
from models import Function
from torch import nn

import nc
from nc import DynamicQuantConfig, RTNConfig, StaticQuantConfig, TuningConfig, autotune, get_all_config_set
from nc.errors import ConfigError, InputError, NCError, NCWarning, StateError
from nc.graph.caches import register

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
STATIC, DYNAMIC, ROUNDED = StaticQuantConfig(), DynamicQuantConfig(), RTNConfig(bits=4, group_size=32)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def tuned(model, tune_config, scores, **options):
    """The model by scores of fp32 and of one configuration after the other, and what was asked."""
    asked, left = [], list(scores)

    def eval_fn(given, *args):
        asked.append((given, args))
        return left.pop(0)

    found = autotune(model, tune_config, eval_fn, run_fn=lambda m: m(X), example_inputs=X, **options)
    return found, asked


def test_the_first_that_loses_no_more_than_is_tolerated(model):
    config = TuningConfig(config_set=[STATIC, DYNAMIC, ROUNDED], tolerable_loss=0.01)
    found, asked = tuned(model, config, [100, 98.9, 99.0])
    assert asked[0][0] is model
    assert found is asked[2][0]
    assert len(asked) == 3
    assert {d.spec.mode for d in found.graph.plan.quantized} == {"dynamic"}


def test_the_best_where_none_is_good_enough(model):
    config = TuningConfig(config_set=[STATIC, DYNAMIC, ROUNDED], tolerable_loss=0.0)
    with pytest.warns(
        NCWarning, match=r"No configuration keeps 100 of fp32's 100\. The best is DynamicQuant"
    ):
        found, asked = tuned(model, config, [100, 90, 95, 92])
    assert found is asked[2][0]


@pytest.mark.parametrize(("fp32", "score", "good"), [(-10, -10.05, True), (-10, -10.2, False), (0, 0, True)])
def test_metrics_that_are_negative_or_zero(model, fp32, score, good):
    config = TuningConfig(config_set=[STATIC, DYNAMIC])
    if good:
        assert len(tuned(model, config, [fp32, score])[1]) == 2
    else:
        with pytest.warns(NCWarning, match="No configuration keeps"):
            assert len(tuned(model, config, [fp32, score, score])[1]) == 3


def test_equal_configurations_are_tried_once_and_at_most_so_many(model):
    config = TuningConfig(config_set=[STATIC, StaticQuantConfig(), DYNAMIC, ROUNDED], max_trials=2)
    with pytest.warns(NCWarning, match="No configuration keeps"):
        _, asked = tuned(model, config, [1, 0, 0])
    assert len(asked) == 3
    assert config.max_trials == 2


def test_a_sampler_gives_the_order_and_arguments_are_passed_on(model):
    config = TuningConfig(config_set=[STATIC, DYNAMIC], sampler=lambda source: reversed(range(len(source))))
    found, asked = tuned(model, config, [1, 1], eval_args=("a", 2))
    assert {d.spec.mode for d in found.graph.plan.quantized} == {"dynamic"}
    assert [args for _, args in asked] == [("a", 2)] * 2


def test_a_configuration_that_fails_is_passed_over_with_a_warning(model):
    wrong = StaticQuantConfig().set_local(
        "no such layer", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")
    )
    with pytest.warns(NCWarning, match="autotune passes .* over"):
        found, _ = tuned(model, TuningConfig(config_set=[wrong, DYNAMIC]), [1, 1])
    assert found is not None
    with pytest.warns(NCWarning, match="over"), pytest.raises(NCError, match="no such layer"):
        tuned(model, TuningConfig(config_set=wrong), [1])


def test_weight_only_and_dictionaries(model):
    config = TuningConfig(config_set=[{"rtn": {"bits": 4, "group_size": 32}}])
    found, _ = tuned(model, config, [1, 1])
    assert type(found[0]).__name__ == "QuantLinear"
    assert type(model[0]) is nn.Linear


def test_all_kinds_can_be_tried(model):
    everything = get_all_config_set()
    assert len(everything) == len(TuningConfig(config_set=everything).configs()) >= 20
    assert len({type(config) for config in everything}) == 4
    for config in everything:
        assert nc.quantize(model, config, lambda m: m(X), example_inputs=X, measure=False) is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "config_set has no configuration"),
        ({"config_set": []}, "config_set has no configuration"),
        ({"config_set": 5}, "5|int"),
        ({"config_set": STATIC, "tolerable_loss": "1%"}, "tolerable_loss='1%'"),
        ({"config_set": STATIC, "max_trials": 0}, "max_trials=0"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(ConfigError, match=says):
        TuningConfig(**options)


def test_bad_calls(model):
    with pytest.raises(ConfigError, match="expected a TuningConfig, but got dict"):
        autotune(model, {}, lambda m: 1)
    with pytest.raises(InputError, match="gave None for Sequential: expected a finite number"):
        autotune(model, TuningConfig(config_set=DYNAMIC), lambda m: None)


def test_data_that_can_be_read_once_is_named(model):
    """As an iterator is: later configurations get nothing, which would look like their fault."""
    batches = iter([X, X])
    config = TuningConfig(config_set=[STATIC, StaticQuantConfig(act_algo="mse")], tolerable_loss=0.0)
    scores = iter([100, 90])
    with pytest.warns(NCWarning) as caught:
        autotune(
            model,
            config,
            lambda _: next(scores),
            run_fn=lambda prepared: [prepared(batch) for batch in batches],
            example_inputs=X,
        )
    texts = [str(each.message) for each in caught]
    assert any("called an earlier prepared model 2 times, and this one not at all" in text for text in texts)


def test_example_inputs_are_those_of_the_first_call_of_calibration(model):
    """As scripts for Neural Compressor have it, which give none."""
    seen = []

    def run(prepared, *data):
        for batch in data:
            seen.append(type(prepared).__name__)
            prepared(batch)

    settings = TuningConfig(config_set=get_all_config_set(), max_trials=4)
    found = autotune(model, settings, lambda m: 1.0, run_fn=run, run_args=(X[:3], X))
    assert tuple(found.graph.example[0].shape) == (3, *X.shape[1:])
    assert seen[0] == type(model).__name__
    assert seen[1:].count(type(model).__name__) == 0  # the rest of the data is not run for it


def test_example_inputs_are_those_of_the_metric_without_calibration(model):
    found = autotune(model, TuningConfig(config_set=DYNAMIC), lambda m: float(m(X).sum() * 0 + 1))
    assert found.graph.example[0].shape == X.shape


def test_a_candidate_whose_metric_is_nan_is_passed_over(model):
    values = iter([1.0, math.nan, 10**400, 0.995])
    settings = TuningConfig(config_set=[STATIC, nc.SmoothQuantConfig(), DYNAMIC])
    with pytest.warns(NCWarning, match="passes .* over: The metric .* gave nan") as caught:
        found = autotune(model, settings, lambda m: next(values), run_fn=lambda m: m(X), example_inputs=X)
    assert sum("passes" in str(each.message) for each in caught) == 2
    assert {d.spec.mode for d in found.graph.plan.quantized} == {"dynamic"}


def test_a_loop_that_trains_teq_says_what_to_do(model):
    prepared = nc.prepare(model, nc.TEQConfig(group_size=-1))
    with pytest.raises(StateError, match=r"TEQ learns its scales in convert\(\)"):
        prepared(X).pow(2).mean().backward()
    with torch.no_grad():
        assert not prepared(X).requires_grad
    assert not nc.prepare(model, nc.AWQConfig(group_size=-1))(X).requires_grad
    assert nc.convert(prepared, measure=False) is not None


def test_a_cache_that_a_loop_gets_is_the_models_own(model):
    """Of any kind: hybrid models keep other states than keys and values in it."""
    caches = pytest.importorskip("transformers.cache_utils")
    register()  # as any capture does
    cache = caches.DynamicCache()
    cache.layers.append(type("OtherLayer", (), {})())
    both = Function(lambda self, x: (self.net(x), cache), net=model)
    output, got = nc.prepare(both, nc.TEQConfig(group_size=-1))(X)
    assert got is cache
    with pytest.raises(StateError, match="TEQ"):
        output.sum().backward()
