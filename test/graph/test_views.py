"""Views of nodes: arguments by their names, wherever a graph gives them."""

import dataclasses
import operator

import pytest
import torch
from models import Attention, ResidualCNN, quantized
from torch import fx

from nc import StaticQuantConfig
from nc.backends import get_backend
from nc.graph.catalogue import first_input, input_node, joined_inputs
from nc.graph.fx_utils import call_function, copy_module
from nc.graph.views import (
    Binary,
    Conv,
    Linear,
    Softmax,
    Transpose,
    Weighted,
    called_with,
    options,
    returned,
    set_argument,
)

aten = torch.ops.aten
#: view → operator and arguments by position; "x" and "w" stand for nodes.
CALLS = {
    Linear: (aten.linear.default, ("x", "w")),
    Weighted: (aten.linear.default, ("x", "w", "x")),
    Conv: (aten.conv2d.default, ("x", "w", None, [2], [1])),
    Binary: (aten.add.Tensor, ("x", "w")),
    Softmax: (aten.softmax.int, ("x", -1)),
    Transpose: (aten.transpose.int, ("x", 1, 2)),
}


@pytest.fixture
def graph():
    return fx.Graph()


@pytest.fixture
def nodes(graph):
    return {"x": graph.placeholder("x"), "w": graph.placeholder("w")}


def by_name(node):
    """Give every argument of a call by its name."""
    node.args, node.kwargs = (
        (),
        {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)}
        | dict(node.kwargs),
    )


@pytest.mark.parametrize("view", CALLS)
def test_a_view_finds_arguments_by_position_and_by_name(view, graph, nodes):
    target, arguments = CALLS[view]
    node = call_function(
        graph, target, tuple(nodes.get(a, a) if isinstance(a, str) else a for a in arguments)
    )
    expected, given = view.of(node), node.args
    assert first_input(node) is input_node(node) is nodes["x"]
    assert called_with(node) == (given, {})
    by_name(node)
    assert view.of(node) == expected
    assert first_input(node) is input_node(node) is nodes["x"]
    assert called_with(node) == (given, {})


def test_sides_have_one_name_in_all_operators(graph, nodes):
    x, w = nodes.values()
    for target in (
        aten.add.Tensor,
        aten.matmul.default,
        aten.bmm.default,
        aten.mm.default,
        aten.mul.Tensor,
        aten.div.Tensor_mode,
    ):
        kwargs = {"rounding_mode": "floor"} if target is aten.div.Tensor_mode else {}
        node = call_function(graph, target, (x, w), kwargs)
        assert Binary.of(node).sides == (x, w)
        assert Binary.of(node).rounding_mode == kwargs.get("rounding_mode")
        set_argument(node, "right", x)
        assert node.args == (x, x)
    assert Binary.of(call_function(graph, aten.add.Tensor, (x, 2), {"alpha": 3})) == Binary(x, 2, 3)


def test_an_argument_is_set_where_it_is_given(graph, nodes):
    x, w = nodes.values()
    node = call_function(graph, aten.linear.default, (x, w))
    set_argument(node, "bias", x)
    assert (node.args, node.kwargs) == ((x, w, x), {})
    by_name(node)
    set_argument(node, "input", w)
    assert (node.args, node.kwargs) == ((), {"input": w, "weight": w, "bias": x})
    add = call_function(graph, aten.add.Tensor, (x, w))
    set_argument(add, "alpha", 2)  # which has no position
    assert (add.args, add.kwargs) == ((x, w), {"alpha": 2})
    pool = call_function(graph, aten.max_pool2d.default, (x, [2]))
    set_argument(pool, "padding", [1])  # behind one that is not given
    assert (pool.args, pool.kwargs) == ((x, [2]), {"padding": [1]})


def test_what_a_view_lacks_has_a_name(graph, nodes):
    with pytest.raises(KeyError, match=r"aten\.relu\.default has no argument 'weight'"):
        Linear.of(call_function(graph, aten.relu.default, (nodes["x"],)))


def test_calls_that_agree_in_all_but_their_input(graph, nodes):
    x, w = nodes.values()
    a, b, c = (call_function(graph, aten.softmax.int, (n, dim)) for n, dim in ((x, 1), (w, 1), (x, 2)))
    assert options(a) == options(b) != options(c)
    assert called_with(call_function(graph, operator.getitem, (x, 1))) == ((x, 1), {})
    assert options(call_function(graph, aten.softmax.int, (), {"dim": 1, "self": x})) == options(a)
    assert list(joined_inputs(call_function(graph, aten.cat.default, (), {"tensors": [x, w]}))) == [x, w]
    graph.output(((a, x),))
    assert returned(fx.GraphModule({}, graph)) == ((a, x),)


@pytest.mark.parametrize("model", [ResidualCNN, Attention])
def test_a_graph_that_gives_its_arguments_by_name_is_the_same_model(model):
    """So an artefact may: it is lowered to the same kernels, and compared with the same bounds."""
    x = torch.randn(2, 6, 32) if model is Attention else torch.randn(2, 3, 16, 16)
    q = quantized(model(), x, StaticQuantConfig())
    module, _ = copy_module(q.graph.module)
    calls = [
        n
        for n in module.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten"
    ]
    for node in calls:
        by_name(node)
    assert len(calls) > 5
    module.recompile()
    named = dataclasses.replace(q.graph, module=module)
    expected, got = (get_backend("native").lower(graph, verify="off") for graph in (q.graph, named))
    assert [(op.operator, op.ran) for op in got.report().ops] == [
        (op.operator, op.ran) for op in expected.report().ops
    ]
    assert torch.equal(expected.run([x])[0], got.run([x])[0])
