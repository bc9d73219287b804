"""Names of outputs come from what the model returns."""

import collections

import pytest
import torch

import nc
from nc.graph.output_names import member_names, output_names

Pair = collections.namedtuple("Pair", "low high")


class Model(torch.nn.Module):
    """Returns what `shape` makes of two values."""

    def __init__(self, shape):
        super().__init__()
        self.linear, self.shape = torch.nn.Linear(8, 8), shape

    def forward(self, x):
        y = self.linear(x)
        return self.shape(y, y + 1)


def names(shape):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    prepared = nc.prepare(Model(shape).eval(), nc.StaticQuantConfig(), example_inputs=(x,))
    prepared(x)
    return output_names(nc.convert(prepared, backend="reference").graph.signature)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda a, b: a, ["output_0"]),
        (lambda a, b: (a, b), ["output_0", "output_1"]),
        (lambda a, b: {"logits": a, "hidden": b}, ["logits", "hidden"]),
        (Pair, ["low", "high"]),
        (lambda a, b: {"logits": a, "past": [b, b + 1]}, ["logits", "past.0", "past.1"]),
        (lambda a, b: {"a": {"b": a}, "a.b": b}, ["a.b", "output_1"]),
        (lambda a, b: {"x": a, "y": b}, ["output_0", "y"]),
        (lambda a, b: {"output_1": a, 3: b}, ["output_0", "output_1"]),
        (lambda a, b: (a, {"y": b}), ["output_0", "y"]),
    ],
)
def test_names(shape, expected):
    assert names(shape) == expected


def test_a_name_that_a_position_would_give_stays_free():
    # the second output would be called as the first one is
    assert names(lambda a, b: {"output_1": a, "x": b}) == ["output_1", "output_1_"]


def test_a_model_output_of_transformers_keeps_its_fields_through_a_file(tmp_path):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = Model(
        lambda a, b: outputs.BaseModelOutputWithPooling(last_hidden_state=a, pooler_output=b)
    ).eval()
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=(x,))
    prepared(x)
    nc.save(nc.convert(prepared, backend="reference"), tmp_path / "m")
    assert output_names(nc.load(tmp_path / "m").graph.signature) == ["last_hidden_state", "pooler_output"]


def test_members_of_contexts():
    assert member_names(["a", "b"], 2) == ["a", "b"]
    assert member_names((["a"], ["none"]), 1) == ["a"]
    assert member_names(("Class", ["a"]), 1) == ["a"]
    assert member_names(Pair, 2) == ["low", "high"]
    assert member_names(None, 2) is None
    assert member_names([1, 2], 2) is None
