"""One configuration gives each operator what the candidate that it follows gives it."""

import itertools

import pytest
import torch
from torch import nn

import nc
from nc.tuning.mixed import FP32, PlannedCandidate, mixed


class Attention(nn.Module):
    """Its last linear reads the result of a product, which SmoothQuant leaves as it is."""

    def __init__(self, size=32):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x):
        scores = (self.q(x) @ self.k(x).transpose(1, 2) / 5).softmax(-1)
        return x + self.out(scores @ self.v(x))


X = torch.randn(4, 8, 32)
CANDIDATES = {
    "smooth": nc.SmoothQuantConfig(alpha=0.7, act_algo="percentile", post=()),
    "kl": nc.StaticQuantConfig(act_algo="kl", act_sym=True, post=()),
    "rows": nc.StaticQuantConfig(act_algo="percentile", post=()) + nc.DynamicQuantConfig(),
    "some": nc.StaticQuantConfig(post=()).exclude("k", "matmul"),
}


@pytest.fixture(scope="module")
def options():
    model = Attention().eval()
    prepared = {n: nc.prepare(model, c, example_inputs=X, backend="native") for n, c in CANDIDATES.items()}
    found = {n: PlannedCandidate(CANDIDATES[n], p.plan, p.capabilities) for n, p in prepared.items()}
    return model, prepared["kl"].graph, found


def asked(decision):
    """What a decision quantizes to, with the fields that say how, without the rules that set them."""
    fields = {name: value for name, value, _ in decision.fields if name not in ("alpha", "scale_sharing")}
    smooth = {
        "folding",
        "init_alpha",
        "alpha_min",
        "alpha_max",
        "alpha_step",
        "shared_criterion",
        "do_blockwise",
    }
    return decision.spec, {
        n: v for n, v in fields.items() if n not in smooth
    } if decision.spec.quantized else {}


@pytest.mark.parametrize("names", list(itertools.product([*CANDIDATES, FP32], repeat=2)))
def test_each_operator_gets_what_its_candidate_gives_it(options, names):
    model, graph, candidates = options
    operators = ["q", "k", "v", "out", "matmul", "matmul_1"]
    for chosen in (
        dict(zip(operators, itertools.cycle(names), strict=False)),
        {name: names[name == "out"] for name in operators},
    ):
        if set(chosen.values()) == {FP32}:
            continue
        plan = nc.describe(model, mixed(graph, chosen, candidates), X, backend="native", strict=False)
        for name, option in chosen.items():
            if option == FP32:
                assert not plan[name].spec.quantized, (chosen, name)
            else:
                assert asked(plan[name]) == asked(candidates[option].plan[name]), (chosen, name)
