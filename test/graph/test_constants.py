"""Values of nodes that depend on constants alone, in graphs of any depth."""

import torch
from torch import fx

from nc.graph.fx_utils import call_function, constant_value

aten = torch.ops.aten


def graph_of(build):
    """A module with a constant `c`, and the node that `build(graph, input, constant)` gives."""
    module = torch.nn.Module()
    module.register_buffer("c", torch.tensor([1.0, 2.0]))
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("c")
    node = build(graph, x, c)
    graph.output(node)
    return fx.GraphModule(module, graph), node


def chain(graph, first, length=5000):
    for _ in range(length):
        first = call_function(graph, aten.add.Tensor, (first, 1.0))
    return first


def test_thousands_of_operators_one_after_another():
    module, node = graph_of(lambda graph, x, c: chain(graph, c))
    assert constant_value(module, node).tolist() == [5001.0, 5002.0]
    module, node = graph_of(lambda graph, x, c: chain(graph, x))
    assert constant_value(module, node) is None


def test_a_value_that_is_read_by_many_is_computed_once():
    def doubled(graph, x, c):
        for _ in range(60):  # 2 ** 60 paths
            c = call_function(graph, aten.add.Tensor, (c, c))
        return c

    module, node = graph_of(doubled)
    assert constant_value(module, node).tolist() == [2.0**60, 2.0**61]


def test_what_is_changed_in_place_is_no_constant():
    def changed(graph, x, c):
        view = call_function(graph, aten.view.default, (c, [2, 1]))
        call_function(graph, aten.add_.Tensor, (view, 1.0))
        return call_function(graph, aten.mul.Tensor, (c, 2.0))

    module, node = graph_of(changed)
    assert constant_value(module, node) is None


def test_an_input_anywhere_makes_it_vary():
    for sides in ("xc", "cx"):
        module, node = graph_of(
            lambda graph, x, c, sides=sides: call_function(
                graph, aten.mul.Tensor, tuple({"x": x, "c": chain(graph, c, 3)}[side] for side in sides)
            )
        )
        assert constant_value(module, node) is None
