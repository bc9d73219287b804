"""Convolutions whose input has a range that is found in each call, against whole numbers and the reference."""

import concurrent.futures

import pytest
import torch
from models import Function, ResidualCNN, quantized, worst_db
from suites.reports import said
from torch import nn
from torch.nn import functional as F

import nc
from nc import DynamicQuantConfig, StaticQuantConfig
from nc.backends import available_backends
from nc.backends.native import executors
from nc.backends.native.operators import dynamic_convolution
from nc.backends.native.plans import c_functions
from nc.graph.catalogue import CONVOLUTIONS, kind_of_node
from nc.graph.fx_utils import constant_of, copy_module
from nc.graph.views import Conv, Dequantize, set_argument

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]
TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def asked(config=None, **options):
    """Static for all else, or `config`; dynamic for convolutions."""
    config = StaticQuantConfig() if config is None else config
    for each in TYPES:
        config.set_local(each, DynamicQuantConfig(**options))
    return config


def dynamic(model, x, config=None, **options):
    with pytest.warns(nc.errors.UnmatchedTypeWarning):  # no model here has convolutions of all types
        return quantized(model.eval(), x, asked(config, **options), "native")


def only(model, x, **options):
    """Nothing but convolutions, with ranges found in each call."""
    config = DynamicQuantConfig(white_list=[nn.Conv1d, nn.Conv2d, nn.Conv3d], **options)
    with pytest.warns(nc.errors.UnmatchedTypeWarning):
        return quantized(model.eval(), x, config, "native")


def called(q, *inputs):
    """Names of the kernels of a call, in order."""
    return [k.implementation for step in q.engine.steps(list(inputs)) for k in step.kernels]


def convolutions(q):
    return [op for op in q.report().ops if op.kind in CONVOLUTIONS]


def in_whole_numbers(q, x, symmetric=False):
    """Return what the only convolution of a model gives for `x`, by sums of whole numbers in float64."""
    module = q.graph.module
    (node,) = (n for n in module.graph.nodes if kind_of_node(n) in CONVOLUTIONS)
    conv, dims = Conv.of(node), x.dim() - 2
    weight = Dequantize.of(conv.weight)
    codes, scales = constant_of(module, weight.codes).double(), constant_of(module, weight.scale).double()
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if symmetric:
        scale, zero = torch.tensor(max(-low, high) / 127, dtype=torch.float32), 128
    else:
        scale = torch.tensor((high - low) / 255, dtype=torch.float32)
        zero = min(max(-round(low / ((high - low) / 255)), 0), 255)
    rounded = ((x / scale).round() + zero).clamp(0, 255).double() - zero
    stride, padding, dilation = conv.sizes(dims)
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    sums = function(rounded, codes, None, stride, padding, dilation, conv.groups)
    shape = (-1, *[1] * dims)
    bias = 0 if conv.bias is None else constant_of(module, conv.bias).double().view(shape)
    return sums * (scales * scale.double()).view(shape) + bias


LAYERS = {
    "window": lambda: nn.Conv2d(8, 16, 3, padding=1),
    "1 x 1": lambda: nn.Conv2d(8, 16, 1),
    "1 x 1 with a stride": lambda: nn.Conv2d(8, 16, 1, stride=2),
    "without a bias": lambda: nn.Conv2d(8, 5, 3, bias=False),
    "two strides": lambda: nn.Conv2d(8, 16, (3, 2), stride=(2, 1), padding=(1, 0)),
    "more pads than window": lambda: nn.Conv2d(8, 16, 2, padding=2),
    "in groups": lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
    "dilated": lambda: nn.Conv2d(8, 16, 3, dilation=2, padding=2),
    "wide": lambda: nn.Conv2d(64, 64, 3, padding=1),
    "three colours": lambda: nn.Conv2d(3, 8, 5, stride=2, padding=2),
    "one channel": lambda: nn.Conv2d(1, 4, 3),
    "row": lambda: nn.Conv1d(8, 16, 4, stride=2, padding=1),
    "row of groups": lambda: nn.Conv1d(8, 8, 5, padding=2, groups=8),
    "volume": lambda: nn.Conv3d(8, 16, 3, padding=1),
}


def shape(layer, batch, more=0):
    return batch, layer.in_channels, *(9 + more, 7, 6)[: layer.weight.dim() - 2]


@pytest.mark.parametrize("act_sym", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_those_of_whole_numbers(name, act_sym):
    layer = LAYERS[name]()
    q = only(layer, torch.randn(shape(layer, 2)), act_sym=act_sym)
    (op,) = convolutions(q)
    assert op.ran == "int8"
    assert "(u8, s8 -> f32)" in op.kernel
    for batch, more in ((2, 0), (1, 0), (3, 4)):
        x = torch.randn(shape(layer, batch, more))
        for y in (x, x.abs(), -x.abs() - 0.1, x * 1e-4 + 3, x * 0, x.abs() * 1e6):
            if not bool(y.any()):
                assert torch.equal(q(y), q.reference(y))
                continue
            expected = in_whole_numbers(q, y, act_sym)
            assert (q(y) - expected).abs().max() <= 4e-6 * expected.abs().max() + 1e-12
            assert worst_db([q.reference(y)], [q(y)]) > 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("act", [None, F.relu, F.relu6, F.silu])
def test_a_tensor_with_what_is_no_number_gives_none(act, bad):
    model = Function(lambda m, x: m.c(x) if act is None else act(m.c(x)), c=nn.Conv2d(4, 8, 3, padding=1))
    q = only(model, torch.randn(2, 4, 6, 6))
    x = torch.randn(2, 4, 6, 6)
    x[1, 2, 3, 4] = bad
    assert q(x).isnan().all()
    assert q.reference(x).isnan().all()
    assert worst_db([q.reference(x[:1])], [q(x[:1])]) > 100


ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "hardswish": F.hardswish, "relu6": F.relu6,
    "leaky": lambda v: F.leaky_relu(v, 0.1), "tanh": torch.tanh, "clamp": lambda v: v.clamp(-0.3, 0.4),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_goes_with_the_convolution(name):
    model = Function(lambda m, x: ACTIVATIONS[name](m.c(x)), c=nn.Conv2d(4, 8, 3, padding=1))
    x = torch.randn(2, 4, 6, 6)
    q = only(model, x)
    assert len(called(q, x)) == 3, "rounding, convolution, and what looks for numbers"
    assert worst_db([q.reference(x)], [q(x)]) > 70


SUMS = {
    "of a branch": lambda m, x: F.relu(m.b(F.relu(m.a(x))) + m.c(x)),
    "of the input": lambda m, x: m.a(x) + x,
    "of what is read later": lambda m, x: (lambda v: (m.b(v) + v) * v)(F.relu(m.a(x))),
    "of an output": lambda m, x: (lambda v: (m.b(v) + v, v))(F.relu(m.a(x))),
    "of a view": lambda m, x: (lambda v: (m.b(v) + v, v.flatten(1)))(F.relu(m.a(x))),
    "twice": lambda m, x: (lambda v: m.c(v) + (m.b(v) + v))(F.relu(m.a(x))),
    "of one": lambda m, x: (lambda v: v + v)(m.a(x)),
    "of another shape": lambda m, x: m.a(x) + x[:1],
    "of a constant": lambda m, x: m.a(x) + torch.ones(2, 8, 6, 6),
    "with a gate": lambda m, x: (lambda v: m.c(v) + m.b(v).sigmoid() * v)(m.a(x)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_goes_with_the_convolution(name):
    layers = {key: nn.Conv2d(8, 8, 3, padding=1) for key in "abc"}
    x = torch.randn(2, 8, 6, 6)
    q = only(Function(SUMS[name], **layers), x)
    assert all(op.ran == "int8" for op in convolutions(q))  # a wrong plan would not be taken
    before = x.clone()
    for _ in range(2):
        assert worst_db(q.reference(x), q(x)) > 90
    assert torch.equal(x, before)


def test_a_block_adds_without_a_copy():
    layers = {key: nn.Conv2d(8, 8, 3, padding=1) for key in "abc"}
    x = torch.randn(2, 8, 6, 6)
    q = only(Function(SUMS["of a branch"], **layers), x)
    names = [name for name in called(q, x) if not name.startswith("c:spoil")]
    assert len(names) == 5, names  # x and what b reads are rounded, and three convolutions
    assert names.count("c:round_images") == 2


def test_a_range_that_several_read_is_found_once():
    layers = {key: nn.Conv2d(8, 8, 3, padding=1) for key in "abc"}
    model = Function(lambda m, x: (m.a(x), m.b(x) * m.c(x)), **layers)
    x = torch.randn(2, 8, 6, 6)
    q = only(model, x)
    assert called(q, x).count("c:round_images") == 1
    assert worst_db(list(q.reference(x)), list(q(x))) > 90


def test_static_beside_dynamic():
    model = Function(
        lambda m, x: m.d(F.relu(m.c(F.relu(m.b(F.relu(m.a(x))))))),
        **{key: nn.Conv2d(8, 8, 3, padding=1) for key in "abcd"},
    ).eval()
    x = torch.randn(2, 8, 6, 6)
    config = StaticQuantConfig().set_local("b", DynamicQuantConfig())
    q = quantized(model, x, config, "native")
    kinds = [k.primitive for step in q.engine.steps([x]) for k in step.kernels if k.primitive != "function"]
    assert kinds[kinds.index("convolution") :] == ["convolution"] * 4
    report = q.report()
    assert report.ran_int8 == 4
    assert {op.operator: op.kernel.split("(")[-1] for op in convolutions(q)} == {
        "a": "u8, s8 -> f32)", "b": "u8, s8 -> u8)", "c": "u8, s8 -> u8)", "d": "u8, s8 -> f32)"
    }  # fmt: skip
    assert report.quantize_outside == 1
    assert report.dequantize_outside == 0
    assert worst_db([q.reference(x)], [q(x)]) > 40


def test_static_codes_that_a_dynamic_convolution_adds():
    model = Function(
        lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))) + m.d(x))),
        **{key: nn.Conv2d(8, 8, 3, padding=1) for key in "abcd"},
    ).eval()
    x = torch.randn(2, 8, 6, 6)
    q = quantized(model, x, StaticQuantConfig().set_local("b", DynamicQuantConfig()), "native")
    assert [op.ran for op in convolutions(q)] == ["int8"] * 4
    assert worst_db([q.reference(x)], [q(x)]) > 40


def test_a_linear_and_a_convolution_of_one_tensor():
    model = Function(lambda m, x: m.c(x).sum() + m.f(x), c=nn.Conv1d(8, 4, 3), f=nn.Linear(9, 5))
    x = torch.randn(2, 8, 9)
    for symmetric in (False, True):
        options = {"act_granularity": "per_tensor", "act_sym": symmetric}
        config = DynamicQuantConfig(**options).set_local("c", DynamicQuantConfig(**options))
        q = quantized(model.eval(), x, config, "native")
        assert q.report().ran_int8 == q.report().asked_int8 == 2
        assert worst_db([q.reference(x)], [q(x)]) > 90


def test_layouts_of_the_input():
    layer = nn.Conv2d(6, 8, 3, padding=1)
    q = only(Function(lambda m, x: m.c(x.transpose(2, 3)), c=layer), torch.randn(2, 6, 7, 5))
    for x in (
        torch.randn(2, 6, 7, 5),
        torch.randn(2, 6, 7, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 6, 1, 1),
        torch.randn(2, 7, 5, 6).permute(0, 3, 1, 2)[:1],
    ):
        assert worst_db([q.reference(x)], [q(x)]) > 100


def test_a_small_resnet():
    torch.manual_seed(0)
    model, x = ResidualCNN().eval(), torch.randn(4, 3, 16, 16)
    q = dynamic(model, x)
    assert all(op.ran == "int8" for op in convolutions(q))
    assert called(q, x).count("c:round_images") == 3
    for y in (torch.randn(4, 3, 16, 16), torch.randn(1, 3, 16, 16), 5 * torch.randn(2, 3, 24, 20)):
        with torch.no_grad():
            exact = model(y)
        assert worst_db([exact], [q(y)]) > worst_db([exact], [q.reference(y)]) - 1
    assert worst_db(model(x), q(x)) > 25
    assert "kernels compared" in q.report().details
    assert "the result of an image depends on the others" in said(q.report())


def test_a_range_follows_the_input():
    """Static ranges cut off what is larger than calibration's."""
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(),
        torch.randn(2, 3, 9, 9),
    )
    static, found = quantized(model, x, None, "native"), dynamic(model, x)
    y = 20 * torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        exact = model(y)
    assert worst_db([exact], [static(y)]) < 10
    assert worst_db([exact], [found(y)]) > 30


def test_an_artefact_gives_the_same(tmp_path):
    model, x = ResidualCNN().eval(), torch.randn(2, 3, 16, 16)
    q = dynamic(model, x)
    q.save(tmp_path / "artefact")
    loaded = nc.load(tmp_path / "artefact", backend="native")
    assert torch.equal(loaded(x), q(x))
    assert [op.ran for op in convolutions(loaded)] == ["int8"] * 3


def test_several_threads_and_sizes():
    model, x = ResidualCNN().eval(), torch.randn(2, 3, 16, 16)
    q = dynamic(model, x)
    inputs = [torch.randn(1 + i % 3, 3, 16, 16 + 2 * (i % 2)) * (1 + i) for i in range(12)]
    expected = [q(each) for each in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(q, inputs))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_each_number_of_threads_gives_the_same():
    x, before = torch.randn(3, 16, 40, 40), torch.get_num_threads()
    q = only(nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1)), x)
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(q(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)


# ---- who gets such ranges ----


def test_the_default_leaves_convolutions_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 8), nn.Flatten(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 3, 8, 8)
    plan = quantized(model, x, DynamicQuantConfig()).graph.plan
    assert [d.spec.mode for d in plan.decisions if d.kind in ("conv2d", "linear")] == ["float", "dynamic"]
    assert (
        plan["0"].reason
        == "ranges found at each call are for a conv2d only where a rule names it or its type"
    )
    both = quantized(model, x, StaticQuantConfig() + DynamicQuantConfig()).graph.plan
    assert [d.spec.mode for d in both.decisions if d.kind in ("conv2d", "linear")] == ["static", "dynamic"]


@pytest.mark.parametrize("key", ["0", nn.Conv2d, "conv2d", "[0]"])
def test_a_rule_gives_them_one_range_for_a_tensor(key):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.randn(2, 3, 8, 8)
    decision = quantized(model, x, StaticQuantConfig().set_local(key, DynamicQuantConfig())).graph.plan["0"]
    assert decision.spec.mode == "dynamic"
    assert str(decision.spec.activation) == "uint8 affine dynamic"
    assert str(decision.spec.weight.granularity) == "per_channel"
    rule = DynamicQuantConfig(act_granularity="per_token")
    with pytest.raises(
        nc.errors.UnsupportedError, match=r"act_granularity='per_token'.*legal there: per_tensor"
    ):
        quantized(model, x, StaticQuantConfig().set_local(key, rule))


def test_transposed_convolutions_have_none_and_say_so():
    model = nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(2, 3, 8, 8)
    model(x)
    plan = quantized(
        model.eval(), x, StaticQuantConfig().set_local("0", DynamicQuantConfig()), "native"
    ).graph.plan
    assert plan["0"].reason == (
        "backend 'native' has no dynamic int8 kernel for conv_transpose2d, but one with ranges from "
        "calibration: add + nc.StaticQuantConfig()"
    )


def test_without_plans_it_runs_in_fp32_and_says_so(monkeypatch):
    monkeypatch.setattr(executors, "why_not", lambda _: "there are none")
    x = torch.randn(2, 3, 8, 8)
    for symmetric in (False, True):
        q = only(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), x, act_sym=symmetric)
        for op in convolutions(q):
            assert op.ran == "fp32"
            assert op.reason == (
                "torch has no dynamic int8 kernel for conv2d; it runs in fp32, between dequantize and quantize"
            )
        assert "there are none" in q.report().details["run by"]
        assert worst_db([q.reference(x)], [q(x)]) > 90


def test_a_convolution_without_a_batch():
    x = torch.randn(3, 8, 8)
    q = only(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x)
    assert worst_db([q.reference(x)], [q(x)]) > 90


OTHER_GRAPHS = {
    "its input is torch.bfloat16, not fp32": lambda x, conv, weight: x.meta.update(
        val=torch.ones(2, 3, 8, 8, dtype=torch.bfloat16)
    ),
    "its input has a range for each row": lambda x, conv, weight: set_argument(
        Conv.of(conv).input, "per_token", True
    ),
    "its weight is not quantized": lambda x, conv, weight: set_argument(conv, "weight", x),
    "its weight is not a constant": lambda x, conv, weight: set_argument(weight, "codes", x),
    "its weight has a scale for each input": lambda x, conv, weight: set_argument(weight, "axis", 1),
    "its bias is computed from the inputs": lambda x, conv, weight: set_argument(conv, "bias", x),
}


@pytest.mark.parametrize("why", OTHER_GRAPHS)
def test_graphs_that_quantization_does_not_make_have_their_reason(why):
    graph = only(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)).graph
    module, _ = copy_module(graph.module)
    (conv,) = (node for node in module.graph.nodes if kind_of_node(node) in CONVOLUTIONS)
    (x,) = (node for node in module.graph.nodes if node.op == "placeholder")
    assert dynamic_convolution.why_not_dynamic_convolution(conv) == ""
    assert dynamic_convolution.why_not_dynamic_convolution(x) == ""
    OTHER_GRAPHS[why](x, conv, Conv.of(conv).weight)
    assert dynamic_convolution.why_not_dynamic_convolution(conv) == why
