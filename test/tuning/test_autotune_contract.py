"""What scripts written for Neural Compressor rely on in `autotune` and `TuningConfig`.

From its documentation and the behaviour that its own tests ask for: fp32 is judged first; lists in fields are
expanded; the search stops at the first configuration whose loss, as a part of fp32's metric, is tolerated (a
tolerance may be negative), or after `max_trials`, and then the best is returned; `eval_args`, `run_args` and
`example_inputs` reach the functions that they are for; a single configuration, lists and ready-made sets all
work; `run_fn` may call a language model with tensors, lists or dictionaries. The user's model stays as it is.

Different on purpose: the best is the model that was judged, not one that is quantized again; a set that ends
with duplicates gives a model and not None; what fails is passed over.
"""

import itertools

import pytest
import torch
from torch import nn
from transformers import GPTJConfig, GPTJForCausalLM

import nc
from nc import (
    GPTQConfig,
    NCWarning,
    RTNConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    TuningConfig,
    autotune,
    get_all_config_set,
    get_rtn_double_quant_config_set,
    get_woq_tuning_config,
)

TOKENS = torch.arange(64).reshape(4, 16)


class ThreeLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc3(self.fc2(self.fc1(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ThreeLinears().eval()


@pytest.fixture(scope="module")
def language_model():
    torch.manual_seed(0)
    return GPTJForCausalLM(
        GPTJConfig(vocab_size=100, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)
    ).eval()


class Scores:
    """An evaluation that gives one number after the other, and keeps what it was called with."""

    def __init__(self, *values):
        self.values, self.models, self.args = list(values), [], []

    def __call__(self, given, *args):
        self.models.append(given)
        self.args.append(args)
        return self.values[len(self.models) - 1]


def bits(q_model, name="fc1"):
    return q_model.get_submodule(name).form.dtype.bits


def test_one_configuration_with_several_values(model):
    score = Scores(1.0, 1.0)
    found = autotune(model=model, tune_config=TuningConfig(config_set=RTNConfig(bits=[4, 6])), eval_fn=score)
    assert score.models == [model, found]
    assert bits(found) == 4
    assert type(model.fc1) is nn.Linear


def test_the_documented_product_of_two_fields(model):
    tune_config = TuningConfig(config_set=RTNConfig(use_sym=[False, True], group_size=[8, 32]), max_trials=10)
    tried = [(each.w_sym, each.group_size) for each in tune_config.configs()]
    assert tried == [(False, 8), (False, 32), (True, 8), (True, 32)]
    score = Scores(1.0, 0.1, 0.2, 0.3, 1.0)
    found = autotune(model, tune_config, score)
    assert found is score.models[4]


@pytest.mark.parametrize(
    ("tolerable_loss", "scores", "taken"),
    [
        (0.01, [0.9, 0.9, 0.99], 5),
        (0.1, [0.9], 4),
        (-0.01, [0.9, 0.9, 0.99, 1.01], 8),
    ],
)
def test_the_first_whose_loss_is_tolerated(model, tolerable_loss, scores, taken):
    score = Scores(1.0, *scores)
    tune_config = TuningConfig(config_set=[RTNConfig(bits=[4, 6, 5, 8])], tolerable_loss=tolerable_loss)
    found = autotune(model, tune_config, score)
    assert found is score.models[-1]
    assert len(score.models) == 1 + len(scores)
    assert bits(found) == taken


@pytest.mark.parametrize("scores", [(0.9, 0.8), (0.8, 0.9)])
def test_the_best_of_max_trials_where_no_loss_is_tolerated(model, scores):
    score = Scores(1.0, *scores)
    tune_config = TuningConfig(config_set=[RTNConfig(bits=[4, 6, 8])], max_trials=2)
    with pytest.warns(NCWarning, match="No configuration keeps"):
        found = autotune(model, tune_config, score)
    assert len(score.models) == 3
    assert found is score.models[1 + scores.index(max(scores))]


def test_duplicates_are_tried_once_and_end_in_a_model(model):
    score = Scores(1.0, 0.5)
    with pytest.warns(NCWarning, match="No configuration keeps"):
        found = autotune(model, TuningConfig(config_set=[RTNConfig(bits=[4, 4]), RTNConfig()]), score)
    assert found is score.models[1]
    assert len(score.models) == 2


def test_arguments_reach_the_functions_that_they_are_for(model):
    calibrated = []

    def run_fn(prepared, batches, last):
        calibrated.append(last)
        for batch in batches:
            prepared(batch)

    score = Scores(1.0, 1.0)
    x = torch.randn(8, 32)
    found = autotune(
        model,
        TuningConfig(config_set=[StaticQuantConfig(act_sym=[True, False])]),
        score,
        eval_args=("data", 5),
        run_fn=run_fn,
        run_args=([x, x + 1], True),
        example_inputs=x,
    )
    assert score.args == [("data", 5)] * 2
    assert calibrated == [True]
    assert {d.spec.mode for d in found.graph.plan.quantized} == {"static"}
    assert all(d.spec.activation.symmetric for d in found.graph.plan.quantized)


def test_rules_stay_in_each_of_the_expanded(model):
    config = RTNConfig(bits=[4, 8]).set_local("fc2", RTNConfig(dtype="fp32"))
    score = Scores(1.0, 0.5, 1.0)
    found = autotune(model, TuningConfig(config_set=config), score)
    assert [bits(each) for each in score.models[1:]] == [4, 8]
    assert all(type(each.fc2) is nn.Linear for each in score.models)
    assert found is score.models[2]


def test_smoothing_with_several_strengths(model):
    x = torch.randn(8, 32)
    score = Scores(1.0, 0.6, 0.9)
    with pytest.warns(NCWarning, match=r"SmoothQuantConfig\(alpha=0\.6\)"):
        found = autotune(
            model,
            TuningConfig(config_set=[SmoothQuantConfig(alpha=[0.5, 0.6])]),
            score,
            run_fn=lambda m: m(x),
            example_inputs=x,
        )
    assert found is score.models[2]


def test_samplers_are_called_with_the_expanded_set(model):
    asked = []

    class Backwards:
        def __init__(self, source):
            asked.append(len(source))
            self.source = source

        def __iter__(self):
            return iter(range(len(self.source) - 1, -1, -1))

    tune_config = TuningConfig([RTNConfig(bits=[4, 8])], Backwards)
    assert [each.w_dtype for each in tune_config.configs()] == ["int8", "int4"]
    assert set(asked) == {2}


def test_a_sampler_that_never_ends_is_stopped_by_max_trials():
    def again(source):
        while True:
            yield from range(len(source))

    tune_config = TuningConfig([RTNConfig(bits=[4, 6, 8])], again, max_trials=2)
    assert len(tune_config.configs()) == 2


@pytest.mark.parametrize("position", [2, -1, 0.5, "first"])
def test_a_sampler_that_gives_no_position(position):
    with pytest.raises(nc.ConfigError, match=r"sampler gave .*: expected positions from 0 to 1\."):
        TuningConfig([RTNConfig(bits=[4, 8])], lambda source: [position]).configs()


def test_samplers_that_repeat_themselves_or_give_nothing():
    assert len(TuningConfig([RTNConfig(bits=[4, 8])], lambda _: itertools.cycle([0, 1])).configs()) == 2
    assert len(TuningConfig([RTNConfig(bits=[4, 8])], lambda _: itertools.repeat(0)).configs()) == 1
    asked = []
    config = TuningConfig([RTNConfig(bits=[4, 8])], lambda _: asked.append(1) or iter(()))
    assert asked == []  # it is asked when the search begins
    with pytest.raises(nc.ConfigError, match="sampler gave no position"):
        config.configs()


def as_tensor(row):
    return row[None]


def as_list(row):
    return (row[None], row[None])


def as_dict(row):
    return {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}


def run_batches(model, batches, _):
    for batch in batches:
        if isinstance(batch, dict):
            model(**batch)
        else:
            model(batch[0] if isinstance(batch, tuple) else batch)


@pytest.mark.parametrize("form", [as_tensor, as_list, as_dict])
def test_weight_only_on_a_language_model(language_model, form):
    score = Scores(1.0, 0.5, 1.0)
    found = autotune(
        language_model,
        TuningConfig(config_set=[GPTQConfig(bits=[4, 8], act_order=True, group_size=32)]),
        score,
        run_fn=run_batches,
        run_args=([form(row) for row in TOKENS], True),
    )
    assert isinstance(found, GPTJForCausalLM)
    assert bits(found, "transformer.h.0.mlp.fc_in") == 8
    assert torch.isfinite(found(TOKENS).logits).all()


def test_the_set_for_weights(language_model):
    tried = get_woq_tuning_config()
    assert [type(each.solver).__name__ for each in tried] == ["RTN", "AutoRound", "GPTQ", "RTN"]
    assert all((each.w_dtype, each.group_size, each.w_sym) == ("int4", 32, False) for each in tried)
    score = Scores(1.0, 0.9, 0.95, 0.95, 0.99)
    with pytest.warns(NCWarning, match="No configuration keeps"):
        found = autotune(
            language_model,
            TuningConfig(config_set=tried, tolerable_loss=-1),
            score,
            run_fn=run_batches,
            run_args=(list(TOKENS[:, None]), True),
            example_inputs=TOKENS,
        )
    assert found is score.models[4]


def test_the_set_with_quantized_scales(model):
    tried = get_rtn_double_quant_config_set()
    assert [each.w_dtype for each in tried] == ["nf4", "int4"]
    score = Scores(1.0, 0.5, 1.0)
    assert autotune(model, TuningConfig(config_set=tried), score) is score.models[2]
    assert bits(score.models[2]) == 4


def test_all_sets_up_to_max_trials(model):
    x = torch.randn(8, 32)
    score = Scores(1.0, 0.1, 0.2, 0.3, 0.4)
    tune_config = TuningConfig(config_set=get_all_config_set(), max_trials=4)
    with pytest.warns(NCWarning, match="No configuration keeps"):
        found = autotune(model, tune_config, score, run_fn=lambda m: m(x), example_inputs=x)
    assert found is score.models[4]


def test_what_has_no_kernel_is_left_out_of_a_set():
    with pytest.warns(NCWarning, match=r"w_sym=False is left out"):
        tune_config = TuningConfig(config_set=[StaticQuantConfig(w_sym=[True, False])])
    assert tune_config.configs() == [StaticQuantConfig(w_sym=True)]
