"""What torch offers for the weights of a module, on models that nc returns.

It works, or it is an error that says what to do.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import nc

X = torch.randn(8, 32)


def net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()


def low_bit(model=None, **options):
    return nc.quantize(model or net(), nc.WeightOnlyConfig("int4", group_size=16, **options), measure=False)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_low_bit_model_on_another_device_than_its_inputs_is_an_error(backend):
    model = nc.quantize(net(), nc.WeightOnlyConfig("int4", group_size=16), measure=False, backend=backend)
    model(X)
    with pytest.raises(
        nc.InputError,
        match="quant_linear got tensors on cpu and meta: put the model and its inputs on one device",
    ):
        model.to("meta")(X)
    assert model(X.to("meta")).shape == (8, 16)


def test_a_low_bit_embedding_on_another_device_is_an_error():
    model = low_bit(nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 16)).eval(), embedding="int8")
    with pytest.raises(nc.InputError, match="quant_embedding got tensors on cpu and meta"):
        model.to("meta")(torch.tensor([1, 2]))


@pytest.mark.parametrize("strict", [True, False])
def test_float_weights_for_a_low_bit_model_are_an_error_that_says_what_to_do(strict):
    model, source = low_bit(), net()
    before = model(X)
    with pytest.raises(
        RuntimeError, match=r"2 holds a weight of format int4 .* load float weights into the float model"
    ):
        model.load_state_dict(source.state_dict(), strict=strict)
    assert torch.equal(model(X), before)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model(X), before)


def test_a_copy_of_a_prepared_model_prints_nothing():
    prepared = nc.prepare(net(), nc.StaticQuantConfig(), example_inputs=X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(prepared)
    assert torch.equal(copied(X), prepared(X))


class Named(nn.Module):
    """A model with parts, values and methods of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.hidden = nn.Linear(32, 32), nn.Linear(32, 16), 5

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)

    @property
    def twice(self):
        return 2 * self.hidden


def prepared_of(kind):
    low = nc.WeightOnlyConfig("int4", group_size=16, solver=nc.GPTQ())
    configs = {
        "static": nc.StaticQuantConfig(),
        "weights": low,
        "mixed": nc.StaticQuantConfig().set_local("decoder", low),
    }
    model = Named().eval()
    return model, nc.prepare(model, configs[kind], example_inputs=X)


@pytest.mark.parametrize("kind", ["static", "weights", "mixed"])
def test_a_prepared_model_has_the_values_of_the_model_and_says_why_it_has_no_methods(kind):
    _, prepared = prepared_of(kind)
    assert (prepared.hidden, prepared.twice) == (5, 10)
    for name in ("encode", "encoder"):
        assert not hasattr(prepared, name)
        with pytest.raises(
            AttributeError, match=f"{name!r} belongs to the fp32 model.*call the prepared model itself"
        ):
            getattr(prepared, name)
    with pytest.raises(AttributeError, match="A prepared model has no attribute 'nothing'"):
        _ = prepared.nothing


@pytest.mark.parametrize("kind", ["static", "weights", "mixed"])
def test_a_prepared_model_leaves_the_weights_of_the_model_alone(kind):
    model, prepared = prepared_of(kind)
    before = copy.deepcopy(model.state_dict())
    for change in (
        lambda: prepared.half(),
        lambda: prepared.to("meta"),
        lambda: prepared.double(),
        lambda: prepared.to(torch.bfloat16),
    ):
        with pytest.raises(nc.UnsupportedError, match="A prepared model can't be cast|can't be moved"):
            change()
    for change in (prepared.state_dict, lambda: prepared.load_state_dict({}), prepared.requires_grad_):
        with pytest.raises(nc.StateError, match="A prepared model"):
            change()
    with pytest.warns(nc.NCWarning, match="stays in eval mode"):
        prepared.train()
    assert not model.training
    model.train()
    prepared.eval()
    assert model.training
    assert prepared.cpu().float() is prepared
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_prepared_model_in_bf16_can_be_cast_to_what_it_is():
    prepared = nc.prepare(net().bfloat16(), nc.WeightOnlyConfig("int4", group_size=16))
    assert prepared.to(torch.bfloat16) is prepared
    with pytest.raises(nc.UnsupportedError, match=r"can't be cast to torch.float32: cast the float model"):
        prepared.float()
