"""Scripts as Neural Compressor's documents, examples and tests have them, with only the import changed."""

import copy
import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import nc
from nc import (
    ConfigError,
    DynamicQuantConfig,
    InputError,
    NCWarning,
    SmoothQuantConfig,
    StaticQuantConfig,
    UnknownFieldError,
    UnmatchedRuleError,
    UnmatchedTypeWarning,
    UnsupportedError,
    convert,
    get_default_dynamic_config,
    get_default_sq_config,
    get_default_static_config,
    load,
    prepare,
    quantize,
    save,
)
from nc.export import export

pytestmark = pytest.mark.ipex  # no script names a backend, so all take the engine that "auto" finds


class UserFloatModel(nn.Module):
    """Linears, one of them followed by an addition."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.fc3(self.fc2(F.relu(self.fc1(x))) + x)


class LanguageModel(nn.Module):
    """Embedding, normalisation and a feed-forward block, called with keywords."""

    def __init__(self):
        super().__init__()
        self.wte, self.ln = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.c_fc, self.c_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids, attention_mask=None):
        x = self.ln(self.wte(input_ids))
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return {"logits": self.c_proj(F.relu(self.c_fc(x)))}


EXAMPLE = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
FP32 = StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")


def run_fn(model):
    for _ in range(2):
        model(EXAMPLE)


def run_text(model):
    for seed in range(2):
        model(**text(seed))


def text(seed=0):
    ids = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones(2, 7)}


@pytest.fixture
def model():
    return UserFloatModel().eval()


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Scripts save to "saved_results".

    First runs in a child process, which take seconds each, are tested elsewhere.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nc.backends.ipex.lower.is_tested", lambda module: True)


def dtypes(q_model):
    """What ran, by operator."""
    return {op.operator: op.ran for op in q_model.report().ops if op.operator.startswith(("fc", "c_"))}


def like(q_model, model, inputs=EXAMPLE, tolerance=0.1):
    return torch.allclose(q_model(inputs), model(inputs), atol=tolerance)


INT8 = {"fc1": "int8", "fc2": "int8", "fc3": "int8"}

# ---- static ----


def test_the_documents_four_lines(model):
    quant_config = StaticQuantConfig(act_sym=True, act_algo="minmax")
    prepared_model = prepare(model, quant_config=quant_config, example_inputs=EXAMPLE)
    run_fn(prepared_model)
    q_model = convert(prepared_model)
    assert dtypes(q_model) == INT8
    assert like(q_model, model)


def test_inputs_by_name_and_a_model_in_training_mode():
    quant_config = get_default_static_config()
    with pytest.warns(NCWarning, match="training mode"):
        prepared_model = prepare(UserFloatModel(), quant_config=quant_config, example_inputs={"x": EXAMPLE})
    run_fn(prepared_model)
    q_model = convert(prepared_model)
    assert dtypes(q_model) == INT8
    assert torch.equal(q_model(x=EXAMPLE), q_model(EXAMPLE))


@pytest.mark.parametrize(
    ("key", "still_int8"),
    [
        ("fc1", ("fc2", "fc3")),
        ("Linear", ()),
        (nn.Linear, ()),
        ([nn.Linear, "Linear&add"], ()),
        (["Linear&add"], ("fc1", "fc3")),
        ("Linear&relu", ("fc2", "fc3")),
        ("Linear&<built-in method relu of type object at 0x7f76d1a0c0a0>", ("fc2", "fc3")),
    ],
    ids=str,
)
def test_fallback_by_name_and_type(model, key, still_int8):
    quant_config = get_default_static_config()
    quant_config.set_local(key, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    prepared_model = prepare(model, quant_config=quant_config, example_inputs=EXAMPLE)
    assert {d.operator for d in prepared_model.plan.quantized if d.kind == "linear"} == set(still_int8)


def test_additions_of_a_gpt_fall_back(model):
    quant_config = StaticQuantConfig(excluded_precisions=["bf16"])
    quant_config.set_local("add", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    prepared_model = prepare(model=model, quant_config=quant_config, example_inputs=EXAMPLE)
    assert [d.operator for d in prepared_model.plan.quantized] == ["fc1", "fc2", "fc3"]
    with pytest.warns(UnmatchedTypeWarning, match="'add' matches no operator"):
        prepare(nn.Sequential(nn.Linear(4, 4)).eval(), quant_config, example_inputs=torch.randn(1, 4))


@pytest.mark.parametrize("act_sym", [True, False])
@pytest.mark.parametrize("act_algo", ["kl", "minmax"])
def test_the_parameters_that_neural_compressor_tunes(model, act_sym, act_algo):
    quant_config = StaticQuantConfig(act_sym=act_sym, act_algo=act_algo)
    prepared_model = prepare(model, quant_config=quant_config, example_inputs=EXAMPLE)
    run_fn(prepared_model)
    q_model = convert(prepared_model)
    assert like(q_model, model)
    assert q_model.graph.plan["fc1"].spec.activation.symmetric == act_sym


def test_an_example_of_zeros_does_no_harm(model):
    prepared_model = prepare(
        model, quant_config=StaticQuantConfig(act_sym=True, act_algo="kl"), example_inputs=torch.zeros(2, 32)
    )
    run_fn(prepared_model)
    assert like(convert(prepared_model), model)


def test_one_configuration_for_several_models(model):
    quant_config = StaticQuantConfig(excluded_precisions=["bf16"])
    fp32_model = copy.deepcopy(model)
    for example_inputs in (EXAMPLE, {"x": EXAMPLE}, (EXAMPLE,), [EXAMPLE], UserDict(x=EXAMPLE)):
        prepared_model = prepare(fp32_model, quant_config=quant_config, example_inputs=example_inputs)
        run_fn(prepared_model)
    assert quant_config == StaticQuantConfig(excluded_precisions=["bf16"])
    assert all(torch.equal(a, b) for a, b in zip(fp32_model.parameters(), model.parameters(), strict=True))


def test_quantize_in_one_call_and_with_arguments(model):
    seen = []

    def calibrate(prepared, loader, batches):
        for batch in loader[:batches]:
            seen.append(batch)
            prepared(batch)

    q_model = quantize(model, quant_config=get_default_static_config(), run_fn=run_fn, example_inputs=EXAMPLE)
    assert like(q_model, model)
    q_model = quantize(
        model, StaticQuantConfig(), calibrate, run_args=([EXAMPLE] * 5, 2), example_inputs=EXAMPLE
    )
    assert len(seen) == 2
    assert dtypes(q_model) == INT8


def test_convert_takes_the_configuration_again(model):
    quant_config = get_default_static_config()
    prepared_model = prepare(model, quant_config, inplace=False, example_inputs=EXAMPLE)
    run_fn(prepared_model)
    assert like(convert(prepared_model, quant_config, inplace=False), model)
    assert like(convert(model=prepared_model), model)
    with pytest.raises(ConfigError, match="another configuration"):
        convert(prepared_model, quant_config=StaticQuantConfig(act_sym=True))


def test_names_of_the_users_script_are_replaced():
    """`model = prepare(model, …)`, and the attributes that a pipeline looks for."""
    model = LanguageModel().eval()
    expected = model(**text())["logits"]
    model = prepare(model=model, quant_config=get_default_static_config(), example_inputs=text())
    with torch.no_grad():
        run_text(model)
    model = convert(model)
    model.eval()
    setattr(model, "config", {"model_type": "gpt"})  # noqa: B010 - as the examples do it
    assert model.config == {"model_type": "gpt"}
    assert torch.allclose(model(**text())["logits"], expected, atol=0.1)
    longer = {"input_ids": torch.ones(3, 11, dtype=torch.long), "attention_mask": torch.ones(3, 11)}
    assert model(**longer)["logits"].shape == (3, 11, 16)


def test_nested_inputs_of_a_diffusion_pipeline():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(6, 8)

        def forward(self, sample, timestep, encoder_hidden_states, added_cond_kwargs=None):
            return (
                self.fc1(sample * timestep)
                + self.fc2(added_cond_kwargs["text_embeds"])
                + encoder_hidden_states
            )

    example_inputs = {
        "sample": torch.randn(2, 8),
        "timestep": torch.tensor(951.0),
        "encoder_hidden_states": torch.randn(2, 8),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, 6),
            "time_ids": torch.tensor([[1024.0, 0.0]] * 2),
        },
    }
    quant_config = SmoothQuantConfig(alpha=0.5, excluded_precisions=["bf16"])
    user_model = prepare(model=UNet().eval(), quant_config=quant_config, example_inputs=example_inputs)
    user_model(**example_inputs)
    assert [d.operator for d in user_model.plan.quantized if d.spec.smooth] == ["fc1", "fc2"]


def test_lists_of_tensors_of_a_recommendation_model():
    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.EmbeddingBag(10, 8, mode="sum") for _ in range(2)])
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(24, 4)

        def forward(self, dense, offsets, indices):
            found = [table(indices[i], offsets[i]) for i, table in enumerate(self.tables)]
            return self.fc2(torch.cat([F.relu(self.fc1(dense)), *found], 1))

    example_inputs = (
        torch.randn(3, 8),
        torch.arange(3).repeat(2, 1),
        [torch.randint(0, 10, (3,)) for _ in range(2)],
    )
    prepared_model = prepare(DLRM().eval(), StaticQuantConfig(), example_inputs=example_inputs)
    prepared_model(*example_inputs)
    assert [d.operator for d in prepared_model.plan.quantized] == ["fc1", "fc2"]


# ---- export, then prepare ----


@pytest.mark.parametrize("w_granularity", ["per_tensor", "per_channel"])
def test_export_quantize_save_load(model, w_granularity):
    exported_model = export(model, example_inputs=(EXAMPLE,))
    float_model_output = exported_model(EXAMPLE)
    assert torch.allclose(float_model_output, model(EXAMPLE), atol=1e-5)
    q_model = quantize(
        model=exported_model, quant_config=StaticQuantConfig(w_granularity=w_granularity), run_fn=run_fn
    )
    assert torch.allclose(q_model(EXAMPLE), float_model_output, atol=0.1)
    q_model.save(example_inputs=(EXAMPLE,), output_dir="./saved_results")
    loaded_quantized_model = load("./saved_results")
    assert torch.equal(loaded_quantized_model(EXAMPLE), q_model(EXAMPLE))


def test_export_with_named_dimensions_of_images():
    user_model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    exported_model = export(
        model=user_model, example_inputs=(x,), dynamic_shapes={"input": {0: Dim("batch")}}
    )
    prepared_model = prepare(exported_model, quant_config=StaticQuantConfig(w_granularity="per_tensor"))
    with torch.no_grad():
        prepared_model(torch.randn(4, 3, 12, 12))
    q_model = convert(prepared_model)
    images = torch.randn(3, 3, 12, 12)
    assert like(q_model, user_model, images)
    with pytest.raises(InputError):
        q_model(torch.randn(3, 3, 14, 14))


def test_export_with_named_dimensions_of_text():
    batch, seq_len = Dim(name="batch_size", max=8), Dim(name="seq_len", max=64)
    ids = text()["input_ids"]
    exported_model = export(
        LanguageModel(), example_inputs=(ids,), dynamic_shapes={"input_ids": (batch, seq_len)}
    )
    prepare_model = prepare(exported_model, get_default_static_config())
    for _ in range(2):
        prepare_model(*(ids,))
    converted_model = convert(prepare_model)
    assert dtypes(converted_model) == {"c_fc": "int8", "c_proj": "int8"}
    assert converted_model(torch.ones(3, 11, dtype=torch.long))["logits"].shape == (3, 11, 16)


def test_fallback_in_an_exported_model(model):
    exported_model = export(model, example_inputs=(EXAMPLE,))
    quant_config = get_default_static_config()
    quant_config.set_local("fc1", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    prepared_model = prepare(exported_model, quant_config)
    assert not prepared_model.plan["fc1"].spec.quantized
    again = prepare(
        exported_model, get_default_static_config()
    )  # an exported model can be prepared more than once
    assert again.plan["fc1"].spec.quantized


@pytest.mark.parametrize("get_config", [get_default_static_config, get_default_dynamic_config])
def test_compiled_models_compute_the_same(model, get_config):
    """The last step of the PT2E scripts; it has nothing left to do here."""
    exported_model = export(model=model, example_inputs=(EXAMPLE,))
    prepared_model = prepare(exported_model, quant_config=get_config())
    run_fn(prepared_model)
    q_model = convert(prepared_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.compile says of TorchScript
        opt_model = torch.compile(q_model)
        assert torch.equal(opt_model(EXAMPLE), q_model(EXAMPLE))
    assert like(q_model, model)


# ---- dynamic ----


def test_dynamic_needs_no_calibration(model):
    exported_model = export(model=model, example_inputs=(EXAMPLE,))
    prepared_model = prepare(exported_model, quant_config=DynamicQuantConfig())
    q_model = convert(prepared_model)
    assert dtypes(q_model) == INT8
    assert like(q_model, model)
    q_model = quantize(model, get_default_dynamic_config(), example_inputs=EXAMPLE)
    assert like(q_model, model)


def test_dynamic_with_a_fallback(model):
    quant_config = DynamicQuantConfig(w_granularity="per_tensor", act_sym=False, act_granularity="per_tensor")
    quant_config.set_local("fc3", DynamicQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    prepared_model = prepare(export(model, (EXAMPLE,)), quant_config)
    assert [d.operator for d in prepared_model.plan.quantized] == ["fc1", "fc2"]


# ---- smooth ----


def test_smooth_quant_of_the_documents(model):
    quant_config = SmoothQuantConfig(alpha=0.5)
    prepared_model = prepare(model, quant_config=quant_config, example_inputs=EXAMPLE)
    run_fn(prepared_model)
    q_model = convert(prepared_model)
    assert dtypes(q_model) == INT8
    assert like(q_model, model)
    q_model.save("saved_results")
    assert torch.equal(load("saved_results")(EXAMPLE), q_model(EXAMPLE))


@pytest.mark.parametrize("key", ["Linear", nn.Linear, "fc1"], ids=str)
def test_smooth_quant_with_a_fallback(model, key):
    """Neural Compressor raises a TypeError for names here."""
    quant_config = get_default_sq_config()
    quant_config.set_local(key, SmoothQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    prepared_model = prepare(model, quant_config=quant_config, example_inputs={"x": EXAMPLE})
    run_fn(prepared_model)
    assert dtypes(convert(prepared_model)) == {
        name: "fp32" if key != "fc1" or name == "fc1" else "int8" for name in INT8
    }


@pytest.mark.parametrize(
    ("act_sym", "act_algo", "alpha", "scale_sharing"),
    [(True, "kl", 0.1, True), (True, "minmax", 0.1, False), (False, "minmax", 1, True)],
)
def test_smooth_quant_parameters(model, act_sym, act_algo, alpha, scale_sharing):
    quant_config = SmoothQuantConfig(
        act_sym=act_sym, act_algo=act_algo, alpha=alpha, scale_sharing=scale_sharing
    )
    prepared_model = prepare(model, quant_config=quant_config, example_inputs=EXAMPLE)
    run_fn(prepared_model)
    assert like(convert(prepared_model), model)


@pytest.mark.parametrize(
    ("shared_criterion", "do_blockwise", "folding"),
    [("max", True, True), ("mean", False, True), ("min", True, False), ("min", False, False)],
)
def test_smooth_quant_finds_alpha(shared_criterion, do_blockwise, folding):
    quant_config = SmoothQuantConfig(
        alpha="auto",
        alpha_min=0.45,
        alpha_max=0.55,
        alpha_step=0.01,
        shared_criterion=shared_criterion,
        do_blockwise=do_blockwise,
        folding=folding,
    )
    fp32_model = LanguageModel().eval()
    prepared_model = prepare(
        fp32_model, quant_config, example_inputs=text()
    )  # raises a ValueError in Neural Compressor
    run_text(prepared_model)
    graph = prepared_model.quantized_graph()
    assert all(0.45 <= graph.plan[name].spec.smooth.alpha <= 0.55 for name in ("c_fc", "c_proj"))
    expected, got = fp32_model(**text())["logits"], graph.module(*graph.example)[0]
    assert torch.allclose(got, expected, atol=0.1)


def test_fields_are_assigned_between_calls(model):
    quant_config = get_default_sq_config()
    quant_config.excluded_precisions = ["bf16"]
    quant_config.folding = True
    quant_config.act_algo = "kl"
    q_model = quantize(model, quant_config=quant_config, run_fn=run_fn, example_inputs=EXAMPLE)
    assert q_model.graph.plan["fc1"].spec.smooth.folding
    assert q_model.graph.plan["fc1"].spec.activation.algo == "kl"
    with pytest.raises(UnknownFieldError, match="did you mean 'alpha'"):
        quant_config.alhpa = 0.7
    with pytest.raises(ConfigError, match="from 0 to 1"):
        quant_config.alpha = 7


def test_the_arguments_of_auto_alpha_as_a_dict():
    arguments = {
        "init_alpha": 0.6,
        "alpha_min": 0.3,
        "alpha_max": 0.9,
        "alpha_step": 0.1,
        "shared_criterion": "mean",
        "do_blockwise": True,
    }
    assert SmoothQuantConfig(alpha="auto", auto_alpha_args=arguments) == SmoothQuantConfig(
        alpha="auto", **arguments
    )


# ---- configurations ----


def test_dictionaries():
    assert (
        StaticQuantConfig.from_dict({"w_dtype": "int8", "act_sym": True}).to_dict()
        == StaticQuantConfig(w_dtype="int8", act_sym=True).to_dict()
    )
    assert (
        SmoothQuantConfig.from_dict({"alpha": 0.8, "folding": True}).to_dict()
        == SmoothQuantConfig(alpha=0.8, folding=True).to_dict()
    )
    config = StaticQuantConfig.from_dict({"global": {"act_sym": True}, "local": {"fc1": {"act_algo": "kl"}}})
    assert config == StaticQuantConfig(act_sym=True).set_local("fc1", StaticQuantConfig(act_algo="kl"))
    assert {"global", "local"} <= set(config.to_dict())
    assert StaticQuantConfig.from_dict(
        {"local": {"fc1": {"act_algo": "kl"}}}
    ) == StaticQuantConfig().set_local("fc1", StaticQuantConfig(act_algo="kl"))
    listed = StaticQuantConfig(act_sym=True, white_list=["fc1"])
    for fields in (
        {"act_sym": True, "white_list": ["fc1"]},
        {"global": {"act_sym": True, "white_list": ["fc1"]}, "local": {}},
    ):
        assert StaticQuantConfig.from_dict(fields) == listed


@pytest.mark.parametrize(
    ("quant_config", "strategy"),
    [
        ({"static_quant": {"act_sym": True}}, StaticQuantConfig),
        (
            {"static_quant": {"global": {"act_sym": True}, "local": {"fc1": {"act_sym": False}}}},
            StaticQuantConfig,
        ),
        ({"smooth_quant": {"alpha": 0.7, "act_sym": True}}, SmoothQuantConfig),
        ({"pt2e_dynamic_quant": {"act_sym": True}}, DynamicQuantConfig),
    ],
    ids=str,
)
def test_a_dict_instead_of_a_configuration(model, quant_config, strategy):
    prepared_model = prepare(model, quant_config, example_inputs=EXAMPLE)
    assert isinstance(prepared_model.quant_config, strategy)
    assert prepared_model.plan["fc2"].spec.activation.symmetric


def test_two_algorithms_in_a_dict_and_in_a_sum(model):
    """Neural Compressor reads the first of two only, and a sum of configurations quantizes nothing."""
    both = {"static_quant": {"white_list": ["fc1"]}, "pt2e_dynamic_quant": {"white_list": ["fc2", "fc3"]}}
    added = StaticQuantConfig(white_list=["fc1"]) + DynamicQuantConfig(white_list=["fc2", "fc3"])
    plans = [prepare(model, config, example_inputs=EXAMPLE).plan for config in (both, added)]
    assert plans[0] == plans[1]
    assert [(d.operator, d.spec.activation.dynamic) for d in plans[0].quantized] == [
        ("fc1", False),
        ("fc2", True),
        ("fc3", True),
    ]


def test_a_white_list_of_one_operator_beside_the_rest(model):
    quant_config = StaticQuantConfig(act_sym=True) + StaticQuantConfig(act_sym=False, white_list=["fc1"])
    plan = prepare(model, quant_config, example_inputs=EXAMPLE).plan
    assert [plan[name].spec.activation.symmetric for name in INT8] == [False, True, True]


# ---- save and load ----


def test_every_way_to_save_and_load(model):
    q_model = quantize(model, get_default_static_config(), run_fn, example_inputs=EXAMPLE)
    save(q_model)
    save(q_model, checkpoint_dir="a/b", format="default")
    q_model.save()
    q_model.save("c")
    q_model.save(output_dir="d")
    expected = q_model(EXAMPLE)
    loaded = [
        load("saved_results"),
        load("./a/b", model),
        load(model_name_or_path="c", original_model=copy.deepcopy(model)),
        load("d", original_model=model, format="default", device="cpu"),
    ]
    assert all(torch.equal(each(EXAMPLE), expected) for each in loaded)
    for wrong in (
        lambda: load("c", format="huggingface"),
        lambda: load("c", device="hpu"),
        lambda: save(q_model, "e", format="vllm"),
    ):
        with pytest.raises(ConfigError, match='format="default"'):
            wrong()


# ---- what can't work, on purpose: typed errors, or names that are not there ----


def test_values_without_a_kernel_are_refused():
    for error, fields in (
        (ConfigError, {"w_dtype": "fp16", "act_dtype": "fp16"}),
        (ConfigError, {"w_dtype": "bf16"}),
        (ConfigError, {"w_dtype": "fp32"}),
        (ConfigError, {"act_algo": "entropy"}),
        (UnsupportedError, {"w_sym": False}),
        (UnsupportedError, {"act_granularity": "per_channel"}),
        (UnknownFieldError, {"model_info": [("fc1", "Linear")]}),
        (UnknownFieldError, {"fp8_config": "E4M3"}),
        (UnknownFieldError, {"typo_kwarg": 3}),
    ):
        with pytest.raises(error):
            StaticQuantConfig(**fields)
    with pytest.raises(ConfigError, match="act_algo"):
        DynamicQuantConfig(act_algo="kl")  # Neural Compressor's own default, which it ignores
    with pytest.raises(ConfigError, match="several values for alpha"):
        prepare(UserFloatModel(), SmoothQuantConfig(alpha=[0.1, 0.2]), example_inputs=EXAMPLE)


def test_names_match_whole(model):
    """A prefix hits all operators whose names begin with it in Neural Compressor."""
    with pytest.raises(UnmatchedRuleError, match="closest names"):
        prepare(model, StaticQuantConfig().set_local("fc", FP32), example_inputs=EXAMPLE)
    plan = prepare(model, StaticQuantConfig().set_local(r"fc\d", FP32), example_inputs=EXAMPLE).plan
    assert not [d for d in plan.quantized if d.kind == "linear"]


def test_steps_that_are_left_out(model):
    with pytest.raises(InputError, match="example_inputs is missing"):
        prepare(model, get_default_static_config())
    prepared_model = prepare(model, get_default_static_config(), example_inputs=EXAMPLE)
    with pytest.raises(nc.StateError, match="Nothing was calibrated"):
        convert(prepared_model)
    with pytest.raises(nc.StateError, match="expects the result of prepare"):
        convert(model, quant_config=get_default_static_config())


@pytest.mark.parametrize("name", ["Evaluator", "MixedPrecisionConfig", "FP8Config", "prepare_qat"])
def test_what_is_not_here_can_not_be_imported(name):
    with pytest.raises(ImportError, match=name):
        exec(f"from nc import {name}")
    assert not hasattr(StaticQuantConfig, "get_config_set_for_tuning")
