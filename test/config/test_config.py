"""The configuration object: what it refuses, and that its JSON form loses nothing."""

import copy
import json
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import FP32, MLP, call
from torch import nn

from nc import (
    ArtefactMissingError,
    BiasCorrection,
    ComposedConfig,
    ConfigError,
    DynamicQuantConfig,
    NCError,
    PatternError,
    SmoothQuantConfig,
    StaticQuantConfig,
    UnknownFieldError,
    UnsupportedError,
    convert,
    describe,
    get_default_static_config,
    prepare,
)
from nc.config import config_from
from nc.planning.rules import spec_of

FIELDS = list(StaticQuantConfig.FIELDS)


# ---- fields ----


def test_defaults_are_those_that_the_documentation_states():
    config = StaticQuantConfig()
    assert {name: getattr(config, name) for name in FIELDS} == {
        "w_dtype": "int8",
        "w_sym": True,
        "w_granularity": "per_channel",
        "w_algo": "minmax",
        "act_dtype": "uint8",
        "act_sym": False,
        "act_granularity": "per_tensor",
        "act_algo": "minmax",
        "excluded_precisions": (),
        "remainder": "fp32",
        "percentile": 99.999,
        "pre": (),
        "post": (BiasCorrection(),),
    }
    assert get_default_static_config() == config
    assert isinstance(config, StaticQuantConfig)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("act_dtyp", "act_dtype"),
        ("wdtype", "w_dtype"),
        ("granularity", "w_granularity"),
        ("algo", "act_algo"),
        ("rules", "w_"),
    ],
)
def test_unknown_field_names_the_nearest(typo, nearest):
    with pytest.raises(UnknownFieldError, match=f"no field '{typo}'; did you mean '.*{nearest}") as caught:
        StaticQuantConfig(**{typo: "int8"})
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, NCError)
    assert "excluded_precisions" in str(caught.value)


def test_fields_are_positional_in_the_documented_order():
    assert StaticQuantConfig("int8", True, "per_tensor", "minmax", "int8") == StaticQuantConfig(
        w_dtype="int8", w_sym=True, w_granularity="per_tensor", w_algo="minmax", act_dtype="int8"
    )
    with pytest.raises(UnknownFieldError, match="two values for 'w_dtype'"):
        StaticQuantConfig("int8", w_dtype="int8")
    with pytest.raises(UnknownFieldError, match=f"at most {len(FIELDS)} values"):
        StaticQuantConfig(*range(len(FIELDS) + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("w_dtype", "int4"),
        ("act_dtype", "fp16"),
        ("w_granularity", "per_group"),
        ("act_granularity", "per_row"),
        ("w_algo", "magic"),
        ("act_algo", "magic"),
        ("w_sym", 1),
        ("act_sym", "yes"),
        ("post", ["bias_correction"]),
        ("pre", [BiasCorrection()]),
        ("percentile", 50.0),
        ("percentile", 100.5),
        ("percentile", True),
        ("percentile", "99"),
        ("excluded_precisions", ("int7",)),
        ("excluded_precisions", "int7"),
        ("excluded_precisions", 3),
        ("w_dtype", ("int8",)),
    ],
)
def test_a_bad_value_names_the_field_and_what_is_legal(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        StaticQuantConfig(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert "Expected" in str(caught.value)
    assert "but got" in str(caught.value)


@pytest.mark.parametrize(("w_dtype", "act_dtype"), [("fp32", "uint8"), ("fp32", "int8"), ("int8", "fp32")])
def test_contradictory_dtypes(w_dtype, act_dtype):
    with pytest.raises(ConfigError, match=f"w_dtype='{w_dtype}' contradicts act_dtype='{act_dtype}'"):
        StaticQuantConfig(w_dtype=w_dtype, act_dtype=act_dtype)


@pytest.mark.parametrize("excluded", [("int8",), ("uint8", "bf16"), "uint8"])
def test_a_dtype_that_is_excluded_too(excluded):
    with pytest.raises(ConfigError, match="excluded_precisions"):
        StaticQuantConfig(excluded_precisions=excluded)


@pytest.mark.parametrize(("field", "value"), [("act_granularity", "per_channel"), ("w_sym", False)])
def test_legal_values_without_a_kernel_say_what_to_use(field, value):
    with pytest.raises(
        UnsupportedError, match=f"{field}=.*use {field.replace('act_granularity', '')}"
    ) as caught:
        StaticQuantConfig(**{field: value})
    assert isinstance(caught.value, ValueError)


def test_fields_can_be_assigned_and_are_checked():
    config = StaticQuantConfig(act_sym=True)
    config.act_algo = "kl"
    assert config == StaticQuantConfig(act_sym=True, act_algo="kl")
    config.act_algo = None  # taken back
    assert config == StaticQuantConfig(act_sym=True)
    for field, value in (("anything", 1), ("act_algo", "magic"), ("act_dtype", "fp64")):
        with pytest.raises(ConfigError):
            setattr(config, field, value)
    assert config == StaticQuantConfig(act_sym=True)
    config.white_list = ["fc"]
    assert config == StaticQuantConfig(act_sym=True, white_list=["fc"])


def test_fields_that_only_make_sense_together_are_assigned_one_by_one():
    config = StaticQuantConfig()
    config.w_dtype = "fp32"
    with pytest.raises(ConfigError, match="w_dtype='fp32' contradicts act_dtype='uint8'"):  # when it is used
        describe(nn.Linear(4, 4).eval(), config, torch.randn(2, 4), backend="reference")
    config.act_dtype = "fp32"
    assert describe(nn.Linear(4, 4).eval(), config, torch.randn(2, 4), backend="reference").quantized == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticQuantConfig(pre=[{"name": "equalization", "iters": 3}]),
        lambda: StaticQuantConfig(pre=[{"name": ["equalization"]}]),
        lambda: StaticQuantConfig(excluded_precisions=(["bf16"],)),
        lambda: SmoothQuantConfig(auto_alpha_args="abc"),
        lambda: SmoothQuantConfig(auto_alpha_args={"w_dtype": "fp32", "act_dtype": "fp32"}),
        lambda: SmoothQuantConfig(alpha=torch.arange(3).numpy()),
        lambda: StaticQuantConfig.from_dict({1: 2}),
        lambda: config_from({"global": {}, "algorithm": ["x"]}),
        lambda: ComposedConfig.from_dict(
            {
                "algorithm": "composed",
                "parts": [{"global": {"act_sym": True}}, {"global": {"act_sym": False}}],
            }
        ),
        lambda: config_from({"static_quant": {"act_sym": True}, "static": {"act_sym": False}}),
    ],
)
def test_odd_values_are_configuration_errors(make):
    with pytest.raises(ConfigError):
        make()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ArtefactMissingError, match="to_json_file"):
        StaticQuantConfig.from_json_file(tmp_path / "none.json")


def test_a_json_of_another_strategy_says_so():
    with pytest.raises(
        ConfigError, match="'static', but got 1 and 'composed'. Read it with the class of that algorithm"
    ):
        StaticQuantConfig.from_json((StaticQuantConfig() + DynamicQuantConfig()).to_json())


def test_neural_compressors_outer_key_is_read_by_the_class_too():
    assert SmoothQuantConfig.from_dict({"smooth_quant": {"alpha": 0.8}}) == SmoothQuantConfig(alpha=0.8)


def test_what_was_not_given_is_not_what_was_given_as_the_default():
    """They differ as local configurations: the one defers to the level above."""
    assert StaticQuantConfig(act_algo="minmax") != StaticQuantConfig()
    assert StaticQuantConfig(act_algo=None) == StaticQuantConfig()
    assert StaticQuantConfig() != DynamicQuantConfig()


def test_configurations_are_hashable_and_keep_their_hash():
    config = StaticQuantConfig()
    found = {config: 1, DynamicQuantConfig(): 2}
    assert found[StaticQuantConfig()] == 1
    config.set_local("a", FP32)
    assert found[config] == 1
    assert len({StaticQuantConfig(), StaticQuantConfig(), StaticQuantConfig(act_sym=True)}) == 2


def test_defaults_are_not_shared():
    StaticQuantConfig().set_local("fc", FP32)
    assert StaticQuantConfig().rules == ()


def test_what_an_operator_gets():
    config = StaticQuantConfig(act_sym=True, act_dtype="int8", w_granularity="per_tensor")
    spec = spec_of("static", {**config.defaults(), **config.given}, "linear")
    assert (str(spec.activation.dtype), spec.activation.symmetric) == ("int8", True)
    assert (spec.activation.quant_min, spec.activation.quant_max) == (-128, 127)
    assert (str(spec.weight.dtype), str(spec.weight.granularity)) == ("int8", "per_tensor")
    assert (spec.weight.quant_min, spec.weight.quant_max) == (-127, 127)
    assert FP32.is_float
    assert not StaticQuantConfig().is_float


# ---- set_local ----


def keys(config):
    return [(rule.key.text, rule.key.is_type) for rule in config.rules]


def test_set_local_chains_and_takes_lists():
    config = StaticQuantConfig()
    assert config.set_local("a", FP32).set_local(["b", nn.Linear, torch.matmul], FP32) is config
    assert keys(config) == [("a", False), ("b", False), ("Linear", True), ("matmul", True)]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (nn.Linear, "Linear"),
        (nn.Conv2d, "Conv2d"),
        (torch.add, "add"),
        (operator.add, "add"),
        (torch.Tensor.matmul, "matmul"),
        (nn.functional.linear, "linear"),
        (nn.LayerNorm, "torch.nn.modules.normalization.LayerNorm"),
        (MLP, "models.MLP"),
    ],
)
def test_types_and_functions_become_names(key, name):
    assert keys(StaticQuantConfig().set_local(key, FP32)) == [(name, True)]


def test_the_same_key_again_replaces_and_moves_to_the_end():
    config = (
        StaticQuantConfig()
        .set_local("a", FP32)
        .set_local("b", FP32)
        .set_local("a", StaticQuantConfig(act_sym=True))
    )
    assert keys(config) == [("b", False), ("a", False)]
    assert config.rules[1].config.act_sym


@pytest.mark.parametrize("key", ["a(", "*", "[z-a]", ["ok", "("]])
def test_an_invalid_regular_expression(key):
    config = StaticQuantConfig()
    with pytest.raises(PatternError, match="not a valid regular expression"):
        config.set_local(key, FP32)
    assert config.rules == ()


@pytest.mark.parametrize("key", [3, None, nn.Linear(1, 1), print])
def test_a_key_of_another_kind(key):
    with pytest.raises(ConfigError):
        StaticQuantConfig().set_local(key, FP32)


def test_a_local_configuration_that_is_none():
    with pytest.raises(
        ConfigError, match=r"expects a configuration, e\.g\. StaticQuantConfig\(\), but got dict"
    ):
        StaticQuantConfig().set_local("fc", {"w_dtype": "fp32"})


def test_local_rules_inside_a_local_configuration():
    with pytest.raises(ConfigError, match="has local rules; set them on the outer one"):
        StaticQuantConfig().set_local("a", StaticQuantConfig().set_local("b", FP32))


def test_rules_do_not_follow_a_local_configuration_that_grows_later():
    local = StaticQuantConfig()
    config = StaticQuantConfig().set_local("a", local)
    local.set_local("b", FP32)
    assert StaticQuantConfig.from_dict(config.to_dict()) == config


def test_prepare_takes_a_snapshot():
    model, x, config = MLP().eval(), torch.randn(4, 16), StaticQuantConfig()
    prepared = prepare(model, config, example_inputs=x, backend="reference")
    config.set_local(nn.Linear, FP32)
    call(prepared, x)
    assert len(prepared.plan.quantized) == 2
    assert [op.asked for op in convert(prepared).report().ops if op.kind == "linear"] == ["int8", "int8"]


def test_copies_are_independent():
    config = StaticQuantConfig().set_local("a", FP32)
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        other.set_local("b", FP32)
        assert keys(config) == [("a", False)]


def test_configurations_differ_by_their_rules():
    assert StaticQuantConfig().set_local("a", FP32) != StaticQuantConfig()


# ---- JSON ----

types = st.sampled_from([nn.Linear, nn.Conv2d, nn.LayerNorm, torch.matmul, torch.add, MLP])
names = st.sampled_from(["fc", "encoder.layer.0", r"encoder\..*", "Linear", "add", r"a\d+", "ünïcode"])


@st.composite
def configs(draw, rules=True):
    dtype = draw(st.sampled_from(["uint8", "int8", "fp32"]))
    if rules and draw(st.booleans()):
        return StaticQuantConfig(post=draw(st.sampled_from([(), (BiasCorrection(),)])))
    config = StaticQuantConfig(
        w_dtype="fp32" if dtype == "fp32" else "int8",
        act_dtype=dtype,
        act_sym=draw(st.booleans()),
        w_granularity=draw(st.sampled_from(["per_channel", "per_tensor"])),
        act_algo=draw(st.sampled_from(["minmax", "moving_average", "percentile", "mse", "kl"])),
        w_algo=draw(st.sampled_from(["minmax", "mse"])),
        percentile=draw(st.floats(51, 100)),
        excluded_precisions=tuple(draw(st.sets(st.sampled_from(["bf16", "fp16"])))),
    )
    if rules:
        for key in draw(
            st.lists(
                st.one_of(types, names, st.lists(st.one_of(types, names), min_size=1, max_size=3)), max_size=5
            )
        ):
            config.set_local(key, draw(configs(rules=False)))
    return config


@given(configs())
def test_json_keeps_everything(config):
    again = StaticQuantConfig.from_json(config.to_json())
    assert again == config
    assert keys(again) == keys(config)
    assert again.to_json() == config.to_json()
    assert isinstance(again.excluded_precisions, tuple)
    assert set(json.loads(config.to_json())) == {"schema_version", "algorithm", "global", "local"}
    assert set(config.to_dict()["global"]) == set(config.given)


def test_json_files(tmp_path):
    config = StaticQuantConfig(act_sym=True).set_local(nn.Linear, FP32)
    config.to_json_file(tmp_path / "config.json")
    assert StaticQuantConfig.from_json_file(str(tmp_path / "config.json")) == config


GOOD = StaticQuantConfig().set_local("a", FP32).to_dict()


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {**GOOD, "extra": 1},
        {**GOOD, "schema_version": 2},
        {**GOOD, "algorithm": "dynamic"},
        {**GOOD, "white_list": ["a"]},
        {**GOOD, "white_list": 3},
        {"w_dtyp": "int8"},
        {**GOOD, "local": [{"key": "a", "algorithm": "magic", "config": {}}]},
        {**GOOD, "local": [{"key": "a", "config": {"post": []}}]},
        {**GOOD, "global": {"w_dtyp": "int8"}},
        {**GOOD, "global": {"w_dtype": "int7"}},
        {**GOOD, "global": 3},
        {**GOOD, "global": [1, 2]},
        {**GOOD, "local": 3},
        {**GOOD, "local": [3]},
        {**GOOD, "local": [{"key": "a"}]},
        {**GOOD, "local": [{"key": "a(", "config": {}}]},
        {**GOOD, "local": [{"key": 3, "config": {}}]},
        {**GOOD, "local": [{"key": "a", "config": 3}]},
        {**GOOD, "local": [{"key": "a", "config": {"w_dtyp": 1}}]},
        {**GOOD, "local": [{"key": "a", "config": {}, "more": 1}]},
    ],
    ids=str,
)
def test_a_dictionary_that_is_no_configuration(data):
    with pytest.raises(ConfigError):
        StaticQuantConfig.from_dict(data)


def test_text_that_is_no_json():
    with pytest.raises(ConfigError, match="not valid JSON"):
        StaticQuantConfig.from_json("{")
