"""Transposed convolutions in int8 on native.

All sizes, groups and paddings, as plans compute them, against the quantized graph.
"""

import pytest
import torch
from models import WHY_NO_PLANS, Function, assert_all_int8, quantized, worst_db
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig, available_backends, compare, load
from nc.kernels import cpu

WHY = available_backends()["native"]
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(WHY), reason=WHY or "it can run")]

LAYERS = {
    "doubles": lambda: nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1),
    "one more at the end": lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1, output_padding=1),
    "more than it pads": lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1),
    "without a bias": lambda: nn.ConvTranspose2d(8, 5, 2, stride=2, bias=False),
    "in groups": lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, groups=4),
    "depthwise": lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, groups=8),
    "dilated": lambda: nn.ConvTranspose2d(8, 16, 3, dilation=2, padding=2),
    "of two sizes": lambda: nn.ConvTranspose2d(
        8, 16, (3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0)
    ),
    "channels last": lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, groups=2).to(
        memory_format=torch.channels_last
    ),
    "row": lambda: nn.ConvTranspose1d(8, 16, 4, stride=2, padding=1),
    "volume": lambda: nn.ConvTranspose3d(8, 16, 3, stride=2, padding=1, output_padding=1),
}


def shape(layer, batch=2):
    return batch, 8, *(5, 7, 4)[: layer.weight.dim() - 2]


@pytest.mark.parametrize(
    "config", [StaticQuantConfig(), StaticQuantConfig(act_dtype="int8", act_sym=True)], ids=["uint8", "int8"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_alone(name, config):
    layer = LAYERS[name]().eval()
    x = torch.randn(shape(layer))
    q = quantized(layer, x, config, "native")
    assert_all_int8(q.report())
    for batch in (2, 1, 3):
        x = torch.randn(shape(layer, batch))
        assert worst_db([q.reference(x)], [q(x)]) > 80
    assert not compare(q, "reference").disagreements


@pytest.mark.parametrize(
    "act", [F.relu, F.gelu, F.silu, F.relu6, F.hardswish, F.leaky_relu, torch.tanh, torch.sigmoid]
)
def test_between_convolutions(act):
    model = Function(
        lambda self, x: self.c(act(self.b(F.relu(self.a(x))))),
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.ConvTranspose2d(8, 8, 2, stride=2),
        c=nn.Conv2d(8, 4, 3, padding=1),
    )
    x = torch.randn(2, 3, 6, 5)
    q = quantized(model.eval(), x, None, "native")
    report = q.report()
    assert_all_int8(report)
    assert WHY_NO_PLANS or report.quantize_outside <= (1 if act is not torch.sigmoid else 2)
    assert worst_db([q.reference(x)], [q(x)]) > 40
    assert not compare(q, "reference").disagreements


def test_what_has_only_a_reference_kernel_runs_in_fp32_and_says_so():
    layer = nn.ConvTranspose2d(8, 16, 3, stride=3, output_padding=2).eval()
    x = torch.randn(shape(layer))
    q = quantized(layer, x, None, "native")
    assert all(
        op.ran == "int8" or "it runs in fp32, between dequantize and quantize" in op.reason
        for op in q.report().ops
    )
    assert worst_db([q.reference(x)], [q(x)]) > 80


def test_values_are_those_of_exact_arithmetic():
    layer = nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1)
    x = torch.randn(shape(layer))
    q = quantized(layer.eval(), x, StaticQuantConfig(post=()), "native")
    if not cpu.accumulates_wide():
        pytest.skip("weights are rounded otherwise where sums are of 16 bits")
    low, high = x.double().min(), x.double().max()
    s = (high - low) / 255
    zero = torch.round(-low / s)
    codes = ((x.double() / s).round() + zero).clamp(0, 255) - zero
    t = layer.weight.detach().double().abs().amax((0, 2, 3)).view(1, -1, 1, 1) / 127
    weight = (layer.weight.detach().double() / t).round()
    expected = F.conv_transpose2d(codes, weight, None, 2, 1) * s * t + layer.bias.detach().double().view(
        1, -1, 1, 1
    )
    assert worst_db([expected], [q(x).double()]) > 60


def test_without_plans_it_is_computed_in_fp32_and_the_report_says_so(monkeypatch):
    monkeypatch.setenv("NC_ONEDNN", "none")
    layer = LAYERS["doubles"]().eval()
    x = torch.randn(shape(layer))
    q = quantized(layer, x, None, "native")
    (op,) = q.report().not_int8
    assert op.reason.startswith("conv_transpose2d has no oneDNN int8 kernel in torch")
    assert worst_db([q.reference(x)], [q(x)]) > 60


def test_saved_and_loaded(tmp_path):
    layer = LAYERS["in groups"]().eval()
    x = torch.randn(shape(layer))
    q = quantized(layer, x, None, "native")
    q.save(tmp_path / "a")
    again = load(tmp_path / "a", backend="native")
    assert torch.equal(q(x), again(x))
    assert_all_int8(again.report())
