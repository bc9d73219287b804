"""Recurrent layers in plans, against the operator that torch calls: the same bits."""

import pytest
import torch
from models import quantized
from torch import nn

from nc import DynamicQuantConfig
from nc.backends import available_backends
from nc.backends.native import recurrent
from nc.backends.native.operators import recurrent_layers
from nc.numerics.metrics import worst_sqnr_db

_WHY = available_backends()["native"] or recurrent.why_unavailable()
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]


class Layer(nn.Module):
    """A layer, its states among inputs and outputs."""

    def __init__(self, cls, **options):
        super().__init__()
        self.layer = cls(12, 20, **options)

    def forward(self, x, *states):
        y, last = self.layer(x, states[0] if len(states) == 1 else states)
        return (y, *(last if isinstance(last, tuple) else (last,)))


def given(layer, steps, rows):
    """An input and first states."""
    directions = layer.num_layers * (1 + layer.bidirectional)
    x = torch.randn((rows, steps, 12) if layer.batch_first else (steps, rows, 12))
    elements = [layer.proj_size or 20, 20][: 2 if isinstance(layer, nn.LSTM) else 1]
    return (x, *(torch.randn(directions, rows, size) for size in elements))


def kernels(q, inputs):
    return [k.implementation for step in q.engine.steps(list(inputs)) for k in step.kernels]


OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True, "bias": False},
    {"bidirectional": True, "batch_first": True},
]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((nn.LSTM, options) for options in OPTIONS),
        *((nn.GRU, options) for options in OPTIONS[1:3]),
        (nn.LSTM, {"proj_size": 7, "num_layers": 2, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_plans_give_what_the_operator_gives(cls, options, monkeypatch):
    model = Layer(cls, **options).eval()
    example = given(model.layer, 5, 3)
    ours = quantized(model, example, DynamicQuantConfig(), "native")
    monkeypatch.setattr(recurrent_layers, "_MOST_GATES", 0)
    called = quantized(model, example, DynamicQuantConfig(), "native")
    assert all(name.startswith("c:recurrent ") for name in kernels(ours, example) if name != "c:map")
    assert not any("recurrent" in name for name in kernels(called, example))
    assert "more memory than a plan holds" in called.report().details["computed by torch"]
    for steps, rows in ((5, 3), (1, 1), (9, 2)):
        inputs = given(model.layer, steps, rows)
        copies = [x.clone() for x in inputs]
        with monkeypatch.context() as patch:
            patch.setattr(recurrent_layers, "_MOST_GATES", 2**24)
            results = ours(*inputs)
        assert all(map(torch.equal, results, called(*inputs)))
        assert worst_sqnr_db(ours.reference(*inputs), results) > 80
        assert all(map(torch.equal, inputs, copies))  # the first states are read, not written
        again = ours(*inputs)
        assert all(map(torch.equal, results, again))


def test_the_report_names_one_kernel():
    model = Layer(nn.GRU).eval()
    q = quantized(model, given(model.layer, 5, 3), DynamicQuantConfig(), "native")
    isa = recurrent.available().isa()
    assert q.report().ops[0].kernel == f"function c:recurrent {isa} (f32 -> f32)"


def test_inputs_that_have_gaps():
    class Slices(Layer):
        def forward(self, x, state):
            return super().forward(x.transpose(0, 2)[..., :12], state)

    model = Slices(nn.GRU).eval()
    example = torch.randn(30, 3, 5), torch.randn(1, 3, 20)
    q = quantized(model, example, DynamicQuantConfig(), "native")
    assert worst_sqnr_db(q.reference(*example), q(*example)) > 80
