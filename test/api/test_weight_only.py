"""Weight-only quantization of the user's own modules.

From configuration to report, against float64 brute force.
"""

import copy
import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from suites.small_llama import random_llama
from torch import nn
from torch.nn.utils import prune
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import nc
from nc import (
    GPTQ,
    CalibrationError,
    ConfigError,
    InputError,
    NCWarning,
    StateError,
    StaticQuantConfig,
    UnmatchedRuleError,
    UnsupportedError,
    WeightOnlyConfig,
    available_backends,
    convert,
    describe,
    prepare,
    quantize,
)
from nc.algorithms.solvers import solve_best
from nc.algorithms.solvers.base import Problem, needing_gradients
from nc.modules.block_calls import Sample, record
from nc.modules.statistics import InputStatistics
from nc.nn import QuantEmbedding, QuantLinear

ENGINES = ["reference", *(name for name in ("native", "ipex") if not available_backends()[name])]
#: IPEX has no kernel for low-bit weights.
LOW_BIT_ENGINES = [name for name in ENGINES if name != "ipex"]
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64).sin()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).eval()


llama = functools.partial(random_llama, num_hidden_layers=3)


def texts(count=4, rows=2, length=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, (rows, length), generator=generator) for _ in range(count)]


def rounded(weight, bits, group):
    """A weight after rounding to nearest with min-max scales, group by group, in float64."""
    highest = 2 ** (bits - 1) - 1
    weight = weight.detach().double().numpy()
    result = np.empty_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            part = weight[row, start : start + group]
            scale = np.abs(part).max() / highest
            result[row, start : start + group] = (
                np.clip(np.round(part / scale), -highest - 1, highest) * scale
            )
    return torch.from_numpy(result)


def weights(model):
    return {
        name: module.packed.dequantize()
        for name, module in model.named_modules()
        if isinstance(module, (QuantLinear, QuantEmbedding))
    }


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (3, 16), (2, 8), (8, 32)])
def test_outputs_are_those_of_weights_rounded_group_by_group(bits, group):
    model = mlp()
    q = quantize(model, WeightOnlyConfig(f"int{bits}", group_size=group, w_algo="minmax"))
    first, second = (
        rounded(m.weight, bits, m.in_features if group == -1 else group) for m in (model[0], model[2])
    )
    hidden = (X.double() @ first.T + model[0].bias.double()).relu()
    expected = hidden @ second.T + model[2].bias.double()
    assert torch.allclose(q(X).double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(q(X), model(X), rtol=1e-5, atol=1e-6)


def test_the_result_is_the_users_class_and_the_users_model_does_not_change():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    q = quantize(model, WeightOnlyConfig(group_size=32))
    assert type(q) is type(model)
    assert type(q.model.layers[0].mlp.up_proj) is QuantLinear
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert {k: v.data_ptr() for k, v in model.state_dict().items()}.keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    q.model.norm.weight.data.zero_()
    assert bool(model.model.norm.weight.all())
    assert type(quantize(model, WeightOnlyConfig(group_size=32), inplace=True)) is LlamaForCausalLM
    assert type(model.model.layers[0].mlp.up_proj) is QuantLinear


def test_in_place_the_layers_are_replaced_once():
    prepared = prepare(llama(), WeightOnlyConfig(group_size=32), inplace=True)

    def stop(done, *_):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(prepared, progress=stop)
    with pytest.raises(StateError, match="inplace=True.*float model"):  # some layers were replaced
        convert(prepared)
    prepared = prepare(llama(), WeightOnlyConfig(group_size=32), inplace=True)
    assert convert(prepared) is prepared.model
    with pytest.raises(StateError, match="inplace=True.*float model"):
        convert(prepared)


def test_generate_with_a_cache_gives_what_the_dequantized_model_gives():
    model = llama()
    q = quantize(model, WeightOnlyConfig(group_size=32))
    plain = copy.deepcopy(model)
    for name, weight in weights(q).items():
        plain.get_submodule(name).weight.data = weight
    ids = texts(1)[0]
    assert torch.equal(
        q.generate(ids, max_new_tokens=8, do_sample=False),
        plain.generate(ids, max_new_tokens=8, do_sample=False),
    )
    assert torch.allclose(q(ids).logits, plain(ids).logits, atol=1e-5)
    assert q.config.use_cache


def test_heads_and_embeddings_stay_float_unless_asked():
    model = llama()
    plan = describe(model, WeightOnlyConfig(group_size=32))
    assert "output head stays float" in plan["lm_head"].reason
    assert "embeddings stay float" in plan["model.embed_tokens"].reason
    q = quantize(model, WeightOnlyConfig(group_size=32, lm_head="int8", embedding="uint4"))
    assert (str(q.lm_head.form.dtype), str(q.model.embed_tokens.form.dtype)) == ("int8", "uint4")
    named = quantize(model, WeightOnlyConfig(group_size=32).set_local("lm_head", WeightOnlyConfig("int5")))
    assert str(named.lm_head.form.dtype) == "int5"
    ids = texts(1)[0]
    assert torch.equal(q.model.embed_tokens(ids), q.model.embed_tokens.packed.dequantize()[ids])


class Twice(nn.Module):
    """One linear under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = self.first

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


@pytest.mark.parametrize(
    "fields", [{}, {"solver": GPTQ(), "transforms": [nc.AWQ()]}, {"scale_dtype": "e8m0"}]
)
def test_a_module_with_two_names_is_replaced_under_both(fields, tmp_path):
    torch.manual_seed(0)
    model, x = Twice().eval(), X[:, :32]
    q = quantize(model, WeightOnlyConfig("int4", group_size=16, **fields), lambda prepared: prepared(x))
    assert q.last is q.first
    assert isinstance(q.last, QuantLinear)
    assert type(model.last) is nn.Linear
    nc.save(q, tmp_path)
    again = nc.load(tmp_path, model=Twice())
    assert again.last is again.first
    assert torch.equal(again(x), q(x))


@pytest.mark.parametrize("key", [nn.Embedding, "Embedding"])
def test_a_rule_for_the_type_of_embeddings_asks_for_them(key):
    model = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 8)).eval()
    q = quantize(model, WeightOnlyConfig("int4", group_size=16).set_local(key, WeightOnlyConfig("int8")))
    assert (str(q[0].form.dtype), str(q[1].form.dtype)) == ("int8", "int4")
    assert isinstance(quantize(model, WeightOnlyConfig(group_size=16, white_list=[key]))[0], QuantEmbedding)


def test_tied_weights_are_quantized_once():
    model = llama(tie_word_embeddings=True)
    q = quantize(model, WeightOnlyConfig(group_size=32, lm_head="int8", embedding="int8"))
    assert q.lm_head.codes is q.model.embed_tokens.codes
    report = nc.report(q)
    assert report.weight_bytes == sum(
        {t.data_ptr(): t.numel() * t.element_size() for t in (*q.parameters(), *q.buffers())}.values()
    )


def test_conv1d_of_transformers_has_its_weight_the_other_way_round():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64)).eval()
    q = quantize(model, WeightOnlyConfig("int8", group_size=-1, w_algo="minmax"))
    layer, float_layer = q.transformer.h[0].attn.c_attn, model.transformer.h[0].attn.c_attn
    assert torch.allclose(layer.packed.dequantize().double(), rounded(float_layer.weight.T, 8, 64), atol=1e-7)
    ids = texts(1)[0]
    assert (q(ids).logits - model(ids).logits).abs().max() < 0.02 * model(ids).logits.abs().max()


def test_rules_as_everywhere():
    config = (
        WeightOnlyConfig(group_size=32)
        .set_local(".*mlp.*", WeightOnlyConfig("int8"))
        .exclude("model.layers.1.mlp.up_proj")
    )
    plan = describe(llama(), config)
    assert str(plan["model.layers.0.mlp.up_proj"].form) == "int8 sym per_group 32"
    assert plan["model.layers.1.mlp.up_proj"].reason == "fp32 was asked for"
    assert "group_size    32     global" in plan.explain("model.layers.0.mlp.up_proj")
    listed = describe(llama(), WeightOnlyConfig(group_size=32, white_list=[".*q_proj"]))
    assert {d.operator.rpartition(".")[2] for d in listed.quantized} == {"q_proj"}
    assert len(describe(llama(), WeightOnlyConfig(group_size=32, white_list=[nn.Linear])).quantized) == 21
    with pytest.raises(UnmatchedRuleError, match=r"closest names: .*q_proj"):
        describe(llama(), WeightOnlyConfig(group_size=32).exclude("model.layers.0.self_attn.q_prj"))


def test_a_group_that_does_not_cover_a_weight_is_refused_with_the_sizes_that_do():
    with pytest.raises(
        ConfigError, match=r"Layer '2'.*=64 does not divide the 96 .* 32, 48, 96\. .*group_size=32 fits all"
    ):
        describe(mlp(), WeightOnlyConfig(group_size=64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"w_dtype": "int9"}, "w_dtype"),
        ({"group_size": 0}, "group_size"),
        ({"scale_dtype": "fp8"}, "scale_dtype"),
        ({"solver": 3}, "solver"),
        ({"solver": nc.AWQ()}, "solver"),
        ({"solver": GPTQ}, "solver"),
        ({"transforms": [GPTQ()]}, "transforms"),
        ({"w_dtype": "nf4", "w_sym": False}, "no zero point"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        WeightOnlyConfig(**fields)


def test_a_configuration_comes_back_from_plain_values():
    config = WeightOnlyConfig("int3", solver=GPTQ(damp=0.05), double_quant=True).set_local(
        "2", WeightOnlyConfig(group_size=8)
    )
    assert WeightOnlyConfig.from_dict(config.to_dict()) == config
    assert WeightOnlyConfig.from_json(config.to_json()) == config


def test_nvfp4_has_a_scale_for_the_whole_tensor():
    q = quantize(mlp(), WeightOnlyConfig("fp4_e2m1", group_size=16, scale_dtype="e4m3"))
    assert q[0].outer_scale.shape == (1, 1)
    assert all(layer.loss < 0.02 for layer in nc.report(q).layers)


class Product(nn.Linear):
    """A linear with a forward of its own, as transformers' Falcon has it."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_forward_of_its_own_is_a_linear_if_it_computes_one():
    torch.manual_seed(0)
    model = nn.Sequential(Product(32, 32), Doubled(32, 32), nn.Linear(32, 8)).eval()
    q = quantize(model, WeightOnlyConfig("int8", group_size=-1))
    assert [type(layer) for layer in q] == [QuantLinear, Doubled, QuantLinear]
    assert "Doubled has its own forward" in nc.report(q).text(details=True)
    x = torch.randn(5, 32)
    assert (q(x) - model(x)).abs().max() < 0.02 * model(x).abs().max()


def test_a_forward_put_on_a_layer_stays_with_the_float_layer():
    for model, x in (
        (mlp(), X),
        (nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 10)).eval(), torch.arange(10)),
    ):
        model[0].forward = lambda x, own=model[0].forward: 100 * own(x)
        q = quantize(model, WeightOnlyConfig("int8", group_size=-1, embedding="int8"))
        assert type(q[0]) is type(model[0])
        assert f"this {type(model[0]).__name__} has its own forward" in nc.report(q).text(details=True)
        assert type(q[-1]) is QuantLinear
        assert (q(x) - model(x)).abs().max() < 0.02 * model(x).abs().max()


@pytest.mark.parametrize("fields", [{}, {"solver": GPTQ()}])
def test_hooks_of_a_layer_are_those_of_the_layer_in_its_place(fields):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64), nn.Linear(64, 10)).eval()
    ids, seen = torch.arange(10), []
    handles = [
        model[0].register_forward_hook(lambda module, args, output: 2 * output),
        model[1].register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
        ),
        model[1].register_forward_hook(
            lambda module, args, kwargs, output: output + len(kwargs) + 1, with_kwargs=True
        ),
        model[1].register_forward_hook(lambda *_: seen.append("always"), always_call=True),
        model[1].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[2].register_forward_pre_hook(lambda module, args: (3 * args[0],)),
    ]
    expected = model(ids).detach()
    prepared = prepare(
        model, WeightOnlyConfig("int8", group_size=-1, embedding="int8", **fields), inplace=True
    )
    prepared(ids)
    q = convert(prepared)
    assert [type(layer) for layer in q] == [QuantEmbedding, QuantLinear, QuantLinear]
    seen.clear()
    assert (q(ids) - expected).abs().max() < 0.02 * expected.abs().max()
    assert seen == ["always"]
    with pytest.raises(RuntimeError):
        q[1](torch.randn(2, 63))
    assert seen == ["always", "always"]
    q[1](torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert seen[3:] == ["backward"]
    for handle in handles:
        handle.remove()
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in q))
    seen.clear()
    assert torch.equal(q(ids), plain(ids))
    assert (q(ids) - expected).abs().max() > 0.1 * expected.abs().max()
    assert not seen


def test_a_copy_has_hooks_of_its_own():
    model, seen = mlp(), []
    handle = model[0].register_forward_hook(lambda *_: seen.append("called"))
    q = quantize(model, WeightOnlyConfig(group_size=32))
    handle.remove()
    q(X)
    assert seen == ["called"]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    "how",
    [lambda m: prune.l1_unstructured(m, "weight", amount=0.5), nn.utils.weight_norm, nn.utils.spectral_norm],
)
def test_hooks_that_compute_the_float_weight_end_with_it(how, inplace):
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own successors are parametrizations
        how(model[0])
    model[0].eval()(X)
    expected, weight = model(X), model[0].weight.detach().clone()
    q = quantize(model, WeightOnlyConfig("int8", group_size=-1), inplace=inplace)
    assert (q[0].packed.dequantize() - weight).abs().max() < weight.abs().max() / 200
    assert q(X).isfinite().all()
    if not inplace:
        assert torch.equal(model(X), expected)
        assert torch.equal(model[0].weight, weight)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(32, 0), (0, 32)])
def test_weights_without_elements_stay_as_they_are(sizes):
    model = nn.Sequential(nn.Linear(*sizes), nn.Linear(32, 32)).eval()
    assert "its weight has no elements" in str(describe(model, WeightOnlyConfig(group_size=32)))
    q = quantize(model, WeightOnlyConfig(group_size=32))
    assert [type(layer) for layer in q] == [nn.Linear, QuantLinear]


def test_a_model_that_is_one_linear_is_refused_with_the_way_out():
    layer = nn.Linear(32, 8).eval()
    with pytest.raises(InputError, match=r"itself a Linear.*torch\.nn\.Sequential"):
        quantize(layer, WeightOnlyConfig(group_size=32))
    assert type(quantize(nn.Sequential(layer).eval(), WeightOnlyConfig(group_size=32))[0]) is QuantLinear


def test_weights_outside_of_linears_are_named():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacked, self.up = nn.Parameter(torch.randn(4, 64, 64)), nn.Linear(64, 64)

        def forward(self, x):
            return self.up(x) @ self.stacked[0]

    with pytest.warns(NCWarning, match=r"Most weights .* stay as they are.*stacked \[4, 64, 64\]"):
        q = quantize(Experts().eval(), WeightOnlyConfig(group_size=32))
    assert "0.0 M weights in no linear or embedding stay float: stacked [4, 64, 64]" in nc.report(q).summary()
    assert "stacked [4, 64, 64]" in str(describe(Experts(), WeightOnlyConfig(group_size=32)))
    with pytest.warns(NCWarning, match=r"No layer gets a low-bit weight: Doubled has its own forward"):
        prepare(nn.Sequential(Doubled(8, 8)).eval(), WeightOnlyConfig(group_size=-1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("act_dtype", ["fp32", "int8", "bf16"])
@pytest.mark.parametrize("engine", LOW_BIT_ENGINES)
def test_inputs_that_are_no_floats_are_refused(engine, act_dtype, dtype):
    q = quantize(mlp(), WeightOnlyConfig("int4", group_size=32, act_dtype=act_dtype), backend=engine)
    message = (
        rf"A linear of 64 inputs and 96 outputs with a weight in int4 was called with a tensor of {dtype}, "
        r"shape \(5, 64\)"
    )
    with pytest.raises(InputError, match=message):
        q(torch.ones(5, 64, dtype=dtype))
    with pytest.raises(InputError, match=message):
        nn.functional.linear(torch.ones(5, 64, dtype=dtype), q[0].weight)


@pytest.mark.parametrize("dtype", ["int4", "fp8_e4m3"])
@pytest.mark.parametrize("ids", [[-1], [10], [True] * 10], ids=str)
def test_ids_that_a_float_embedding_refuses_are_refused(dtype, ids):
    model = nn.Sequential(nn.Embedding(10, 32)).eval()
    q = quantize(model, WeightOnlyConfig(dtype, group_size=16, embedding=dtype))
    for table in (model, q):
        with pytest.raises((IndexError, RuntimeError)):
            table(torch.tensor(ids))
    assert q(torch.tensor([[9, 0]], dtype=torch.int32)).shape == (1, 2, 32)


@pytest.mark.parametrize("act_dtype", ["fp32", "int8", "int8_block32", "bf16"])
@pytest.mark.parametrize("engine", LOW_BIT_ENGINES)
def test_inputs_whose_sign_is_not_in_memory(engine, act_dtype):
    q = quantize(mlp(), WeightOnlyConfig("int4", group_size=32, act_dtype=act_dtype), backend=engine)
    x = torch.complex(X, 2 * X).conj().imag
    assert x.is_neg()
    assert torch.equal(q[0](x), q[0](x.clone()))
    assert torch.equal(q[0](x), q[0](-2 * X))
    y = torch._neg_view(X)  # contiguous; a conjugate's parts are not
    assert torch.equal(q[0](y), q[0](-X))


def test_weights_that_are_not_finite_are_refused():
    model = mlp()
    model[2].weight.data[3, 4] = float("nan")
    with pytest.raises(InputError, match=r"'2\.weight' holds NaN.*exclude\('2'\)"):
        quantize(model, WeightOnlyConfig(group_size=32))
    assert quantize(model, WeightOnlyConfig(group_size=32).exclude("2"))


class TestCalibration:
    def calibrated(self, model, config, data):
        prepared = prepare(model, config)
        for batch in data:
            prepared(batch) if isinstance(batch, torch.Tensor) else prepared(**batch)
        return convert(prepared)

    def test_it_returns_what_the_float_model_returns_and_needs_data(self):
        model, ids = llama(), texts(1)[0]
        prepared = prepare(model, WeightOnlyConfig(group_size=32, solver=GPTQ()))
        with pytest.raises(StateError, match=r"Nothing was calibrated: gptq needs data"):
            convert(prepared)
        assert torch.equal(prepared(ids).logits, model(ids).logits)

    @pytest.mark.parametrize(
        "fields", [{"solver": GPTQ()}, {"solver": nc.AutoRound(steps=2)}, {"transforms": [nc.AWQ()]}]
    )
    def test_calls_without_a_token_are_no_data(self, fields):
        config, ids = WeightOnlyConfig(group_size=32, **fields), texts(1)[0]
        padding = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
        for model, empty, whole in ((mlp(), X[:0], X), (llama(), padding, ids)):
            with pytest.raises(
                StateError,
                match=r"needs data \(the 2 calls so far had empty tensors, or nothing but padding\)",
            ):
                self.calibrated(model, config, [empty, empty])
            found, expected = (
                weights(self.calibrated(model, config, data)) for data in ([empty, whole, empty], [whole])
            )
            assert all(torch.equal(weight, expected[name]) for name, weight in found.items())

    def test_each_block_is_solved_for_the_inputs_that_the_quantized_blocks_in_front_give(self):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).eval()
        data = [torch.randn(16, 32) for _ in range(3)]
        q = self.calibrated(model, WeightOnlyConfig("int3", group_size=16, solver=GPTQ()), data)
        x = torch.cat(data)
        for index in range(3):
            layer, weight = q[index][0], model[index][0].weight.double()
            error = (weight - layer.packed.dequantize().double()) @ x.double().T
            expected = error.square().sum() / (weight @ x.double().T).square().sum()
            assert layer.result.loss == pytest.approx(float(expected.detach()), rel=1e-4)
            assert layer.result.tokens == 48
            assert layer.result.loss <= layer.result.rtn_loss
            x = q[index](x)

    def test_a_solver_of_whole_blocks_gets_the_float_model_s_outputs(self):
        seen = []

        @dataclasses.dataclass(frozen=True)
        class Whole(nc.RTN):
            name = "whole"

            def solve_block(self, problem):
                seen.append(problem)
                outputs = [problem.run(call).detach() for call in problem.samples]
                assert all(
                    output.shape == target.shape
                    for output, target in zip(outputs, problem.targets, strict=True)
                )
                return {name: self.solve(layer) for name, layer in problem.layers.items()}

        model, data = llama(), texts(2)
        q = self.calibrated(
            model, WeightOnlyConfig("int2", group_size=32, solver=Whole(), transforms=[nc.Smooth()]), data
        )
        assert [problem.name for problem in seen] == [f"model.layers.{i}" for i in range(3)]
        with torch.no_grad():
            states = model(data[0], output_hidden_states=True).hidden_states
        assert torch.allclose(seen[1].targets[0], states[2], atol=1e-5)
        assert not torch.allclose(next(iter(seen[1].samples))[0][0], states[1], atol=1e-3)
        assert q.model.layers[0].mlp.up_proj.result.asked == "whole"

    def test_padding_does_not_count(self):
        ids = texts(1)[0]
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        q = self.calibrated(
            llama(),
            WeightOnlyConfig(group_size=32, solver=GPTQ()),
            [{"input_ids": ids, "attention_mask": mask}],
        )
        assert {m.result.tokens for m in q.modules() if isinstance(m, QuantLinear)} == {25}

    def test_the_same_data_gives_the_same_bytes(self):
        one, other = (
            self.calibrated(llama(), WeightOnlyConfig(group_size=32, solver=GPTQ()), texts()).state_dict()
            for _ in range(2)
        )
        assert all(torch.equal(one[k], other[k]) for k in one)

    def test_data_that_is_not_finite_names_the_layer(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.raises(CalibrationError, match=r"Layer '0'.*exclude\('0'\)"):
            self.calibrated(
                model, WeightOnlyConfig(group_size=-1, solver=GPTQ()), [torch.full((2, 8), float("inf"))]
            )

    def test_a_layer_that_no_data_reaches_is_rounded_to_nearest_and_the_report_says_so(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                return self.first(x) if x.sum() > 0 else self.second(x)

        q = self.calibrated(Experts(), WeightOnlyConfig(group_size=-1, solver=GPTQ()), [torch.ones(4, 8)])
        assert (q.second.result.solver, q.second.result.tokens) == ("rtn", 0)
        assert "note: second: calibration never reached it" in nc.report(q).summary()

    def test_an_encoder_and_a_decoder(self):
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)).eval()
        ids = texts(1)[0]
        data = [{"input_ids": ids, "decoder_input_ids": ids[:, :6]}]
        q = self.calibrated(model, WeightOnlyConfig(group_size=32, solver=GPTQ()), data)
        found = {name: m.result for name, m in q.named_modules() if isinstance(m, QuantLinear)}
        assert found["encoder.block.1.layer.0.SelfAttention.q"].tokens == 32
        assert found["decoder.block.1.layer.0.SelfAttention.q"].tokens == 12
        assert found["decoder.block.1.layer.1.EncDecAttention.k"].tokens == 32
        assert torch.isfinite(q(**data[0]).logits).all()
        assert q.generate(ids, max_new_tokens=3).shape[0] == 2

    def test_progress_is_told_block_by_block(self):
        prepared = prepare(llama(), WeightOnlyConfig(group_size=32, solver=GPTQ()))
        prepared(texts(1)[0])
        seen = []
        convert(prepared, progress=lambda done, total, name: seen.append((done, total, name)))
        assert seen[0] == (0, 4, "model.layers.0")
        assert seen[-1][:2] == (4, 4)


class TestWithOtherStrategies:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.enc = nn.Conv2d(3, 16, 3), nn.Linear(16 * 36, 64)
            self.embed, self.up, self.down = nn.Embedding(50, 64), nn.Linear(64, 128), nn.Linear(128, 10)

        def forward(self, image, ids):
            hidden = self.enc(self.conv(image).relu().flatten(1))
            return self.down(self.up(hidden + self.embed(ids).mean(1)).relu())

    def config(self, **fields):
        return WeightOnlyConfig("int4", group_size=32, white_list=["up", "down", "embed"], **fields)

    def data(self, count=3):
        generator = torch.Generator().manual_seed(0)
        return [
            (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 50, (4, 7), generator=generator))
            for _ in range(count)
        ]

    @pytest.mark.parametrize("backend", ENGINES)
    @pytest.mark.parametrize("solver", [nc.RTN(), GPTQ()], ids=["rtn", "gptq"])
    def test_low_bit_layers_stay_one_operator_of_the_captured_graph(self, backend, solver, tmp_path):
        torch.manual_seed(0)
        model, data = self.Net().eval(), self.data()
        prepared = prepare(
            model, StaticQuantConfig() + self.config(solver=solver), example_inputs=data[0], backend=backend
        )
        for batch in data:
            prepared(*batch)
        q = convert(prepared, measure=False)
        ops = {op.operator: op for op in q.report().ops}
        assert ops["up"].ran == "int4 weight"
        assert (ops["conv"].asked, ops["up"].kind, ops["embed"].kind) == (
            "int8",
            "quant_linear",
            "quant_embedding",
        )
        if backend != "reference":
            assert (ops["conv"].ran, ops["enc"].ran) == ("int8", "int8")
        expected = model(*data[0])
        assert (q(*data[0]) - expected).square().mean() < 0.03 * expected.square().mean()
        q.save(tmp_path / "q")
        assert torch.equal(nc.load(tmp_path / "q", backend=backend)(*data[0]), q(*data[0]))

    def test_static_ranges_are_those_behind_the_low_bit_layers(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).eval()
        x = torch.randn(64, 16)
        config = StaticQuantConfig() + WeightOnlyConfig(
            "int2", group_size=-1, white_list=["0"], solver=GPTQ()
        )
        prepared = prepare(model, config, example_inputs=x, backend="reference")
        prepared(x)
        q = convert(prepared, measure=False)
        low_bit = convert(
            _fed(prepare(model, WeightOnlyConfig("int2", group_size=-1, white_list=["0"], solver=GPTQ())), x)
        )
        hidden = low_bit[0](x)
        scale = next(n.args[1] for n in q.graph.module.graph.nodes if "quantize_per_tensor" in str(n.target))
        assert scale == pytest.approx(
            float((hidden.max().clamp(min=0) - hidden.min().clamp(max=0)).detach()) / 255, rel=1e-5
        )

    def test_rules_that_name_nothing_are_refused_in_a_sum_too(self):
        with pytest.raises(UnmatchedRuleError, match="nowhere"):
            prepare(
                self.Net(),
                StaticQuantConfig() + self.config().exclude("nowhere"),
                example_inputs=self.data()[0],
                backend="reference",
            )


def _fed(prepared, *batches):
    for batch in batches:
        prepared(batch)
    return prepared


def test_a_cache_is_no_part_of_what_reaches_a_block():
    """Capture makes caches containers for pytree.

    Their tensors would be kept and grow with each call of a block.
    """
    model, ids = llama(), texts(1)[0]
    prepare(model, StaticQuantConfig(), example_inputs=ids, backend="reference")
    (calls,) = record(model, list(model.model.layers), [Sample(((ids,), {"use_cache": True}))])
    caches = [
        value
        for _, kwargs in calls
        for name, value in kwargs.items()
        if name in ("cache", "past_key_value", "past_key_values")
    ]
    assert caches == [None] * 3


class InPlace(nn.Module):
    """A block that may change its input; with "layers" also what its layers read."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.norm, self.short = in_place, nn.LayerNorm(64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        inside = self.norm(x)
        short = self.short(inside)
        hidden = self.down(self.up(inside.relu_() if self.in_place == "layers" else inside.relu()).relu())
        if self.in_place:
            x += hidden
            return x.add_(short)
        return x + hidden + short


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"solver": GPTQ()},
        {"solver": GPTQ(two_sided="gptaq")},
        {"solver": GPTQ(two_sided="qronos")},
        {"solver": nc.AutoRound(steps=4)},
        {"transforms": [nc.AWQ()]},
    ],
    ids=["gptq", "gptaq", "qronos", "autoround", "awq"],
)
@pytest.mark.sample(3)
def test_blocks_that_change_tensors_in_place_get_the_codes_of_those_that_do_not(fields, whole):
    """`whole`: the model is one block, so what it changes is the user's input."""
    results = []
    learned = isinstance(fields.get("solver"), nc.AutoRound)  # by gradients, which need what layers read
    for in_place in ("", "input" if learned else "layers"):
        torch.manual_seed(0)
        model = nn.Sequential(*(InPlace(in_place) for _ in range(1 if whole else 3))).eval()
        prepared = prepare(model, WeightOnlyConfig("int3", group_size=32, **fields))
        for seed in range(3):
            prepared(torch.randn(9, 64, generator=torch.Generator().manual_seed(seed)))
        results.append(convert(prepared).state_dict())
    plain, in_place = results
    assert [n for n in plain if not torch.equal(plain[n], in_place[n])] == []


def test_what_learns_by_gradients_says_which_block_has_none():
    prepared = prepare(
        nn.Sequential(*(InPlace("layers") for _ in range(2))).eval(),
        WeightOnlyConfig(group_size=32, solver=nc.AutoRound()),
    )
    prepared(torch.randn(4, 64))
    with pytest.raises(
        UnsupportedError, match="AutoRound needs gradients inside block '0', and torch gives none: .*inplace"
    ):
        convert(prepared)


@pytest.mark.parametrize("kind", ["gptaq", "qronos"])
def test_two_sided_solvers_take_the_layers_of_a_block_one_after_the_other(kind):
    """Each corrects what those in front of it left, in its own block too.

    Else all correct the same error, and together too much.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(2))
    ).eval()
    x, solver = torch.randn(200, 32), GPTQ(two_sided=kind)
    prepared = prepare(
        model, WeightOnlyConfig("int3", group_size=16, solver=solver), backend="reference"
    )  # whose sums the solver sees
    prepared(x)
    q = convert(prepared)
    float_x = x
    with torch.no_grad():
        for block, q_block in zip(model, q, strict=True):
            for index in range(3):
                if index != 1:
                    found = InputStatistics.empty(x.shape[1], hessian=True, cross=True)
                    found.add(x, float_x)
                    form = q_block[index].form
                    asked = Problem(name="", weight=block[index].weight, form=form, rule="wls", inputs=found)
                    expected, result = solve_best(asked, solver)
                    assert result.solver == "gptq"
                    assert torch.equal(q_block[index].codes, expected.codes)
                x, float_x = q_block[index](x), block[index](float_x)


class Residual(nn.Module):
    """Two residual branches, as blocks of transformers have them."""

    def __init__(self, size):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x):
        x = x + self.b(self.a(self.norms[0](x)).tanh())
        return x + self.down(self.up(self.norms[1](x)).relu())


def test_qronos_brings_the_output_of_a_deep_model_nearer_to_the_float_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(48) for _ in range(5))).eval()
    for weight in (p for p in model.parameters() if p.dim() == 2):
        nn.init.normal_(weight, std=1.2 / weight.shape[1] ** 0.5)
    mix = torch.randn(48, 48) * torch.rand(48).mul(3).exp() / 10
    x, held_out = torch.randn(2, 1200, 48) @ mix
    error = {}
    for kind in (None, "qronos"):
        prepared = prepare(model, WeightOnlyConfig("int3", group_size=16, solver=GPTQ(two_sided=kind)))
        prepared(x)
        with torch.no_grad():
            error[kind] = float((convert(prepared)(held_out) - model(held_out)).square().mean())
    assert error["qronos"] < 0.9 * error[None]


def test_only_missing_gradients_are_called_so():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught, needing_gradients("TEQ", "0"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert caught.type is RuntimeError


class Adapted(nn.Module):
    """A linear with an adapter beside it, as peft makes it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_no_layers():
    model = nn.Sequential(Adapted(nn.Linear(32, 16)), nn.Linear(16, 16)).eval()
    q = nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=8))
    assert isinstance(q[0].base_layer, QuantLinear)
    assert isinstance(q[1], QuantLinear)
    for name in Adapted.adapter_layer_names:
        assert type(q[0].get_submodule(name)["default"]) is nn.Linear
    assert "it is part of an adapter" in nc.report(q).text(details=True)
