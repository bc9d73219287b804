"""Weights that hooks and parametrizations compute.

What is quantized is what the model computes with, and the model stays as it is.
"""

import copy
import logging
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nc
from nc import WeightOnlyConfig, convert, prepare, quantize
from nc.nn import QuantEmbedding, QuantLinear

SIZE = 32


class AddProduct(nn.Module):
    """A low-rank update; it has no right inverse."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(0.2 * torch.randn(4, SIZE)), nn.Parameter(0.2 * torch.randn(SIZE, 4))

    def forward(self, weight):
        return weight + self.b @ self.a


class EqualRate:
    """A hook of a user: the weight does not exist before the first call."""

    def __init__(self, module):
        weight = module.weight
        del module._parameters["weight"]
        module.register_parameter("weight_orig", nn.Parameter(weight.detach()))
        module.register_forward_pre_hook(self)

    def __call__(self, module, inputs):
        module.weight = module.weight_orig * (2 / inputs[0].shape[-1]) ** 0.5 * 10


def with_keywords(module):
    module.register_parameter("raw", nn.Parameter(module.weight.detach()))
    del module._parameters["weight"]
    module.register_forward_pre_hook(lambda m, _, __: setattr(m, "weight", 3 * m.raw), with_kwargs=True)


def pruned_twice(module):
    prune.l1_unstructured(module, "weight", 0.3)
    prune.ln_structured(module, "weight", 0.3, 2, 0)


def normed_twice(module):
    nn.utils.weight_norm(nn.utils.weight_norm(module), "bias", dim=None)


HOW = {
    "weight_norm": nn.utils.weight_norm,
    "weight_norm of all": lambda m: nn.utils.weight_norm(m, dim=None),
    "weight_norm of the bias too": normed_twice,
    "spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "pruned twice": pruned_twice,
    "equal rate": EqualRate,
    "hook with keywords": with_keywords,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "low rank": lambda m: parametrize.register_parametrization(m, "weight", AddProduct()),
}
HOOKS = [how for how in HOW if how not in ("low rank", "orthogonal") and "parametrized" not in how]


def low_bit(**fields):
    return WeightOnlyConfig("int8", **{"group_size": -1, **fields})


CONFIGS = {
    "rtn": low_bit(),
    "gptq": low_bit(solver=nc.GPTQ()),
    "awq": low_bit(group_size=SIZE, transforms=(nc.AWQ(),)),
    "teq": low_bit(group_size=SIZE, transforms=(nc.TEQ(steps=2),)),
    "autoround": low_bit(group_size=SIZE, solver=nc.AutoRound(steps=2)),
    "static": nc.StaticQuantConfig(),
    "dynamic": nc.DynamicQuantConfig(),
    "mixed": nc.DynamicQuantConfig().set_local("1", low_bit()),
}


def build(how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own successors are parametrizations
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        HOW[how](model[1])
    return model


def with_loaded_weights(how, *, training=False):
    """A model whose weights were loaded after it was built, that no call has reached since, and its true outputs."""
    torch.manual_seed(0)
    trained = build(how)
    for parameter in trained.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    torch.manual_seed(1)
    model, twin = build(how).train(training), build(how).eval()
    model.load_state_dict(state)
    twin.load_state_dict(state)
    x = torch.randn(64, SIZE)
    with torch.no_grad():
        return model, x, twin(x)


def state_of(model):
    return {
        name: (tensor, tensor.detach().clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def check_unchanged(model, state):
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert now.keys() == state.keys()
    assert all(
        now[name] is tensor and torch.equal(now[name], value) for name, (tensor, value) in state.items()
    )


def sqnr(expected, got):
    return float(10 * (expected.square().sum() / (expected - got).square().sum()).detach().log10())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.filterwarnings("ignore:The model is in training mode")
def test_what_is_quantized_is_what_the_model_computes_with(how, config, training):
    model, x, expected = with_loaded_weights(how, training=training)
    state = state_of(model)
    options = {} if isinstance(CONFIGS[config], WeightOnlyConfig) else {"example_inputs": x}
    with torch.no_grad():
        q = quantize(model, CONFIGS[config], lambda prepared: prepared(x), measure=False, **options)
        assert sqnr(expected, q(x)) > 30
    assert all(module.training is training for module in model.modules())
    check_unchanged(model, state)
    if isinstance(CONFIGS[config], WeightOnlyConfig):
        assert isinstance(q[1], QuantLinear)
        assert not q[1]._forward_pre_hooks
        assert all("parametriz" not in name and "orig" not in name for name in q.state_dict())


@pytest.mark.parametrize("how", HOW)
def test_without_a_call_the_weight_is_that_of_the_parameters(how):
    """No calibration data either; in place as well."""
    model, x, expected = with_loaded_weights(how)
    state = state_of(model)
    assert "Linear" in str(nc.describe(model, low_bit())["1"].module_type)
    q = quantize(model, low_bit())
    check_unchanged(model, state)
    assert sqnr(expected, q(x)) > 30
    assert torch.equal(quantize(model, low_bit(), inplace=True)(x), q(x))


@pytest.mark.parametrize("how", ["weight_norm", "parametrized weight_norm", "equal rate"])
def test_layers_that_stay_float_keep_what_computes_their_weight(how):
    model, x, expected = with_loaded_weights(how)
    q = quantize(model, low_bit().exclude("1"))
    assert q[1].state_dict().keys() == model[1].state_dict().keys()
    assert sqnr(expected, q(x)) > 30
    with torch.no_grad():
        for parameter in q[1].parameters():
            parameter.mul_(2)
    assert sqnr(expected, q(x)) < 20


def test_embeddings_too():
    table = nn.Embedding(20, SIZE)
    parametrizations.weight_norm(table)
    model = nn.Sequential(table, nn.Linear(SIZE, SIZE)).eval()
    with torch.no_grad():
        table.parametrizations.weight.original0.mul_(3)
    q = quantize(model, low_bit(embedding="int8"))
    assert isinstance(q[0], QuantEmbedding)
    assert sqnr(model(torch.arange(20)), q(torch.arange(20))) > 30


@pytest.mark.parametrize("nested", [False, True])
def test_a_weight_that_something_else_computes_stays_float(nested):
    """The module around the layer sets its weight, by a hook or in its forward."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw, self.layer = nn.Parameter(torch.randn(SIZE, SIZE)), nn.Linear(SIZE, SIZE)
            del self.layer._parameters["weight"]
            self.layer.weight = torch.zeros(SIZE, SIZE)
            if nested:
                self.register_forward_pre_hook(lambda module, _: module.set())

        def set(self):
            self.layer.weight = 2 * self.raw

        def forward(self, x):
            if not nested:
                self.set()
            return self.layer(x)

    model = nn.Sequential(Around(), nn.Linear(SIZE, SIZE)).eval()
    x = torch.randn(8, SIZE)
    q = quantize(model, low_bit())
    assert "not a parameter, and what computes it is outside" in str(nc.describe(model, low_bit()))
    with torch.no_grad():
        assert sqnr(model(x), q(x)) > 30


def test_an_adapter_that_merges_itself_in_eval_mode_is_as_before():
    class Adapter(nn.Linear):
        def __init__(self):
            super().__init__(SIZE, SIZE)
            self.product, self.merged = nn.Parameter(torch.randn(SIZE, SIZE)), False

        def train(self, mode=True):
            super().train(mode)
            if self.merged is mode:
                self.weight.data += -self.product.data if mode else self.product.data
                self.merged = not mode
            return self

        def forward(self, x):
            return super().forward(x) + (0 if self.merged else x @ self.product.T)

    model = nn.Sequential(Adapter(), nn.Linear(SIZE, SIZE)).train()
    state, x = state_of(model), torch.randn(8, SIZE)
    expected = copy.deepcopy(model).eval()(x)
    for config, options in (
        (low_bit(solver=nc.GPTQ()), {}),
        (nc.DynamicQuantConfig(), {"example_inputs": x}),
    ):
        with pytest.warns(nc.NCWarning, match="training mode"):
            prepared = prepare(model, config, **options)
        with torch.no_grad():
            prepared(x)
            assert sqnr(expected, convert(prepared)(x)) > 30
        assert (model[0].training, model[0].merged) == (True, False)
        check_unchanged(model, state)


class Holder:
    """Not a module, and can't be copied."""

    def __init__(self, module):
        self.module, self.lock = module, threading.Lock()


class Odd(nn.Module):
    """Holds what can't be copied, and what must follow the copy."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.lock, self.event, self.numbers = threading.Lock(), threading.Event(), (i for i in range(3))
        with Path(__file__).open() as self.file:  # a closed one can't be copied either
            self.log = logging.getLogger("odd")
        self.locked = {"lock": threading.RLock(), "layers": [self.first, self.second]}
        self.holder, self.call, self.options = Holder(self.second), self.run, {"scale": 1.0}
        self.function = lambda x, lock=self.lock: x

    def run(self, x):
        return self.holder.module(self.locked["layers"][0](x).relu()) * self.options["scale"]

    def forward(self, x):
        with self.lock, self.locked["lock"]:
            return self.function(self.call(x))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"solver": nc.GPTQ()},
        {"solver": nc.GPTQ(two_sided="gptaq")},
        {"transforms": (nc.AWQ(),)},
        {"solver": nc.AutoRound(steps=2)},
    ],
    ids=str,
)
def test_what_cannot_be_copied_is_shared(fields):
    torch.manual_seed(0)
    model = nn.Sequential(Odd(), Odd()).eval()
    state, x = state_of(model), torch.randn(16, SIZE)
    expected = model(x)
    q = quantize(model, low_bit(**{"group_size": SIZE, **fields}), lambda prepared: prepared(x))
    with torch.no_grad():
        assert sqnr(expected, q(x)) > 30
        assert torch.equal(model(x), expected)
    check_unchanged(model, state)
    assert q[0].locked["layers"][0] is not model[0].first
    assert q[0].holder.module is not model[0].second
    assert q[0].call.__self__ is q[0]
    assert q[0].options is not model[0].options
    assert q[0].lock is model[0].lock
    assert q[0].file is model[0].file
    assert not {t.data_ptr() for t in q.parameters()} & {t.data_ptr() for t in model.parameters()}


@pytest.mark.parametrize(
    "config", [nc.StaticQuantConfig(), nc.DynamicQuantConfig()], ids=["static", "dynamic"]
)
def test_what_cannot_be_copied_can_be_captured(config):
    torch.manual_seed(0)
    model, x = nn.Sequential(Odd(), Odd()).eval(), torch.randn(16, SIZE)
    state = state_of(model)
    q = quantize(model, config, lambda prepared: prepared(x), example_inputs=x, measure=False)
    assert sqnr(model(x), q(x)) > 25
    check_unchanged(model, state)


@pytest.mark.parametrize("fields", [{}, {"solver": nc.GPTQ()}, {"transforms": (nc.AWQ(),)}], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_scripted_submodule_stays_as_it_is(inplace, fields):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)).eval()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), torch.jit.script(inner), nn.Linear(SIZE, SIZE)).eval()
    x = torch.randn(16, SIZE)
    expected = model(x).detach()
    q = quantize(
        model, low_bit(**{"group_size": SIZE, **fields}), lambda prepared: prepared(x), inplace=inplace
    )
    assert isinstance(q[1], torch.jit.ScriptModule)
    assert sqnr(expected, q(x)) > 30
    if not inplace:
        with torch.no_grad():
            next(q[1].parameters()).zero_()
        assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("error::nc.NCWarning")
@pytest.mark.parametrize("how", ["parametrized weight_norm", "weight_norm", "low rank"])
def test_weights_that_are_computed_are_not_told_to_stay(how):
    model, _, _ = with_loaded_weights(how)
    model = nn.Sequential(model[1]).eval()
    assert not nc.describe(model, low_bit()).others
    assert isinstance(quantize(model, low_bit())[0], QuantLinear)


@pytest.mark.parametrize("scale_dtype", ["fp16"])
@pytest.mark.parametrize("w_dtype", ["int4", "int8", "nf4"])
def test_scales_that_their_format_cannot_hold_are_refused_with_the_layer(w_dtype, scale_dtype):
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).eval()
    config = WeightOnlyConfig(w_dtype, group_size=SIZE, scale_dtype=scale_dtype)
    for factor, said in ((1e-7, "only and need a scale of"), (1e9, "the largest one in fp16")):
        changed = copy.deepcopy(model)
        changed[1].weight.data *= factor
        with pytest.raises(
            nc.ConfigError, match=rf"Layer '1': The weights go up to .*{said}.*bf16.*set_local\('1'"
        ):
            quantize(changed, config)
        wide = quantize(changed, config.set_local("1", WeightOnlyConfig(scale_dtype="fp32")))
        assert sqnr(changed[1].weight, wide[1].packed.dequantize()) > 15
        config = WeightOnlyConfig(w_dtype, group_size=SIZE, scale_dtype=scale_dtype)
    model[1].weight.data[0] *= 1e-9
    model[0].weight.data.zero_()
    q = quantize(model, config)
    assert sqnr(model[1].weight, q[1].packed.dequantize()) > 15, "one small group among others is no loss"


def test_a_model_whose_layers_have_low_bit_weights_already():
    q = quantize(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).eval(), low_bit().exclude("1"))
    both = quantize(q, WeightOnlyConfig("int4", group_size=SIZE))
    assert [layer.form.bits for layer in both] == [8, 4]
    for step in (prepare, nc.describe, quantize):
        with pytest.raises(
            nc.InputError, match=r"All linears and embeddings of the model \(2\) have low-bit weights already"
        ):
            step(both, low_bit())
