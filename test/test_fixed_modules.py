"""What torch offers for the weights of a module, on models that nc returns: it works, or it is an error that says what to do."""

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
    with pytest.raises(nc.InputError, match="quant_linear got tensors on cpu and meta: put the model and its inputs on one device"):
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
    with pytest.raises(RuntimeError, match=r"2 holds a weight of format int4 .* load float weights into the float model"):
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
