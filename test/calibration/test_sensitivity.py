"""The estimate of each operator's noise, against what each one alone does to the outputs."""

import pytest
import torch
from models import MLP, Attention, ResidualCNN, prepared_for
from torch import nn

import nc
from nc.calibration.sensitivity import noise_of_operators, ranking
from nc.graph.fx_utils import run_with

CASES = {
    "linears": (MLP, (32, 16), nc.StaticQuantConfig(post=())),
    "convolutions and sums": (ResidualCNN, (8, 3, 16, 16), nc.StaticQuantConfig(post=())),
    "attention": (Attention, (8, 6, 32), nc.StaticQuantConfig(post=())),
    "ranges per row": (Attention, (8, 6, 32), nc.DynamicQuantConfig()),
}


def measured(fp32, quantized, plan, x):
    """Run the float graph once for each operator, with its rounded result for exact inputs."""
    names = {d.operator for d in plan.quantized}
    exact, rounded = {}, {}

    def note(node, value, _):
        if node.meta.get("operator") in names:
            exact[node.name] = value
        return value

    def compare(node, value, _):
        if node.name not in exact:
            return value
        rounded[node.name] = value
        return exact[node.name]

    (expected,) = run_with(fp32, (x,), note)
    run_with(quantized, (x,), compare)
    operators = {node.name: node.meta["operator"] for node in fp32.graph.nodes if node.name in rounded}
    found = {}
    for name, value in rounded.items():
        (got,) = run_with(fp32, (x,), lambda node, own, _, n=name, v=value: v if node.name == n else own)
        found[operators[name]] = float((got - expected).square().sum() / expected.square().sum())
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_near_what_each_operator_alone_does(name):
    make, shape, config = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(*shape)
    prepared = prepared_for(make().eval(), x, config)
    graph = prepared.quantized_graph()
    expected = measured(prepared.graph.module, graph.module, graph.plan, x)
    found = noise_of_operators(prepared.graph.module, graph.module, graph.plan, [(x,)], probes=64)
    assert found.keys() == expected.keys()
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for operator, share in expected.items():
        assert found[operator] == pytest.approx(share, rel=0.6), operator
    assert max(found, key=found.get) == max(expected, key=expected.get)


def test_graphs_that_work_in_place_have_none():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    plan = prepared_for(MLP().eval(), torch.randn(2, 16)).plan
    assert noise_of_operators(module, module, plan, [(torch.randn(2, 16),)]) == {}


def test_outputs_that_no_operator_reaches_do_not_count():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x), x * 2, x.argmax(-1)

    x = torch.randn(16, 8)
    prepared = prepared_for(Two().eval(), x, nc.StaticQuantConfig(post=()))
    graph = prepared.quantized_graph(judged=[(x,)])
    assert list(graph.noise) == ["fc"]
    assert 0 < graph.noise["fc"] < 0.01


@pytest.mark.parametrize("size", [1e-28, 1e-24, 1e-12, 1e12, 1e24])
def test_shares_do_not_depend_on_the_size_of_the_outputs(size):
    """Squares of the smallest and the largest are no fp32 numbers."""

    def shares(size):
        torch.manual_seed(0)
        model, x = MLP().eval(), torch.randn(32, 16)
        with torch.no_grad():
            model.fc2.weight.mul_(size)
            model.fc2.bias.mul_(size)
        prepared = prepared_for(model, x, nc.StaticQuantConfig(post=()))
        return prepared.quantized_graph(judged=[(x,)]).noise

    expected, found = shares(1.0), shares(size)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.05)


def test_outputs_that_are_all_zero_have_no_shares():
    model, x = MLP().eval(), torch.randn(8, 16)
    nn.init.zeros_(model.fc2.weight)
    nn.init.zeros_(model.fc2.bias)
    prepared = prepared_for(model, x, nc.StaticQuantConfig(post=()))
    assert prepared.quantized_graph(judged=[(x,)]).noise == {}


def test_the_report_names_the_worst_dozen():
    noise = {f"layer{i}": 1.0 / 2**i for i in range(20)}
    found = ranking(noise)
    assert found.operators == tuple(f"layer{i}" for i in range(12))
    assert "layer0 50% (-0.0 dB alone), layer1 25% (3.0 dB alone)" in found.text
