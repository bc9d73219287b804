"""Norms in single operators become one call with the same numbers; what only looks like one stays."""

import re

import pytest
import torch
from models import Function, quantized
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends import available_backends
from nc.backends.native.passes import finish, kernels
from nc.backends.passes import run_passes
from nc.graph.fx_utils import copy_module
from nc.numerics.metrics import worst_sqnr_db

pytestmark = [
    pytest.mark.isas,
    pytest.mark.skipif(
        bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
    ),
]

G = torch.Generator().manual_seed(0)
X, IMAGE = torch.randn(2, 5, 16, generator=G), torch.randn(2, 8, 9, 7, generator=G)
SIZE = 24
WEIGHT, BIAS = torch.randn(SIZE, generator=G), torch.randn(SIZE, generator=G)
EXACT = 90  # dB
LAYER, RMS = "aten.layer_norm.default", "aten.rms_norm.default"


class Normed(nn.Module):
    """A linear from 16 to 24, or a convolution from 8 to 24 channels, and what follows.

    Some of the results are much larger than others.
    """

    def __init__(self, norm, product=None):
        super().__init__()
        self.product, self.norm = product or nn.Linear(16, SIZE), norm
        self.register_buffer("weight", WEIGHT)
        self.register_buffer("bias", BIAS)
        with torch.no_grad():
            self.product.weight.mul_(
                torch.logspace(-1, 1, SIZE).view(-1, *[1] * (self.product.weight.dim() - 1))
            )

    def forward(self, x):
        return self.norm(self.product(x), self.weight, self.bias)


def channels(x, w, b, eps=1e-6):
    """As in ConvNeXt and Segment Anything."""
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + eps)
    return w[:, None, None] * x + b[:, None, None]


def last(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(1e-5 + (centred * centred).mean((-1,), keepdim=True)) * w + b


def by_variance(x, w, b):
    return w * ((x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()) + b


def rms(x, w, eps=1e-6):
    """As in T5 and Llama."""
    x = x.to(torch.float32)
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def conv(dims=2):
    return (nn.Conv1d, nn.Conv2d)[dims - 1](8, SIZE, 3, padding=1)


FOUND = {
    "channels of images": (Normed(channels, conv()), IMAGE, LAYER),
    "the last dimension": (Normed(last), X, LAYER),
    "by the variance": (Normed(by_variance), X, LAYER),
    "without weights": (Normed(lambda x, w, b: last(x, 1.0, 0.0)), X, LAYER),
    "without a bias": (Normed(lambda x, w, b: last(x, w, x.mean())), X, LAYER),
    "weights as [1, 24, 1, 1]": (
        Normed(lambda x, w, b: w.view(1, -1, 1, 1) * channels(x, torch.ones(SIZE), b * 0), conv()),
        IMAGE,
        LAYER,
    ),
    "channels of sequences": (
        Normed(lambda x, w, b: last(x.transpose(1, 2), w, b).transpose(1, 2), conv(1)),
        IMAGE[..., 0],
        LAYER,
    ),
    "no eps": (Normed(lambda x, w, b: channels(x, w, b, eps=0), conv()), IMAGE, LAYER),
    "rms": (Normed(lambda x, w, b: rms(x, w)), X, RMS),
    "rms, 1 + weights": (Normed(lambda x, w, b: rms(x, 1 + w)), X, RMS),
    "rms with a bias": (Normed(lambda x, w, b: rms(x, w) + b), X, RMS),
    "rms by division": (
        Normed(lambda x, w, b: x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
        X,
        RMS,
    ),
    "rms of channels": (
        Normed(lambda x, w, b: x / torch.sqrt((x**2).mean(1, keepdim=True) + 1e-6), conv()),
        IMAGE,
        RMS,
    ),
    "rms of a module": (Normed(lambda x, w, b: F.rms_norm(x, [SIZE], w)), X, RMS),
}


def targets(q):
    """Operators of the lowered graph."""
    module, _ = copy_module(q.graph.module)
    run_passes(module, (*kernels(q.graph.example), *finish()))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", FOUND)
def test_one_call(name):
    model, x, target = FOUND[name]
    q = quantized(model.eval(), x, None, "native")
    found = targets(q)
    assert refused(q) == []
    assert found.count(target) == 1
    assert not {"aten.mean.dim", "aten.rsqrt.default", "aten.sqrt.default", "aten.var.correction"} & set(
        found
    )
    for given in (x, x[:1], torch.cat([x, 100 * x]), x.repeat(1, 1, 1, 3) if x.dim() == 4 else x):
        assert worst_sqnr_db([q.reference(given)], [q(given)]) > EXACT


def mean(x, dim=-1):
    return x.mean(dim, keepdim=True)


def variance(x, *, unbiased=False):
    return x.var(-1, unbiased=unbiased, keepdim=True)


KEPT = {
    "the unbiased variance": lambda x: (x - mean(x)) / (variance(x, unbiased=True) + 1e-5).sqrt(),
    "eps outside of the root": lambda x: (x - mean(x)) / (variance(x).sqrt() + 1e-5),
    "two dimensions": lambda x: x * torch.rsqrt(mean(x.pow(2), (-1, -2)) + 1e-5),
    "two means": lambda x: (x - mean(x, 1)) * torch.rsqrt(mean((x - mean(x)).pow(2)) + 1e-5),
    "another top": lambda x: x.abs() * torch.rsqrt(mean(x.pow(2)) + 1e-5),
    "the mean stays in": lambda x: x / (variance(x) + 1e-5).sqrt(),
    "upside down": lambda x: torch.sqrt(mean(x.pow(2)) + 1e-5) / x,
    "a cube": lambda x: x * torch.rsqrt(mean(x.abs().pow(3)) + 1e-5),
    "the root is read twice": lambda x: (d := (mean(x.pow(2)) + 1e-5).sqrt()).tanh() + x / d,
    "the square is read twice": lambda x: x / (mean(d := x.pow(2)) + 1e-5).sqrt() + d,
    "eps from the input": lambda x: x * torch.rsqrt(mean(x.pow(2)) + x.abs().max()),
}


def refused(q):
    """Why norms stay in single operators, as the report says it."""
    text = q.report().details.get("not in one call", "")
    assert not text or f"not in one call: {text}" in q.report().summary()
    return re.findall(r"sqrt \(norm: (.*?)\)", text)


def test_a_norm_in_fp64_stays_and_says_so():
    def forward(x, w, b):
        y = x.double()
        return (y * torch.rsqrt(mean(y.pow(2)) + 1e-5)).float()

    q = quantized(Normed(forward).eval(), X, None, "native")
    assert RMS not in targets(q)
    assert refused(q) == ["its input is not fp32"]


@pytest.mark.parametrize("name", KEPT)
def test_what_only_looks_like_a_norm_stays(name):
    q = quantized(Normed(lambda x, w, b: KEPT[name](x)).eval(), X, None, "native")
    assert not {LAYER, RMS} & set(targets(q))
    assert refused(q) == (["its parts are read elsewhere too"] if "read twice" in name else [])
    assert worst_sqnr_db([q.reference(X)], [q(X)]) > EXACT


PARTS = {
    "weights of the other dimension": lambda x, w, b: last(x, w[:5, None], 0.0),
    "weights from the input": lambda x, w, b: last(x, x[..., :1], 0.0),
    "weights that add a dimension": lambda x, w, b: last(x, w.view(1, 1, 1, -1), 0.0),
    "a bias of another shape": lambda x, w, b: rms(x, w) + b[:5, None],
    "the sum of another tensor": lambda x, w, b: last(x, w, x.flip(-1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_follows_and_is_no_weight_stays(name):
    q = quantized(Normed(PARTS[name]).eval(), X, None, "native")
    assert {LAYER, RMS} & set(targets(q))
    assert worst_sqnr_db([q.reference(X)], [q(X)]) > EXACT


def test_not_across_a_change_in_place():
    """The second read of x would see the change."""

    def forward(self, x):
        y = self.linear(x)
        top = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y[..., :3].mul_(2)
        return top * WEIGHT, y

    q = quantized(Function(forward, linear=nn.Linear(16, SIZE)).eval(), X, None, "native")
    assert refused(q) == ["something is changed in place between its parts"]
    for expected, got in zip(q.reference(X), q(X), strict=True):
        assert worst_sqnr_db([expected], [got]) > EXACT


def test_a_quantized_layer_reads_the_codes_of_a_norm():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), Normed(channels, conv()), nn.Conv2d(SIZE, 8, 1)).eval()
    q = quantized(model, IMAGE, nc.StaticQuantConfig(), "native")
    assert worst_sqnr_db([q.reference(IMAGE)], [q(IMAGE)]) > 40  # a code may round otherwise
    assert [op.ran for op in q.report().ops if op.kind == "conv2d"] == ["int8"] * 3


def test_a_free_size_is_not_normalised():
    """`layer_norm` takes the size as a number."""
    model = Function(
        lambda self, x: last(self.linear(x).transpose(1, 2), 1.0, 0.0), linear=nn.Linear(16, SIZE)
    )
    q = quantized(model.eval(), X, None, "native")
    assert LAYER not in targets(q)
    assert refused(q) == ["the size of its dimension is free"]
    for given in (X, torch.randn(2, 9, 16, generator=G)):
        assert worst_sqnr_db([q.reference(given)], [q(given)]) > EXACT
