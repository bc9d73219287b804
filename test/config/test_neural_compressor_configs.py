"""Neural Compressor's weight-only scripts with only the import changed.

Names, defaults, dictionary forms, rules, the whole flow.
"""

import inspect
import itertools

import numpy as np
import pytest
import torch
from suites.small_llama import random_llama

import nc
from nc import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    HQQConfig,
    MXQuantConfig,
    RTNConfig,
    TEQConfig,
    WeightOnlyConfig,
    convert,
    get_default_AutoRound_config,
    get_default_awq_config,
    get_default_double_quant_config,
    get_default_gptq_config,
    get_default_hqq_config,
    get_default_mx_config,
    get_default_rtn_config,
    get_default_teq_config,
    prepare,
    quantize,
)
from nc.algorithms.solvers import GPTQ, HQQ, RTN, AutoRound
from nc.algorithms.transforms import AWQ, TEQ
from nc.config import config_from

WEIGHT_ONLY = {
    "rtn": RTNConfig,
    "gptq": GPTQConfig,
    "awq": AWQConfig,
    "teq": TEQConfig,
    "hqq": HQQConfig,
    "autoround": AutoRoundConfig,
}
IDS = torch.arange(48).reshape(4, 12) % 50


def llama(blocks):
    return random_llama(num_hidden_layers=blocks, vocab_size=50, max_position_embeddings=64)


@pytest.fixture(scope="module")
def model():
    return llama(2)


def small(factory):
    """A configuration whose groups fit the tiny model, with few steps."""
    return factory(group_size=32, **({"iters": 3} if factory is AutoRoundConfig else {}))


# ---- names and defaults ----


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (RTNConfig, dict(dtype="int", bits=4, use_sym=True, group_size=32, group_dim=1, use_layer_wise=True)),
        (GPTQConfig, dict(percdamp=0.01, block_size=2048, act_order=False, static_groups=False)),
        (GPTQConfig, dict(true_sequential=False)),
        (AWQConfig, dict(use_auto_scale=True, use_auto_clip=True, folding=False, double_quant_use_sym=True)),
        (TEQConfig, dict(folding=True, use_layer_wise=False, double_quant_group_size=256)),
        (HQQConfig, dict(bits=4, group_size=64, quant_zero=True, quant_scale=False)),
        (HQQConfig, dict(scale_quant_group_size=128)),
        (AutoRoundConfig, dict(iters=200, nsamples=128, batch_size=8, seed=42)),
        (AutoRoundConfig, dict(scheme="W4A16", scale_dtype="fp16")),
        (MXQuantConfig, dict(w_dtype="int8", act_dtype="int8", out_dtype="bfloat16")),
        (MXQuantConfig, dict(blocksize=32, round_method="nearest")),
    ],
)
def test_parameters_have_neural_compressors_defaults(factory, expected):
    defaults = {name: p.default for name, p in inspect.signature(factory).parameters.items()}
    assert expected.items() <= defaults.items()


def test_defaults_ask_for_what_neural_compressor_does():
    assert (RTNConfig().w_dtype, RTNConfig().group_size, RTNConfig().w_sym, RTNConfig().w_algo) == (
        "int4",
        32,
        True,
        "minmax",
    )
    assert RTNConfig().solver == RTN()
    assert GPTQConfig().solver == GPTQ(damp=0.01, block=2048, order="none", static_groups=False)
    assert (AWQConfig().transforms, AWQConfig().w_algo) == ((AWQ(),), "wls")
    assert (TEQConfig().transforms, TEQConfig().w_algo) == ((TEQ(),), "minmax")
    assert (HQQConfig().solver, HQQConfig().group_size, HQQConfig().w_sym) == (HQQ(), 64, False)
    auto = AutoRoundConfig()
    assert (auto.w_dtype, auto.group_size, auto.scale_dtype) == ("int4", 128, "fp16")
    assert auto.solver == AutoRound(steps=200, batch=8, samples=128, seed=42)


def test_default_builders():
    assert (
        get_default_rtn_config()
        == get_default_rtn_config("client")
        == get_default_rtn_config(processor_type="SERVER")
        == RTNConfig()
    )
    assert get_default_gptq_config(processor_type="client") == GPTQConfig()
    assert get_default_AutoRound_config() == AutoRoundConfig()
    assert get_default_awq_config() == AWQConfig()
    assert get_default_teq_config() == TEQConfig()
    assert get_default_hqq_config() == HQQConfig()
    assert get_default_mx_config() == MXQuantConfig()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (RTNConfig(bits=8), {"w_dtype": "int8"}),
        (RTNConfig(dtype="int3", bits=8), {"w_dtype": "int3"}),
        (RTNConfig(dtype="nf4", use_sym=False), {"w_dtype": "nf4", "w_sym": True}),
        (RTNConfig(dtype="fp8_e4m3fn"), {"w_dtype": "fp8_e4m3"}),
        (RTNConfig(use_sym=False, group_size=-1), {"w_sym": False, "group_size": -1}),
        (RTNConfig(use_mse_search=True), {"w_algo": "mse"}),
        (RTNConfig(quant_lm_head=True, bits=8), {"lm_head": "int8"}),
        (RTNConfig(dtype="fp32"), {"w_dtype": "fp32", "is_float": True}),
        (GPTQConfig(act_order=True, percdamp=0.1), {"solver": GPTQ(damp=0.1, block=2048, order="static")}),
        (
            GPTQConfig(hybrid_order=True, static_groups=True),
            {"solver": GPTQ(block=2048, order="groups", static_groups=True)},
        ),
        (AWQConfig(use_auto_scale=False), {"transforms": (), "w_algo": "wls"}),
        (AWQConfig(use_auto_clip=False), {"transforms": (AWQ(clip=False),), "w_algo": "minmax"}),
        (HQQConfig(quant_zero=False), {"float_zero": True}),
        (
            AutoRoundConfig(bits=3, group_size=64, use_sym=False, minmax_lr=0.01),
            {"w_dtype": "int3", "group_size": 64, "w_sym": False},
        ),
        (
            AutoRoundConfig(scheme="W8A8", scale_dtype="torch.float32"),
            {"w_dtype": "int8", "act_dtype": "int8", "scale_dtype": "fp32"},
        ),
        (
            MXQuantConfig(w_dtype="fp4", weight_only=True),
            {"w_dtype": "fp4_e2m1", "scale_dtype": "e8m0", "group_size": 32},
        ),
    ],
)
def test_parameters_mean_what_they_say(given, expected):
    assert {name: getattr(given, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RTNConfig(bits=9), nc.ConfigError, "from 2 to 8"),
        (lambda: RTNConfig(use_double_quant=True, double_quant_bits="6"), nc.ConfigError, "bits is 1 to 8"),
        (lambda: AutoRoundConfig(act_bits="8"), nc.ConfigError, "act_bits"),
        (lambda: GPTQConfig(percdamp="0.1"), nc.ConfigError, "damp is at least 0"),
        (lambda: RTNConfig(dtype="int16"), nc.ConfigError, "dtype"),
        (lambda: RTNConfig(dtype="fp4"), nc.UnsupportedError, '"nf4" or "fp4_e2m1"'),
        (lambda: RTNConfig(dtype="fp8_e4m3fnuz"), nc.UnsupportedError, '"fp8_e4m3fn"'),
        (lambda: RTNConfig(group_dim=0), nc.UnsupportedError, "group_dim=1"),
        (
            lambda: RTNConfig(use_double_quant=True, double_quant_dtype="nf4"),
            nc.UnsupportedError,
            "whole numbers",
        ),
        (lambda: GPTQConfig(act_order=True, hybrid_order=True), nc.ConfigError, "set one of them"),
        (lambda: GPTQConfig(fp8_aware=True), nc.UnsupportedError, "fp8_e4m3fn"),
        (lambda: HQQConfig(quant_scale=True), nc.UnsupportedError, "quant_zero=False"),
        (lambda: AutoRoundConfig(scheme="NVFP4"), nc.UnsupportedError, "W2A16 to W8A16"),
        (lambda: AutoRoundConfig(act_bits=4), nc.UnsupportedError, "act_bits=16"),
        (lambda: AutoRoundConfig(itres=3), nc.UnknownFieldError, "itres"),
        (lambda: MXQuantConfig(w_dtype="int4"), nc.UnsupportedError, "use fp4"),
        (lambda: MXQuantConfig(round_method="dither"), nc.UnsupportedError, "nearest"),
        (lambda: get_default_double_quant_config("GGML"), nc.ConfigError, "BNB_NF4, GGML_TYPE_Q4_K"),
        (lambda: config_from({"rtn": {"bit": 4}}), nc.UnknownFieldError, "'bit'"),
        (lambda: config_from({"rtn": {"global": {}, "locals": {}}}), nc.ConfigError, "global, local"),
    ],
)
def test_what_has_no_meaning_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("factory", "given"),
    [
        (RTNConfig, {"use_full_range": True}),
        (GPTQConfig, {"true_sequential": True}),
        (AWQConfig, {"absorb_layer_dict": {"norm": "q"}}),
        (TEQConfig, {"folding": False}),
        (AutoRoundConfig, {"enable_quanted_input": False}),
        (AutoRoundConfig, {"enable_adam": True}),
        (AutoRoundConfig, {"nblocks": 2}),
    ],
)
def test_what_changes_numbers_there_and_not_here_is_said(factory, given):
    with pytest.warns(nc.NCWarning, match=f"{factory.__name__}\\({next(iter(given))}=.*has no effect"):
        factory(**given)


def test_what_only_saves_memory_is_accepted_in_silence():
    assert RTNConfig(use_layer_wise=False, model_path="x") == RTNConfig()
    assert GPTQConfig(use_layer_wise=True, use_block_wise=True, model_path="x") == GPTQConfig()
    assert AWQConfig(folding=True, use_layer_wise=True) == AWQConfig()
    assert (
        AutoRoundConfig(low_gpu_mem_usage=True, amp=False, device_map="cpu", export_format="itrex")
        == AutoRoundConfig()
    )


# ---- numbers ----


def rounded(weight, group, highest):
    """Symmetric codes from -highest to highest, in float64."""
    parts = weight.detach().double().numpy().reshape(weight.shape[0], -1, group)
    scale = (np.abs(parts).max(2, keepdims=True) / highest).astype(np.float32).astype(np.float64)
    return torch.from_numpy(
        (np.clip(np.round(parts / scale), -highest, highest) * scale).reshape(weight.shape)
    )


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (3, 16)])
def test_rtn_weights_are_those_of_the_definition(bits, group, model):
    q = quantize(model, RTNConfig(bits=bits, group_size=group))
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        expected = rounded(model.get_submodule(name).weight, group, 2 ** (bits - 1) - 1)
        assert torch.allclose(q.get_submodule(name).packed.dequantize().double(), expected, rtol=1e-6, atol=0)


def test_bits_reach_the_codes_for_every_algorithm():
    """Neural Compressor's AWQ and TEQ searched, and TEQ wrote, 4 bits whatever was asked."""
    model = llama(1)
    for factory, bits in itertools.product((RTNConfig, AWQConfig, TEQConfig), (3, 8)):
        prepared = prepare(model, factory(bits=bits))
        prepared(IDS)
        layer = convert(prepared).model.layers[0].mlp.up_proj
        assert layer.form.bits == bits
        assert int(layer.packed.unpacked().max()) > (7 if bits == 8 else 3)
        assert (layer.packed.dequantize() - model.model.layers[0].mlp.up_proj.weight).abs().max() < (
            0.2 if bits == 3 else 0.02
        )


# ---- rules and dictionaries ----


def test_local_configurations_stand_for_themselves(model):
    config = RTNConfig(bits=8, group_size=64, use_double_quant=True).set_local(
        ".*mlp.*", RTNConfig(group_size=16)
    )
    config.set_local(torch.nn.Linear, RTNConfig(bits=5)).set_local(
        ["lm_head", ".*v_proj"], RTNConfig(dtype="fp32")
    )
    plan = nc.describe(model, config)
    assert str(plan["model.layers.0.mlp.up_proj"].form) == "int4 sym per_group 16"
    assert str(plan["model.layers.0.self_attn.q_proj"].form) == "int5 sym per_group 32"
    assert plan["model.layers.1.self_attn.v_proj"].form is None
    assert plan["lm_head"].form is None


def test_the_users_own_rule_for_the_head_wins(model):
    plan = nc.describe(model, RTNConfig().set_local("lm_head", RTNConfig(bits=8)))
    assert plan["lm_head"].form.bits == 8
    assert nc.describe(model, RTNConfig())["lm_head"].form is None
    assert nc.describe(model, RTNConfig(quant_lm_head=True))["lm_head"].form.bits == 4


def test_a_local_configuration_may_repeat_the_transform_of_the_outer_one(model):
    config = (
        AWQConfig().set_local(".*down_proj", AWQConfig(bits=8)).set_local(".*o_proj", AWQConfig(dtype="fp32"))
    )
    plan = nc.describe(model, config)
    assert plan.transforms == (AWQ(),)
    assert (plan["model.layers.0.mlp.down_proj"].form.bits, plan["model.layers.0.mlp.up_proj"].form.bits) == (
        8,
        4,
    )
    assert plan["model.layers.0.self_attn.o_proj"].form is None
    config = RTNConfig().set_local(".*down_proj", AWQConfig()).set_local(".*up_proj", RTNConfig(bits=8))
    plan = nc.describe(model, config)
    assert plan["model.layers.0.mlp.down_proj"].transforms == (AWQ(),)
    assert plan["model.layers.0.mlp.up_proj"].transforms == ()
    assert (
        nc.describe(model, AWQConfig().set_local(".*up_proj", RTNConfig()))[
            "model.layers.0.mlp.up_proj"
        ].transforms
        == ()
    )


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_dictionaries(name):
    factory = WEIGHT_ONLY[name]
    assert config_from({name: {}}) == config_from({name: {"global": {}}}) == factory()
    fields = {"bits": 8, "group_size": 64}
    assert config_from({name: fields}) == factory(**fields)
    both = config_from(
        {name: {"global": fields, "local": {"lm_head": {"dtype": "fp32"}, "Linear": {"bits": 3}}}}
    )
    assert both == factory(**fields).set_local("lm_head", factory(dtype="fp32")).set_local(
        "Linear", factory(bits=3)
    )
    assert config_from(both.to_dict()) == both
    assert WeightOnlyConfig.from_json(both.to_json()) == both


def test_a_dictionary_of_several_strategies_is_their_sum(model):
    config = config_from(
        {"rtn": {"white_list": [".*mlp.*"]}, "gptq": {"white_list": [".*self_attn.*"], "bits": 8}}
    )
    assert config == RTNConfig(white_list=[".*mlp.*"]) + GPTQConfig(white_list=[".*self_attn.*"], bits=8)
    plan = nc.describe(model, config)
    assert {d.solver.name for d in plan.quantized if "mlp" in d.operator} == {"rtn"}
    assert {d.solver.name for d in plan.quantized if "attn" in d.operator} == {"gptq"}
    assert config_from({"static_quant": {}}) == nc.StaticQuantConfig()


# ---- the whole flow ----


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.sample(3)
def test_prepare_calibrate_convert(name, model):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    prepared = prepare(model, small(WEIGHT_ONLY[name]), example_inputs=(IDS,))
    for row in IDS[:2]:
        prepared(row[None])
    q = convert(prepared)
    assert type(q) is type(model)
    with torch.no_grad():
        error = (q(IDS).logits - model(IDS).logits).norm() / model(IDS).logits.norm()
    assert 0 < error < 0.2
    assert q.generate(IDS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 15)
    assert len(nc.report(q).quantized) == 14
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.sample(2)
def test_quantize_with_a_run_function(name, model):
    def run_fn(prepared, batches):
        for batch in batches:
            prepared(input_ids=batch)

    q = quantize(
        model,
        {name: {"group_size": 32, **({"iters": 2} if name == "autoround" else {})}},
        run_fn,
        run_args=([IDS[:2], IDS[2:]],),
    )
    assert len(nc.report(q).quantized) == 14


@pytest.mark.parametrize("name", ["gptq", "awq", "teq", "autoround"])
def test_algorithms_that_need_data_say_so(name, model):
    with pytest.raises(nc.StateError, match="Nothing was calibrated"):
        convert(prepare(model, small(WEIGHT_ONLY[name])))


@pytest.mark.parametrize(
    ("type", "bits"),
    [("BNB_NF4", 4 + 8 / 32 + 32 / (32 * 2)), ("GGML_TYPE_Q4_K", 4 + 2 * 8 / 32 + 2 * 32 / (32 * 2))],
)
def test_double_quantized_scales(type, bits, model):  # Neural Compressor's name
    q = quantize(model, get_default_double_quant_config(type))
    layer = q.model.layers[0].self_attn.q_proj
    assert layer.packed.scale.dtype == torch.uint8
    assert layer.packed.bytes * 8 / (64 * 64) == bits
    error = (layer.packed.dequantize() - model.model.layers[0].self_attn.q_proj.weight).norm()
    assert error < 0.12 * model.model.layers[0].self_attn.q_proj.weight.norm()


def test_mx_weights_alone_and_with_activations(model):
    q = quantize(model, MXQuantConfig(w_dtype="fp8_e4m3", weight_only=True))
    assert str(q.model.layers[0].mlp.up_proj.form).startswith("fp8_e4m3 per_group 32 e8m0 scales")
    linear = torch.nn.Sequential(torch.nn.Linear(64, 32)).eval()
    x = torch.randn(5, 64)
    simulated = quantize(linear, MXQuantConfig(), example_inputs=x, backend="reference")
    parts = [(t.detach().double().reshape(t.shape[0], 2, 32)) for t in (x, linear[0].weight)]
    scales = [torch.exp2(torch.floor(torch.log2(p.abs().amax(2, keepdim=True)))) / 64 for p in parts]
    x_q, w_q = (
        (torch.clamp(torch.round(p / s), -127, 127) * s).flatten(1)
        for p, s in zip(parts, scales, strict=True)
    )
    expected = x_q @ w_q.T + linear[0].bias.double()
    assert torch.allclose(simulated(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_saved_and_loaded_as_in_neural_compressors_scripts(model, tmp_path):
    q = quantize(model, RTNConfig())
    nc.save(q, tmp_path / "saved_results")
    loaded = nc.load(tmp_path / "saved_results", original_model=model, device="cpu")
    assert torch.equal(loaded(IDS).logits, q(IDS).logits)
