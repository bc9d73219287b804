"""Recurrent layers against torch's own: any number of rows and steps, and states that are given or returned."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import nc
from nc import DynamicQuantConfig, StaticQuantConfig, available_backends, convert, load, prepare
from nc.errors import CaptureError, InputError, NCWarning
from nc.numerics.metrics import sqnr_db

ENGINES = [name for name, why in available_backends().items() if name in ("ipex", "native", "reference") and not why]
LAYERS = [
    (cls, options)
    for cls in (nn.LSTM, nn.GRU, nn.RNN)
    for options in (
        {},
        {"batch_first": True, "bidirectional": True},
        {"num_layers": 2, "bias": False},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
    )
] + [(nn.LSTM, {"proj_size": 4}), (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]


class Layer(nn.Module):
    """A recurrent layer, with the states that it is given."""

    def __init__(self, cls, inputs=8, hidden=16, **options):
        super().__init__()
        self.rnn = cls(inputs, hidden, **options)

    def forward(self, x, *states):
        if not states:
            return self.rnn(x)
        return self.rnn(x, states if isinstance(self.rnn, nn.LSTM) else states[0])

    def inputs(self, rows, steps, states=False):
        layer = self.rnn
        x = torch.randn((rows, steps) if layer.batch_first else (steps, rows)).unsqueeze(-1) * torch.randn(layer.input_size)
        if not states:
            return (x,)
        layers = layer.num_layers * (1 + layer.bidirectional)
        hidden = torch.randn(layers, rows, layer.proj_size or layer.hidden_size).tanh()
        return (x, hidden, torch.randn(layers, rows, layer.hidden_size)) if isinstance(layer, nn.LSTM) else (x, hidden)


def worst_db(expected, got):
    pairs = zip(tree_leaves(expected), tree_leaves(got), strict=True)
    return min(sqnr_db(a.detach(), b) for a, b in pairs if a.numel())


# ---- any number of steps ----


@pytest.mark.parametrize("states", [False, True], ids=["no states", "states"])
@pytest.mark.parametrize(("cls", "options"), LAYERS, ids=str)
def test_any_number_of_rows_and_steps(cls, options, states):
    model = Layer(cls, **options).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NCWarning)  # which would say that sizes are fixed
        prepared = prepare(model, DynamicQuantConfig(), example_inputs=model.inputs(3, 5, states), backend="reference")
    for rows, steps in ((3, 5), (1, 9), (4, 1), (2, 30)):
        inputs = model.inputs(rows, steps, states)
        with torch.no_grad():
            assert worst_db(model(*inputs), prepared(*inputs)) > 120


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_dynamic_shapes_may_name_the_steps(cls, rows):
    model = Layer(cls, batch_first=True).eval()
    free = {"x": {0: torch.export.Dim("rows"), 1: torch.export.Dim("steps")}}
    prepared = prepare(model, DynamicQuantConfig(), example_inputs=model.inputs(rows, 5), dynamic_shapes=free, backend="reference")
    inputs = model.inputs(2, 11)
    with torch.no_grad():
        assert worst_db(model(*inputs), prepared(*inputs)) > 120


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("config", [DynamicQuantConfig(), StaticQuantConfig()], ids=["dynamic", "static"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_engines_take_any_number_of_rows_and_steps(backend, cls, config, tmp_path):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = cls(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 4)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = Tagger().eval(), torch.randn(3, 6, 8)
    prepared = prepare(model, config, example_inputs=x, backend=backend)
    prepared(x)
    q = convert(prepared, **({"isolate": "never"} if backend == "ipex" else {}))
    q.save(tmp_path / "m")
    again = load(tmp_path / "m", backend=backend)
    for rows, steps in ((3, 6), (1, 17), (5, 1), (2, 3)):
        y = torch.randn(rows, steps, 8)
        assert sqnr_db(model(y).detach(), q(y)) > 20
        assert sqnr_db(q.reference(y), q(y)) > 60
        assert torch.equal(again(y), q(y))


def test_states_of_other_sizes_are_refused():
    """torch's kernels do not look at them, and read beyond the end of their memory."""
    model = Layer(nn.LSTM, proj_size=4).eval()
    x, h, c = model.inputs(3, 5, states=True)
    prepared = prepare(model, DynamicQuantConfig(), example_inputs=(x, h, c), backend="reference")
    for wrong in ((x, h[:, :2], c[:, :2]), (x, h.repeat(2, 1, 1), c), (x, h, c.repeat(2, 1, 1)), (x, h[..., :3], c), (x[..., :7], h, c)):
        with pytest.raises(InputError):
            prepared(*wrong)


def test_one_feature_and_one_row():
    """Sizes of 1, which export takes for ones that might be free."""
    model = Layer(nn.GRU, 1, 1, batch_first=True).eval()
    prepared = prepare(model, DynamicQuantConfig(), example_inputs=model.inputs(1, 1, states=True), backend="reference")
    inputs = model.inputs(4, 7, states=True)
    with torch.no_grad():
        assert worst_db(model(*inputs), prepared(*inputs)) > 120
    with pytest.raises(InputError):
        prepared(torch.randn(4, 7, 2), inputs[1])


@pytest.mark.parametrize(("enforce_sorted", "states"), [*itertools.product((False, True), (False, True))])
def test_packed_sequences_are_an_error_that_says_what_to_do(enforce_sorted, states):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
            hx = (torch.zeros(1, len(x), 16),) * 2 if states else None
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed, hx)[0], batch_first=True)[0]

    with pytest.raises(CaptureError, match="padded sequences"):
        nc.describe(Packed().eval(), DynamicQuantConfig(), (torch.randn(3, 5, 8), torch.tensor([5, 3, 2])))
