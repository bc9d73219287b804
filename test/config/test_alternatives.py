"""Lists of values in configurations: what they stand for, and that only tuning takes them."""

import copy
import inspect

import pytest
import torch
from torch import nn

import nc
from nc import (
    AutoRoundConfig,
    AWQConfig,
    ConfigError,
    DynamicQuantConfig,
    FakeQuantConfig,
    HQQConfig,
    NCWarning,
    RTNConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    UnknownFieldError,
    UnsupportedError,
    WeightOnlyConfig,
)
from nc.config import QuantConfig, config_from, configs_from
from nc.config.base import strategies
from nc.torchao import quantize_


def test_each_combination_the_last_parameter_the_fastest():
    found = RTNConfig(use_sym=[True, False], bits=[4, 8])
    assert configs_from(found) == tuple(
        RTNConfig(bits=bits, use_sym=symmetric) for bits in (4, 8) for symmetric in (True, False)
    )
    assert found.varied == ("bits", "use_sym")


def test_classes_and_functions_by_position_too():
    assert configs_from(StaticQuantConfig(act_algo=["kl", "minmax"], act_sym=[True, False])) == tuple(
        StaticQuantConfig(act_algo=algorithm, act_sym=symmetric)
        for symmetric in (True, False)
        for algorithm in ("kl", "minmax")
    )
    assert configs_from(WeightOnlyConfig(["int4", "int8"], 64)) == (
        WeightOnlyConfig("int4", 64),
        WeightOnlyConfig("int8", 64),
    )
    assert configs_from(RTNConfig("int", [4, 8])) == (RTNConfig(bits=4), RTNConfig(bits=8))
    assert configs_from(SmoothQuantConfig(alpha=[0.4], auto_alpha_args={"alpha_min": 0.2})) == (
        SmoothQuantConfig(alpha=0.4, alpha_min=0.2),
    )
    assert len(configs_from(FakeQuantConfig(weight=["int4", "int8"]))) == 2


def test_lists_that_are_values_are_not_expanded():
    one = StaticQuantConfig(
        excluded_precisions=["bf16", "fp16"], post=[nc.BiasCorrection()], white_list=["fc", "other"]
    )
    assert isinstance(one, StaticQuantConfig)
    assert one.excluded_precisions == ("bf16", "fp16")
    assert isinstance(WeightOnlyConfig(transforms=[nc.AWQ(), nc.Smooth()]), WeightOnlyConfig)
    assert isinstance(RTNConfig(white_list=["a", "b"]), WeightOnlyConfig)
    assert isinstance(AWQConfig(white_list=["a"], absorb_layer_dict={}), WeightOnlyConfig)
    assert isinstance(AutoRoundConfig(iters=1, options=["MXFP4"]), WeightOnlyConfig)


def test_lists_of_lists_are_several_lists():
    found = configs_from(
        StaticQuantConfig(excluded_precisions=[["bf16"], []], post=[[], [nc.BiasCorrection()]])
    )
    assert [(each.excluded_precisions, len(each.post)) for each in found] == [
        (("bf16",), 0),
        (("bf16",), 1),
        ((), 0),
        ((), 1),
    ]


def test_rules_are_those_of_each_and_are_not_shared():
    found = RTNConfig(bits=[4, 8]).set_local("head", RTNConfig(dtype="fp32")).exclude("first")
    assert configs_from(found) == tuple(
        RTNConfig(bits=bits).set_local("head", RTNConfig(dtype="fp32")).exclude("first") for bits in (4, 8)
    )
    one, other = configs_from(found)
    one.exclude("second")
    assert len(other.rules) == 2


@pytest.mark.parametrize(
    "document",
    [
        {"rtn": {"bits": [4, 8]}},
        {"rtn": {"global": {"bits": [4, 8]}, "local": {"head": {"dtype": "fp32"}}}},
        {"static_quant": {"act_sym": [True, False]}},
        {"static_quant": {"global": {"act_sym": [True, False]}, "local": {"head": {"act_sym": True}}}},
    ],
)
def test_dictionaries(document):
    found = configs_from(document)
    assert len(set(map(repr, found))) == 2
    (inner,) = document.values()
    assert all(len(each.rules) == ("local" in inner) for each in found)
    with pytest.raises(ConfigError, match="several values for"):
        config_from(document)


def test_what_no_kernel_has_is_left_out_with_a_warning():
    with pytest.warns(
        NCWarning, match=r"quant_zero=True, quant_scale=True is left out: HQQConfig\(quant_scale"
    ):
        found = configs_from(HQQConfig(quant_zero=[True, False], quant_scale=[True, False]))
    assert len(found) == 3
    with pytest.warns(NCWarning, match="is left out"), pytest.raises(UnsupportedError, match="w_sym=False"):
        StaticQuantConfig(w_sym=[False])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RTNConfig(bits=[]), r"RTNConfig\(bits=\[\]\): expected at least one value"),
        (lambda: RTNConfig(bits=[4, 99]), "bits .* but got 99"),
        (lambda: StaticQuantConfig(act_algo=["minmax", "magic"]), "act_algo .* but got 'magic'"),
        (lambda: StaticQuantConfig(post=[nc.BiasCorrection(), "magic"]), "post"),
        (lambda: StaticQuantConfig("int8", w_dtype=["int8"]), "two values for 'w_dtype'"),
        (lambda: StaticQuantConfig(wdtype=["int8"]), "did you mean 'w_dtype'"),
        (lambda: DynamicQuantConfig(*[["x"]] * 99), "at most"),
    ],
)
def test_bad_values_are_said_at_once(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_parameter_that_does_not_exist_is_the_type_error_of_any_call():
    for make in (lambda: RTNConfig(bits=[4], nbits=3), lambda: RTNConfig("int", [4], bits=4)):
        with pytest.raises(TypeError, match=r"RTNConfig\(\) got"):
            make()
    with pytest.raises(UnknownFieldError, match="nbits"):
        config_from({"rtn": {"nbits": [4]}})


@pytest.mark.parametrize("several", [RTNConfig(bits=[4, 8]), StaticQuantConfig(act_sym=[True, False])])
def test_only_tuning_takes_them(several):
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    uses = (
        lambda: nc.prepare(model, several, example_inputs=x),
        lambda: nc.quantize(model, several, lambda m: m(x), example_inputs=x),
        lambda: nc.describe(model, several, x),
        lambda: nc.tune(model, x, lambda m: m(x), candidates=[several]),
        lambda: quantize_(model, several),
        lambda: StaticQuantConfig().set_local("0", several),
        lambda: StaticQuantConfig() + several,
        lambda: several + StaticQuantConfig(),
        lambda: config_from([several][0]),
    )
    for use in uses:
        with pytest.raises(
            ConfigError, match=r"has several values for (bits|act_sym), which only TuningConfig"
        ):
            use()


@pytest.mark.parametrize("strategy", strategies().values(), ids=lambda strategy: strategy.__name__)
def test_other_configurations_stay_values(strategy):
    """Copies, and what tools read of the signature."""
    config = strategy()
    assert copy.copy(config) == copy.deepcopy(config) == config
    assert isinstance(config, QuantConfig)
    assert strategy.from_dict(config.to_dict()) == config
    assert list(inspect.signature(RTNConfig).parameters)[:2] == ["dtype", "bits"]


def test_a_subclass_has_parameters_of_its_own():
    class Own(nc.StaticQuantConfig):
        def __init__(self, keep, **fields):
            super().__init__(**fields)
            self.__dict__["keep"] = keep

    made = Own(["a", "b"], act_sym=True)
    assert type(made) is Own
    assert (made.keep, made.act_sym) == (["a", "b"], True)
