"""Constant factors behind products go into their scales, and sums behind permutations into their kernels.

The numbers stay the same.
"""

import pytest
import torch
from models import WHY_NO_PLANS, Function, quantized
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends import available_backends
from nc.backends.native.passes import finish, kernels
from nc.backends.passes import run_passes
from nc.graph.fx_utils import copy_module
from nc.numerics.metrics import worst_sqnr_db

pytestmark = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)

G = torch.Generator().manual_seed(0)
X, IMAGE = torch.randn(2, 5, 16, generator=G), torch.randn(2, 8, 9, 9, generator=G)
EXACT = 80  # dB: fp32 in another order, with random weights; one code that rounds otherwise costs more
CHANNELS = torch.randn(24, generator=G)  # some are negative
CHANNELS[3] = 0.0


class Scaled(nn.Module):
    """A linear from 16 to 24, or a convolution from 8 to 24 channels, and what follows.

    A buffer as the factor.
    """

    def __init__(self, follow, factor=CHANNELS, product=None, bias=True):
        super().__init__()
        self.product = product or nn.Linear(16, 24, bias=bias)
        self.register_buffer("factor", factor)
        self.follow = follow

    def forward(self, x):
        return self.follow(self.product(x), self.factor)


def targets(q):
    """Operators of the lowered graph, without packets' names."""
    module, _ = copy_module(q.graph.module)
    run_passes(module, (*kernels(q.graph.example), *finish()))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def conv(dims):
    return {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](8, 24, 3)


FOLDED = {
    "channels": (Scaled(lambda y, f: f * y), X),
    "channels behind": (Scaled(lambda y, f: y * f), X),
    "without bias": (Scaled(lambda y, f: y * f, bias=False), X),
    "a number": (Scaled(lambda y, f: y * -0.3), X),
    "a quotient": (Scaled(lambda y, f: y / (f.abs() + 0.5)), X),
    "one element": (Scaled(lambda y, f: f[:1] * y), X),
    "twice": (Scaled(lambda y, f: f * y * 0.25), X),
    "an activation behind": (Scaled(lambda y, f: F.relu(f * y)), X),
    "1 x 1 x 24": (Scaled(lambda y, f: f.view(1, 1, 24) * y), X),
    "conv1d": (Scaled(lambda y, f: f[:, None] * y, product=conv(1)), IMAGE[:, :, 0]),
    "conv2d": (Scaled(lambda y, f: f[:, None, None] * y, product=conv(2)), IMAGE),
    "conv2d, 1 x 24 x 1 x 1": (Scaled(lambda y, f: y * f.view(1, 24, 1, 1), product=conv(2)), IMAGE),
    "conv3d": (
        Scaled(lambda y, f: f.view(24, 1, 1, 1) * y, product=conv(3)),
        IMAGE[:, :, None].expand(-1, -1, 4, -1, -1).contiguous(),
    ),
}


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("name", FOLDED)
def test_factors_go_into_the_scales(name, granularity):
    model, x = FOLDED[name]
    q = quantized(model.eval(), x, nc.StaticQuantConfig(w_granularity=granularity), "native")
    assert not {"aten.mul.Tensor", "aten.div.Tensor"} & set(targets(q))
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > EXACT
    assert [op.ran for op in q.report().ops if op.operator == "product"] == ["int8"]


KEPT = {
    "of rows": (Scaled(lambda y, f: f[:5, None] * y), X),
    "of rows as many as channels": (Scaled(lambda y, f: f[:, None] * y), torch.randn(2, 24, 16, generator=G)),
    "the other dimension of a convolution": (Scaled(lambda y, f: f[:7] * y, product=conv(2)), IMAGE),
    "as many positions as channels": (
        Scaled(lambda y, f: f * y, product=nn.Conv1d(8, 24, 1)),
        torch.randn(2, 8, 24, generator=G),
    ),
    "more dimensions": (Scaled(lambda y, f: f.view(1, 1, 1, 24) * y), X),
    "from the input": (Scaled(lambda y, f: y * y.abs().mean()), X),
    "a square": (Scaled(lambda y, f: y * y), X),
    "read elsewhere too": (Scaled(lambda y, f: torch.cat([f * y, y])), X),
    "a divisor": (Scaled(lambda y, f: 0.7 / (y + 30)), X),
    "too small": (Scaled(lambda y, f: y * 1e-36), X),
    "infinite": (Scaled(lambda y, f: f * y, torch.full((24,), torch.inf)), X),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_factors_stay(name):
    model, x = KEPT[name]
    q = quantized(model.eval(), x, None, "native")
    assert {"aten.mul.Tensor", "aten.div.Tensor", "aten.reciprocal.default"} & set(targets(q))
    expected, got = q.reference(x), q(x)
    assert torch.equal(expected.isnan(), got.isnan())
    finite = expected.isfinite()
    assert torch.equal(finite, got.isfinite())
    assert worst_sqnr_db([expected[finite]], [got[finite]]) > EXACT or not finite.any()


def test_weights_in_two_products_with_factors_of_their_own():
    linear = nn.Linear(16, 16)
    model = Function(lambda self, x: self.linear(x) * 0.5 + self.linear(torch.tanh(x)) * -3.0, linear=linear)
    q = quantized(model.eval(), X, None, "native")
    assert "aten.mul.Tensor" not in targets(q)
    assert worst_sqnr_db([q.reference(X)], [q(X)]) > EXACT


class Block(nn.Module):
    """As in ConvNeXt, without its layer norm."""

    def __init__(self, swap=False):
        super().__init__()
        self.depth, self.up, self.down = (
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Linear(8, 32),
            nn.Linear(32, 8),
        )
        self.scale, self.swap = nn.Parameter(torch.randn(8, generator=G)), swap

    def forward(self, x):
        y = (self.scale * self.down(F.gelu(self.up(self.depth(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return y + x if self.swap else x + y


@pytest.mark.parametrize("swap", [False, True])
def test_the_kernel_adds_where_a_permutation_stood_between(swap):
    model = nn.Sequential(nn.Conv2d(8, 8, 2, 2), Block(swap), Block(swap), nn.Conv2d(8, 4, 1)).eval()
    q = quantized(model, IMAGE, None, "native")
    found = targets(q)
    assert found.count("onednn.qlinear_pointwise.binary") == 2
    assert not {"aten.mul.Tensor", "aten.add.Tensor"} & set(found)
    for x in (IMAGE, IMAGE[:1], torch.randn(3, 8, 6, 14, generator=G)):
        assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60  # a code may round otherwise
    asked = {op.operator: op.kernel for op in q.report().ops if op.ran == "int8"}
    assert asked["1.down"] or WHY_NO_PLANS


def test_a_sum_that_is_returned_has_its_sizes_and_values():
    q = quantized(Block().eval(), IMAGE, None, "native")
    assert q(IMAGE).shape == IMAGE.shape
    assert worst_sqnr_db([q.reference(IMAGE)], [q(IMAGE)]) > 60


def test_sums_of_other_sizes_stay_behind_the_permutation():
    model = Function(
        lambda self, x: self.linear(x).permute(0, 2, 1) + x.mean(), linear=nn.Linear(16, 24)
    ).eval()
    q = quantized(model, X, None, "native")
    assert "onednn.qlinear_pointwise.binary" not in targets(q)
    assert worst_sqnr_db([q.reference(X)], [q(X)]) > EXACT


def test_both_sides_are_permuted_products():
    a, b = nn.Linear(16, 24), nn.Linear(16, 24)
    model = Function(lambda self, x: self.a(x).permute(0, 2, 1) + self.b(x).permute(0, 2, 1), a=a, b=b)
    q = quantized(model.eval(), X, None, "native")
    assert targets(q).count("onednn.qlinear_pointwise.binary") == 1
    assert worst_sqnr_db([q.reference(X)], [q(X)]) > EXACT
