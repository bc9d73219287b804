"""Weights that are rounded by what their operators' outputs lose."""

import dataclasses

import pytest
import torch
from models import graph_of, quantized
from suites.reports import said
from torch import nn

import nc
from nc.algorithms import weight_rounding
from nc.algorithms.weight_rounding import WeightRounding
from nc.api.preparation.captured import PreparedModel
from nc.backends import get_backend
from nc.numerics.weights import pairs_fit
from nc.planning.rules import decide


def smooth(*shape, seed=0):
    """Inputs whose neighbours are alike, so that errors of neighbouring weights can cancel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return torch.cumsum(x, -1) / shape[-1] ** 0.5


LAYERS = {
    "linear": (lambda: nn.Linear(48, 24), (32, 48)),
    "linear of three dimensions": (lambda: nn.Linear(48, 24), (8, 5, 48)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 5, padding=2), (8, 6, 40)),
    "conv1d same": (lambda: nn.Conv1d(6, 8, 4, padding="same", dilation=2), (8, 6, 40)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), (4, 4, 20, 20)),
    "conv2d in groups": (
        lambda: nn.Conv2d(8, 8, 3, groups=4, padding=(2, 1), dilation=(2, 1)),
        (4, 8, 16, 16),
    ),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (4, 8, 16, 16)),
}


def error(q_model, model, x):
    """Of the weights alone: activations stay exact."""
    got = q_model.reference.graph.module
    weight = next(v for name, v in got.named_buffers() if v.dtype is torch.int8)
    (layer,) = model.children()
    scale = next(
        v
        for v in got.buffers()
        if v.dtype is torch.float32
        and v.numel() == len(weight)
        and v.dim() == 1
        and not torch.equal(v, layer.bias)
    )
    rounded = weight.float() * scale.reshape(-1, *[1] * (weight.dim() - 1))
    own = layer.weight.data.clone()
    with torch.no_grad():
        expected = model(x)
        layer.weight.copy_(rounded)
        found = model(x)
        layer.weight.copy_(own)
    return float((found - expected).square().mean())


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_lose_less(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x, other = nn.Sequential(make()).eval(), smooth(*shape), smooth(*shape, seed=1)
    batches = [x, smooth(*shape, seed=2)]

    def converted(post):
        prepared = nc.prepare(model, nc.StaticQuantConfig(post=post), example_inputs=x, backend="reference")
        for batch in batches:
            prepared(batch)
        return nc.convert(prepared)

    plain, rounded = converted(()), converted((WeightRounding(),))
    assert "1 weights rounded" in said(rounded.report())
    assert error(rounded, model, other) < 0.8 * error(plain, model, other)


def test_dynamic_linears_beside_static_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 14, 8)).eval()
    x = smooth(8, 4, 16)
    config = nc.StaticQuantConfig(post=(WeightRounding(),)) + nc.DynamicQuantConfig()
    assert "2 weights rounded" in said(quantized(model, x, config).report())


def test_what_makes_outputs_worse_is_taken_back(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = smooth(64, 32)
    plain = quantized(model, x, nc.StaticQuantConfig(post=()))
    solved = weight_rounding._codes

    def spoiled(weight, held, factor):
        codes = solved(weight, held, factor)
        return codes.flip(1) if len(weight) == 32 else codes

    monkeypatch.setattr(weight_rounding, "_codes", spoiled)
    found = quantized(model, x, nc.StaticQuantConfig(post=(WeightRounding(),)))
    assert "1 weights rounded by what their outputs lose; 1 taken back" in said(found.report())
    codes = [v for v in plain.graph.module.buffers() if v.dtype is torch.int8]
    kept = [v for v in found.graph.module.buffers() if v.dtype is torch.int8]
    assert torch.equal(kept[0], codes[0])
    assert not torch.equal(kept[1], codes[1])


def test_operators_that_read_one_tensor_share_its_factor(monkeypatch):
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.out = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.out(self.query(x) + self.key(x))

    made, factored = [], weight_rounding.factored
    monkeypatch.setattr(weight_rounding, "factored", lambda h: made.append(h.shape) or factored(h))
    quantized(Heads().eval(), smooth(64, 32), nc.StaticQuantConfig(post=(WeightRounding(),)))
    assert made == [(1, 32, 32), (1, 16, 16)]


def test_a_shared_weight_is_solved_once():
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(torch.relu(self.fc(x)))

    found = quantized(Shared().eval(), smooth(64, 32), nc.StaticQuantConfig(post=(WeightRounding(),)))
    assert "1 weights rounded" in said(found.report())


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv3d(2, 2, 3), (2, 2, 5, 5, 5)), (nn.ConvTranspose2d(2, 2, 3), (2, 2, 5, 5))]
)
def test_other_layers_stay(layer, shape):
    found = quantized(
        nn.Sequential(layer).eval(), smooth(*shape), nc.StaticQuantConfig(post=(WeightRounding(),))
    )
    assert "nothing: no int8 operator has a weight" in said(found.report())


def test_codes_of_the_same_data_are_the_same():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), smooth(64, 64)
    found = [quantized(model, x, nc.StaticQuantConfig(post=(WeightRounding(),))) for _ in range(2)]
    first, second = ([v for v in q.graph.module.buffers()] for q in found)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(33, 16), (64, 33)),
        (nn.Conv2d(6, 8, 3, groups=2), (8, 6, 9, 9)),
        (nn.Conv2d(1, 8, 3), (8, 1, 9, 9)),
        (nn.Conv2d(8, 8, 3, groups=8), (8, 8, 9, 9)),
    ],
    ids=["linear", "groups", "one channel", "depthwise"],
)
def test_pairs_of_products_that_16_bits_have_to_hold(layer, shape):
    """As on a CPU with AVX2."""
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.mul_(3).clamp_(-0.3, 0.3)  # many of the largest codes beside each other
    found = rounded_for_avx2(nn.Sequential(layer).eval(), smooth(*shape))
    assert "1 weights rounded" in found.applied[0].text
    (codes,) = (b for b in found.module.buffers() if b.dtype == torch.int8)
    assert pairs_fit(codes, 0, getattr(layer, "groups", 1))


@pytest.mark.parametrize("window", [9, 33])
def test_sound_on_one_channel(window):
    """The windows of waves are nearly one another's multiples: errors of all codes move into one."""
    torch.manual_seed(0)
    time = torch.arange(400) * (0.05 + 0.3 * torch.rand(8, 1, 1))
    found = rounded_for_avx2(nn.Sequential(nn.Conv1d(1, 256, window)).eval(), torch.sin(time))
    assert "1 weights rounded" in found.applied[0].text
    (codes,) = (b for b in found.module.buffers() if b.dtype == torch.int8)
    assert int(codes.abs().max()) == 64


def rounded_for_avx2(model, x):
    config, graph = nc.StaticQuantConfig(), graph_of(model, x)
    kind = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d"}[type(model[0])]
    capabilities = dataclasses.replace(
        get_backend("reference").capabilities(), narrow_sums=frozenset({(kind, "uint8")})
    )
    plan = decide(config, graph, capabilities)
    assert plan["0"].spec.weight.paired
    prepared = PreparedModel(graph, plan, capabilities, "reference", config, (WeightRounding(),))
    prepared(x)
    return prepared.quantized_graph()
