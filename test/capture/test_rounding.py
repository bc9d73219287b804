"""Capture of models whose low-bit layers round activations: the graph is compared as if they did not."""

import pytest
import torch
from models import Attention, graph_of
from torch import nn
from torch.nn import functional as F

import nc
from nc.capture.rounding import rounding_layers, unrounded_graph
from nc.graph.views import LowBitLinear
from nc.ops import quant_linear


class Block(nn.Module):
    """A layer of an encoder."""

    def __init__(self, dim=64):
        super().__init__()
        self.attention, self.first, self.second = Attention(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = self.first(x + self.attention(x))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x) + torch.rand_like(x)


def low_bit(model, act_dtype):
    config = nc.WeightOnlyConfig("int8", group_size=-1, act_dtype=act_dtype, w_algo="minmax")
    return nc.quantize(model.eval(), config, backend="auto")


def act_dtypes(module):
    return [LowBitLinear.of(n).act_dtype for n in module.graph.nodes if n.target is quant_linear]


@pytest.mark.parametrize("act_dtype", ["int8", "int8_block32"])
def test_deep_models_are_captured(act_dtype):
    """Of two right computations one rounds to the next code here and there, and the outputs differ."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = low_bit(nn.Sequential(*(Block() for _ in range(4))), act_dtype)
        before = [(layer.act_dtype, layer.engine) for layer in rounding_layers(model)]
        graph = graph_of(model, torch.randn(2, 24, 64))
        assert act_dtypes(graph.module) == [act_dtype] * 24
        assert [(layer.act_dtype, layer.engine) for layer in rounding_layers(model)] == before
        assert len(before) == 24


def test_what_is_another_model_is_found_all_the_same():
    model = low_bit(Noise(), "int8")
    with pytest.raises(nc.CaptureError, match="another output"):
        graph_of(model, torch.randn(3, 64))
    assert [layer.act_dtype for layer in rounding_layers(model)] == ["int8"]


def test_layers_that_round_nothing_are_compared_as_they_are():
    model = low_bit(nn.Sequential(nn.Linear(64, 32)), "fp32")
    assert not rounding_layers(model)
    assert act_dtypes(graph_of(model, torch.randn(3, 64)).module) == ["fp32"]


def test_the_graph_that_is_compared_is_a_copy():
    model = low_bit(nn.Sequential(nn.Linear(64, 32)), "int8")
    module = graph_of(model, torch.randn(3, 64)).module
    copy = unrounded_graph(module)
    assert act_dtypes(copy) == ["fp32"]
    assert act_dtypes(module) == ["int8"]
    x = torch.randn(5, 64)
    torch.testing.assert_close(copy(x)[0], F.linear(x, model[0].weight, model[0].bias))
