"""Ways of plans to compute an operator: the first one that does not refuse.

What refuses says why, and the report prints it.
"""

import pytest
import torch
from models import Function, quantized
from torch import fx, nn

from nc.backends.native import operators
from nc.backends.native.plans.operands import PackedWeights, PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.kernels.onednn.providers import provider

pytestmark = pytest.mark.needs_plans


def recorder():
    return Recorder(fx.symbolic_trace(nn.Identity()), provider().maker, PackedWeights(), {})


def test_the_first_way_that_does_not_refuse_gives_the_result():
    tried = []

    def way(name, why=""):
        def run():
            tried.append(name)
            need(not why, why)
            return name

        return run

    ways = {"C": way("C", "too wide"), "oneDNN": way("oneDNN"), "torch": way("torch")}
    assert recorder().first_possible(ways) == "oneDNN"
    assert tried == ["C", "oneDNN"]


def test_where_all_refuse_each_says_why():
    with pytest.raises(Refused, match="^C: too wide; oneDNN: no kernel$"):
        recorder().first_possible(
            {"C": lambda: need(False, "too wide"), "oneDNN": lambda: need(0, "no kernel")}
        )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "not a tensor"),
        (3, "not a tensor"),
        (PlanTensor(torch.ones(2), object()), "computed from the inputs"),
    ],
)
def test_arguments_that_are_no_constants(value, why):
    with pytest.raises(Refused, match=why):
        recorder().constant(value)
    assert recorder().optional_constant(None) is None


def test_the_report_prints_who_refused_and_why():
    model = Function(
        lambda self, x: self.b(torch.cumsum(self.a(x), 1) - self.a(x).mean(0)),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
    )
    q = quantized(model, torch.randn(4, 8), None, "native")
    details = q.report().details["computed by torch"]
    assert (
        details == "mean (oneDNN: its input is not a batch of images in fp32)"
    )  # cumsum has no way of ours, so none refused
    assert f"computed by torch: {details}" in q.report().summary()


def test_a_view_of_what_torch_computes_is_no_refusal():
    """A pad waits for a convolution that could pad by itself.

    Here a view reads it, so torch computes it first.
    """
    model = Function(
        lambda self, x: self.b(nn.functional.pad(self.a(x), (0, 2)).reshape(2, -1)),
        a=nn.Linear(8, 8),
        b=nn.Linear(40, 4),
    )
    q = quantized(model, torch.randn(2, 4, 8), None, "native")
    assert any("pad" in step.name for step in q.engine.steps([torch.randn(2, 4, 8)]))
    assert "computed by torch" not in q.report().details


def test_a_model_whose_operators_all_have_ways_has_nothing_to_say():
    q = quantized(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8), None, "native"
    )
    assert "computed by torch" not in q.report().details


def test_two_files_can_not_claim_one_operator():
    row = PlannedOperator((torch.ops.aten.relu.default,))
    with pytest.raises(AssertionError, match=r"two files have ways for aten\.relu\.default"):
        operators._by_target([row, row])


def test_graphs_of_one_token_have_ways_of_their_own():
    general, one_token = operators.table(), operators.table(one_token=True)
    norm = torch.ops.aten.layer_norm.default
    assert list(general[norm].ways) == ["oneDNN"]
    assert list(one_token[norm].ways) == ["C"]
    assert one_token[norm].to_codes is general[norm].to_codes
    assert general.keys() < one_token.keys()


def test_all_operators_of_plans_have_a_way_or_wait():
    for target, row in operators.table(one_token=True).items():
        assert row.ways or row.waits, target
