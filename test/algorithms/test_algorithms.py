"""The protocol of algorithms.

Their order, what plan and report say of them, and that a solver that reads layer inputs is one file.
"""

import dataclasses
import warnings
from typing import ClassVar

import pytest
import torch
from models import MLP
from torch import nn

import nc
from nc import (
    BiasCorrection,
    ConfigError,
    Equalization,
    SmoothQuantConfig,
    StaticQuantConfig,
    convert,
    describe,
    load,
    prepare,
    save,
)
from nc.algorithms import POST
from nc.algorithms.base import Bound, Needs, Stage, Tap
from nc.graph.plan import Applied, Plan


def add_products(state, x):
    """Σ xᵀx over the rows, float64 [inputs, inputs]."""
    rows = x.reshape(-1, x.shape[-1]).double()
    return {"xx": rows.T @ rows + (state["xx"] if state else 0.0)}


@dataclasses.dataclass(frozen=True, slots=True)
class GPTQ:
    """Codes of linears, column by column.

    The error of each is made up for in those that follow (Frantar et al., arXiv 2210.17323).
    """

    damp: float = 0.01
    name: ClassVar[str] = "gptq_in_a_test"
    stage: ClassVar[Stage] = Stage.CODES

    def needs(self, module, plan):
        linears = [d.operator for d in plan.quantized if d.kind == "linear"]
        return Needs(
            samples=Bound(rows=1000), taps=tuple(Tap(name, "input", add_products) for name in linears)
        )

    def apply(self, context):
        changed = []
        for (operator, _), state in context.observed.items():
            weight = context.weight(operator)
            if weight is not None and not weight.spec.paired:
                node = next(n for n in context.module.graph.nodes if n.meta.get("operator") == operator)
                codes = self.codes(getattr(context.module, node.args[1].target).double(), state["xx"], weight)
                changed += [operator] if bool((codes != weight.codes).any()) else []
                weight.replace(codes)
        return Applied(self.name, tuple(changed), f"codes of {len(changed)} linears chosen")

    def codes(self, w, xx, weight):
        inverse = torch.linalg.inv(
            xx + self.damp * xx.diagonal().mean() * torch.eye(len(xx), dtype=torch.float64)
        )
        upper = torch.linalg.cholesky(inverse, upper=True)
        scale, rest, codes = weight.scale.double(), w.clone(), torch.empty_like(w)
        for i in range(w.shape[1]):
            codes[:, i] = (rest[:, i] / scale).round().clamp(weight.spec.quant_min, weight.spec.quant_max)
            error = (rest[:, i] - codes[:, i] * scale) / upper[i, i]
            rest[:, i:] -= error[:, None] * upper[i, i:]
        return codes.to(torch.int8)


@pytest.fixture(autouse=True)
def known_algorithms(monkeypatch):
    monkeypatch.setitem(POST, GPTQ.name, GPTQ)
    monkeypatch.delitem(POST, GPTQ.name)


def correlated(rows=200, width=32, rank=6):
    """Inputs that vary in few directions: what a column loses, others can make up for."""
    mixing = torch.randn(rank, width)
    return lambda: torch.randn(rows, rank) @ mixing + 0.05 * torch.randn(rows, width)


def converted(model, config, batches):
    prepared = prepare(model.eval(), config, example_inputs=batches[0], backend="reference")
    for batch in batches:
        prepared(batch)
    return convert(prepared)


def test_a_solver_that_reads_layer_inputs_is_one_file(tmp_path):
    data = correlated()
    batches, evaluation = [data() for _ in range(4)], data()
    model = nn.Sequential(nn.Linear(32, 16))
    expected = model(evaluation).detach().double()

    def weight_error(q):
        weight = q.graph.module
        node = next(n for n in weight.graph.nodes if n.meta.get("operator") == "0")
        codes, scale = (getattr(weight, a.target).double() for a in node.args[1].args[:2])
        return float(
            (evaluation.double() @ (codes * scale[:, None]).T + model[0].bias.detach().double() - expected)
            .square()
            .mean()
        )

    nearest = converted(model, StaticQuantConfig(post=()), batches)
    solved = converted(model, StaticQuantConfig(post=[GPTQ()]), batches)
    assert weight_error(solved) < weight_error(nearest) / 2
    assert [a.algorithm for a in solved.report().algorithms] == ["gptq_in_a_test", "dead_channels"]
    assert solved.report().algorithms[0] == Applied("gptq_in_a_test", ("0",), "codes of 1 linears chosen")
    save(solved, tmp_path / "q")
    assert torch.equal(load(tmp_path / "q", backend="reference")(evaluation), solved(evaluation))


def test_it_sees_as_many_samples_as_it_asks_for(monkeypatch):
    rows = []

    def note(self, context):
        rows.append(sum(len(batch[0]) for batch in context.batches))
        return Applied(self.name, (), "")

    for algorithm in (GPTQ, BiasCorrection):
        monkeypatch.setattr(algorithm, "apply", note)
    batches = [torch.randn(50, 32) for _ in range(30)]
    converted(nn.Sequential(nn.Linear(32, 16)), StaticQuantConfig(post=[GPTQ(), BiasCorrection()]), batches)
    assert rows == [1000, 100]  # whole batches, up to 1000 and 96 rows


def test_the_order_is_part_of_the_plan():
    config = SmoothQuantConfig(act_algo="auto", pre=[Equalization()], post=[BiasCorrection(), GPTQ()])
    plan = describe(MLP().eval(), config, torch.randn(4, 16), backend="reference")
    assert [(s.algorithm, s.stage) for s in plan.algorithms] == [
        ("equalization", "float graph"), ("smooth_quant", "statistics"), ("range_search", "qparams"),
        ("bias_correction", "codes"), ("gptq_in_a_test", "codes"), ("dead_channels", "codes"),
    ]  # fmt: skip
    assert "1. equalization (float graph): iterations=10, tolerance=2e-07" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    prepared = prepare(MLP().eval(), config, example_inputs=torch.randn(4, 16), backend="reference")
    prepared(torch.randn(64, 16))
    q = convert(prepared)
    assert [a.algorithm for a in q.report().algorithms] == [s.algorithm for s in plan.algorithms]
    for applied in q.report().algorithms:
        assert f"\n{applied.algorithm}: {applied.text}\n" in f"{q.report().summary()}\n"


def test_each_says_why_it_did_nothing():
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(4, 16)
    q = converted(model, SmoothQuantConfig(pre=[Equalization(), nc.BiasAbsorption()]).exclude("0"), [x])
    assert [a.operators for a in q.report().algorithms] == [(), (), ()]
    starts = (
        "0 operators changed: no two layers",
        "0 operators changed: no layer",
        "nothing: no int8 operator has a weight",
    )
    assert all(a.text.startswith(start) for a, start in zip(q.report().algorithms, starts, strict=True))


def test_an_algorithm_stands_where_its_stage_allows():
    with pytest.raises(ConfigError, match="pre"):
        StaticQuantConfig(pre=[GPTQ()])
    config = StaticQuantConfig(post=[GPTQ(damp=0.1)])
    assert StaticQuantConfig.from_dict(config.to_dict()) == config


def test_codes_that_cannot_be_are_refused(monkeypatch):
    def too_large(self, w, xx, weight):
        return torch.full(w.shape, -128, dtype=torch.int8)

    monkeypatch.setattr(GPTQ, "codes", too_large)
    with pytest.raises(ValueError, match="range from -127 to 127"):
        converted(nn.Sequential(nn.Linear(16, 8)), StaticQuantConfig(post=[GPTQ()]), [torch.randn(4, 16)])


class Normed(nn.Module):
    """A batch norm that was trained on other data than it gets: its means say nothing of what comes."""

    def __init__(self, mean):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.norm.bias.data.fill_(mean)

    def forward(self, x):
        return self.conv2(torch.relu(self.norm(self.conv1(x))))


@pytest.mark.parametrize(("mean", "warns"), [(4.0, False), (40.0, True)])
def test_an_algorithm_that_changes_the_fp32_model_says_so(mean, warns):
    """Bias absorption trusts the batch norm: of values below what it expects it makes others."""
    model = Normed(mean).eval()
    x = torch.randn(8, 3, 4, 4) * (mean / 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prepare(model, StaticQuantConfig(pre=[nc.BiasAbsorption()]), example_inputs=x, backend="reference")
    said = [str(w.message) for w in found if issubclass(w.category, nc.NCWarning)]
    assert [text.startswith("bias_absorption changes what the fp32 model computes") for text in said] == [
        True
    ] * warns


def test_smoothing_says_where_it_harms():
    """Large channels meet large weights.

    With alpha 1 all of them go into the weights, whose rounding then counts in all channels alike.
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(64, 64) * torch.logspace(-2, 0, 64)
    model[0].weight.data *= torch.logspace(-2, 0, 64)
    texts = {}
    for alpha in (0.5, 1.0):
        q = converted(model, SmoothQuantConfig(alpha=alpha, act_algo="minmax", post=()), [x])
        texts[alpha] = q.report().algorithms[0].text
    assert "larger error on calibration samples than without it" not in texts[0.5]
    assert "have a larger error on calibration samples than without it (" in texts[1.0]
