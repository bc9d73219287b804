"""Sizes that a model is warmed up with when it is loaded."""

import pytest
import torch
from suites.small_llama import random_llama

import nc
from nc.api.quantized import QuantizedModel
from nc.api.warm import warm_up
from nc.errors import InputError


class Net(torch.nn.Module):
    """Two inputs of one shape, one of another."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = torch.nn.Linear(8, 8), torch.nn.Embedding(20, 8)

    def forward(self, ids, mask, row):
        return self.linear(self.table(ids)) * mask[..., None] + row


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("warm") / "m"
    model = Net().eval()
    x = (torch.randint(0, 20, (2, 5)), torch.ones(2, 5), torch.randn(8))
    q = nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(*x), example_inputs=x, measure=False)
    nc.save(q, place)
    return place


def calls_of(monkeypatch, saved, warm):
    """Shapes that the loaded model was called with, and the model."""
    seen = []
    call = QuantizedModel.forward

    def noted(self, *args, **kwargs):
        tensors = [*args, *kwargs.values()]
        seen.append([tuple(tensor.shape) for tensor in tensors])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(QuantizedModel, "forward", noted)
    return seen, nc.load(saved, warm=warm)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ((3, 7), [(3, 7), (3, 7), (8,)]),
        ({"ids": (1, 9), "mask": (1, 9)}, [(1, 9), (1, 9), (8,)]),
        ((torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 6), torch.randn(8)), [(4, 6), (4, 6), (8,)]),
    ],
)
def test_the_model_is_called_with_these_sizes(saved, monkeypatch, entry, expected):
    seen, _ = calls_of(monkeypatch, saved, [entry, entry])
    assert seen
    assert all(shapes == expected for shapes in seen)


def test_nothing_is_called_without(saved, monkeypatch):
    seen, _ = calls_of(monkeypatch, saved, ())
    assert seen == []


def test_values_of_the_example_are_repeated(saved):
    seen = []
    model = nc.load(saved)
    x = torch.randint(0, 20, (2, 5))
    expected = model(x, torch.ones(2, 5), torch.randn(8)).shape
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    warm_up(model, [(4, 12)])
    hook.remove()
    ids = seen[0]["ids"]
    example = model.graph.example[0]
    assert torch.equal(ids[:2, :5], example)
    assert torch.equal(ids[2:4, 5:10], example)
    assert expected == (2, 5, 8)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ((3,), "has 2 dimensions"),
        ((0, 4), "1 or more"),
        ("text", "expected a list of inputs, shapes"),
        ({"nothing": (1, 2)}, "no input nothing; it has ids, mask, row"),
        ({"row": (8,)}, "does not say that of 'ids'"),
        ({"ids": (1, 9), "mask": (1, 9), "row": (7,)}, "expected size 8"),
        ((torch.ones(1, 1, dtype=torch.int64),), "missing"),
    ],
)
def test_what_does_not_fit_is_an_error(saved, entry, says):
    with pytest.raises(InputError, match=says):
        nc.load(saved, warm=[entry])


def test_low_bit_models_take_inputs(tmp_path):
    nc.save(nc.quantize(random_llama(), nc.WeightOnlyConfig("int4", group_size=32)), tmp_path / "m")
    assert nc.load(tmp_path / "m", warm=[{"input_ids": torch.ones(1, 4, dtype=torch.int64)}]) is not None
    with pytest.raises(InputError, match="give inputs"):
        nc.load(tmp_path / "m", warm=[(1, 4)])
