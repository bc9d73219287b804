"""Models with tensors without elements, arguments computed from sizes, and examples of size 1."""

import pytest
import torch
from models import call, graph_of, quantized, run_graph
from torch import nn
from torch.nn import functional as F
from transformers import StableLmConfig, StableLmModel

import nc
from nc import DynamicQuantConfig, InputError, SmoothQuantConfig, StaticQuantConfig
from nc.algorithms.output_errors import errors_of
from nc.formats.reasons import Cause
from nc.numerics.metrics import sqnr_db


class Applied(nn.Module):
    """A function of layers and an input."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self.layers, x)


# ---- tensors without elements ----


@pytest.mark.parametrize("config", [StaticQuantConfig(), SmoothQuantConfig(), DynamicQuantConfig()])
def test_a_head_that_is_rotated_as_a_whole_has_an_empty_rest(config):
    settings = StableLmConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        partial_rotary_factor=1.0,
        max_position_embeddings=64,
    )
    model = StableLmModel(settings).eval()
    inputs = {"input_ids": torch.randint(0, 64, (4, 7)), "use_cache": False}
    q = quantized(model, inputs, config)
    assert sqnr_db(call(model, inputs).last_hidden_state, call(q, inputs).last_hidden_state) > 20


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3), (2, 0, 4)])
def test_a_tensor_without_elements_has_no_error(shape):
    assert errors_of([torch.zeros(shape)], [torch.zeros(shape)]) == (0.0, 0.0)


@pytest.mark.once  # IPEX, where a test imports it, replaces torch's layer norm by one that fails for no rows
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))],
    ids=["linear", "block"],
)
@pytest.mark.parametrize("config", [StaticQuantConfig(), SmoothQuantConfig(), DynamicQuantConfig()])
@pytest.mark.parametrize("dim", [0, 1])
def test_layers_that_read_rows_without_elements(layer, config, dim):
    def rest(layers, x):
        h = layers[0](x)
        return h, layers[1](h.narrow(dim, 0, h.shape[dim] - h.shape[dim]))

    x = torch.randn(3, 5, 8)
    model = Applied(rest, nn.Linear(8, 8), layer).eval()
    first, second = call(quantized(model, x, config, "native"), x)
    assert sqnr_db(call(model, x)[0], first) > 20
    assert second.shape == call(model, x)[1].shape


@pytest.mark.parametrize("config", [StaticQuantConfig(), DynamicQuantConfig()])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_a_linear_whose_weight_is_a_vector_stays_float(config, shape):
    x = torch.randn(shape)
    model = Applied(lambda layers, x: F.relu(F.linear(F.relu(layers[0](x)), layers.v)), nn.Linear(8, 8))
    model.layers.register_parameter("v", nn.Parameter(torch.linspace(0.1, 1, 8)))
    q = quantized(model.eval(), x, config, "native")
    first, second = (d for d in q.graph.plan.decisions if d.kind == "linear")
    assert first.spec.quantized
    assert second.stays_for(Cause.VECTOR_WEIGHT)
    assert sqnr_db(call(model, x), call(q, x)) > 25


# ---- arguments computed from sizes ----


COMPUTED = {
    "groups": lambda x, w: F.conv2d(x, w[:, :4], groups=x.shape[0] // 2),
    "groups of a transposed one": lambda x, w: F.conv_transpose2d(x, w[:, :4], groups=x.shape[0] // 2),
    "padding": lambda x, w: F.conv2d(F.pad(x, (1, 1)), w, padding=x.shape[0] // 4),
    "dilation": lambda x, w: F.conv2d(x, w, padding="same", dilation=x.shape[0] // 2),
    "stride": lambda x, w: F.conv2d(x, w, stride=x.shape[0] // 2),
    "slope": lambda x, w: F.leaky_relu(x, 1 / x.shape[0]),
    "limits": lambda x, w: F.hardtanh(x, -x.shape[0], x.shape[0]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_has_an_argument_computed_from_sizes_stays_float(name):
    def forward(layers, x):
        return layers[2](COMPUTED[name](F.relu(layers[0](x)), layers[1].weight))

    model = Applied(forward, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)).eval()
    x = torch.randn(4, 3, 8, 8)
    q = quantized(model, x, StaticQuantConfig(), "native")
    runs = {op.operator: op for op in q.report().ops}
    assert runs["layers.0"].ran == runs["layers.2"].ran == "int8"
    assert sqnr_db(call(model, x), call(q, x)) > 30
    convolution = next((op for op in q.graph.plan.decisions if op.stays_for(Cause.COMPUTED_OPTIONS)), None)
    assert (convolution is None) == (name in ("slope", "limits"))
    if convolution is not None:
        assert name.split()[0] in convolution.reason


def test_a_weight_for_each_image_is_grouped_by_the_batch():
    """As StyleGAN2 does."""

    def forward(layers, x):
        h = F.relu(layers[0](x))
        images, weight = h.shape[0], layers[1].weight
        weights = weight.expand(images, *weight.shape) * (1 + h.mean((2, 3)))[..., None, None, None]
        up = F.conv_transpose2d(h.reshape(1, -1, *h.shape[2:]), weights.flatten(0, 1), groups=images)
        return layers[2](up.reshape(images, 4, *up.shape[2:]))

    model = Applied(forward, nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    for backend in (name for name in ("native", "ipex") if not nc.available_backends()[name]):
        q = quantized(model, x, StaticQuantConfig(), backend)
        runs = {op.operator: op.ran for op in q.report().ops}
        assert (runs["layers.0"], runs["layers.2"]) == ("int8", "int8")
        other = torch.randn(3, 3, 8, 8)
        assert sqnr_db(call(model, other), call(q, other)) > 15


# ---- examples of size 1 ----


class Steps(nn.Module):
    """A recurrent layer whose steps come first."""

    def __init__(self, cls):
        super().__init__()
        self.layer = cls(16, 8)

    def forward(self, x, *states):
        return self.layer(x, *states)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("given", [False, True])
def test_one_sequence_with_steps_first_leaves_the_batch_free(cls, steps, given):
    def inputs(steps, batch):
        state = torch.randn(1, batch, 8)
        states = () if not given else ((state, state),) if cls is nn.LSTM else (state,)
        return torch.randn(steps, batch, 16), *states

    model = Steps(cls).eval()
    q = quantized(model, inputs(steps, 1), DynamicQuantConfig())
    for sizes in ((9, 5), (1, 1), (12, 2)):
        args = inputs(*sizes)
        assert sqnr_db(call(model, args)[0], call(q, args)[0]) > 30


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_model_may_be_a_recurrent_layer(cls):
    x = torch.randn(12, 3, 16)
    model = cls(16, 8).eval()
    q = quantized(model, x, DynamicQuantConfig())
    assert q.graph.plan.quantized
    other = torch.randn(7, 5, 16)
    assert sqnr_db(call(model, other)[0], call(q, other)[0]) > 30


def test_one_token_leaves_the_length_free():
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8)).eval()
    graph = graph_of(model, torch.zeros(3, 1, dtype=torch.int64))
    ids = torch.randint(0, 16, (2, 6))
    torch.testing.assert_close(run_graph(graph, ids), call(model, ids))


def test_a_size_of_one_that_was_taken_for_a_constant_says_so():
    graph = graph_of(nn.Conv2d(1, 4, 3), torch.randn(3, 1, 8, 8))
    with pytest.raises(InputError, match="size of 1 for a constant: if the model takes other sizes"):
        run_graph(graph, torch.randn(3, 2, 8, 8))
