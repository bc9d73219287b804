"""The search for the first operator that differs, with an engine that is wrong, or fails, where a test says so."""

import pytest
import torch
from models import quantized
from torch import nn

from nc import VerificationError
from nc.backends.verify import first_disagreement, verify_outputs

LAYERS = 6


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return quantized(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))).eval(), torch.randn(4, 8), None, "reference"
    ).graph


def engine(wrong, fails):
    """Runs a part of the graph.

    Wrong from a number of layers on, and with an error for some numbers of layers.
    """

    def run(part, inputs):
        layers = sum(node.meta.get("kind") == "linear" for node in part.graph.nodes)
        if layers in fails:
            msg = "no such kernel"
            raise RuntimeError(msg)
        outputs = part(*inputs)
        return [-value for value in outputs] if layers >= wrong else outputs

    return run


@pytest.mark.parametrize("wrong", range(1, LAYERS + 2))
def test_the_first_wrong_operator_is_found(graph, wrong):
    found = first_disagreement(graph.module, graph.example, engine(wrong, ()))
    assert (found.operator, found.failed) == (str(wrong - 1) if wrong <= LAYERS else "", ())


@pytest.mark.parametrize("fails", [(1,), (3,), (4,), (1, 3, 4), (3, 4, 6)])
@pytest.mark.parametrize("wrong", [2, 5])
def test_a_part_for_which_the_engine_fails_hides_nothing(graph, wrong, fails):
    found = first_disagreement(graph.module, graph.example, engine(wrong, fails))
    assert found.operator == str(wrong - 1)
    assert set(found.failed) <= {str(layers - 1) for layers in fails}


def test_outputs_of_another_shape_differ(graph):
    def run(part, inputs):
        return [
            value[:1] if len(part.graph.find_nodes(op="get_attr")) > 6 else value for value in part(*inputs)
        ]

    assert first_disagreement(graph.module, graph.example, run).operator != ""


@pytest.mark.parametrize(
    ("wrong", "fails", "told"),
    [
        (3, (), r"The first operator that differs is '2'; give it fp32: set_local\('2', "),
        (
            3,
            (4,),
            r"operator that differs is '2' \(not compared, because the engine fails for a part of the graph "
            r"that ends there: '3'\); give",
        ),
        (9, (), "No single operator differs; the error accumulates"),
        (
            9,
            (4,),
            r"No operator that was compared differs \(not compared, because the engine fails .* ends there: "
            r"'3'\)\. verify",
        ),
        (1, range(1, 7), r"No operator that was compared differs \(.*'3'.*\)\. verify"),
    ],
)
def test_the_message_says_what_was_found_and_what_could_not_be_compared(graph, wrong, fails, told):
    with pytest.raises(VerificationError, match=told):
        verify_outputs(
            graph,
            [-value for value in graph.module(*graph.example)],
            "raise",
            "An engine",
            lambda: first_disagreement(graph.module, graph.example, engine(wrong, fails)),
        )
