"""The questions that every walk over a graph asks: they have an answer for every node and argument."""

import operator

import pytest
import torch
from torch import fx

from nc.graph.catalogue import climb, first_input, joined_inputs, kind_of_node, op_name, schema_arguments
from nc.graph.dataflow import behind_matmul, consumers, origin, producer

aten = torch.ops.aten


@pytest.fixture
def graph():
    return fx.Graph()


@pytest.mark.parametrize("value", [None, 3, 2.5, "same", [1, 2], torch.float32])
def test_what_is_no_node_has_no_operator(value):
    assert op_name(value) == ""
    assert kind_of_node(value) is None


def test_arithmetic_on_sizes_is_no_operator_on_tensors(graph):
    size = graph.call_function(aten.sym_size.int, (graph.placeholder("x"), 0))
    total = graph.call_function(operator.add, (1, size))
    assert op_name(total) == "operator.add"
    assert kind_of_node(total) is None
    assert op_name(graph.call_function(operator.getitem, (total, 0))) == "getitem"
    assert op_name(graph.call_function(aten.add.Tensor, (total, size))) == "add"
    assert schema_arguments(total) == {}


def test_an_operator_of_another_namespace_is_not_atens(graph):
    x = graph.placeholder("x")
    call = graph.call_function(torch.ops.quantized.linear_dynamic.default, (x, x))
    assert op_name(call) == "quantized::linear_dynamic"
    assert kind_of_node(call) is None


def test_a_walk_ends_at_an_argument_that_is_no_node(graph):
    x = graph.placeholder("x")
    odd = graph.call_function(aten.reshape.default, (7, [1]))
    end = graph.call_function(aten.relu.default, (graph.call_function(aten.view.default, (odd, [1, 1])),))
    empty = graph.call_function(aten.view.default, ())
    graph.output((end, empty, x))
    assert climb(end, lambda n: n.op == "call_function") is odd
    assert producer(end) is odd
    assert origin(end.args[0], set()) is odd
    assert first_input(odd) is None
    assert producer(empty) is empty
    assert behind_matmul(fx.GraphModule({}, graph)) == frozenset()


def test_what_is_joined_may_be_one_value(graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(joined_inputs(graph.call_function(aten.cat.default, ([x, y],)))) == [x, y]
    assert list(joined_inputs(graph.call_function(aten.cat.default, (x,)))) == []


def test_readers_behind_many_diamonds_are_found_once(graph):
    value = x = graph.placeholder("x")
    for _ in range(60):  # a walk along every path would take 2^60 steps
        parts = graph.call_function(aten.split.Tensor, (value, 1))
        value = graph.call_function(aten.cat.default, ([graph.call_function(operator.getitem, (parts, i)) for i in (0, 1)],))
    reader = graph.call_function(aten.linear.default, (value, x))
    assert list(consumers(x)) == [reader]
