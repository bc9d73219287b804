"""The QDQ graph: where the pairs are, with which numbers, and that it computes what its definition says."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from models import (
    FP32,
    MLP,
    Attention,
    Conv1dNet,
    Conv3dNet,
    Function,
    ResidualCNN,
    TransposeNet,
    call,
    prepared_for,
    quantized,
    worst_db,
)
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig, convert
from nc.api.preparation.captured import PreparedModel
from nc.backends.reference import ReferenceBackend
from nc.backends.torchscript import explicit_clamps
from nc.formats import TensorFormat
from nc.graph.catalogue import op_name
from nc.numerics.weights import quantize_weight
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor
from nc.planning.rules import resolve

#: Without bias correction every number of the graph follows from ranges and weights alone.
BARE = StaticQuantConfig(post=())


def nodes(q, target):
    return [n for n in q.graph.module.graph.nodes if n.target is target or op_name(n) == target]


def counts(q):
    """(quantize, dequantize of activations, dequantize of weights)."""
    weights = [n for n in nodes(q, dequantize_per_tensor) if n.args[0].op == "get_attr"]
    activations = len(nodes(q, dequantize_per_tensor)) - len(weights)
    return (
        len(nodes(q, quantize_per_tensor)),
        activations,
        len(weights) + len(nodes(q, dequantize_per_channel)),
    )


def reads(q, operator):
    """What an operator's inputs are: "q" for codes, else the name of the operator that made them."""
    node = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == operator)
    dequantizes = (dequantize_per_tensor, dequantize_per_channel)
    return ["q" if a.target in dequantizes else op_name(a) for a in node.args[:2]]


def exact_qparams(tensors, low_code=0, high_code=255):
    """Asymmetric qparams of everything in `tensors`, in float64."""
    low = min(0.0, *(float(t.min()) for t in tensors))
    high = max(0.0, *(float(t.max()) for t in tensors))
    scale = (high - low) / (high_code - low_code)
    return scale, low_code - round(low / scale)


def qparams_at(q, index):
    node = nodes(q, quantize_per_tensor)[index]
    return node.args[1:5]


# ---- where the pairs are ----


def test_mlp_has_a_pair_in_front_of_each_linear():
    model, x = MLP(), torch.randn(32, 16)
    q = quantized(model, x, BARE)
    assert counts(q) == (2, 2, 2)
    assert reads(q, "fc1") == reads(q, "fc2") == ["q", "q"]
    hidden = F.relu(model.fc1(x)).detach()
    for index, tensor in enumerate((x, hidden)):
        scale, zero_point = exact_qparams([tensor])
        assert qparams_at(q, index) == (pytest.approx(scale, rel=1e-6), zero_point, 0, 255)


def test_activations_stand_between_an_operator_and_the_pair():
    """relu and gelu are fused into the producer, so codes are of their output."""
    for act in (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Dropout()):
        q = quantized(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4)), torch.randn(8, 4), BARE)
        assert counts(q) == (2, 2, 2)
        first = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == "0")
        assert next(iter(first.users)).target is not quantize_per_tensor or isinstance(act, nn.Dropout)


def test_residual_block_has_one_pair_on_the_shortcut_and_pools_run_on_codes():
    q = quantized(ResidualCNN(), torch.randn(4, 3, 8, 8), BARE)
    assert counts(q) == (6, 7, 4)
    shortcut, main = reads(q, "add")
    assert (shortcut, main) == ("q", "conv2d")  # the convolution's side is fused, so it stays fp32
    pool = nodes(q, "max_pool2d")[0]
    assert pool.args[0].target is dequantize_per_tensor
    before, after = pool.args[0].args[0], next(iter(pool.users))
    assert before.args[1:] == after.args[1:]  # max pooling keeps scale and zero point
    average = nodes(q, "adaptive_avg_pool2d")[0]
    behind = nodes(q, quantize_per_tensor)[-1]
    assert average.args[0].args[0].args[1:] == behind.args[1:]  # engines average codes without another scale


@pytest.mark.parametrize(
    ("pool", "on_codes"),
    [
        (nn.MaxPool2d(3, 1, 1), True),
        (nn.AvgPool2d(2), True),
        (nn.AvgPool2d(3, 1, 1, count_include_pad=False), True),
        (
            nn.AvgPool2d(3, 1, 1),
            False,
        ),  # counts zeros outside, which codes hold only where the zero point is 0
    ],
)
def test_which_pools_run_on_codes(pool, on_codes):
    q = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Conv2d(8, 4, 1)), torch.randn(2, 3, 8, 8), BARE)
    (node,) = [n for n in q.graph.module.graph.nodes if "pool" in str(n.target)]
    assert (node.args[0].target is dequantize_per_tensor) is on_codes


def test_a_pool_reads_fp32_where_its_input_is_needed_in_fp32_anyway():
    """Squeeze and excitation: codes for the pool alone would be an extra kernel, and cost accuracy.

    Its result has a range of its own.
    """

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.c(y * torch.sigmoid(self.b(F.adaptive_avg_pool2d(y, 1))))

    model, x = (
        Function(forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 8, 1), c=nn.Conv2d(8, 4, 1)),
        torch.randn(2, 3, 8, 8),
    )
    q = quantized(model, x, BARE)
    (pool,) = nodes(q, "adaptive_avg_pool2d")
    assert op_name(pool.args[0]) == "relu"
    (behind,) = pool.users
    scale, zero_point = exact_qparams([F.relu(model.a(x)).mean((2, 3)).detach()])
    assert behind.args[1:3] == (pytest.approx(scale, rel=1e-5), zero_point)


def test_pools_keep_their_ranges_on_a_backend_with_fewer_kernels():
    """The pool's input is fp32 there; what was calibrated for it still serves the linear behind."""
    x = torch.randn(2, 3, 8, 8)
    prepared = prepared_for(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), x, BARE
    )
    everything = ReferenceBackend().capabilities()
    linear = dataclasses.replace(
        everything, backend="other", ops=tuple(row for row in everything.ops if row.kind == "linear")
    )
    assert [d.operator for d in prepared.quantized_graph(linear).plan.quantized] == ["3"]


def test_the_last_sum_reads_codes_that_exist_anyway():
    """Its block's convolutions read the shortcut as codes: nobody needs it in fp32."""

    def forward(self, x):
        y = F.relu(self.a(x))
        return F.relu(self.c(F.relu(self.b(y))) + y)

    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 8, 1), "c": nn.Conv2d(8, 8, 1)}
    q = quantized(Function(forward, **layers), torch.randn(2, 3, 8, 8), BARE)
    assert reads(q, "add") == ["conv2d", "q"]
    assert q.graph.plan["add"].reason == "no int8 operator reads the sum; it is fused in fp32"
    asked = quantized(
        Function(forward, **layers), torch.randn(2, 3, 8, 8), StaticQuantConfig().set_local("add", FP32)
    )
    assert reads(asked, "add") == ["conv2d", "relu"]


@pytest.mark.parametrize("main_first", [True, False])
def test_of_two_convolutions_in_front_of_a_sum_the_shortcut_is_quantized(main_first):
    """As in each first block of a ResNet: fusers know no other form, whichever side is written first."""

    def forward(self, x):
        sides = self.second(F.relu(self.first(x))), self.shortcut(x)
        return self.head(F.relu(sides[0] + sides[1] if main_first else sides[1] + sides[0]))

    layers = {
        "first": nn.Conv2d(3, 8, 3, padding=1),
        "second": nn.Conv2d(8, 8, 3, padding=1),
        "shortcut": nn.Conv2d(3, 8, 1),
    }
    q = quantized(Function(forward, **layers, head=nn.Conv2d(8, 4, 1)), torch.randn(2, 3, 8, 8), BARE)
    assert reads(q, "add") == (["conv2d", "q"] if main_first else ["q", "conv2d"])


def test_shortcut_and_next_convolution_share_their_codes():
    q = quantized(ResidualCNN(), torch.randn(4, 3, 8, 8), BARE)
    add, conv = (
        next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == name)
        for name in ("add", "conv1")
    )
    assert add.args[0].args[0] is conv.args[0].args[0]
    assert add.args[0] is not conv.args[0]  # each reader has a dequantize of its own


def test_attention_has_codes_on_both_sides_of_both_matmuls():
    q = quantized(Attention(), torch.randn(4, 6, 32), BARE)
    # x (one for q, k and v), query, key, softmax, value, and the input of `out`
    assert counts(q) == (6, 8, 4)
    for name in ("matmul", "matmul_1"):
        assert reads(q, name) == ["q", "q"]
    assert (
        len(
            {
                n.args[0].args[0]
                for n in q.graph.module.graph.nodes
                if n.meta.get("operator") in ("query", "key", "value")
            }
        )
        == 1
    )
    softmax = nodes(q, "softmax")[0]
    codes = next(iter(softmax.users))
    assert codes.target is quantize_per_tensor
    assert codes.args[2] == 0  # probabilities have zero point 0


def test_values_that_are_only_moved_keep_the_scale_of_their_source():
    def forward(self, x):
        y = self.a(x)
        return self.b(y.reshape(-1, 4).t().t()), self.b(y)

    q = quantized(Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(8, 4), BARE)
    pairs = [n.args[1:] for n in nodes(q, quantize_per_tensor)]
    assert len(pairs) == 3
    assert pairs[1] == pairs[2]


def test_parts_of_a_tensor_have_scales_of_their_own():
    def forward(self, x):
        left, right = self.a(x).chunk(2, -1)
        return self.b(left), self.b(right * 0.01)

    q = quantized(Function(forward, a=nn.Linear(4, 8), b=nn.Linear(4, 4)), torch.randn(8, 4), BARE)
    scales = [n.args[1] for n in nodes(q, quantize_per_tensor)]
    assert scales[1] > 20 * scales[2]


def test_an_fp32_operator_has_no_pair():
    q = quantized(MLP(), torch.randn(8, 16), StaticQuantConfig(post=()).set_local("fc1", FP32))
    assert counts(q) == (1, 1, 1)
    assert reads(q, "fc1") == ["", ""]
    assert reads(q, "fc2") == ["q", "q"]


def test_two_readers_with_different_configurations_have_codes_of_their_own():
    model = Function(lambda self, x: self.a(x) + self.b(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    config = StaticQuantConfig(post=()).set_local("b", StaticQuantConfig(act_dtype="int8", act_sym=True))
    q = quantized(model, torch.randn(8, 4), config)
    assert sorted(n.args[2:5] for n in nodes(q, quantize_per_tensor))[0] == (0, -128, 127)
    assert counts(q)[0] == 2


# ---- weights ----


def brute_force_weight(weight, axis):
    """Symmetric int8 codes in [-127, 127] and scales per index of `axis`, in float64."""
    w = np.moveaxis(weight.detach().double().numpy(), axis, 0).reshape(weight.shape[axis], -1)
    scale = np.abs(w).max(axis=1).astype(np.float64) / 127
    scale = np.where(scale < 2.0**-100, 1.0, scale).astype(np.float32)
    # the definition divides in fp32
    codes = np.clip(np.rint(w.astype(np.float32) / scale[:, None]), -127, 127).astype(np.int8)
    return np.moveaxis(codes.reshape(np.moveaxis(weight.detach().numpy(), axis, 0).shape), 0, axis), scale


WEIGHTS = {
    "linear": (nn.Linear(5, 7), (9, 5), 0),
    "conv1d": (nn.Conv1d(3, 4, 3), (2, 3, 8), 0),
    "conv2d": (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), 0),
    "grouped conv2d": (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 8, 8), 0),
    "conv3d": (nn.Conv3d(2, 4, 3), (2, 2, 5, 5, 5), 0),
    "conv_transpose1d": (nn.ConvTranspose1d(3, 4, 3), (2, 3, 8), 1),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6), 1),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 4, 3), (2, 2, 4, 4, 4), 1),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_int8_per_output_channel(case):
    layer, shape, axis = WEIGHTS[case]
    q = quantized(layer, torch.randn(shape), BARE)
    (node,) = nodes(q, dequantize_per_channel)
    codes, scale = (getattr(q.graph.module, n.target) for n in node.args[:2])
    assert (codes.dtype, scale.dtype, node.args[2:]) == (torch.int8, torch.float32, (None, axis, torch.int8))
    expected_codes, expected_scale = brute_force_weight(layer.weight, axis)
    assert np.allclose(scale.numpy(), expected_scale, rtol=1e-6, atol=0)
    assert np.array_equal(codes.numpy(), expected_codes)
    assert codes.abs().max() == 127
    assert codes.min() >= -127


def test_a_grouped_transposed_convolution_has_one_scale():
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    q = quantized(layer, torch.randn(2, 4, 6, 6), BARE)
    assert not nodes(q, dequantize_per_channel)
    (weight,) = [n for n in nodes(q, dequantize_per_tensor) if n.args[0].op == "get_attr"]
    assert weight.args[1] == pytest.approx(layer.weight.abs().max().item() / 127, rel=1e-6)
    assert weight.args[2] == 0


def test_weights_per_tensor():
    layer = nn.Linear(5, 7)
    q = quantized(layer, torch.randn(9, 5), StaticQuantConfig(w_granularity="per_tensor", post=()))
    assert not nodes(q, dequantize_per_channel)
    (weight,) = [n for n in nodes(q, dequantize_per_tensor) if n.args[0].op == "get_attr"]
    codes = getattr(q.graph.module, weight.args[0].target)
    scale = layer.weight.abs().max().item() / 127
    assert weight.args[1] == pytest.approx(scale, rel=1e-6)
    assert torch.equal(codes, torch.round(layer.weight / weight.args[1]).to(torch.int8))


def test_a_channel_of_zeros_has_scale_one():
    weight = torch.randn(3, 4)
    weight[1] = 0
    spec = TensorFormat(dtype="int8", symmetric=True, granularity="per_channel", narrow=True)
    codes, scale = quantize_weight(weight, spec, 0)
    assert scale[1] == 1
    assert not codes[1].any()


def constants(q):
    return {name: b for name, b in q.graph.module.named_buffers() if b.dtype == torch.int8}


def test_a_shared_weight_is_quantized_once_with_activations_of_each_call():
    model = Function(lambda self, x: self.fc(F.relu(self.fc(x)) * 10), fc=nn.Linear(4, 4))
    q = quantized(model, torch.randn(16, 4), BARE)
    assert len(constants(q)) == 1
    assert counts(q) == (2, 2, 2)
    scales = [n.args[1] for n in nodes(q, quantize_per_tensor)]
    assert scales[0] != scales[1]


def test_tied_weights_are_quantized_once():
    model = Function(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    assert len(constants(quantized(model, torch.randn(8, 4), BARE))) == 1


def test_an_embedding_keeps_its_table_when_the_head_that_shares_it_is_int8():
    model = Function(
        lambda self, i: self.head(self.table(i)), table=nn.Embedding(10, 8), head=nn.Linear(8, 10, bias=False)
    )
    model.head.weight = model.table.weight
    q = quantized(model, torch.randint(0, 10, (4, 3)), BARE)
    assert len(constants(q)) == 1
    assert {b.dtype for b in q.graph.module.buffers()} == {torch.int8, torch.float32}
    assert worst_db(call(model, torch.arange(10)[None]), q(torch.arange(10)[None])) > 20


def test_no_fp32_copy_of_a_quantized_weight_stays():
    q = quantized(MLP(), torch.randn(8, 16), BARE)
    floats = sum(b.numel() for b in q.graph.module.buffers() if b.dtype == torch.float32)
    assert floats == 2 * (32 + 8)  # biases and scales
    assert q.report().float_bytes == 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert q.report().weight_bytes == 16 * 32 + 32 * 8 + 4 * floats


# ---- activations ----


def test_symmetric_uint8_has_zero_point_128():
    x = torch.randn(32, 16)
    q = quantized(MLP(), x, StaticQuantConfig(act_sym=True, post=()))
    scale, zero_point, low, high = qparams_at(q, 0)
    assert (zero_point, low, high) == (128, 0, 255)
    assert scale == pytest.approx(x.abs().max().item() / 127, rel=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_int8_activations(symmetric):
    x = torch.rand(32, 16) - 0.2
    q = quantized(MLP(), x, StaticQuantConfig(act_dtype="int8", act_sym=symmetric, post=()))
    scale, zero_point, low, high = qparams_at(q, 0)
    assert (low, high) == (-128, 127)
    expected = (x.abs().max().item() / 127, 0) if symmetric else exact_qparams([x], -128, 127)
    assert (scale, zero_point) == (pytest.approx(expected[0], rel=1e-6), expected[1])


def test_ranges_are_those_of_all_batches():
    model, parts = MLP().eval(), [torch.randn(8, 16) * s for s in (1.0, 3.0, 0.1)]
    prepared = prepared_for(model, parts[0], BARE)
    for part in parts[1:]:
        prepared(part)
    q = convert(prepared)
    for index, tensors in enumerate((parts, [F.relu(model.fc1(p)) for p in parts])):
        scale, zero_point = exact_qparams(tensors)
        assert qparams_at(q, index)[:2] == (pytest.approx(scale, rel=1e-5), zero_point)


class NoVnni(ReferenceBackend):
    """A CPU that adds pairs of u8 x s8 products in 16 bits, with saturation."""

    def capabilities(self):
        everything = super().capabilities()
        narrow_sums = frozenset(
            (row.kind, dtype) for row in everything.ops for dtype in ("uint8", "int8") if row.kind != "add"
        )
        return dataclasses.replace(everything, narrow_sums=narrow_sums)


def without_vnni(model, x, config):
    from models import graph_of

    graph = graph_of(model, x)
    capabilities = NoVnni().capabilities()
    prepared = PreparedModel(graph, resolve(config, graph, capabilities), capabilities, "reference", config)
    prepared(x)
    return convert(prepared)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_no_pair_of_products_exceeds_16_bits_without_vnni(dtype, symmetric):
    x = torch.randn(64, 16)
    q = without_vnni(MLP(), x, StaticQuantConfig(act_dtype=dtype, act_sym=symmetric))
    for codes in constants(q).values():
        pairs = codes.int().reshape(len(codes), -1, 2)
        assert 255 * int(pairs.clamp(min=0).sum(-1).max()) <= 2**15 - 1
        assert 255 * int(pairs.clamp(max=0).sum(-1).min()) >= -(2**15)
        assert int(codes.abs().max()) > 64  # not by 7 bits
    for node in nodes(q, quantize_per_tensor):
        assert node.args[3:5] == ((0, 255) if dtype == "uint8" else (-128, 127))
    assert "paired" in str(q.graph.plan)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_the_second_input_of_a_matmul_takes_seven_bits_without_vnni(dtype):
    q = without_vnni(Attention(), torch.randn(4, 6, 32), StaticQuantConfig(act_dtype=dtype))
    for name in ("matmul", "matmul_1"):
        node = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == name)
        left, right = (node.args[i].args[0] for i in (0, 1))
        codes = quantize_per_tensor(torch.linspace(-1e3, 1e3, 999), *right.args[1:]).int()
        middle = 128 if dtype == "uint8" else 0  # engines shift uint8 codes to int8 on this side
        assert (int(codes.min()) - middle, int(codes.max()) - middle) == (-64, 63)
        assert left.args[3:5] == ((0, 255) if dtype == "uint8" else (-128, 127))


def change_before_the_read(self, x):
    y = self.a(x)
    view = y.view(y.shape)
    y.add_(3.0)
    return self.c(x) @ view.transpose(-1, -2)


@pytest.mark.parametrize(
    "forward",
    [change_before_the_read, lambda self, x: self.c(x) @ self.a(x).view(x.shape).transpose(-1, -2)],
    ids=["in place", "moves"],
)
def test_clamps_that_torchscript_needs_change_no_number(forward):
    x = torch.randn(2, 6, 8)
    q = without_vnni(Function(forward, a=nn.Linear(8, 8), c=nn.Linear(8, 8)), x, StaticQuantConfig())
    expected = q.reference(3 * x)
    explicit_clamps(q.graph.module)
    q.graph.module.recompile()
    assert [n.args[3:] for n in nodes(q, quantize_per_tensor) if n.args[3:] != (0, 255, torch.uint8)] == []
    assert len(nodes(q, "clamp")) == 1
    assert torch.equal(q.reference(3 * x), expected)


def test_eight_bit_codes_would_exceed_16_bits():
    """The bound above means something: with VNNI all 255 codes are used."""
    q = quantized(MLP(), torch.randn(64, 16), BARE)
    (weight, *_) = constants(q).values()
    assert 2 * 255 * int(weight.abs().max()) > 2**15 - 1
    assert qparams_at(q, 0)[2:] == (0, 255)


# ---- what it computes ----


def simulate(x, weights, biases):
    """A quantized MLP of integers: exact products of codes in int64, everything else in float64."""
    value = x.astype(np.float64)
    float_value = value.copy()
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        low, high = min(0.0, float_value.min()), max(0.0, float_value.max())
        scale = np.float32((high - low) / 255)
        zero = round(-low / ((high - low) / 255))
        codes = np.clip(np.rint(value.astype(np.float32) / scale) + zero, 0, 255).astype(np.int64)
        w_scale = (np.abs(w).max(axis=1) / 127).astype(np.float32)
        w_codes = np.clip(np.rint(w.astype(np.float32) / w_scale[:, None]), -127, 127).astype(np.int64)
        value = (codes - zero) @ w_codes.T * (np.float64(scale) * w_scale.astype(np.float64)) + b
        float_value = float_value @ w.T.astype(np.float64) + b
        if i + 1 < len(weights):
            value, float_value = np.maximum(value, 0), np.maximum(float_value, 0)
    return value


def test_reference_is_integer_arithmetic():
    model, x = MLP().eval(), torch.randn(32, 16)
    q = quantized(model, x, BARE)
    layers = (model.fc1, model.fc2)
    expected = simulate(
        x.numpy(), [f.weight.detach().numpy() for f in layers], [f.bias.detach().numpy() for f in layers]
    )
    # fp32 sums can move a value over a rounding edge of the second input: then one code differs
    step = float(nodes(q, quantize_per_tensor)[1].args[1]) * model.fc2.weight.abs().max().item()
    difference = np.abs(q(x).detach().numpy() - expected)
    assert difference.max() <= 1.01 * step
    assert np.median(difference) < 1e-5
    assert torch.equal(q(x), q.reference(x))


CASES = {
    "mlp": (MLP, (64, 16)),
    "residual": (ResidualCNN, (8, 3, 8, 8)),
    "attention": (Attention, (8, 6, 32)),
    "conv1d": (Conv1dNet, (8, 4, 12)),
    "conv3d": (Conv3dNet, (4, 2, 6, 6, 6)),
    "transpose": (TransposeNet, (4, 3, 8, 8)),
}


@pytest.mark.parametrize(
    "config",
    [BARE, StaticQuantConfig(), StaticQuantConfig(act_sym=True), StaticQuantConfig(act_dtype="int8")],
)
@pytest.mark.parametrize("case", CASES)
def test_quantization_noise_is_that_of_eight_bits(case, config):
    """~6 dB per bit less the crest of the data.

    A wrong scale or zero point costs far more than the margin.
    """
    build, shape = CASES[case]
    model, x = build().eval(), torch.randn(shape)
    assert worst_db(call(model, x), quantized(model, x, config)(x)) > 30


def test_bias_correction_removes_the_mean_error():
    torch.manual_seed(0)
    model, x = MLP().eval(), torch.randn(256, 16)
    plain, corrected = quantized(model, x, BARE), quantized(model, x)
    expected = model(x).detach()

    def mean_error(q):
        return (q(x) - expected).mean(0).abs().max()

    assert mean_error(corrected) < 1e-5
    assert mean_error(plain) > 20 * mean_error(corrected)
    assert counts(plain) == counts(corrected)


class Shared(nn.Module):
    """One bias in two operators: each is corrected by an error of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.bias = self.a.bias

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class ComputedBias(nn.Module):
    """A part of the bias is cleared in the graph, as in Swin v2."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        bias = self.bias.clone()
        bias[4:8].zero_()
        return F.linear(x, self.weight, bias)


@pytest.mark.parametrize(
    ("build", "shape", "channels"),
    [
        (Shared, (256, 16), 1),
        (ComputedBias, (256, 16), 1),
        (lambda: nn.Linear(16, 12, bias=False), (4, 64, 16), 2),
        (lambda: nn.Conv2d(3, 8, 3), (4, 3, 12, 12), 1),
        (lambda: nn.Conv1d(3, 8, 3, bias=False), (4, 3, 99), 1),
        (lambda: nn.ConvTranspose2d(3, 8, 2, stride=2), (4, 3, 8, 8), 1),
        (lambda: nn.Conv2d(3, 8, 1), (3, 12, 12), 0),
    ],
    ids=["shared", "computed", "no bias", "conv2d", "conv1d without bias", "transposed", "without a batch"],
)
def test_bias_correction_of_every_kind_of_bias(build, shape, channels):
    """The mean over all positions of each channel is that of fp32, on the data that it was measured on."""
    model, x = build().eval(), torch.randn(shape)
    expected = model(x).detach().double()
    others = [d for d in range(expected.dim()) if d != channels]

    def mean_error(config):
        return float((quantized(model, x, config)(x).double() - expected).mean(others).abs().max())

    assert mean_error(StaticQuantConfig()) < 2e-6
    assert mean_error(BARE) > 1e-5


def test_the_same_request_gives_the_same_graph():
    torch.manual_seed(1)
    model, x = ResidualCNN(), torch.randn(4, 3, 8, 8)
    first, second = quantized(model, x), quantized(model, x)
    assert first.graph.module.code == second.graph.module.code
    for (name, a), (other, b) in zip(
        first.graph.module.named_buffers(), second.graph.module.named_buffers(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)


def test_the_prepared_model_is_not_changed_by_converting():
    model, x = ResidualCNN().eval(), torch.randn(4, 3, 8, 8)
    prepared = prepared_for(model, x)
    before = collections.OrderedDict((k, v.clone()) for k, v in prepared.graph.module.named_buffers())
    expected = prepared(x)
    convert(prepared)
    assert torch.equal(prepared(x), expected)
    assert list(before) == [k for k, _ in prepared.graph.module.named_buffers()]
    assert all(torch.equal(before[k], v) for k, v in prepared.graph.module.named_buffers())


def with_outputs(model, x, config=None, backend="reference"):
    return convert(prepared_for(model, x, config, backend, placement="outputs"), measure=False)


def read_otherwise(q, operator):
    """What reads an operator's result, behind a relu, as something else than codes."""
    node = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == operator)
    if [op_name(user) for user in node.users] == ["relu"]:
        (node,) = node.users
    return [op_name(user) or user.op for user in node.users if user.target is not quantize_per_tensor]


def test_codes_as_outputs():
    x = torch.randn(2, 3, 8, 8)
    q = with_outputs(ResidualCNN(), x)
    assert [read_otherwise(q, name) for name in ("stem", "conv1", "conv2", "add")] == [[]] * 4
    assert read_otherwise(q, "fc") == ["output"]  # linears give fp32
    assert reads(q, "add") == ["q", "q"]
    assert read_otherwise(quantized(ResidualCNN(), x), "conv2") == ["add"]
    assert q.graph.sqnr_vs_fp32_db > 30


def test_codes_as_outputs_reach_every_reader():
    """A join, a slice and the model's own output read the codes of one output."""

    def forward(self, x):
        a, b = self.a(x), F.relu(self.b(x))
        return self.c(torch.cat([a, b], 1)), a, b[:, 1:]

    x = torch.randn(2, 3, 6, 6)
    q = with_outputs(
        Function(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), c=nn.Conv2d(8, 2, 1)), x, BARE
    )
    assert [read_otherwise(q, name) for name in "abc"] == [[], [], []]
    module, outputs = q.graph.module, q(x)
    made = {n.meta["operator"]: n for n in module.graph.nodes if n.meta.get("operator") in ("a", "b", "c")}
    for output, name in zip(outputs[:2], "ca", strict=True):
        users = [n for n in made[name].users if n.target is quantize_per_tensor]
        scales = {float(n.args[1]) for n in users}
        assert len(scales) == 1
        quanta = output.double() / scales.pop()
        assert (quanta - quanta.round()).abs().max() < 1e-4
    (codes,) = [n for n in made["a"].users if n.target is quantize_per_tensor]
    low, high = min(0.0, float(outputs[1].min())), float(outputs[1].max())
    assert abs(codes.args[1] - (high - low) / 255) < 2 * codes.args[1] / 255


@pytest.mark.parametrize("algorithm", ["minmax", "auto", "percentile", "kl"])
def test_codes_as_outputs_have_ranges_of_every_algorithm(algorithm):
    x = torch.randn(4, 3, 8, 8)
    q = with_outputs(ResidualCNN(), x, StaticQuantConfig(act_algo=algorithm))
    assert read_otherwise(q, "conv2") == []
    assert q.graph.sqnr_vs_fp32_db > 15


def test_signed_codes_as_outputs_stand_in_front_of_a_relu():
    """Codes from -128 do not cut at 0, so an engine can't leave out the relu."""
    q = with_outputs(ResidualCNN(), torch.randn(2, 3, 8, 8), StaticQuantConfig(act_dtype="int8"))
    node = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == "conv1")
    assert [n.target for n in node.users] == [quantize_per_tensor]


def test_codes_as_outputs_are_kept_with_the_model_and_on_other_backends(tmp_path):
    from nc import available_backends, load

    x = torch.randn(2, 3, 8, 8)
    q = with_outputs(ResidualCNN(), x)
    q.save(tmp_path / "q")
    again = load(tmp_path / "q", backend="reference")
    assert again.graph.plan.placement == "outputs"
    assert torch.equal(again(x), q(x))
    if not available_backends()["native"]:
        assert worst_db(q(x), load(tmp_path / "q", backend="native")(x)) > 30


def test_a_placement_that_does_not_exist():
    from nc import ConfigError, prepare

    with pytest.raises(
        ConfigError, match="Expected placement to be one of 'inputs', 'outputs', but got 'every_output'"
    ):
        prepare(MLP(), BARE, example_inputs=torch.randn(2, 16), placement="every_output")


def test_an_output_has_the_codes_that_its_reader_asks_for():
    """One quantize behind the convolution, also for the reader that asks for nothing."""
    config = StaticQuantConfig().set_local("b", StaticQuantConfig(act_dtype="int8", act_algo="kl"))
    model = Function(lambda self, x: (self.b(y := self.a(x)), y), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 2, 1))
    q = with_outputs(model, torch.randn(2, 3, 6, 6), config)
    (codes,) = next(n for n in q.graph.module.graph.nodes if n.meta.get("operator") == "a").users
    assert codes.target is quantize_per_tensor
    assert codes.args[5] is torch.int8
    assert len(codes.users) == 2
