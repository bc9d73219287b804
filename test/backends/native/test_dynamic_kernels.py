"""Kernels of dynamic operators: whoever puts one in marks it, and reports read the mark."""

import pytest
import torch
from models import Function, quantized
from torch import fx, nn

from nc import DynamicQuantConfig
from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.native.lower import executed
from nc.graph.fx_utils import call_function

LAYERS = {
    "linear": (nn.Linear(8, 8), torch.randn(3, 8)),
    "linear of a vector": (nn.Linear(8, 8), torch.randn(8)),
    "lstm": (Function(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(8, 8)), torch.randn(2, 3, 8)),
    "gru": (Function(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(8, 8)), torch.randn(2, 3, 8)),
}


@pytest.mark.parametrize("act_granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_runs_in_int8_is_said_to(name, act_granularity):
    model, x = LAYERS[name]
    q = quantized(model.eval(), x, DynamicQuantConfig(act_granularity=act_granularity), "native")
    report = q.report()
    assert report.asked_int8 == report.ran_int8 == 1


def test_linears_that_became_one_are_all_said_to_run_in_int8():
    model = Function(lambda m, x: m.a(x) * m.b(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    report = quantized(model.eval(), torch.randn(3, 8), DynamicQuantConfig(), "native").report()
    assert report.asked_int8 == report.ran_int8 == 2


def test_a_mark_is_all_that_a_kernel_needs():
    graph = fx.Graph()
    node = call_function(graph, torch.ops.aten.relu.default, (graph.placeholder("x"),))
    node.meta["operator"] = "layer"
    graph.output((node,))
    module = fx.GraphModule(nn.Module(), graph)
    assert executed(module) == {}
    node.meta[DYNAMIC_KERNEL] = True
    assert executed(module) == {"layer": "int8"}
