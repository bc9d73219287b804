"""Bias correction is kept where it helps.

Padding does not steer it, few samples do not mislead it, and the report says what it did.
"""

import pytest
import torch
from models import Function
from torch import nn

import nc
from nc import StaticQuantConfig
from nc.algorithms import bias_correction
from nc.algorithms.bias_correction import MODEL, ONE_ROW, READ, Corrections
from nc.numerics.mean_error import equal_rows, mean_error, row_weights, square_errors
from nc.numerics.metrics import sqnr_db

BARE = StaticQuantConfig(post=())


class RMSNorm(nn.Module):
    """As language models write it."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


NORMS = {
    "layer": lambda: nn.LayerNorm(32),
    "rms": RMSNorm,
    "batch": lambda: nn.BatchNorm1d(32),
    "none": nn.Identity,
}
PADDINGS = {
    "zeros": lambda x: torch.cat([x[:32], 0 * x[:32]]),
    "mostly zeros": lambda x: torch.cat([x[:16], 0 * x[:48]]),
    "a constant": lambda x: torch.cat([x[:32], torch.full((32, 32), 3.0)]),
    "a repeated row": lambda x: torch.cat([x[:32], x[:1].expand(32, -1)]),
    "masked": lambda x: torch.cat([x[:32], torch.full((32, 32), -1e4)]),
    "few samples": lambda x: x[:4],
    "one sample": lambda x: x[:1],
    "none": lambda x: x,
}


def quantized(model, x, config=None, batches=None):
    prepared = nc.prepare(model, config or StaticQuantConfig(), example_inputs=x, backend="reference")
    for batch in batches or [x]:
        prepared(batch)
    return nc.convert(prepared)


def db(q, model, x):
    return sqnr_db(model(x).detach(), q(x))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("norm", NORMS)
def test_real_rows_never_get_worse(norm, padding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), NORMS[norm](), nn.Linear(32, 8)).eval()
    x = PADDINGS[padding](torch.randn(64, 32))
    real = x[: {"mostly zeros": 16, "few samples": 4, "one sample": 1, "none": 64}.get(padding, 32)]
    default, bare = quantized(model, x), quantized(model, x, BARE)
    for rows in (real, torch.randn(512, 32)):
        assert db(default, model, rows) > db(bare, model, rows) - 0.2


def test_padding_behind_a_norm_stays_what_it_is():
    """The mean error of real rows is small, but a norm makes a row that holds nothing else as large as any other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    x = torch.cat([torch.randn(48, 32) + 2, torch.zeros(16, 32)])
    q = quantized(model, x)
    torch.testing.assert_close(q(x[48:]), model(x[48:]), rtol=0, atol=0.01)
    (applied, *_) = q.report().algorithms
    assert READ in applied.text
    assert "taken back" in applied.text
    assert "0" not in applied.operators


def test_one_row_is_not_judged():
    x = torch.randn(1, 16).expand(8, -1).contiguous()
    (applied, *_) = quantized(nn.Linear(16, 4).eval(), x).report().algorithms
    assert applied.operators == ()
    assert applied.text == f"0 biases corrected; 1 taken back because {ONE_ROW} (linear)"


def depthwise():
    """Depthwise filters whose channels differ a lot, and one scale for all of them."""
    layers = []
    for _ in range(3):
        conv = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        conv.weight.data *= torch.logspace(-1.5, 0, 16)[torch.randperm(16)].view(-1, 1, 1, 1)
        layers += [conv, nn.ReLU6(), nn.Conv2d(16, 16, 1), nn.ReLU6()]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU6(), *layers, nn.Flatten(), nn.Linear(16 * 64, 4)
    ).eval()


def pictures(count, border=0):
    x = torch.nn.functional.interpolate(torch.rand(count, 3, 4, 4), (8, 8), mode="bilinear")
    if border:
        x[:, :, :border] = x[:, :, -border:] = x[..., :border] = x[..., -border:] = 0
    return x


@pytest.mark.parametrize("border", [0, 2])
@pytest.mark.parametrize("sizes", [(32,), (8, 3, 16)])
def test_depthwise_convolutions_gain(border, sizes):
    """Weights with one scale per tensor have a mean error that samples of the same kind have too."""
    torch.manual_seed(0)
    model, batches, fresh = depthwise(), [pictures(n, border) for n in sizes], pictures(64, border)
    coarse = {"w_granularity": "per_tensor"}
    default = quantized(model, batches[0], StaticQuantConfig(**coarse), batches)
    bare = quantized(model, batches[0], StaticQuantConfig(**coarse, post=()), batches)
    assert db(default, model, fresh) > db(bare, model, fresh) + 1


def test_all_outputs_are_judged():
    """One head would gain what the other one loses."""
    torch.manual_seed(1)
    model = Function(
        lambda m, x: (m.a(x), m.norm(m.a(x))), a=nn.Linear(32, 32, bias=False), norm=nn.LayerNorm(32)
    ).eval()
    x = torch.cat([torch.randn(60, 32) + 1, torch.zeros(4, 32)])
    expected, corrected, bare = model(x), quantized(model, x)(x), quantized(model, x, BARE)(x)
    for e, c, b in zip(expected, corrected, bare, strict=True):
        assert (c - e).square().sum() <= 1.02 * (b - e).square().sum()


# ---- all corrections together ----


@pytest.mark.parametrize("bad", [(), ("c",), ("a", "h"), tuple("abcdefgh")])
def test_those_that_harm_the_model_are_found(bad):
    def attempt(operators):
        kept = {name: torch.ones(1) for name in "abcdefgh" if name in operators}
        error = 10.0 + sum(50.0 if name in bad else -1.0 for name in kept)
        return Corrections(kept, {}, [(error, error)])

    found = bias_correction._best(attempt, list("abcdefgh"))
    assert list(found.deltas) == [name for name in "abcdefgh" if name not in bad]
    assert found.refused == dict.fromkeys(bad, MODEL)


def test_what_could_not_be_tried_is_taken_back():
    calls = []

    def attempt(operators):
        calls.append(operators)
        return Corrections({name: torch.ones(1) for name in operators}, {}, [(float(len(operators)), 0.0)])

    names = [f"l{i}" for i in range(100)]
    found = bias_correction._best(attempt, names)
    assert len(calls) == 1 + bias_correction._TRIALS
    assert (list(found.deltas), list(found.refused)) == ([], names)


# ---- the mean error ----


def test_the_mean_error_leaves_out_samples_one_by_one():
    torch.manual_seed(0)
    expected = torch.randn(12, 5)
    got = expected + torch.randn(12, 5) * 0.1 + 0.05
    samples = torch.arange(12) // 3
    found, error = mean_error(expected, got, samples), (expected - got).double()
    held_out = sum(
        float((error[samples == g] - error[samples != g].mean(0)).square().sum()) for g in range(4)
    )
    torch.testing.assert_close(found.delta, error.mean(0), rtol=1e-5, atol=1e-7)
    assert found.before == pytest.approx(float(error.square().sum()), rel=1e-5)
    assert found.held_out == pytest.approx(held_out, rel=1e-5)


def test_equal_rows_count_as_one_and_are_left_out_together():
    torch.manual_seed(0)
    rows, noise = torch.randn(6, 5), torch.randn(6, 5)
    once = mean_error(rows, rows + noise, torch.arange(6))
    often = torch.tensor([0, 1, 1, 1, 2, 3, 4, 5, 0, 0])
    again = mean_error(rows[often], (rows + noise)[often], torch.arange(10))
    torch.testing.assert_close(again.delta, once.delta, rtol=1e-5, atol=1e-7)
    assert (again.before, again.held_out) == pytest.approx((once.before, once.held_out), rel=1e-5)
    assert mean_error(rows[:1].expand(9, -1), rows[:1].expand(9, -1) + 1, torch.arange(9)).held_out is None


def test_rows_that_are_far_larger_count_less():
    rows = torch.cat([torch.randn(9, 8), torch.full((1, 8), 1e4)])
    weights = row_weights(rows, equal_rows(rows))
    assert torch.equal(weights[:9], torch.ones(9))
    power = float(weights[9] * rows[9].square().sum())
    assert power == pytest.approx(100 * float(rows[:9].square().sum(1).median()), rel=0.5)


def test_equal_but_for_rounding():
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(50, 24), torch.zeros(2, 24)])
    classes = equal_rows(torch.cat([rows, rows * (1 + 2**-23), rows * 1.01]))
    assert (classes[:50] == classes[52:102]).sum() >= 48
    assert (classes[:50] != classes[104:154]).all()
    assert len(classes[:50].unique()) == 50
    assert classes[50] == classes[51] == classes[102]


def test_errors_of_masks_are_none():
    e = torch.tensor([[-torch.inf, 1.0], [2.0, 3.0]])
    assert square_errors(e, e + torch.tensor([[0.0, 1.0], [0.0, 0.0]]))[0] == 1.0
