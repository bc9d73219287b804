"""Channels between layers that become alike."""

import copy

import pytest
import torch
from models import quantized, worst_db
from suites.reports import said
from torch import nn

import nc
from nc.algorithms import channel_scaling
from nc.algorithms.channel_scaling import ChannelScaling, best_scale, regions
from nc.capture.capture import capture
from nc.graph.views import Weighted

CONFIG = nc.StaticQuantConfig(pre=(ChannelScaling(),), post=())
PLAIN = nc.StaticQuantConfig(post=())


def uneven(layer, factor=30.0):
    """Make the outputs of a layer very different."""
    with torch.no_grad():
        sizes = torch.logspace(0, -1, len(layer.weight)) ** (torch.tensor(factor).log10())
        layer.weight *= sizes.reshape(-1, *[1] * (layer.weight.dim() - 1))
        if layer.bias is not None:
            layer.bias *= sizes
    return layer


class Block(nn.Module):
    """An inverted residual: its input, and the sum, are tensors of two layers each."""

    def __init__(self, clip=nn.ReLU6):
        super().__init__()
        self.stem = uneven(nn.Conv2d(3, 16, 3))
        self.expand = uneven(nn.Conv2d(16, 32, 1))
        self.depthwise = uneven(nn.Conv2d(32, 32, 3, padding=1, groups=32))
        self.project = uneven(nn.Conv2d(32, 16, 1))
        self.head = nn.Conv2d(16, 8, 1)
        self.clip = clip()

    def forward(self, x):
        x = self.stem(x)
        y = self.clip(self.depthwise(self.clip(self.expand(x))))
        return self.head(x + self.project(y))


def model_of(make=Block):
    torch.manual_seed(0)
    return make().eval()


X = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def found_regions(model, x):
    graph = capture(model, x)
    return [
        (
            {n.meta["operator"] for n in region.producers},
            {n.meta["operator"] for n in region.consumers},
        )
        for region in regions(graph.module)
    ]


def test_layers_that_share_channels_are_found_together():
    assert found_regions(model_of(), X) == [
        ({"stem", "project"}, {"expand", "head"}),
        ({"expand"}, {"depthwise"}),
        ({"depthwise"}, {"project"}),
    ]


class Read(Block):
    """Its channels are read by something that does not scale."""

    def forward(self, x):
        return self.head(torch.tanh(self.stem(x))), self.stem(x)


class Returned(Block):
    def forward(self, x):
        x = self.stem(x)
        return x, self.head(x)


class Twice(Block):
    def forward(self, x):
        return self.head(self.stem(x)) + self.head(self.stem(2 * x))


class Broadcast(Block):
    def forward(self, x):
        x = self.stem(x)
        return self.head(x + x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("make", [Read, Returned, Twice, Broadcast])
def test_other_readers_and_shared_weights_forbid_it(make):
    assert found_regions(model_of(make), X) == []
    report = quantized(model_of(make), X, CONFIG).report()
    assert "0 operators scaled" in said(report)


@pytest.mark.parametrize("clip", [nn.ReLU6, nn.ReLU, lambda: nn.Hardtanh(-1.0, 2.0), nn.Identity])
def test_the_float_model_stays_and_int8_loses_less(clip):
    model = model_of(lambda: Block(clip))
    before = copy.deepcopy(model.state_dict())
    plain, scaled = quantized(model, X, PLAIN), quantized(model, X, CONFIG)
    assert "5 operators scaled; fp32 outputs before and after agree to 1" in said(scaled.report())
    with torch.no_grad():
        expected = model(X)
    assert worst_db(expected, scaled(X)) > worst_db(expected, plain(X)) + 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("algorithm", ["percentile", "mse", "kl", "auto"])
def test_other_ranges_are_found_for_the_scaled_tensors(algorithm):
    model = model_of()
    config = nc.StaticQuantConfig(act_algo=algorithm, pre=(ChannelScaling(),), post=())
    plain = nc.StaticQuantConfig(act_algo=algorithm, post=())
    with torch.no_grad():
        expected = model(X)
    assert (
        worst_db(expected, quantized(model, X, config)(X))
        > worst_db(expected, quantized(model, X, plain)(X)) + 1
    )


def region_and_ranges(model, x, producer):
    graph = capture(model, x)
    region = next(r for r in regions(graph.module) if producer in {n.meta["operator"] for n in r.producers})
    values = {}
    with torch.no_grad():
        from nc.graph.fx_utils import run_with

        run_with(graph.module, (x,), lambda node, value, _: values.setdefault(node, value))
    ranges = {
        node: (values[node].double().amin((0, 2, 3)), values[node].double().amax((0, 2, 3)))
        for node in region.tensors
    }
    return graph.module, region, ranges


def test_in_front_of_a_depthwise_convolution_channels_fill_the_range():
    module, region, ranges = region_and_ranges(model_of(lambda: Block(nn.ReLU)), X, "expand")
    scale = best_scale(module, region, ranges)
    (read,) = region.coded
    sizes = ranges[read][1]
    alive = sizes > 0
    expected = (1.25 * sizes).clamp(max=sizes.max())  # with room for larger values than calibration saw
    torch.testing.assert_close((scale * expected)[alive], sizes.max().expand(32)[alive])


def test_a_channel_that_reaches_a_clip_stays_and_others_do_not_pass_it():
    model = model_of()
    with torch.no_grad():
        model.expand.bias[5] = 20.0  # always above 6
    module, region, ranges = region_and_ranges(model, X, "expand")
    scale = best_scale(module, region, ranges)
    assert scale[5] == 1
    (clipped,) = region.clips
    assert float((ranges[clipped][1] * scale).max()) <= 6 + 1e-9
    assert float(scale.max()) > 2


def test_a_channel_that_reaches_the_lower_limit_of_a_clip_stays():
    model = model_of(lambda: Block(lambda: nn.Hardtanh(-1.0, 4.0)))
    with torch.no_grad():
        model.expand.bias[5], model.expand.bias[7] = -20.0, 3.5  # always below -1; large
    module, region, ranges = region_and_ranges(model, X, "expand")
    scale = best_scale(module, region, ranges)
    assert scale[5] == 1
    (clipped,) = region.clips
    low, high = (end * scale for end in ranges[clipped])
    assert float(low.min()) >= -1 - 1e-9
    assert float(high.max()) <= 4 + 1e-9
    assert float(scale.max()) > 2


def test_the_expected_error_is_that_of_rounding():
    """Against codes and weights that are rounded, for values that are uniform as the estimate has it."""
    torch.manual_seed(0)
    model = nn.Sequential(uneven(nn.Linear(8, 16)), nn.Linear(16, 32)).eval()
    graph = capture(model, torch.randn(64, 8))
    (region,) = regions(graph.module)
    sizes = torch.logspace(0, -2, 16, dtype=torch.float64)
    ranges = {node: (-sizes, sizes) for node in region.tensors}
    x = (2 * torch.rand(20000, 16, dtype=torch.float64) - 1) * sizes
    weight = model[1].weight.detach().double()
    for power in (0.0, 0.5, 1.0):
        scale = (1 / sizes) ** power
        step = float((2 * sizes * scale).max()) / 255
        codes = torch.round(x * scale / step) * step
        scaled = weight / scale
        w_step = scaled.abs().amax(1, keepdim=True) / 127
        rounded = torch.round(scaled / w_step) * w_step
        exact = x @ weight.T
        error = (codes @ rounded.T - exact).square().sum() / exact.square().sum()
        estimate = channel_scaling._expected_error(graph.module, region, ranges, scale)
        assert estimate == pytest.approx(float(error), rel=0.35)


def test_transposed_convolutions_take_no_scale_and_one_scale_per_tensor_is_left_alone():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = uneven(nn.Conv2d(3, 8, 1)), nn.ConvTranspose2d(8, 4, 3)

        def forward(self, x):
            return self.b(self.a(x))

    assert found_regions(model_of(Up), X) == []
    config = nc.StaticQuantConfig(w_granularity="per_tensor", pre=(ChannelScaling(),), post=())
    assert "0 operators scaled" in said(quantized(model_of(), X, config).report())


def test_dead_channels_and_fp32_layers():
    model = model_of()
    with torch.no_grad():
        model.expand.weight[3], model.expand.bias[3] = 0, -1  # gives 0 behind the clip
    assert "5 operators scaled" in said(quantized(model, X, CONFIG).report())
    config = nc.StaticQuantConfig(pre=(ChannelScaling(),), post=()).exclude(
        "depthwise", "project", "head", "expand"
    )
    assert "0 operators scaled" in said(quantized(model_of(), X, config).report())


def test_weights_are_named_in_the_report_of_the_region():
    graph = capture(model_of(), X)
    region = next(iter(regions(graph.module)))
    assert all(Weighted.of(node).weight.op == "get_attr" for node in region.producers)
