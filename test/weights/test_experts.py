"""Mixtures of experts whose weights transformers stacks in one parameter.

Each expert gets a low-bit weight of its own.
"""

import copy
import fnmatch

import pytest
import torch
from safetensors.torch import load_file, save_file
from suites.reports import said

import nc
from nc.api.pretrained import quantize_folder
from nc.errors import CaptureError, UnsupportedError
from nc.nn import QuantLinear
from nc.numerics.metrics import sqnr_db
from nc.storage.tensor_file import StoredTensor
from nc.torchao import quantize_
from nc.weights.experts import Experts, separated, stacked_names

transformers = pytest.importorskip("transformers")
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
MODELS = {
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4},
    "Qwen3Moe": {
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    # weights are [E, K, N], with biases
    "GptOss": {"intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
}


def four_bits():
    return nc.WeightOnlyConfig("int4", group_size=32)


def build(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **COMMON, **MODELS[name], bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if not stacked_names(model):
        pytest.skip("this version of transformers has a linear for each expert")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


IDS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_taken_apart_in_a_copy(name):
    model = build(name)
    before, names = logits(model), [key for key, _ in model.named_parameters()]
    apart = separated(model)
    assert len(stacked_names(model)) == 4
    assert [key for key, _ in model.named_parameters()] == names
    assert not stacked_names(apart)
    torch.testing.assert_close(logits(apart), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model), before)
    assert separated(apart) is apart


@pytest.mark.parametrize("name", MODELS)
def test_each_expert_is_quantized(name, tmp_path):
    """As the model computes with the dequantized values in its own stacks."""
    model = build(name)
    q = nc.quantize(model, four_bits(), backend="reference")
    assert type(q) is type(model)
    expected = copy.deepcopy(model)
    for key, module in q.named_modules():
        if isinstance(module, Experts):
            assert all(isinstance(expert, QuantLinear) for expert in module.children())
            weights = torch.stack([expert.packed.dequantize() for expert in module.children()])
            stack = expected.get_parameter(key)
            assert weights.mT.shape == stack.shape or weights.shape == stack.shape
            stack.data.copy_(weights.mT if module.transposed else weights)
        elif isinstance(module, QuantLinear) and not isinstance(
            q.get_submodule(key.rpartition(".")[0]), Experts
        ):
            expected.get_submodule(key).weight.data.copy_(module.packed.dequantize())
    torch.testing.assert_close(logits(q), logits(expected), rtol=1e-4, atol=1e-4)
    nc.save(q, tmp_path / "model")
    again = nc.load(tmp_path / "model", backend="reference")
    assert torch.equal(logits(again), logits(q))
    tokens = again.generate(IDS[:1], max_new_tokens=3, do_sample=False, min_new_tokens=3)
    assert tokens.shape == (1, 19)


@pytest.mark.parametrize(
    "solver", [nc.GPTQ(), nc.GPTQ(two_sided="gptaq"), nc.GPTQ(two_sided="qronos")], ids=str
)
@pytest.mark.sample(1)
def test_solvers(solver):
    """An expert may get other tokens than in the float model.

    One that gets none is rounded to nearest, and the report says so.
    """
    model = build("Qwen3Moe")
    for gate in (module.weight.data for key, module in model.named_modules() if key.endswith("mlp.gate")):
        gate[1], gate[3], gate[5] = -gate[0], -gate[2], 0  # two of the others always have a score above 0
    prepared = nc.prepare(model, nc.WeightOnlyConfig("int3", group_size=32, solver=solver))
    for _ in range(2):
        prepared(input_ids=IDS)
    q = nc.convert(prepared)
    rounded = nc.quantize(model, nc.WeightOnlyConfig("int3", group_size=32))
    assert sqnr_db(logits(model), logits(q)) > sqnr_db(logits(model), logits(rounded))
    layers = [layer for layer in nc.report(q).layers if ".experts." in layer.operator]
    unreached = {layer.operator for layer in layers if "calibration" in layer.note}
    assert len(layers) == 24
    assert unreached >= {f"model.layers.0.mlp.experts.{stack}.5" for stack in ("gate_up_proj", "down_proj")}
    assert {layer.solver for layer in layers if layer.operator in unreached} == {"rtn"}
    assert {layer.solver for layer in layers if layer.operator not in unreached} == {"gptq"}


def test_rules_name_experts(tmp_path):
    model = build("Mixtral")
    config = (
        four_bits()
        .exclude(".*experts.down_proj.*")
        .set_local("model.layers.0.mlp.experts.gate_up_proj.3", nc.WeightOnlyConfig("int8"))
    )
    q = nc.quantize(model, config)
    experts = q.model.layers[0].mlp.experts
    assert [expert.form.dtype.name for expert in experts.gate_up_proj.children()] == ["int4"] * 3 + ["int8"]
    assert isinstance(experts.down_proj, torch.nn.Parameter)
    nc.save(q, tmp_path / "model")
    assert torch.equal(logits(nc.load(tmp_path / "model")), logits(q))
    assert "experts.down_proj.0" in nc.describe(model, config).table()


def config_with(solver, rules):
    config = nc.WeightOnlyConfig("int4", group_size=32, solver=solver)
    if rules == "a stack stays":
        config.exclude(".*experts.down_proj.*")
    elif rules == "an expert stays":
        config.exclude(".*experts.(down|gate_up)_proj.1")
    return config


@pytest.mark.parametrize("rules", ["all", "a stack stays", "an expert stays"])
@pytest.mark.parametrize(
    "solver", [nc.RTN(), nc.GPTQ(), nc.GPTQ(two_sided="qronos")], ids=["rtn", "gptq", "qronos"]
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_a_folder_gives_what_the_model_in_memory_gives(name, solver, rules, tmp_path):
    """Files hold the experts of most models one by one, under other names."""
    model = build(name)
    model.save_pretrained(tmp_path / "source", max_shard_size="40KB")
    data = [] if isinstance(solver, nc.RTN) else list(IDS[:, None])
    quantize_folder(tmp_path / "source", config_with(solver, rules), tmp_path / "out", data)
    prepared = nc.prepare(model, config_with(solver, rules))
    for ids in data:
        prepared(ids)
    nc.save(nc.convert(prepared), tmp_path / "expected")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()
    assert torch.equal(logits(nc.load(tmp_path / "out")), logits(nc.load(tmp_path / "expected")))


def qwen3_vl():
    """Its conversion looks up the shape of the stack in the model, and can only make a stack whole."""
    if not hasattr(transformers, "Qwen3VLMoeConfig"):
        pytest.skip("this version of transformers does not have it")
    torch.manual_seed(0)
    text = {
        **COMMON,
        "intermediate_size": 64,
        "head_dim": 16,
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    tokens = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        **tokens,
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_a_folder_with_stacks_that_are_transposed_while_they_are_read(tmp_path, monkeypatch):
    model = qwen3_vl()
    model.save_pretrained(tmp_path / "source")
    read, seen = StoredTensor.read, []

    def counted(stored):
        seen.extend([stored] if len(stored.shape) == 3 else [])
        return read(stored)

    monkeypatch.setattr(StoredTensor, "read", counted)
    quantize_folder(tmp_path / "source", four_bits(), tmp_path / "out")
    nc.save(nc.quantize(model, four_bits()), tmp_path / "expected")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()
    assert len(seen) == 4, "each stack is read once, not once for each expert"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_one_expert_of_a_quantized_model(dtype, kept, tmp_path):
    """Of the tensors of a stack not only the first is looked at."""
    build("Mixtral").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    tensors |= {
        key: (80 * value).to(dtype)
        for key, value in tensors.items()
        if "layers.1" in key and "experts.2.w" in key
    }
    save_file(tensors, path)
    config = four_bits()
    if kept:
        config.exclude(".*experts.*")
    with pytest.raises(
        nc.ArtefactCorruptError, match=f"has dtype {dtype}; the files are of a quantized model"
    ):
        quantize_folder(tmp_path / "source", config, tmp_path / "out")


def test_experts_of_two_dtypes_are_of_the_wider(tmp_path):
    model = build("Mixtral")
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    halved = {key: value.bfloat16() for key, value in tensors.items() if "experts.0.w2" in key}
    save_file(tensors | halved, path)
    quantize_folder(tmp_path / "source", four_bits(), tmp_path / "out")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[0] = layer.mlp.experts.down_proj[0].bfloat16()
    nc.save(nc.quantize(model, four_bits()), tmp_path / "expected")
    assert (tmp_path / "out" / "model.json").read_bytes() == (
        tmp_path / "expected" / "model.json"
    ).read_bytes()
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("stop", [1, 2])
def test_a_folder_whose_run_was_stopped(stop, tmp_path):
    build("Mixtral").save_pretrained(tmp_path / "source")
    arguments = tmp_path / "source", config_with(nc.GPTQ(), "an expert stays")

    def interrupted(done, total, name):
        if done == stop:
            raise KeyboardInterrupt

    quantize_folder(*arguments, tmp_path / "whole", list(IDS[:, None]))
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(*arguments, tmp_path / "out", list(IDS[:, None]), progress=interrupted)
    quantize_folder(*arguments, tmp_path / "out", list(IDS[:, None]))
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("missing", ["experts.1.w1", "experts.3.w2", "experts.*.w3"])
def test_a_folder_without_an_expert(missing, tmp_path):
    """The others would move up."""
    build("Mixtral").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    kept = {
        key: value
        for key, value in load_file(path).items()
        if not fnmatch.fnmatch(key, f"*.layers.1.*{missing}.weight")
    }
    save_file(kept, path)
    with pytest.raises(nc.ArtefactCorruptError, match="4 experts of 'model.layers.1.mlp.experts"):
        quantize_folder(tmp_path / "source", four_bits(), tmp_path / "out")


def test_in_place():
    model = build("GptOss")
    with pytest.raises(nc.NCError):
        nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=7), inplace=True)
    assert stacked_names(model)
    expected = logits(nc.quantize(model, four_bits()))
    assert nc.quantize(model, four_bits(), inplace=True) is model
    assert torch.equal(logits(model), expected)


def test_a_filter_of_torchao_sees_each_expert_and_the_models_own_modules():
    model = build("Qwen3Moe")
    own, seen = set(map(id, model.modules())), {}

    def chosen(module, name):
        seen[name] = module
        return name.endswith("gate_up_proj.1")

    quantize_(model, four_bits(), chosen)
    found = sorted(name for name, module in model.named_modules() if isinstance(module, QuantLinear))
    assert found == [f"model.layers.{i}.mlp.experts.gate_up_proj.1" for i in range(2)]
    assert len(stacked_names(model)) == 2, "down_proj of both layers stays as it was"
    assert all(isinstance(module, torch.nn.Linear) for name, module in seen.items() if "experts." in name)
    assert id(seen["model.layers.0.self_attn.q_proj"]) in own


def test_stacks_without_quantized_experts_stay(tmp_path):
    model = build("Mixtral")
    q = nc.quantize(model, four_bits().exclude(".*layers.0.*experts.*"))
    assert all(key.startswith("model.layers.0.") for key in stacked_names(q))
    assert len(stacked_names(q)) == 2
    nc.save(q, tmp_path / "model")
    assert torch.equal(logits(nc.load(tmp_path / "model")), logits(q))


def test_a_step_with_quantized_experts_has_no_plan():
    q = nc.quantize(build("Mixtral"), four_bits())
    expected = logits(q)
    with pytest.raises(CaptureError):
        nc.accelerate_generation(q)
    assert torch.equal(logits(q), expected)


def test_files_of_other_tools_are_refused(tmp_path):
    q = nc.quantize(build("Mixtral"), nc.WeightOnlyConfig("int4", group_size=32, scale_dtype="fp16"))
    with pytest.raises(UnsupportedError, match="holds experts"):
        nc.export_weights(q, tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_what_stands_for_a_weight_is_good_for_its_product_only():
    plain, turned = (
        Experts(torch.nn.Parameter(torch.randn(3, 8, 4)), transposed) for transposed in (False, True)
    )
    x, y = torch.randn(5, 4), torch.randn(5, 8)
    torch.testing.assert_close(
        torch.nn.functional.linear(x, plain[1], bias=torch.ones(8)), x @ plain.get_submodule("1").weight.T + 1
    )
    torch.testing.assert_close(y @ turned[torch.tensor(2)], y @ turned.get_submodule("2").weight.T)
    for wrong in (
        lambda: x @ plain[0].mT,
        lambda: y @ plain[0],
        lambda: torch.nn.functional.linear(y, turned[0]),
        lambda: plain[0] + 1,
    ):
        with pytest.raises((TypeError, AttributeError)):
            wrong()


def test_captured_models_say_that_experts_stay_fp32():
    model = build("Mixtral")
    model.config.use_cache = False
    with pytest.warns(
        nc.NCWarning,
        match="Most weights of this model stay as they are.*experts.gate_up_proj.*WeightOnlyConfig",
    ):
        q = nc.quantize(model, nc.DynamicQuantConfig(), example_inputs={"input_ids": IDS})
    report = nc.report(q)
    assert {product.weight.rpartition(".")[2] for product in report.unknown_products} == {
        "gate_up_proj",
        "down_proj",
    }
    assert sum(product.size for product in report.unknown_products) == sum(
        p.numel() for p in model.parameters() if p.dim() == 3
    )
    assert "weights stay fp32, as nc has no int8 for what reads them" in said(report)
