"""Equalization and bias absorption.

The function stays, ranges become equal, and what can't be equalized is left alone.
"""

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Function, ResidualCNN, assert_close, graph_of, run_graph, settle
from torch import nn
from torch.nn import functional as F

import nc
from nc.algorithms.bias_absorption import BiasAbsorption
from nc.algorithms.equalization import LARGEST_SCALE, Equalization, equalizing_scale, pairs
from nc.capture.capture import capture
from nc.errors import ConfigError
from nc.graph.catalogue import WEIGHTED, kind_of_node
from nc.numerics import affine
from nc.numerics.metrics import sqnr_db

#: Enough passes for a chain to settle.
SETTLED = Equalization(iterations=1000, tolerance=1e-14)
IMAGE = (2, 3, 9, 9)


def layers(graph):
    return {n.meta["operator"]: n for n in graph.module.graph.nodes if kind_of_node(n) in WEIGHTED}


def constant(graph, layer, argument):
    node = layers(graph)[layer].args[argument]
    return getattr(graph.module, node.target)


def weights(graph):
    return {name: constant(graph, name, 1) for name in layers(graph)}


def fresh(model):
    """A copy whose parameters are drawn anew, from the test's seed."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return settle(model).eval()


def uneven(model):
    """A fresh copy with channels of different ranges in every layer."""
    model = fresh(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 10 ** torch.empty(parameter.shape[:2] + (1,) * (parameter.dim() - 2)).uniform_(
                -1, 1
            )
    return model


def ranges(graph, layer, size=9):
    """(r of each output, r of each input) by what the layer answers to a unit impulse at each input, whatever its weight's layout is."""
    node = layers(graph)[layer]
    weight = constant(graph, layer, 1)
    dims = weight.dim() - 2
    channels = int(node.args[0].meta["val"].shape[1 - weight.dim()])
    impulses = torch.zeros(channels, channels, *[size] * dims, dtype=weight.dtype)
    impulses[(range(channels), range(channels), *[size // 2] * dims)] = 1
    answer = node.target(impulses, weight, None, *node.args[3:]).abs()
    answer = answer.reshape(*answer.shape[:2], -1).amax(2)
    return answer.amax(0), answer.amax(1)


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, **options)


def net(*modules):
    return nn.Sequential(*modules)


RELU = nn.ReLU()

#: name → (network, input shape, operators whose weights change)
CASES = {
    "linear": (net(nn.Linear(6, 8), RELU, nn.Linear(8, 4)), (5, 6), "0 2"),
    "linear of tokens": (net(nn.Linear(6, 8), RELU, nn.Linear(8, 4)), (2, 5, 6), "0 2"),
    "linear of one": (net(nn.Linear(6, 8), RELU, nn.Linear(8, 4)), (6,), "0 2"),
    "no bias": (net(nn.Linear(6, 8, bias=False), RELU, nn.Linear(8, 4, bias=False)), (5, 6), "0 2"),
    "no activation": (net(conv(3, 8), nn.Identity(), nn.Dropout(), conv(8, 4)), IMAGE, "0 3"),
    "leaky_relu": (net(conv(3, 8), nn.LeakyReLU(0.3), conv(8, 4)), IMAGE, "0 2"),
    "prelu": (net(conv(3, 8), nn.PReLU(8), conv(8, 4)), IMAGE, "0 2"),
    "batch norms": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, conv(8, 4), nn.BatchNorm2d(4)), IMAGE, "0 3"),
    "one image": (net(conv(3, 8), RELU, conv(8, 4)), IMAGE[1:], "0 2"),
    "conv1d": (net(nn.Conv1d(3, 8, 3), RELU, nn.Conv1d(8, 4, 3)), (2, 3, 9), "0 2"),
    "conv3d": (net(nn.Conv3d(3, 8, 3), RELU, nn.Conv3d(8, 4, 3)), (2, 3, 7, 7, 7), "0 2"),
    "depthwise": (net(conv(3, 8), RELU, conv(8, 8, groups=8), RELU, conv(8, 4, 1)), IMAGE, "0 2 4"),
    "depthwise with multiplier": (net(conv(3, 8), RELU, conv(8, 16, groups=8), RELU, conv(16, 4, 1)), IMAGE, "0 2 4"),
    "grouped": (net(conv(3, 8), RELU, conv(8, 12, groups=4), RELU, conv(12, 6, groups=2)), IMAGE, "0 2 4"),
    "transposed": (net(nn.ConvTranspose2d(3, 8, 3), RELU, nn.ConvTranspose2d(8, 4, 3)), IMAGE, "0 2"),
    "grouped transposed": (
        net(nn.ConvTranspose2d(3, 8, 3), RELU, nn.ConvTranspose2d(8, 12, 3, groups=4), RELU, conv(12, 6, groups=2)),
        IMAGE,
        "0 2 4",
    ),
}  # fmt: skip
#: The same behind other operators, where an impulse can't measure the second layer.
FURTHER = {
    "pools": (net(conv(3, 8), RELU, nn.MaxPool2d(2), conv(8, 6, 1), nn.AvgPool2d(3, 1, 1), conv(6, 4, 1)), IMAGE, "0 3 5"),
    "upsample": (net(conv(3, 8), RELU, nn.Upsample(scale_factor=2), conv(8, 4)), IMAGE, "0 3"),
    "classifier": (net(conv(3, 8), RELU, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), IMAGE, "0 4"),
    "flattened blocks": (net(conv(3, 8), RELU, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 6), RELU, nn.Linear(6, 4)), IMAGE, "0 4 6"),
    "mean": (Function(lambda m, x: m.b(F.relu(m.a(x)).mean((2, 3))), a=conv(3, 8), b=nn.Linear(8, 4)), IMAGE, "a b"),
    "mean kept": (Function(lambda m, x: m.b(F.relu(m.a(x)).mean((-2, -1), True)), a=conv(3, 8), b=conv(8, 4, 1)), IMAGE, "a b"),
    "tokens in a row": (
        Function(lambda m, x: m.b(F.relu(m.a(x)).reshape(10, 8)), a=nn.Linear(6, 8), b=nn.Linear(8, 4)),
        (2, 5, 6),
        "a b",
    ),
    "strided": (net(conv(3, 8, stride=2, padding=1), RELU, conv(8, 4, stride=2, padding=1)), IMAGE, "0 2"),
    "residual": (ResidualCNN(), IMAGE, "conv1 conv2"),
}  # fmt: skip


def check_function(case, equalization):
    """Equalize a network in float64 and compare it with the original; its graph."""
    model, shape, changed = {**CASES, **FURTHER}[case]
    model, x = uneven(model).double(), torch.randn(shape).double()
    graph = graph_of(model, x)
    before = weights(graph)
    assert equalization.change(graph.module) == tuple(changed.split())
    assert_close(model(x), run_graph(graph, x), 1e-12)
    after = weights(graph)
    assert [name for name in before if not torch.equal(before[name], after[name])] == changed.split()
    used = {n.target for n in graph.module.graph.nodes if n.op == "get_attr"}
    assert used == {name for name, _ in graph.module.named_buffers(remove_duplicate=False)}
    return graph


@pytest.mark.parametrize("case", FURTHER)
def test_the_function_stays(case):
    check_function(case, Equalization())


@pytest.mark.parametrize("case", CASES)
def test_the_function_stays_and_ranges_become_equal(case):
    graph = check_function(case, SETTLED)
    found = pairs(graph.module)
    assert len(found) == len(layers(graph)) - 1
    for pair in found:
        outputs, _ = ranges(graph, pair.first.meta["operator"])
        _, inputs = ranges(graph, pair.second.meta["operator"])
        assert torch.allclose(outputs, inputs, rtol=1e-6)


def test_one_pass_gives_the_geometric_mean():
    model = net(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data, model[0].bias.data = (
        torch.tensor([[4.0, -16.0], [1.0, 0.5]]),
        torch.tensor([8.0, 3.0]),
    )
    model[2].weight.data = torch.tensor([[1.0, -4.0]])
    graph = graph_of(model, torch.randn(3, 2))
    assert Equalization(iterations=1).change(graph.module) == ("0", "2")
    assert constant(graph, "0", 1).tolist() == [[1.0, -4.0], [2.0, 1.0]]
    assert constant(graph, "0", 2).tolist() == [2.0, 6.0]
    assert constant(graph, "2", 1).tolist() == [[4.0, -2.0]]


def test_a_flattened_channel_is_a_block_of_inputs():
    graph = graph_of(
        uneven(net(conv(3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))),
        torch.randn(IMAGE),
    )
    Equalization().change(graph.module)
    first, second = constant(graph, "0", 1), constant(graph, "4", 1)
    assert torch.allclose(first.abs().amax((1, 2, 3)), second.view(5, 4, 4).abs().amax((0, 2)), rtol=1e-6)


def test_more_passes_settle_a_chain():
    graph = graph_of(
        uneven(net(conv(3, 8), nn.ReLU(), conv(8, 8, groups=8), nn.ReLU(), conv(8, 4, 1))), torch.randn(IMAGE)
    )

    def ranges_after(**options):
        copied = copy.deepcopy(graph)
        Equalization(**options).change(copied.module)
        return [w.abs().flatten(1).amax(1) for w in weights(copied).values()][:2]

    def spread(dense, depthwise):
        return (dense / depthwise).log().abs().max()

    assert spread(*ranges_after(iterations=20)) < 1e-4 < spread(*ranges_after(iterations=1))
    once, ended = ranges_after(iterations=1), ranges_after(iterations=20, tolerance=1e9)
    assert all(map(torch.equal, once, ended))


# ---- what is left alone ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def _two(function, **options):
    return Function(function, a=conv(3, 8), b=conv(8, 4, **options))


def _linears(function, second=None):
    return Function(function, a=nn.Linear(6, 8), b=second or nn.Linear(8, 4))


LEFT_ALONE = {
    "clamp": (_two(lambda m, x: m.b(m.a(x).clamp(max=1.0))), IMAGE),
    "two readers": (_two(lambda m, x: (lambda y: m.b(y).sum() + y.sum())(F.relu(m.a(x)))), IMAGE),
    "two readers before the relu": (_two(lambda m, x: (lambda y: m.b(F.relu(y)).sum() + y.sum())(m.a(x))), IMAGE),
    "an output": (_two(lambda m, x: (lambda y: (m.b(y), y))(F.relu(m.a(x)))), IMAGE),
    "an output twice": (Function(lambda m, x: (lambda y: (y, y))(F.relu(m.a(x))), a=conv(3, 8)), IMAGE),
    "an addition": (_two(lambda m, x: m.b(F.relu(m.a(x)) + x.mean())), IMAGE),
    "one layer twice": (Function(lambda m, x: m.a(F.relu(m.a(x))), a=nn.Linear(6, 6)), (5, 6)),
    "a tied weight": (Tied(), (5, 6)),
    "a weight read elsewhere": (_linears(lambda m, x: m.b(F.relu(m.a(x))) + x.sum() * m.b.weight.sum()), (5, 6)),
    "a computed bias": (_linears(lambda m, x: m.b(F.relu(F.linear(x, m.a.weight, m.a.bias + 1)))), (5, 6)),
    "a computed weight": (_linears(lambda m, x: m.b(F.relu(F.linear(x, m.a.weight + x.sum())))), (5, 6)),
    "its bias": (Function(lambda m, x: (lambda y: F.linear(y, m.b.weight, y[0]))(m.a(x)), a=nn.Linear(6, 4), b=nn.Linear(4, 4)), (5, 6)),
    "a linear over the width": (net(conv(3, 8), nn.ReLU(), nn.Linear(7, 4)), IMAGE),
    "a pool over channels": (net(nn.Linear(6, 8), nn.ReLU(), nn.AvgPool1d(2), nn.Linear(4, 4)), (2, 5, 6)),
    "slopes": (Function(lambda m, x: m.b(F.prelu(x, m.a(x.mean(0)))), a=nn.Linear(6, 6), b=nn.Linear(6, 4)), (5, 6)),
    "a mean over channels": (Function(lambda m, x: m.b(m.a(x).mean(1, True)), a=conv(3, 8), b=conv(1, 4)), IMAGE),
    "heads": (_linears(lambda m, x: m.b(F.relu(m.a(x)).reshape(5, 2, 4)), nn.Linear(4, 4)), (5, 6)),
    "channels moved": (_two(lambda m, x: m.b(F.relu(m.a(x)).reshape(2, 7, 8, 7).transpose(1, 2))), IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_would_change_the_function_is_left_alone(case):
    model, shape = LEFT_ALONE[case]
    graph = graph_of(uneven(model), torch.randn(shape))
    before, code = dict(graph.module.named_buffers()), graph.module.code
    assert Equalization().change(graph.module) == ()
    assert graph.module.code == code
    assert all(getattr(graph.module, name) is value for name, value in before.items())


def test_what_is_not_homogeneous_is_left_alone():
    functions = (
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.GELU(),
        nn.SiLU(),
        nn.ELU(),
        nn.Sigmoid(),
        nn.Hardswish(),
        nn.Softplus(),
        nn.GroupNorm(2, 8),
    )
    branches = nn.ModuleList(net(conv(3, 8), function, conv(8, 4)) for function in (*functions, nn.ReLU()))
    graph = graph_of(
        Function(lambda m, x: [branch(x) for branch in m.branches], branches=branches), torch.randn(IMAGE)
    )
    assert Equalization().change(graph.module) == ("branches.9.0", "branches.9.2")


def test_half_precision_is_left_alone():
    graph = graph_of(
        uneven(net(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))).bfloat16(), torch.randn(5, 6).bfloat16()
    )
    assert Equalization().change(graph.module) == ()


def test_equal_ranges_need_no_change():
    model = net(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].weight.data, model[2].weight.data = torch.eye(4), -torch.eye(4)
    assert Equalization().change(graph_of(model, torch.randn(2, 4)).module) == ()


def test_channels_without_weights_keep_their_scale():
    model = uneven(net(conv(3, 8), nn.ReLU(), conv(8, 4))).double()
    model[0].weight.data[1], model[2].weight.data[:, 2] = 0, 0
    x = torch.randn(IMAGE).double()
    graph = graph_of(model, x)
    Equalization().change(graph.module)
    assert_close(model(x), run_graph(graph, x), 1e-12)
    kept = (constant(graph, "0", 1) == model[0].weight).flatten(1).all(1) & (
        constant(graph, "0", 2) == model[0].bias
    )
    assert kept.tolist() == [i in (1, 2) for i in range(8)]
    assert (constant(graph, "2", 1) == model[2].weight).transpose(0, 1).flatten(1).all(
        1
    ).tolist() == kept.tolist()


def test_dead_channels_are_not_blown_up():
    model = net(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].weight.data[0] = 1e-30
    graph = graph_of(model, torch.randn(5, 6))
    Equalization().change(graph.module)
    assert constant(graph, "0", 2)[0] == pytest.approx(LARGEST_SCALE * model[0].bias[0].item(), rel=1e-6)
    assert torch.allclose(constant(graph, "2", 1)[:, 0] * LARGEST_SCALE, model[2].weight[:, 0], rtol=1e-6)


@pytest.mark.parametrize("share", [True, False])
def test_the_users_model_stays_as_it_is(share):
    for model, x in (
        (
            uneven(
                net(conv(3, 8), nn.ReLU(), conv(8, 8, groups=8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4))
            ),
            torch.randn(IMAGE),
        ),
        (uneven(net(conv(3, 8), nn.ReLU(), conv(8, 4))).double(), torch.randn(IMAGE).double()),
        (
            uneven(net(conv(3, 8), nn.ReLU(), conv(8, 4))).to(memory_format=torch.channels_last),
            torch.randn(IMAGE),
        ),
    ):
        before = {k: v.clone() for k, v in model.eval().state_dict().items()}
        graph = capture(model, x, share_weights=share)
        assert Equalization().change(graph.module)[0] == "0"
        assert_close(model(x), run_graph(graph, x), 1e-5)
        BiasAbsorption(n_sigma=0).change(graph.module)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_shared_bias_becomes_two():
    model = uneven(net(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))).double()
    model[2].bias = model[0].bias
    x = torch.randn(5, 6).double()
    graph = capture(model.eval(), x, share_weights=True)
    Equalization().change(graph.module)
    assert_close(model(x), run_graph(graph, x), 1e-12)


# ---- properties ----

POSITIVE = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6))
def test_the_scale_makes_both_ranges_their_geometric_mean(channels):
    r1, r2 = torch.tensor(channels, dtype=torch.float64).unbind(1)
    scale = equalizing_scale(r1.view(1, -1, 1), r2.view(1, 1, -1))
    assert torch.allclose(r1 * scale, r2 / scale, rtol=1e-12)
    assert torch.allclose(r1 * scale, (r1 * r2).sqrt(), rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_the_scale_of_no_range_is_one(value):
    odd, even = torch.tensor([value, 4.0]).double(), torch.tensor([1.0, 1.0]).double()
    assert equalizing_scale(odd.view(1, 2, 1), even.view(1, 1, 2)).tolist() == [1.0, 0.5]
    assert equalizing_scale(even.view(1, 2, 1), odd.view(1, 1, 2)).tolist() == [1.0, 2.0]


@functools.cache
def small_graph():
    return graph_of(net(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5)), torch.ones(2, 6))


@given(st.lists(POSITIVE, min_size=4, max_size=4))
def test_planted_scales_are_taken_out(scales):
    """Of all networks that differ in nothing but the scales of channels, one is equalized."""
    scales = torch.tensor(scales)
    plain, scaled = copy.deepcopy(small_graph()), copy.deepcopy(small_graph())
    first, _, second = (n for n in scaled.module.graph.nodes if n.op == "call_function")
    for node, factor in (
        (first.args[1], scales[:, None]),
        (first.args[2], scales),
        (second.args[1], 1 / scales),
    ):
        setattr(scaled.module, node.target, getattr(scaled.module, node.target) * factor)
    for graph in (plain, scaled):
        Equalization().change(graph.module)
    for layer, argument in (("0", 1), ("0", 2), ("2", 1)):
        assert torch.allclose(constant(plain, layer, argument), constant(scaled, layer, argument), rtol=1e-5)


# ---- what it is for ----


def planted_mobilenet():
    """Depthwise blocks whose channels are scaled by 10^-2 to 10^2, and back by the next layer.

    The same function as without.
    """
    model = net(conv(3, 16), nn.ReLU(), conv(16, 16, groups=16), nn.ReLU(), conv(16, 16, 1), nn.ReLU(), conv(16, 16, groups=16),
                nn.ReLU(), conv(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))  # fmt: skip
    chain = [m for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    for first, second in zip(chain, chain[1:], strict=False):
        scale = 10 ** torch.empty(16).uniform_(-2, 2)
        first.weight.data *= scale.view(-1, 1, 1, 1)
        first.bias.data *= scale
        shape = (-1, 1, 1, 1) if second.weight.shape[1] == 1 else (1, -1, 1, 1)[: second.weight.dim()]
        second.weight.data /= scale.view(shape)
    return model.eval()


def rounded(graph):
    """The graph with 8-bit weights, one scale per tensor."""
    graph = copy.deepcopy(graph)
    for node in layers(graph).values():
        weight = getattr(graph.module, node.args[1].target)
        scale, _ = affine.choose_qparams(*weight.aminmax(), quant_min=-127, quant_max=127, symmetric=True)
        setattr(
            graph.module,
            node.args[1].target,
            affine.dequantize(affine.quantize(weight, scale, 0, -127, 127, dtype=torch.int8), scale, 0),
        )
    return graph


def test_one_scale_per_tensor_fits_equalized_weights():
    """Seeds 0 to 9: 2.3 to 12.2 dB before, 51.4 to 56.6 dB after."""
    model, x = planted_mobilenet(), torch.randn(8, 3, 12, 12)
    graph = graph_of(model, x)
    expected = model(x).detach()
    before = sqnr_db(expected, run_graph(rounded(graph), x))
    assert Equalization().change(graph.module) == ("0", "2", "4", "6", "8", "11")
    assert_close(expected, run_graph(graph, x), 1e-5)
    after = sqnr_db(expected, run_graph(rounded(graph), x))
    assert before < 20
    assert after > 45


# ---- bias absorption ----


def high(model, mean=6.0):
    """Batch norms with means far above their standard deviations, but for the last channel of each."""
    model = fresh(model)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.bias.data += mean
            module.bias.data[-1] = 0.5
            module.weight.data[0] *= -1
    return model.double()


#: name → (first layer, batch norm, second layer, input shape)
ABSORBING = {
    "conv": (conv(3, 8), nn.BatchNorm2d(8), conv(8, 4), IMAGE),
    "no bias": (conv(3, 8, bias=False), nn.BatchNorm2d(8), conv(8, 4, bias=False), IMAGE),
    "depthwise": (conv(3, 8), nn.BatchNorm2d(8), conv(8, 16, groups=8), IMAGE),
    "grouped": (conv(3, 8), nn.BatchNorm2d(8), conv(8, 6, groups=2, stride=2, dilation=2), IMAGE),
    "conv1d": (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 3), (2, 3, 9)),
    "transposed": (nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8), conv(8, 4), IMAGE),
    "linear": (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), (5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("case", ABSORBING)
def test_absorption_is_exact_above_c(case):
    first, norm, second, shape = ABSORBING[case]
    model, x = high(net(first, norm, RELU, second)), torch.randn(shape).double()
    first, norm, *_ = model
    norm.running_mean[:], norm.running_var[:] = (
        first(x).detach().transpose(0, 1).flatten(1).mean(1),
        100.0,
    )  # nothing is below c
    plain = graph_of(model, x)
    equalized = copy.deepcopy(plain)
    assert Equalization().change(equalized.module) == ("0", "3")
    scale = constant(equalized, "0", 2) / constant(plain, "0", 2)
    c = (norm.bias - 3 * norm.weight.abs()).clamp(min=0)
    assert (c > 0).tolist() == [True] * 7 + [False]
    for graph, expected in ((plain, c), (equalized, c * scale)):
        before = constant(graph, "0", 2)
        assert BiasAbsorption().change(graph.module) == ("0", "3")
        assert torch.allclose(before - constant(graph, "0", 2), expected)
        assert_close(model(x), run_graph(graph, x), 1e-12)
        assert BiasAbsorption().change(graph.module) == ()  # nothing is left


def test_absorption_is_an_approximation_below_c():
    """c = 2, pre-activations x: relu(x - 2) + 2 differs from relu(x) where x < 2."""
    model = net(nn.Linear(1, 1), nn.BatchNorm1d(1, eps=0.0), nn.ReLU(), nn.Linear(1, 1)).eval()
    for parameter, value in zip(model.parameters(), (1.0, 0.0, 1.0, 5.0, 2.0, 1.0), strict=True):
        parameter.data.fill_(value)
    x = torch.tensor([[-10.0], [-4.0], [-3.0], [0.0], [7.0]])
    graph = graph_of(model, x)
    assert BiasAbsorption().change(graph.module) == ("0", "3")
    assert constant(graph, "0", 2).item() == 3.0
    assert constant(graph, "3", 2).item() == 5.0
    assert model(x).flatten().tolist() == [1.0, 3.0, 5.0, 11.0, 25.0]
    assert run_graph(graph, x).flatten().tolist() == [5.0, 5.0, 5.0, 11.0, 25.0]


NOT_ABSORBING = {
    "padding": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, conv(8, 4, padding=1)), IMAGE),
    "padding on one axis": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, conv(8, 4, padding=(0, 1))), IMAGE),
    "padding as it comes": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, conv(8, 4, 2, padding="same")), IMAGE),
    "a transposed reader": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, nn.ConvTranspose2d(8, 4, 3)), IMAGE),
    "leaky_relu": (net(conv(3, 8), nn.BatchNorm2d(8), nn.LeakyReLU(), conv(8, 4)), IMAGE),
    "a padded pool": (net(conv(3, 8), nn.BatchNorm2d(8), RELU, nn.AvgPool2d(3, 1, 1), conv(8, 4)), IMAGE),
    "no batch norm": (net(conv(3, 8), RELU, conv(8, 4)), IMAGE),
    "no affine parameters": (net(conv(3, 8), nn.BatchNorm2d(8, affine=False), RELU, conv(8, 4)), IMAGE),
    "two readers": (
        Function(
            lambda m, x: (lambda y: m.b(y).sum() + y.sum())(F.relu(m.n(m.a(x)))), a=conv(3, 8), n=nn.BatchNorm2d(8), b=conv(8, 4)
        ),
        IMAGE,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", NOT_ABSORBING)
def test_what_is_not_exact_is_not_absorbed(case):
    model, shape = NOT_ABSORBING[case]
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            module.bias.data.fill_(6)
    graph = graph_of(model, torch.randn(shape))
    code = graph.module.code
    assert BiasAbsorption().change(graph.module) == ()
    assert graph.module.code == code


@pytest.mark.parametrize("affine", [True, False])
def test_folding_notes_the_statistics_of_the_output(affine):
    norm = nn.BatchNorm2d(4, affine=affine)
    if affine:
        norm.weight.data, norm.bias.data = (
            torch.tensor([1.0, -2.0, 0.5, 0.0]),
            torch.tensor([3.0, 0.0, -1.0, 2.0]),
        )
    meta = layers(graph_of(net(conv(3, 4), norm), torch.randn(IMAGE)))["0"].meta
    assert meta["output_mean"].dtype == meta["output_std"].dtype == torch.float64
    assert meta["output_mean"].tolist() == ([3.0, 0.0, -1.0, 2.0] if affine else [0.0] * 4)
    assert meta["output_std"].tolist() == ([1.0, 2.0, 0.5, 0.0] if affine else [1.0] * 4)


def test_equalization_scales_the_statistics():
    model = settle(net(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4)))
    graph = graph_of(model, torch.randn(IMAGE))
    before = constant(graph, "0", 2)
    Equalization().change(graph.module)
    scale = (constant(graph, "0", 2) / before).double()
    meta = layers(graph)["0"].meta
    assert torch.allclose(meta["output_mean"], model[1].bias * scale, rtol=1e-5)
    assert torch.allclose(meta["output_std"], model[1].weight.abs() * scale, rtol=1e-5)


# ---- configuration ----


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Equalization(iterations=0), "iterations to be a whole number from 1, but got 0"),
        (lambda: Equalization(iterations=2.0), "but got 2.0"),
        (lambda: Equalization(iterations=True), "but got True"),
        (lambda: Equalization(tolerance=-1e-9), "tolerance to be a number from 0, but got -1e-09"),
        (lambda: Equalization(tolerance=float("nan")), "but got nan"),
        (lambda: Equalization(tolerance="no"), "but got 'no'"),
        (lambda: BiasAbsorption(n_sigma=-1), "n_sigma to be a number from 0, but got -1"),
        (lambda: BiasAbsorption(n_sigma=float("inf")), "but got inf"),
        (lambda: BiasAbsorption(n_sigma=None), "but got None"),
    ],
)
def test_values_that_cannot_be_meant(build, text):
    with pytest.raises(ConfigError, match=text):
        build()


def test_names():
    assert (Equalization.name, BiasAbsorption.name) == ("equalization", "bias_absorption")


# ---- the whole way ----


@pytest.mark.parametrize(
    "backend",
    [name for name, why in nc.available_backends().items() if name in ("ipex", "reference") and not why],
)
def test_per_tensor_weights_recover(backend):
    """A depthwise network with badly scaled channels, quantized by a configuration."""
    model, batches = planted_mobilenet(), [torch.randn(8, 3, 12, 12) for _ in range(4)]
    noise, changes = {}, {}
    for name, pre in {
        "plain": [],
        "equalized": [Equalization()],
        "absorbed": [Equalization(), BiasAbsorption()],
    }.items():
        prepared = nc.prepare(
            model,
            nc.StaticQuantConfig(w_granularity="per_tensor", pre=pre),
            example_inputs=batches[0],
            backend=backend,
        )
        for batch in batches:
            assert sqnr_db(model(batch), prepared(batch)) > 60  # the fp32 function stays
        q = nc.convert(prepared, **({} if backend == "reference" else {"isolate": "never"}))
        noise[name], changes[name] = (
            sqnr_db(model(batches[0]), q(batches[0])),
            [str(a) for a in q.report().algorithms],
        )
        if backend == "ipex":
            assert q.report().ran_int8 == q.report().asked_int8
    assert min(noise["equalized"], noise["absorbed"]) > noise["plain"] + 8, noise
    assert not [line for line in changes["plain"] if "equalization" in line or "absorption" in line]
    assert changes["equalized"][0].startswith(
        "equalization: 6 operators changed; fp32 outputs before and after agree to 1"
    )
    assert changes["absorbed"][1].startswith("bias_absorption:")


def test_transforms_are_part_of_a_configuration():
    config = nc.StaticQuantConfig(
        pre=[Equalization(iterations=3), BiasAbsorption(n_sigma=2.0)], post=[nc.BiasCorrection()]
    )
    again = nc.StaticQuantConfig.from_json(config.to_json())
    assert again == config
    assert again.pre == (Equalization(iterations=3), BiasAbsorption(n_sigma=2.0))
    with pytest.raises(ConfigError, match="pre applies to whole models"):
        nc.StaticQuantConfig().set_local("a", nc.StaticQuantConfig(pre=[Equalization()]))
    with pytest.raises(
        ConfigError, match=r"Expected pre to be a list out of Equalization\(\), BiasAbsorption\(\)"
    ):
        nc.StaticQuantConfig(pre=["equalization"])
