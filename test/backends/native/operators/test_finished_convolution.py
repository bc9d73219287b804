"""Convolutions with activations, slopes and numbers behind them that torch's own kernels do not do."""

import pytest
import torch
from models import (
    WHY_NO_PLANS,
    Function,
    assert_all_int8,
    assert_same_but_for_ties,
    call,
    quantized,
    settle,
    worst_db,
)
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig, available_backends, load
from nc.numerics.metrics import sqnr_db

WHY = available_backends()["native"]
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(WHY), reason=WHY or "it can run")]
needs_plans = pytest.mark.skipif(bool(WHY_NO_PLANS), reason=WHY_NO_PLANS or "there are plans")
EXACT = 80  # dB: fp32 in another order

LAYERS = {
    "window": lambda: nn.Conv2d(8, 24, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(24, 24, 3, padding=1, groups=24),
    "pointwise": lambda: nn.Conv2d(8, 24, 1),
    "in groups": lambda: nn.Conv2d(8, 24, 3, stride=2, groups=4, bias=False),
    "row": lambda: nn.Conv1d(8, 24, 3, padding=1),
    "volume": lambda: nn.Conv3d(8, 24, 3, padding=1),
}
TAILS = {
    "numbers": lambda self, y: F.hardswish(y) * 1.38 + 0.59,
    "a negative factor": lambda self, y: 0.25 - F.relu(y) * 0.7,
    "twice": lambda self, y: (F.silu(y) * 2 - 0.5) / 3,
    "a parameter of one element": lambda self, y: self.scale * F.hardswish(y) + self.bias,
    "leaky relu": lambda self, y: F.leaky_relu(y, 0.2),
    "leaky relu and numbers": lambda self, y: F.leaky_relu(y, 0.2) * 3 + 1,
    "one slope": lambda self, y: F.prelu(y, self.scale),
    "slopes": lambda self, y: F.prelu(y, self.slopes),
    "slopes and numbers": lambda self, y: F.prelu(y, self.slopes) * 0.5 - 0.1,
    "gelu": lambda self, y: F.gelu(y) + 0.3,
}


class Tailed(nn.Module):
    """A layer, what follows it, and a padded convolution, which reads that as codes; or nothing."""

    def __init__(self, layer, tail, last=True):
        super().__init__()
        dims = layer.weight.dim() - 2
        self.layer, self.tail = layer, tail
        self.last = (
            (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](24, 8, 3, padding=1) if last else nn.Identity()
        )
        self.scale, self.bias = nn.Parameter(torch.tensor([1.38])), nn.Parameter(torch.tensor([0.59]))
        self.slopes = nn.Parameter(torch.linspace(-0.5, 1.5, 24))

    def forward(self, x):
        return self.last(self.tail(self, self.layer(x)))


def inputs(layer, batch=2):
    return torch.randn(batch, layer.weight.shape[1] * layer.groups, *(9, 7, 5)[: layer.weight.dim() - 2])


CASES = {(name, "window", True) for name in TAILS} | {
    (tail, name, last)
    for tail in ("a negative factor", "slopes and numbers")
    for name in LAYERS
    for last in (True, False)
}


@needs_plans
@pytest.mark.parametrize(("tail", "name", "last"), sorted(CASES))
def test_one_call(tail, name, last):
    """Read as codes (`last`), or returned in fp32."""
    layer = LAYERS[name]()
    model, x = Tailed(layer, TAILS[tail], last).eval(), inputs(layer)
    q = quantized(model, x, StaticQuantConfig(), "native")
    assert_all_int8(q.report())
    assert "computed by torch" not in q.report().details
    assert sqnr_db(call(model, x), call(q, x)) > 25
    others = inputs(layer, 12)
    assert_same_but_for_ties(q.reference(others), q(others))


@needs_plans
def test_after_a_save(tmp_path):
    layer = nn.Conv2d(8, 24, 3)
    x = inputs(layer)
    q = quantized(Tailed(layer, TAILS["slopes and numbers"]).eval(), x, StaticQuantConfig(), "native")
    q.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(x), q(x))


@pytest.mark.parametrize("tail", ["numbers", "slopes", "leaky relu and numbers"])
def test_without_plans(tail, monkeypatch):
    monkeypatch.setattr("nc.backends.native.planned.why_not", lambda module: "not in this test")
    layer = nn.Conv2d(8, 24, 3)
    x = inputs(layer)
    q = quantized(Tailed(layer, TAILS[tail]).eval(), x, StaticQuantConfig(), "native")
    assert worst_db([q.reference(x)], [q(x)]) > EXACT


def targets(q):
    return [str(node.target) for node in q.graph.module.graph.nodes if node.op == "call_function"]


FOLDED = {
    "a constant for each channel": lambda self, x: self.b(F.relu(self.a(x) * self.channels + self.channels)),
    "before a batch norm": lambda self, x: self.b(F.relu(self.norm(self.a(x) * 2 + 1))),
    "behind a batch norm": lambda self, x: self.b(F.relu(self.norm(self.a(x)) * self.channels - 3)),
    "in front of a pointwise one": lambda self, x: self.one(F.hardswish(self.a(x)) * 1.38 + 0.59),
    "in front of two": lambda self, x: (lambda y: self.one(y) + self.one2(y))(F.relu(self.a(x)) / 3 - 1),
    "a factor in front of a padded one": lambda self, x: self.b(F.relu(self.a(x)) * 0.3),
    "a difference": lambda self, x: self.b(F.relu(2 - self.a(x))),
    "an alpha": lambda self, x: self.b(F.relu(torch.add(self.a(x), self.channels, alpha=3))),
    "a factor of a sum": lambda self, x: self.b(F.relu(torch.add(self.a(x), self.c(x), alpha=3))),
    "a factor of a difference": lambda self, x: self.b(F.relu(torch.rsub(self.a(x), self.c(x), alpha=-2))),
    "a transposed one": lambda self, x: self.one(F.relu(self.up(F.relu(self.a(x))) * 0.3 + self.channels)),
}
SUMS = {"a factor of a sum": {"add"}, "a factor of a difference": {"rsub"}, "in front of two": {"add"}}
KEPT = {
    "a term in front of a padded one": lambda self, x: self.b(F.relu(self.a(x)) + 0.59),
    "far from 0": lambda self, x: self.one(self.a(x).cumsum(1) - 1000),
    "of places": lambda self, x: self.b(F.relu(self.a(x) * self.places)),
    "read elsewhere": lambda self, x: (lambda y: self.b(F.relu(y * 2)) + y[:, :8])(self.a(x)),
    "changed between": lambda self, x: (lambda h: (h * 2, h.add_(1))[0])(F.relu(self.a(x))).mul(1) + x.sum(),
}


def folding(forward):
    return settle(
        Function(
            forward,
            a=nn.Conv2d(8, 24, 3, padding=1),
            b=nn.Conv2d(24, 8, 3, padding=1),
            c=nn.Conv2d(8, 24, 1),
            one=nn.Conv2d(24, 8, 1),
            one2=nn.Conv2d(24, 8, 1, bias=False),
            up=nn.ConvTranspose2d(24, 24, 2, groups=1),
            norm=nn.BatchNorm2d(24),
            channels=nn.Parameter(torch.randn(24, 1, 1)),
            places=nn.Parameter(torch.randn(9, 7)),
        )
    ).eval()


@pytest.mark.parametrize("name", [*FOLDED, *KEPT])
def test_numbers_in_weights_are_exact(name):
    """Against the model in float64; zeros of padding are around what the numbers give."""
    model, x = folding((FOLDED | KEPT)[name]), torch.randn(2, 8, 9, 7)
    q = quantized(model, x, StaticQuantConfig(act_dtype="fp32", w_dtype="fp32"))
    names = {target.split(".")[1] for target in targets(q)} & {"mul", "div", "add", "sub", "rsub"}
    assert bool(names) == (name in KEPT) if name not in SUMS else names == SUMS[name]
    assert not any(node.kwargs.get("alpha", 1) != 1 for node in q.graph.module.graph.nodes)
    with torch.no_grad():
        expected = model.double()(x.double())
    assert sqnr_db(expected, q(x).double()) > 110


class Numbers(nn.Module):
    """`scale * x + bias`, as PP-LCNetV3 learns them."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor([1.38])), nn.Parameter(torch.tensor([0.59]))

    def forward(self, x):
        return self.scale * x + self.bias


def learned(inputs, outputs, size, stride=1, groups=1):
    norm = nn.BatchNorm2d(outputs)
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm, Numbers(), *([nn.Hardswish(), Numbers()] if stride != 2 else []))


class Excite(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


def block(inputs, outputs, size, stride=1, excite=False):
    between = [Excite(inputs)] if excite else []
    return [learned(inputs, inputs, size, stride, inputs), *between, learned(inputs, outputs, 1)]


@needs_plans
def test_text_recognition():
    """PP-OCR's network in small: nothing between its products is computed in fp32 or by torch but the SE."""
    model = settle(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            *block(16, 32, 3),
            *block(32, 32, 3, 2),
            *block(32, 64, 5, excite=True),
            *block(64, 64, 5),
            nn.AvgPool2d((4, 1)),
            nn.Flatten(2),
            Function(lambda self, x: self.head(x.transpose(1, 2)), head=nn.Linear(64, 20)),
        )
    ).eval()
    x = torch.randn(2, 3, 16, 64)
    q = quantized(model, x, StaticQuantConfig(), "native")
    runs = {(op.kind, op.ran) for op in q.report().ops}
    assert {("conv2d", "int8"), ("linear", "int8"), ("hardswish", "int8")} <= runs
    assert not {("conv2d", "fp32"), ("linear", "fp32"), ("hardswish", "fp32")} & runs
    assert "computed by torch" not in q.report().details
    other = torch.randn(3, 3, 16, 48)
    assert worst_db([q.reference(other)], [q(other)]) > 40
    assert sqnr_db(call(model, other), call(q, other)) > 20


def prelus(channels):
    layer = nn.PReLU(channels)
    nn.init.uniform_(layer.weight, -0.5, 0.5)
    return layer


@needs_plans
def test_super_resolution():
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        prelus(24),
        nn.Conv2d(24, 24, 3, padding=1),
        prelus(24),
        nn.Conv2d(24, 12, 3, padding=1),
        nn.PixelShuffle(2),
    ).eval()
    x = torch.randn(2, 3, 12, 12)
    q = quantized(model, x, StaticQuantConfig(), "native")
    runs = {op.operator: (op.ran, op.reason) for op in q.report().ops}
    assert runs["1"] == ("int8", "fused into 0")
    assert_all_int8(q.report())
    assert sqnr_db(call(model, x), call(q, x)) > 30


@needs_plans
def test_face_embedding():
    """As MobileFaceNet: depthwise convolutions between PReLUs, and additions."""

    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(16, 32, 1, bias=False),
                nn.BatchNorm2d(32),
                prelus(32),
                nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
                nn.BatchNorm2d(32),
                prelus(32),
                nn.Conv2d(32, 16, 1, bias=False),
                nn.BatchNorm2d(16),
            )

        def forward(self, x):
            return x + self.layers(x)

    model = settle(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), prelus(16), Bottleneck(), Bottleneck(), nn.Conv2d(16, 32, 8, groups=16)
        )
    ).eval()
    x = torch.randn(2, 3, 16, 16)
    q = quantized(model, x, StaticQuantConfig(), "native")
    runs = {(op.kind, op.ran) for op in q.report().ops}
    assert ("prelu", "int8") in runs
    assert not {("prelu", "fp32"), ("conv2d", "fp32")} & runs
    assert sqnr_db(call(model, x), call(q, x)) > 20
