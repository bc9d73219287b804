"""Engines that show no inner values.

Their outputs for new sizes of inputs are compared with the quantized graph's.
"""

import contextlib
import warnings

import pytest
import torch
from models import MLP, quantized, worst_db
from torch import nn

import nc
from nc import NCWarning, StaticQuantConfig
from nc.backends import get_backend
from nc.backends.new_sizes import NewSizes
from nc.kernels import cpu

ENGINES = [name for name in ("ipex", "openvino") if not get_backend(name).why_unavailable()]


def checked(run):
    """A `NewSizes` whose engine is `run(graph's outputs)`, and its graph."""
    graph = quantized(MLP(), torch.randn(4, 16)).graph
    return NewSizes(
        lambda inputs: [run(out, inputs[0]) for out in graph.module(*inputs)], graph, "The engine"
    ), graph


def wrong_for_one_row(out, x):
    return out.flip(-1) if len(x) == 1 else out


def test_outputs_of_wrong_sizes_are_the_graphs():
    run, graph = checked(wrong_for_one_row)
    x = torch.randn(7, 16)
    with pytest.warns(
        NCWarning,
        match=r"The engine is not used for inputs of sizes \(1, 16\): it computes something else: .* dB, expected at least 15",
    ) as given:
        first = run([x[:1]])
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (x[:1], x):
            torch.testing.assert_close(run([rows])[0], graph.module(rows)[0], rtol=0, atol=0)
        assert torch.equal(run([x[:1]])[0], first[0])
    assert run.details() == {
        "sizes compared": "2 beside the example's, 1 of them wrong: the quantized graph computes those"
    }


def test_each_size_is_compared_once():
    calls = []
    run, graph = checked(lambda out, x: out)
    own, graph.module.forward = graph.module.forward, lambda *inputs: calls.append(1) or own(*inputs)
    for rows in (4, 4, 3, 3, 2, 3):
        run([torch.randn(rows, 16)])
    assert len(calls) == 6 + 2  # the engine of this test calls the graph too
    assert run.details() == {"sizes compared": "2 beside the example's, none wrong"}


def test_the_graph_computes_two_samples_of_a_batch():
    rows = []
    run, graph = checked(lambda out, x: out)
    own = graph.module.forward
    graph.module.forward = lambda x: rows.append(len(x)) or own(x)
    run([torch.randn(64, 16)])
    assert rows == [64, 2]  # the first is the engine of this test


@pytest.mark.parametrize("wrong", [slice(0, 1), slice(-1, None), slice(32, None), slice(None)])
def test_an_end_of_a_batch_that_is_wrong_is_found(wrong):
    def run_wrong(out, x):
        out = out.clone()
        if len(x) == 64:
            out[wrong] += 5
        return out

    run, graph = checked(run_wrong)
    x = torch.randn(64, 16)
    with pytest.warns(NCWarning, match="computes something else"):
        got = run([x])
    own = graph.module.forward(x)
    torch.testing.assert_close(got[0], own[0], rtol=0, atol=0)


def test_inputs_without_a_batch_are_compared_as_a_whole():
    graph = quantized(nn.Conv1d(6, 8, 3), torch.randn(6, 20)).graph
    run = NewSizes(lambda inputs: graph.module(*inputs), graph, "The engine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run([torch.randn(6, 30)])[0].shape == (8, 28)


def test_samples_that_depend_on_each_other_are_compared_as_a_whole():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    graph = quantized(Centred(), torch.randn(4, 16)).graph
    run = NewSizes(lambda inputs: graph.module(*inputs), graph, "The engine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([torch.randn(9, 16)])
    assert run.details() == {"sizes compared": "1 beside the example's, none wrong"}


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_inputs_that_tell_nothing_are_not_judged(value):
    run, _ = checked(lambda out, x: out + 1e-9 if value == 0 else out)
    run([torch.full((1, 16), value)])
    assert run.details() == {}


def test_outputs_of_other_shapes_are_wrong():
    run, graph = checked(lambda out, x: out[:, 1:] if len(x) == 1 else out)
    with pytest.warns(NCWarning, match="gives outputs of other shapes"):
        assert run([torch.randn(1, 16)])[0].shape == graph.module(torch.randn(1, 16))[0].shape


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loads", [False, True])
def test_engines_compare_new_sizes(monkeypatch, tmp_path, engine, loads):
    x = torch.randn(4, 16)
    q = quantized(MLP(), x, StaticQuantConfig(), engine)
    if loads:
        nc.save(q, tmp_path / "q")
        q = nc.load(tmp_path / "q", backend=engine)
    q(x)
    assert "sizes compared" not in q.report().details
    q(x[:3])
    assert q.report().details["sizes compared"] == "1 beside the example's, none wrong"
    off = quantized(MLP(), x, StaticQuantConfig(), engine, verify_sizes=False)
    off(x[:3])
    assert "sizes compared" not in off.report().details


@pytest.mark.skipif("ipex" not in ENGINES, reason="only IPEX's AMX kernels are wrong")
@pytest.mark.parametrize("behind", [[], [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]])
def test_a_result_of_one_place_where_the_example_has_more(behind):
    """Behind a pool the outputs do not tell: RegNet had 19 to 40 dB there."""
    x = torch.randn(1, 80, 33, 33)
    q = quantized(
        nn.Sequential(nn.Conv2d(80, 8, 3, stride=2, padding=1), *behind), x, StaticQuantConfig(), "ipex"
    )
    assert worst_db(q.reference(x[..., :5]), q(x[..., :5])) > 60
    amx = "amx_int8" in cpu.machine_features()
    with pytest.warns(NCWarning, match="'0' has a result of one place") if amx else contextlib.nullcontext():
        got = q(x[..., :2])
    assert worst_db(q.reference(x[..., :2]), got) > 60
    wrong = "1 of them wrong: the quantized graph computes those" if amx else "none wrong"
    assert q.report().details["sizes compared"] == f"2 beside the example's, {wrong}"


def test_what_is_known_to_be_wrong_is_not_used_however_close_it_is():
    graph = quantized(MLP(), torch.randn(4, 16)).graph
    run = NewSizes(
        lambda inputs: graph.module(*inputs),
        graph,
        "The engine",
        lambda inputs: "so" if len(inputs[0]) == 1 else "",
    )
    run([torch.randn(3, 16)])
    with pytest.warns(NCWarning, match=r"not used for inputs of sizes \(1, 16\): so\. The quantized graph"):
        run([torch.randn(1, 16)])
    assert run.details() == {
        "sizes compared": "2 beside the example's, 1 of them wrong: the quantized graph computes those"
    }
