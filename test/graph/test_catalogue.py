"""The questions that every walk over a graph asks: they have an answer for every node and argument."""

import copy
import operator
import re
from pathlib import Path

import pytest
import torch
from models import graph_of, quantized
from torch import fx, nn

import nc
from nc import DynamicQuantConfig, StaticQuantConfig
from nc.backends.dynamic import replace_dynamic
from nc.backends.native.recurrent import replace_recurrent
from nc.formats.rule_key import KIND_NAMES
from nc.graph import catalogue
from nc.graph.catalogue import (
    KINDS,
    climb,
    decide_kinds,
    first_input,
    joined_inputs,
    kind_of_node,
    op_name,
    schema_arguments,
)
from nc.graph.dataflow import behind_matmul, consumers, origin, producer
from nc.graph.fx_utils import call_function, copy_module, retarget, take_over

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten


@pytest.fixture
def graph():
    return fx.Graph()


def kind_after_deciding(node):
    """The kind of a node, once the kinds of its graph are decided."""
    decide_kinds(fx.GraphModule({}, node.graph))
    return kind_of_node(node)


@pytest.mark.parametrize("value", [None, 3, 2.5, "same", [1, 2], torch.float32])
def test_what_is_no_node_has_no_operator(value):
    assert op_name(value) == ""
    assert kind_of_node(value) is None


def test_arithmetic_on_sizes_is_no_operator_on_tensors(graph):
    size = call_function(graph, aten.sym_size.int, (graph.placeholder("x"), 0))
    total = call_function(graph, operator.add, (1, size))
    assert op_name(total) == "operator.add"
    assert kind_after_deciding(total) is None
    assert op_name(call_function(graph, operator.getitem, (total, 0))) == "getitem"
    addition = call_function(graph, aten.add.Tensor, (total, size))
    assert op_name(addition) == "add"
    assert kind_after_deciding(addition) == "add"
    assert schema_arguments(total) == {}


def test_an_operator_of_another_namespace_is_not_atens(graph):
    x = graph.placeholder("x")
    call = call_function(graph, torch.ops.quantized.linear_dynamic.default, (x, x))
    assert op_name(call) == "quantized::linear_dynamic"
    assert kind_after_deciding(call) is None


def test_a_walk_ends_at_an_argument_that_is_no_node(graph):
    x = graph.placeholder("x")
    odd = call_function(graph, aten.reshape.default, (7, [1]))
    end = call_function(graph, aten.relu.default, (call_function(graph, aten.view.default, (odd, [1, 1])),))
    empty = call_function(graph, aten.view.default, ())
    graph.output((end, empty, x))
    assert climb(end, lambda n: n.op == "call_function") is odd
    assert producer(end) is odd
    assert origin(end.args[0], set()) is odd
    assert first_input(odd) is None
    assert producer(empty) is empty
    assert behind_matmul(fx.GraphModule({}, graph)) == frozenset()


def test_what_is_joined_may_be_one_value(graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(joined_inputs(call_function(graph, aten.cat.default, ([x, y],)))) == [x, y]
    assert list(joined_inputs(call_function(graph, aten.cat.default, (x,)))) == []


def test_readers_behind_many_diamonds_are_found_once(graph):
    value = x = graph.placeholder("x")
    for _ in range(60):  # a walk along every path would take 2^60 steps
        parts = call_function(graph, aten.split.Tensor, (value, 1))
        value = call_function(
            graph, aten.cat.default, ([call_function(graph, operator.getitem, (parts, i)) for i in (0, 1)],)
        )
    reader = call_function(graph, aten.linear.default, (value, x))
    assert list(consumers(x)) == [reader]


class EveryKind(nn.Module):
    """One operator of each kind but the convolutions of other dimensions."""

    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.gru(self.lstm(self.up(self.conv(x)).transpose(1, 2))[0])[0]
        left, right = self.left(y), self.right(y)
        return torch.matmul(left, right.transpose(1, 2)), left + right


@pytest.fixture(scope="module")
def every_kind():
    return quantized(
        EveryKind().eval(),
        torch.randn(2, 4, 6),
        StaticQuantConfig().set_local(nn.LSTM, DynamicQuantConfig()).set_local(nn.GRU, DynamicQuantConfig()),
    )


def kinds(module):
    """Name of each operator → the kind of its node."""
    return {
        node.meta["operator"]: kind_of_node(node) for node in module.graph.nodes if "operator" in node.meta
    }


def test_the_kind_of_an_operator_lasts_from_capture_to_load(every_kind, tmp_path):
    graph = graph_of(EveryKind().eval(), torch.randn(2, 4, 6))
    expected = {op.name: op.kind for op in graph.operators if op.quantizable}
    assert set(expected.values()) == {"conv1d", "conv_transpose1d", "lstm", "gru", "linear", "matmul", "add"}
    assert kinds(graph.module) == expected
    assert {d.spec.mode for d in every_kind.graph.plan.decisions} >= {"static", "dynamic"}
    assert kinds(every_kind.graph.module) == expected
    assert kinds(copy.deepcopy(every_kind.graph.module)) == expected
    every_kind.save(tmp_path)
    assert kinds(nc.load(tmp_path, backend="reference").graph.module) == expected


def test_what_computes_an_operator_in_another_way_has_not_its_kind(every_kind):
    module = every_kind.graph.module
    lowered, _ = copy_module(module)
    replace_dynamic(lowered)
    replace_recurrent(lowered)
    lost = {name for name, kind in kinds(module).items() if kind != kinds(lowered).get(name)}
    assert lost == {"lstm", "gru"}
    assert {op_name(n) for n in lowered.graph.nodes if kind_of_node(n)} == {
        "conv1d",
        "conv_transpose1d",
        "linear",
        "bmm",
        "add",
    }


def test_rules_name_the_kinds_that_the_catalogue_has():
    assert set(KIND_NAMES) == KINDS


class TestOneNamePerNode:
    @pytest.fixture
    def named(self, monkeypatch):
        """What the catalogue was asked the name of, in order."""
        seen, name_of = [], catalogue.name_of
        monkeypatch.setattr(catalogue, "name_of", lambda target: seen.append(target) or name_of(target))
        return seen

    def test_prepare_asks_once_for_each_node(self, named):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
        prepared = nc.prepare(
            model, StaticQuantConfig(), example_inputs=torch.randn(4, 8), backend="reference"
        )
        computed = (
            aten.linear.default,
            aten.relu.default,
        )  # older versions of torch also export what checks sizes
        assert [target for target in named if target in computed] == [
            aten.linear.default,
            aten.relu.default,
            aten.linear.default,
        ]
        assert [op_name(node) for node in prepared.graph.module.graph.nodes if op_name(node)] == [
            "linear",
            "relu",
            "linear",
        ]

    def test_a_node_that_a_pass_makes_is_named_where_it_is_made(self, named, graph):
        x = graph.placeholder("x")
        node = call_function(graph, aten.add.Tensor, (x, x))
        assert (op_name(node), kind_of_node(node)) == ("add", None)
        assert op_name(node) == "add"
        assert named == [aten.add.Tensor]
        retarget(node, aten.mul.Tensor)
        assert op_name(node) == "mul"

    def test_a_node_that_takes_the_place_of_another_keeps_its_own(self, graph):
        x = graph.placeholder("x")
        old, new = (
            call_function(graph, aten.linear.default, (x, x)),
            call_function(graph, aten.mul.Tensor, (x, x)),
        )
        old.meta["operator"] = "fc"
        decide_kinds(fx.GraphModule({}, graph))
        take_over(new, old)
        assert (op_name(new), kind_of_node(new), new.meta["operator"]) == ("mul", None, "fc")

    @pytest.mark.parametrize(
        "ask", [op_name, kind_of_node, lambda node: decide_kinds(fx.GraphModule({}, node.graph))]
    )
    def test_a_node_without_a_name_is_an_error_that_names_it(self, graph, ask):
        node = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
        with pytest.raises(
            LookupError, match=r"Node 'relu_default' calls aten.relu.default and does not carry"
        ):
            ask(node)

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "nc").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
    )
    def test_nodes_that_call_are_made_by_the_helpers(self, path):
        if path.name != "fx_utils.py":
            text = path.read_text(encoding="utf-8")
            assert (
                re.findall(
                    r"graph\.call_function|create_node\(\s*\"call|(?m:^\s*node\.target = (?!name))", text
                )
                == []
            )
