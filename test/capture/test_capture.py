"""Capture: names as the user would say them, and a graph that computes what the model computes."""

import contextlib
import copy
import dataclasses
import math
import warnings

import pytest
import torch
from models import (
    MLP,
    Attention,
    Function,
    OwnLinear,
    ResidualCNN,
    assert_close,
    call,
    graph_of,
    quantizable,
    run_graph,
    settle,
)
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.pytorch_utils import Conv1D

import nc
from nc import CaptureError, InputError, NCWarning, StaticQuantConfig, UnsupportedError, describe, prepare
from nc.graph.catalogue import op_name
from nc.graph.placement import works_in_place


def kinds(graph):
    return {op.name: op.kind for op in graph.operators if op.quantizable}


def check(model, *inputs, relative=0.0, others=()):
    """The captured graph gives the model's own outputs, for the example and for other inputs."""
    graph = graph_of(model, *inputs)
    for args in (inputs, *others):
        expected = call(model, copy.deepcopy(args))
        assert_close(expected, run_graph(graph, *copy.deepcopy(args)), relative)
    return graph


# ---- names ----


def test_modules_are_named_by_their_path():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.Conv1d(2, 2, 1)) for _ in range(2)]
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graph = graph_of(Function(lambda self, x: self.block(x), block=Block()), torch.randn(3, 2, 4))
    assert kinds(graph) == {
        "block.layers.0.0": "linear",
        "block.layers.0.1": "conv1d",
        "block.layers.1.0": "linear",
        "block.layers.1.1": "conv1d",
    }


def test_functional_operators_are_numbered_per_module():
    inner = Function(lambda self, x: torch.matmul(x, x.transpose(1, 2)) @ x + x)
    model = Function(lambda self, x: self.inner(x) + self.inner(x) + x, inner=inner)
    graph = graph_of(model, torch.randn(2, 3, 4))
    assert quantizable(graph) == [
        "inner.matmul",
        "inner.matmul_1",
        "inner.add",
        "inner.matmul_2",
        "inner.matmul_3",
        "inner.add_1",
        "add",
        "add_1",
    ]


def test_a_module_called_twice_has_one_weight_and_two_names():
    graph = check(
        Function(lambda self, x: self.fc(F.relu(self.fc(x))), fc=nn.Linear(4, 4)), torch.randn(2, 4)
    )
    assert quantizable(graph) == ["fc", "fc@1"]
    assert [op.module_name for op in graph.operators if op.quantizable] == ["fc", "fc"]
    weights = {n.args[1].target for n in graph.module.graph.nodes if n.meta.get("operator") in ("fc", "fc@1")}
    assert len(weights) == 1


def test_a_module_under_two_names_is_one_module():
    model = Function(lambda self, x: self.b(F.relu(self.a(x))))
    model.a = model.b = nn.Linear(4, 4)
    graph = check(model, torch.randn(2, 4))
    assert quantizable(graph) == ["a", "a@1"]


def test_tied_weights_keep_the_names_of_their_modules():
    model = Function(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    graph = check(model, torch.randn(2, 4))
    assert quantizable(graph) == ["a", "b"]
    weights = {n.args[1].target for n in graph.module.graph.nodes if n.meta.get("operator") in ("a", "b")}
    assert len(weights) == 1


def test_output_layer_tied_to_the_embedding():
    model = Function(
        lambda self, i: self.head(self.table(i)), table=nn.Embedding(10, 4), head=nn.Linear(4, 10, bias=False)
    )
    model.head.weight = model.table.weight
    graph = check(model, torch.randint(0, 10, (2, 3)))
    assert quantizable(graph) == ["head"]


class Addmm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class FunctionalLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return F.linear(x, self.kernel)


class MatmulWeight(FunctionalLinear):
    def forward(self, x):
        return x @ self.kernel.t()


@pytest.mark.parametrize(
    "layer", [OwnLinear(4, 6), Addmm(), FunctionalLinear(), MatmulWeight(), Conv1D(6, 4)]
)
def test_every_spelling_of_a_linear_is_a_linear(layer):
    model = Function(lambda self, x: self.layer(x), layer=layer)
    graph = check(model, torch.randn(3, 4), relative=1e-6)
    assert list(kinds(graph).values()) == ["linear"]
    assert next(iter(kinds(graph))).startswith("layer")


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm"])
def test_parametrised_weights_are_constants_named_by_their_module(wrap):
    layer = getattr(nn.utils.parametrizations, wrap)(nn.Linear(4, 6))
    graph = check(Function(lambda self, x: self.fc(x), fc=layer), torch.randn(3, 4), relative=1e-6)
    assert kinds(graph) == {"fc": "linear"}


def test_multihead_attention_is_four_linears_and_two_matmuls():
    model = Function(
        lambda self, x: self.attn(x, x, x, need_weights=False)[0],
        attn=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    graph = check(model, torch.randn(2, 5, 8), relative=1e-5, others=[(torch.randn(3, 4, 8),)])
    found = kinds(graph)
    assert found["attn.out_proj"] == "linear"
    assert sorted(found.values()).count("linear") >= 2  # q, k and v share one projection
    assert list(found.values()).count("matmul") == 2
    assert not [op for op in graph.operators if op.kind == "scaled_dot_product_attention"]


def test_multihead_attention_with_its_weights_returned():
    model = Function(lambda self, x: self.attn(x, x, x), attn=nn.MultiheadAttention(8, 2, batch_first=True))
    graph = check(model, torch.randn(2, 5, 8), relative=1e-5)
    assert list(kinds(graph).values()).count("matmul") == 2


def test_transformer_encoder_layer_is_made_of_linears():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    graph = check(Function(lambda self, x: self.layer(x), layer=layer), torch.randn(2, 5, 16), relative=1e-5)
    assert {"layer.linear1", "layer.linear2", "layer.self_attn.out_proj"} <= set(quantizable(graph))
    assert kinds(graph)["layer.linear1"] == "linear"


@pytest.mark.parametrize("inside", [False, True])
def test_an_encoder_with_a_mask_takes_any_mask(inside):
    """Torch compares the mask with a causal one, to choose a kernel."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    if inside:
        model = Function(lambda self, x, mask: self.encoder(x, mask=mask), encoder=model)
    model.eval()
    hint, causal = torch.nn.modules.transformer._detect_is_causal_mask, nn.Transformer
    example = torch.randn(2, 5, 16), causal.generate_square_subsequent_mask(5)
    graph = graph_of(model, *example)
    band = torch.zeros(7, 7).masked_fill((torch.arange(7) - torch.arange(7)[:, None]).abs() > 2, -math.inf)
    for x, mask in (example, (torch.randn(3, 7, 16), band)):
        with torch.no_grad():
            expected = model(x, mask)
            (found,) = graph.module(x, mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.nn.modules.transformer._detect_is_causal_mask is hint


def test_operators_that_stay_float_have_reasons():
    model = Function(
        lambda self, i: torch.softmax(self.norm(self.table(i)), -1),
        table=nn.Embedding(10, 4),
        norm=nn.LayerNorm(4),
    )
    graph = graph_of(model, torch.randint(0, 10, (2, 3)))
    assert [(op.name, bool(op.reason)) for op in graph.operators] == [
        ("table", True),
        ("norm", True),
        ("softmax", True),
    ]


def test_weight_that_depends_on_the_input_is_not_quantizable():
    graph = graph_of(Function(lambda self, x: F.linear(x, x * 2)), torch.randn(3, 4))
    assert [op.reason for op in graph.operators] == ["its weight is computed from the inputs"]


def test_float64_operators_are_not_quantizable():
    graph = graph_of(
        Function(lambda self, x: self.fc(x), fc=nn.Linear(4, 4).double()),
        torch.randn(3, 4, dtype=torch.float64),
    )
    assert not quantizable(graph)
    assert "float64" in graph.operators[0].reason


def test_additions_of_constants_and_masks_are_no_operators():
    model = Function(lambda self, x: (x + 1.0) + torch.ones(4) + x[:, :1])
    assert not graph_of(model, torch.randn(3, 4)).operators


def test_names_are_the_same_in_two_captures():
    x = torch.randn(2, 3, 8, 8)
    model = ResidualCNN().eval()
    assert graph_of(model, x).operators == graph_of(copy.deepcopy(model), torch.randn(1, 3, 10, 10)).operators


# ---- the model is not touched ----


class Everything(nn.Module):
    """Batch norm, dropout, in-place operators, a hook's favourite layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 2)
        self.bn.eval()

    def forward(self, x):
        return self.fc(self.drop(self.act(self.bn(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize("step", [prepare, describe])
def test_the_model_is_not_touched(step):
    model = Everything().train()
    model.bn.eval()
    calls = []
    model.fc.register_forward_hook(lambda *_: calls.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.warns(NCWarning, match="training mode"):
        step(model, StaticQuantConfig(), example_inputs=torch.randn(2, 3, 6, 6), backend="reference")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert {name: m.training for name, m in model.named_modules()} == {
        "": True, "conv": True, "bn": False, "drop": True, "act": True, "fc": True
    }  # fmt: skip
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    calls.clear()
    model(torch.randn(2, 3, 6, 6))
    assert calls == [1]


class Remembers(nn.Module):
    """Counts its calls, keeps results and makes an attribute: what forward may do outside of buffers."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.last, self.all, self.sizes = nn.Linear(4, 4), 0, None, [], {}

    def forward(self, x):
        self.calls, self.last, self.new = self.calls + 1, self.fc(x), True
        self.all.append(self.last)
        self.sizes[len(self.all)] = 1
        return self.last


@pytest.mark.parametrize("step", [prepare, describe])
def test_what_forward_remembers_is_as_it_was(step):
    model = Remembers().eval()
    refused = torch.__version__ < (2, 9)  # torch.export refuses lists and dicts of the model's that grow
    with pytest.raises(CaptureError) if refused else contextlib.nullcontext():
        step(model, StaticQuantConfig(), example_inputs=torch.randn(2, 4), backend="reference")
    assert (model.calls, model.last, model.all, model.sizes, hasattr(model, "new")) == (
        0,
        None,
        [],
        {},
        False,
    )


def test_the_flags_come_back_when_capture_fails():
    model = Function(lambda self, x: x if x.sum() > 0 else -x, drop=nn.Dropout())
    model.train()
    model.drop.eval()
    with pytest.raises(CaptureError), warnings.catch_warnings():
        warnings.simplefilter("ignore", NCWarning)
        prepare(model, StaticQuantConfig(), example_inputs=torch.randn(3), backend="reference")
    assert model.training
    assert not model.drop.training


def test_the_prepared_model_does_not_follow_the_users_model():
    model, x = MLP().eval(), torch.randn(4, 16)
    expected = model(x)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=x, backend="reference")
    nn.init.zeros_(model.fc1.weight)
    assert torch.equal(prepared(x), expected)


def test_inplace_shares_the_weights_and_leaves_eval_mode():
    model, x = MLP().train(), torch.randn(4, 16)
    with pytest.warns(NCWarning):
        prepared = prepare(model, StaticQuantConfig(), True, x, backend="reference")
    assert not model.training
    shared = {b.data_ptr() for b in prepared.graph.module.buffers()}
    assert {p.data_ptr() for p in model.parameters()} <= shared


def test_the_example_is_not_changed_by_a_model_that_works_in_place():
    x = torch.randn(4, 8)
    before = x.clone()
    model = Function(lambda self, x: self.fc(self.act(x)), act=nn.ReLU(inplace=True), fc=nn.Linear(8, 8))
    prepare(model.eval(), StaticQuantConfig(), example_inputs=x, backend="reference")
    assert torch.equal(x, before)


# ---- outputs equal fp32 ----


def test_outputs_are_equal_bit_for_bit_at_any_batch_size():
    check(MLP(), torch.randn(4, 16), others=[(torch.randn(n, 16),) for n in (1, 2, 7)])


def test_a_batch_of_one_does_not_fix_the_batch():
    check(MLP(), torch.randn(1, 16), others=[(torch.randn(3, 16),)])


def test_sequence_length_stays_free():
    check(
        Attention(),
        torch.randn(1, 5, 32),
        relative=1e-5,
        others=[(torch.randn(3, 9, 32),), (torch.randn(2, 1, 32),)],
    )


def test_image_size_of_a_convolutional_model_stays_free():
    check(ResidualCNN(), torch.randn(1, 3, 8, 8), relative=1e-5, others=[(torch.randn(2, 3, 12, 16),)])


class Patches(nn.Module):
    """Cuts an image into tokens, of any number."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 4, stride=4), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.patch(x).flatten(2).transpose(1, 2))


def test_image_size_of_a_model_with_tokens_is_fixed_unless_asked_for():
    model, x, other = Patches().eval(), torch.randn(1, 3, 8, 8), torch.randn(2, 3, 12, 16)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=x, backend="reference")
    assert_close(call(model, x.repeat(3, 1, 1, 1)), prepared(x.repeat(3, 1, 1, 1)), 1e-5)
    with pytest.raises(InputError, match="expected size 8 in dimension 2.*dynamic_shapes"):
        prepared(other)
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 2: auto, 3: auto}}
    prepared = prepare(
        model, StaticQuantConfig(), example_inputs=x, backend="reference", dynamic_shapes=shapes
    )
    for inputs in (x, other):
        assert_close(call(model, inputs), prepared(inputs), 1e-5)


class NormedAttention(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x, mask=None):
        return super().forward(self.norm(x), mask)


@pytest.mark.parametrize("model", [Attention, NormedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_of_four_dimensions_does_not_fix_the_length(model, dtype):
    model = model().eval()
    graph = graph_of(model, torch.randn(1, 5, 32), torch.ones(1, 1, 5, 5, dtype=dtype))
    other = torch.randn(3, 9, 32), torch.ones(3, 1, 9, 9, dtype=dtype)
    assert_close(call(model, other), run_graph(graph, *other), 1e-5)


def test_prepared_model_equals_fp32():
    x = torch.randn(4, 16)
    model = MLP().eval()
    assert torch.equal(
        prepare(model, StaticQuantConfig(), example_inputs=x, backend="reference")(x), model(x)
    )


def test_large_values_that_cancel_are_no_difference():
    """Folding a batch norm rounds relative to the largest value; small ones beside it are all rounding."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.mul_(1e5)
    x = torch.randn(4, 3, 16, 16)
    assert_close(call(model, x), run_graph(graph_of(model, x), x), 1e-5)


def test_a_batch_that_the_caller_fixes():
    x = torch.randn(2, 16)
    prepared = prepare(
        MLP().eval(), StaticQuantConfig(), example_inputs=x, backend="reference", dynamic_shapes={"x": None}
    )
    prepared(x)
    with pytest.raises(InputError, match="expected size 2 in dimension 0"):
        prepared(torch.randn(3, 16))


BATCH_NORMS = {
    "conv1d": (nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), (2, 3, 9)),
    "conv2d": (nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), (2, 3, 9, 9)),
    "conv2d without bias, affine": (
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6, affine=False),
        (2, 3, 9, 9),
    ),
    "conv3d": (nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6), (2, 3, 5, 5, 5)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6), (2, 3, 5, 5)),
    "linear": (nn.Linear(3, 6), nn.BatchNorm1d(6), (4, 3)),
}


@pytest.mark.parametrize("case", BATCH_NORMS)
def test_batch_norm_is_folded(case):
    layer, norm, shape = BATCH_NORMS[case]
    model = settle(nn.Sequential(layer, norm if norm.affine else nn.BatchNorm2d(6)))
    if not norm.affine:
        model[1] = norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    graph = check(model, torch.randn(shape), relative=1e-5)
    assert [op.kind for op in graph.operators] == [case.split()[0]]


def test_batch_norm_behind_a_grouped_transpose_or_a_3d_linear_is_right_too():
    transpose = settle(nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)))
    check(transpose, torch.randn(2, 4, 5, 5), relative=1e-5)
    # BatchNorm1d normalises dimension 1 of a 3-D tensor, which is not the linear's output
    check(settle(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(5))), torch.randn(2, 5, 3), relative=1e-5)


def test_batch_norm_stays_where_its_input_is_read_twice():
    def forward(self, x):
        y = self.conv(x)
        return self.bn(y) + y

    model = settle(Function(forward, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3)))
    graph = check(model, torch.randn(2, 3, 4, 4), relative=1e-6)
    assert "bn" in [op.name for op in graph.operators]


def test_one_convolution_in_front_of_two_batch_norms():
    model = Function(
        lambda self, x: self.bn2(self.conv(F.relu(self.bn1(self.conv(x))))),
        conv=nn.Conv2d(3, 3, 1),
        bn1=nn.BatchNorm2d(3),
        bn2=nn.BatchNorm2d(3),
    )
    check(settle(model), torch.randn(2, 3, 4, 4), relative=1e-5)


def test_batch_norm_without_running_statistics():
    check(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        torch.randn(2, 3, 4, 4),
        relative=1e-5,
    )


def test_numbers_that_change_nothing_are_left_out():
    def forward(self, x):
        x = self.a(x).relu()
        return torch.softmax(1 * (x + 0) - 0.0, -1) / 1.0

    graph = check(Function(forward, a=nn.Linear(4, 4)), torch.randn(2, 4))
    assert not {"add", "sub", "mul", "div"} & {op_name(node) for node in graph.module.graph.nodes}


def test_numbers_that_change_a_dtype_a_shape_or_a_value_stay():
    def forward(self, x):
        x = self.a(x).relu()
        return (x > 0) + 0, x.half() * torch.ones(()), x.sum() + torch.zeros(3), x - 1, x + 0.0001

    check(Function(forward, a=nn.Linear(4, 4)), torch.randn(2, 4))


def test_a_sum_with_0_is_a_copy_where_something_is_written():
    def forward(self, x):
        y = self.a(x)
        z = y + 0
        z[:, 0] = 7.0
        return y, z

    check(Function(forward, a=nn.Linear(4, 4)), torch.randn(2, 4))


def add_to_first(self, x):
    y = self.a(x)
    y[:, 0] += 1.0
    return self.b(y)


def assign_slice(self, x):
    y = self.a(x)
    y[:, :2] = 0.0
    return self.b(y)


def view_then_inplace(self, x):
    y = self.a(x)
    z = y.view(-1)
    z.mul_(2.0)
    return self.b(y)


def chain_inplace(self, x):
    y = self.a(x)
    r = y
    y.relu_()
    y += x
    y.clamp_(max=1.0)
    return self.b(y) + r


def clone_then_inplace(self, x):
    y = self.a(x)
    z = y.clone()
    z.mul_(3.0)
    return self.b(y) + self.b(z)


def masked_fill_inplace(self, x):
    y = self.a(x)
    y.masked_fill_(y < 0.0, 0.0)  # continuous: quantization flips no value from one side to the other
    return self.b(y)


def out_of_chunks(self, x):
    left, right = self.a(x).chunk(2, -1)
    left.relu_()
    return self.b(torch.cat([left, right], -1))


def two_changes_through_a_view(self, x):
    y = self.a(x)
    first = torch.relu_(y[:, :2].mul_(-2.0))
    return self.b(y) + first.sum()


def compared_inplace(self, x):
    y = self.a(x).view(-1, 2, 2)
    y.gt_(-9.0)  # stays 0 or 1 in fp32
    return self.b(y.flatten(1))


def powers_inplace(self, x):
    y = self.a(x).view(-1, 2, 2)
    y.pow_(2)
    return self.b(y.flatten(1))


INPLACE = [
    compared_inplace,
    powers_inplace,
    add_to_first,
    assign_slice,
    view_then_inplace,
    chain_inplace,
    clone_then_inplace,
    masked_fill_inplace,
    out_of_chunks,
    two_changes_through_a_view,
]


def scaled_view_of_a_new_value(self, x):
    y = self.a(x).view(-1, 2, 2).transpose(1, 2)
    y.div_(3.0)
    return self.b(y.flatten(1))


def test_a_view_that_nothing_else_reads_is_a_new_value():
    """DeBERTa divides a view of what a linear gives."""
    model = Function(scaled_view_of_a_new_value, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    graph = check(model, torch.randn(3, 4), relative=1e-6, others=[(torch.randn(5, 4),)])
    assert not works_in_place(graph.module)


def sums_of_integers(self, x):
    y = (self.a(x) > -9).int().view(-1, 2, 2)
    y.cumsum_(1)
    return self.b(x), y


def test_a_change_in_place_keeps_the_dtype():
    """`cumsum` gives int64 of integers."""
    model = Function(sums_of_integers, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    prepared = prepare(model.eval(), StaticQuantConfig(), example_inputs=x, backend="reference")
    assert prepared(x)[1].dtype is torch.int32


@pytest.mark.parametrize("forward", INPLACE, ids=lambda f: f.__name__)
def test_in_place_operators(forward):
    model = Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    check(model, torch.randn(3, 4), relative=1e-6, others=[(torch.randn(5, 4),)])


@pytest.mark.parametrize("forward", INPLACE, ids=lambda f: f.__name__)
def test_in_place_operators_are_quantized_behind_the_change(forward):
    """The codes of a tensor that is changed in place are those of the changed tensor."""
    model = Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    x = torch.randn(64, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=x, backend="reference")
    with torch.no_grad():
        assert_close(model(x), prepared(x), 1e-6)
    from nc import convert
    from nc.numerics.metrics import sqnr_db

    with torch.no_grad():  # autograd refuses a change in place of a chunk
        assert sqnr_db(model(x), convert(prepared)(x)) > 25


def through_a_view_of_the_weight(self, x):
    weight = self.a.weight.clone()
    weight.view(-1)[:3].mul_(5.0)
    return F.linear(x, weight)


def test_weight_that_is_changed_through_a_view():
    """It is no constant: the product is with the changed one."""
    model = Function(through_a_view_of_the_weight, a=nn.Linear(4, 4))
    check(model, torch.randn(3, 4), relative=1e-6, others=[(torch.randn(5, 4),)])


def test_numbers_of_constant_tensors_are_numbers():
    """Strides of a detector's levels, in a buffer: the engine's plan needs no value of a tensor for them."""

    def forward(self, x):
        y = self.a(x)
        return torch.cat([y + torch.full((y.shape[0], 1), stride) for stride in self.strides], 1)

    model = Function(forward, a=nn.Linear(4, 4))
    model.register_buffer("strides", torch.tensor([8.0, 16.0]))
    graph = check(model, torch.randn(3, 4), relative=1e-6, others=[(torch.randn(5, 4),)])
    assert not any(op_name(node) in ("item", "_local_scalar_dense") for node in graph.module.graph.nodes)


def test_inputs_changed_in_place_by_the_model():
    """The caller's tensor must hold the same values afterwards as with the fp32 model, or stay as it was.

    The output must be right.
    """

    def forward(self, x):
        x += 1.0
        return self.fc(x)

    model, x = Function(forward, fc=nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    expected = call(model, x.clone())
    try:
        prepared = prepare(model, StaticQuantConfig(), example_inputs=x.clone(), backend="reference")
    except CaptureError as error:
        assert "changes" in str(error)
        return
    assert torch.equal(prepared(x.clone()), expected)


def test_dropout_of_a_model_in_training_mode_does_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    x = torch.randn(3, 8)
    with pytest.warns(NCWarning, match="training mode"):
        prepared = prepare(model, StaticQuantConfig(), example_inputs=x, backend="reference")
    assert torch.equal(prepared(x), model.eval()(x))


@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_convolutions_padded_by_name(dim, padding, kernel):
    conv = getattr(nn, f"Conv{dim}d")(2, 3, kernel, padding=padding, dilation=1)
    check(conv, torch.randn(2, 2, *[8] * dim), relative=1e-6)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_survive(mode):
    check(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), torch.randn(2, 2, 6, 6), relative=1e-6)


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, x: x.chunk(2)[-1] * 2,
        lambda _, x: x.split(2)[-1] * 2,
        lambda _, x: torch.cat([p + i for i, p in enumerate(x.split(2))]),
    ],
    ids=["chunk", "split", "cat"],
)
def test_parts_of_the_batch(forward):
    """How many parts there are depends on the batch: another one is right, or refused."""
    model = Function(forward).eval()
    for batch in (1, 2, 3):
        prepared = prepare(
            model, StaticQuantConfig(), example_inputs=torch.randn(batch, 4), backend="reference"
        )
        for other in range(1, 7):
            x = torch.randn(other, 4)
            try:
                expected, got = model(x), prepared(x)
            except (InputError, IndexError):
                assert other != batch
            else:
                assert torch.equal(expected, got)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "name", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
)
def test_convolutions_with_and_without_a_batch(name, batched):
    x = torch.randn(2, 3, *[5] * int(name[-2]))
    conv = getattr(nn, name)(3, 4, 3, stride=2).eval()
    graph = graph_of(conv, x if batched else x[0])
    (node,) = (n for n in graph.module.graph.nodes if op_name(n).startswith("conv"))
    assert node.args[0].meta["val"].dim() == x.dim()
    check(conv, x if batched else x[0], relative=1e-6)


@pytest.mark.parametrize("limits", [{"min": True}, {"max": True}, {"min": True, "max": True}])
def test_clamp_to_tensors(limits):
    def forward(self, x):
        return torch.clamp(self.fc(x), **{end: x.mean() + (0.1 if end == "max" else 0) for end in limits})

    check(Function(forward, fc=nn.Linear(4, 3)), torch.randn(5, 4), relative=1e-6)


# ---- inputs and outputs of any structure ----


@dataclasses.dataclass
class Plain:
    value: torch.Tensor


def test_nested_outputs_keep_their_structure():
    def forward(self, x):
        y = self.fc(x)
        return {"a": (y, [y + 1.0, None]), "b": y.sum(), "n": 3}

    model = Function(forward, fc=nn.Linear(4, 4)).eval()
    out = run_graph(graph_of(model, torch.randn(2, 4)), torch.ones(2, 4))
    y = model.fc(torch.ones(2, 4))
    assert list(out) == ["a", "b", "n"]
    assert isinstance(out["a"], tuple)
    assert isinstance(out["a"][1], list)
    assert torch.equal(out["a"][1][0], y + 1.0)
    assert out["a"][1][1] is None
    assert out["n"] == 3


def test_model_outputs_keep_their_class_and_keys():
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        return_dict=True,
    )
    model = BertModel(config).eval()
    example = {
        "input_ids": torch.randint(0, 50, (1, 6)),
        "attention_mask": torch.ones(1, 6, dtype=torch.long),
    }
    other = {"input_ids": torch.randint(0, 50, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    other["attention_mask"][0, 5:] = 0
    prepared = prepare(model, StaticQuantConfig(), example_inputs=example, backend="reference")
    out, expected = prepared(**other), call(model, other)
    assert type(out) is type(expected)
    assert isinstance(out, BaseModelOutputWithPooling) or list(out) == list(expected)
    assert_close(expected, out, 1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y=None, *, double=False, scale=1.0, names=("p", "q")):
        z = self.fc(x) * scale
        z = z if y is None else z + self.fc(y)
        return z * 2 if double else z


def test_positional_and_keyword_calls_are_the_same():
    model, x, y = TwoInputs().eval(), torch.randn(2, 4), torch.randn(2, 4)
    expected = call(model, (x, y))
    for example in ((x, y), [x, y], {"x": x, "y": y}, {"y": y, "x": x}):
        prepared = prepare(model, StaticQuantConfig(), example_inputs=example, backend="reference")
        for got in (prepared(x, y), prepared(x, y=y), prepared(y=y, x=x)):
            assert torch.equal(got, expected)


def test_none_arguments_may_be_given_or_left_out():
    model, x = TwoInputs().eval(), torch.randn(2, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs={"x": x, "y": None}, backend="reference")
    assert torch.equal(prepared(x), model(x))
    assert torch.equal(prepared(x, None), model(x))


def test_constants_are_part_of_the_contract():
    model, x = TwoInputs().eval(), torch.randn(2, 4)
    prepared = prepare(
        model, StaticQuantConfig(), example_inputs={"x": x, "double": True, "scale": 0.5}, backend="reference"
    )
    assert torch.equal(prepared(x=x, double=True, scale=0.5), model(x, double=True, scale=0.5))
    with pytest.raises(InputError, match=r"'double' was captured as the constant True"):
        prepared(x=x, double=False, scale=0.5)
    with pytest.raises(InputError, match="'scale' was captured as the constant 0.5"):
        prepared(x=x, double=True, scale=1.0)


def test_integer_constants():
    model = Function(lambda self, x, n: self.fc(x)[:, :n], fc=nn.Linear(4, 8)).eval()
    x = torch.randn(3, 4)
    graph = graph_of(model, x, 3)
    assert run_graph(graph, x, 3).shape == (3, 3)
    with pytest.raises(InputError, match="constant 3"):
        run_graph(graph, x, 4)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, batch):
        return self.fc(batch["x"]) + batch["more"][0]


def test_dictionaries_and_lists_of_tensors_as_one_argument():
    model = Nested().eval()
    batch = {"x": torch.randn(2, 4), "more": [torch.randn(2, 4)]}
    prepared = prepare(model, StaticQuantConfig(), example_inputs=(batch,), backend="reference")
    other = {"x": torch.randn(5, 4), "more": [torch.randn(5, 4)]}
    assert torch.equal(prepared(other), model(other))
    with pytest.raises(InputError, match="'batch'.*structure"):
        prepared({"x": batch["x"]})


class VarArgs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *rest, flag=True, **more):
        y = self.fc(x)
        for t in (*rest, *more.values()):
            y = y + t
        return y if flag else -y


def test_variadic_arguments():
    model, t = VarArgs().eval(), [torch.randn(2, 4) for _ in range(4)]
    prepared = prepare(model, StaticQuantConfig(), example_inputs=tuple(t[:3]), backend="reference")
    assert torch.equal(prepared(*t[1:]), model(*t[1:]))
    prepared = prepare(
        model, StaticQuantConfig(), example_inputs={"x": t[0], "extra": t[1]}, backend="reference"
    )
    assert torch.equal(prepared(t[2], extra=t[3]), model(t[2], extra=t[3]))


class PositionalOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, /, y):
        return self.fc(x) + y


def test_positional_only_arguments():
    model, x, y = PositionalOnly().eval(), torch.randn(2, 4), torch.randn(2, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=(x, y), backend="reference")
    assert torch.equal(prepared(x, y), model(x, y))


def test_an_input_that_is_returned_as_it_is():
    check(Function(lambda self, x: (self.fc(x), x), fc=nn.Linear(4, 4)), torch.randn(2, 4))


def test_an_input_that_the_model_does_not_read():
    check(
        Function(lambda self, x, unused: self.fc(x), fc=nn.Linear(4, 4)), torch.randn(2, 4), torch.randn(2, 7)
    )


def test_a_model_without_quantizable_operators():
    check(nn.ReLU(), torch.randn(2, 4))


def test_constants_made_in_forward():
    def forward(self, x):
        grid = torch.arange(x.shape[1]).float() / x.shape[1]
        return self.fc(x * grid) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.zeros(x.shape[0], 1)

    model = Function(forward, fc=nn.Linear(4, 4))  # its bias takes one of them
    check(model, torch.randn(2, 4), relative=1e-6, others=[(torch.randn(5, 4),)])


# ---- attention ----


def sdpa(dim=8, **options):
    """Attention of raw inputs.

    The product with `one` fixes the head size, as the linears of a real model do.
    """

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q * self.one.to(q.dtype), k, v, mask, **options)

    return Function(forward, one=nn.Parameter(torch.ones(dim)))


def qkv(batch=2, heads=4, length=5, dim=8, kv_heads=None, kv_length=None):
    kv = (batch, kv_heads or heads, kv_length or length, dim)
    return torch.randn(batch, heads, length, dim), torch.randn(kv), torch.randn(kv)


def check_attention(model, *inputs):
    """Against attention in float64."""
    graph = graph_of(model, *inputs)
    assert not [op for op in graph.operators if op.kind == "scaled_dot_product_attention"]
    assert [op.kind for op in graph.operators if op.quantizable] == ["matmul", "matmul"]
    exact = call(model, [t.double() if t.is_floating_point() else t for t in inputs])
    assert_close(exact, run_graph(graph, *inputs), 1e-5)


def test_attention():
    check_attention(sdpa(), *qkv())


def test_attention_of_other_key_length():
    check_attention(sdpa(), *qkv(kv_length=9))


@pytest.mark.parametrize("length", [5, 1])
def test_causal_attention(length):
    check_attention(sdpa(is_causal=True), *qkv(length=length, kv_length=5))


def test_attention_with_a_scale_of_its_own():
    check_attention(sdpa(scale=0.3), *qkv())


def test_attention_of_head_sizes_that_are_no_power_of_two():
    check_attention(sdpa(12), *qkv(dim=12))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention(kv_heads):
    check_attention(sdpa(enable_gqa=True), *qkv(kv_heads=kv_heads))


def test_attention_with_a_float_mask():
    check_attention(sdpa(), *qkv(), torch.randn(2, 1, 5, 5))


def test_attention_with_a_boolean_mask():
    mask = torch.rand(2, 1, 5, 5) > 0.5
    mask[..., 0] = True
    check_attention(sdpa(), *qkv(), mask)


def test_a_row_that_may_attend_to_nothing_gives_zeros():
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 2] = False
    check_attention(sdpa(), *qkv(), mask)


def test_a_sample_whose_keys_are_all_padding_gives_zeros():
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1] = False
    check_attention(sdpa(), *qkv(), mask)


def test_a_row_that_a_float_mask_hides_entirely_gives_zeros():
    mask = torch.zeros(2, 1, 5, 5)
    mask[0, 0, 2] = -math.inf
    check_attention(sdpa(), *qkv(), mask)


def test_attention_with_a_mask_of_two_dimensions():
    check_attention(sdpa(), *qkv(), torch.ones(5, 5, dtype=torch.bool).tril())
    check_attention(sdpa(), *qkv(), torch.full((5, 5), -math.inf).triu(1))


def test_attention_of_three_dimensions():
    check_attention(sdpa(), torch.randn(2, 5, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8))


def test_attention_whose_values_are_wider_than_its_keys():
    q, k, _ = qkv()
    check_attention(sdpa(), q, k, torch.randn(2, 4, 5, 12))


# ---- what can't be captured ----


def test_a_branch_on_values_names_the_users_line():
    def forward(self, x):
        if x.sum() > 0:  # the line to be shown
            return self.fc(x)
        return x

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+, in forward: if x\.sum\(\) > 0") as caught:
        prepare(
            Function(forward, fc=nn.Linear(4, 4)).eval(),
            StaticQuantConfig(),
            example_inputs=torch.ones(2, 4),
            backend="reference",
        )
    assert "torch.where" in str(caught.value)


def test_a_loop_over_values_is_refused():
    def forward(self, x):
        for _ in range(int(x.abs().sum())):
            x = self.fc(x)
        return x

    with pytest.raises(CaptureError, match=r"test_capture\.py"):
        graph_of(Function(forward, fc=nn.Linear(4, 4)), torch.ones(2, 4))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return self.fc(x) + self.count


class Remembering(Counting):
    def forward(self, x):
        self.count = self.count + x.sum()
        return self.fc(x)


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_a_model_that_changes_its_buffers_is_refused_and_left_alone(kind):
    model = kind().eval()
    with pytest.raises(CaptureError, match="count"):
        prepare(model, StaticQuantConfig(), example_inputs=torch.ones(2, 4), backend="reference")
    assert model.count.item() == 0


class Reassigning(Counting):
    def forward(self, x):
        self.count = self.count.to(device=x.device, dtype=x.dtype)
        return self.fc(x) + self.count


def test_a_buffer_that_is_assigned_to_itself_is_no_state():
    model = Reassigning()
    model.count += 2
    x = torch.randn(2, 4)
    assert_close(call(model, x), run_graph(graph_of(model, x), x), 1e-6)


def test_masks_that_transformers_builds_with_vmap():
    masks = pytest.importorskip("transformers.masking_utils")
    expansion = getattr(masks, "_vmap_expansion_sdpa", None) or masks._vmap_for_bhqkv

    def near(batch, head, query, key):
        return (query - key).abs() < 2

    def forward(self, x):
        name = "_vmap_expansion_sdpa" if hasattr(masks, "_vmap_expansion_sdpa") else "_vmap_for_bhqkv"
        places = [torch.arange(size) for size in (x.shape[0], 1, x.shape[1], x.shape[1])]
        with masks.TransformGetItemToIndex():
            mask = getattr(masks, name)(near)(*places)
        return self.fc(mask[:, 0].to(x.dtype) @ x)

    model = Function(forward, fc=nn.Linear(4, 4)).eval()
    x, longer = torch.randn(2, 5, 4), torch.randn(3, 7, 4)
    graph = graph_of(model, x)
    for given in (x, longer):
        assert_close(call(model, given), run_graph(graph, given), 1e-6)
    after = getattr(masks, "_vmap_expansion_sdpa", None) or masks._vmap_for_bhqkv
    assert after is expansion


def test_a_model_with_random_numbers_is_refused():
    with pytest.raises(CaptureError, match="draws random numbers") as caught:
        graph_of(Function(lambda self, x: self.fc(x) + torch.randn(4), fc=nn.Linear(4, 4)), torch.ones(2, 4))
    assert "capture.py" not in str(caught.value)  # a line of this package's would mislead


def test_a_cache_with_other_states_than_keys_and_values_is_refused_with_advice():
    """Mamba's cache holds convolution and recurrent states."""
    caches = pytest.importorskip("transformers.cache_utils")
    if not hasattr(caches, "LinearAttentionLayer"):
        pytest.skip("this transformers has no such cache")

    def forward(self, x):
        cache = caches.DynamicCache()
        cache.layers.append(caches.LinearAttentionLayer())
        return self.fc(x), cache

    with pytest.raises(CaptureError, match="LinearAttentionLayer.*\n.*use_cache=False"):
        graph_of(Function(forward, fc=nn.Linear(4, 4)), torch.ones(2, 4))
    cache = caches.DynamicCache()
    cache.layers.append(caches.LinearAttentionLayer())
    model = Function(lambda self, x, cache: self.fc(x), fc=nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="LinearAttentionLayer.*\n.*use_cache=False"):
        nc.prepare(model.eval(), nc.StaticQuantConfig(), example_inputs=(torch.ones(2, 4), cache))


def test_a_batch_baked_into_the_model_is_said_aloud():
    model = Function(lambda self, x: self.fc(x).reshape(2, -1), fc=nn.Linear(4, 4)).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = graph_of(model, torch.randn(2, 4))
    assert_close(call(model, torch.ones(2, 4)), run_graph(graph, torch.ones(2, 4)), 0.0)
    try:
        out = run_graph(graph, torch.ones(4, 4))
    except InputError:
        assert any("shapes" in str(w.message) or "dimension" in str(w.message) for w in caught)
    else:
        assert torch.equal(out, call(model, torch.ones(4, 4)))


@pytest.mark.parametrize(
    "x", [torch.randn(2, 5), torch.ones(2, 16, dtype=torch.int64), (torch.randn(2, 16),)]
)
def test_examples_that_the_model_itself_fails_on(x):
    with pytest.raises(
        InputError, match=r"MLP itself fails on example_inputs \(x: .*\): \w+Error: "
    ) as caught:
        graph_of(MLP(), x)
    assert caught.value.__cause__ is not None  # with the user's own line in its traceback


@pytest.mark.parametrize(
    ("x", "what"), [(torch.randn(0, 16), "an empty tensor"), (torch.full((2, 16), torch.nan), "NaN")]
)
def test_examples_that_nothing_can_be_verified_on(x, what):
    with pytest.raises(InputError, match=f"example_inputs hold {what}"):
        graph_of(MLP(), x)


def test_shapes_of_arguments_that_forward_collects_stay_free():
    model = Function(lambda self, x, **more: self.fc(x) + more["extra"], fc=nn.Linear(4, 4)).eval()
    x = torch.randn(4, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs={"x": x, "extra": x}, backend="reference")
    assert_close(model(x[:2], extra=x[2:]), prepared(x[:2], extra=x[2:]), 1e-6)


def test_a_failed_capture_prints_nothing(capfd):
    def branch(self, x):
        return self.fc(x) if x.sum() > 0 else -x

    with pytest.raises(CaptureError):
        graph_of(Function(branch, fc=nn.Linear(4, 4)), torch.randn(2, 4))
    assert capfd.readouterr() == ("", "")


def test_an_operator_on_constants_alone_stays_fp32():
    """IPEX crashed on DeBERTa's projected relative positions."""
    model = Function(lambda self, x: self.fc(x).relu() + self.fc(self.table).sum(0), fc=nn.Linear(4, 4))
    model.table = nn.Parameter(torch.randn(8, 4))
    graph = graph_of(model, torch.randn(3, 4))
    (reason,) = {op.reason for op in graph.operators if op.kind == "linear" and not op.quantizable}
    assert reason == "its input is a constant: computed once, not at each call"
    assert sum(op.quantizable for op in graph.operators if op.kind == "linear") == 1


def test_autocast_around_prepare_has_no_effect():
    """It would capture another model, in bf16, of which nothing is int8."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).eval()
    x = torch.randn(4, 16)

    def quantized():
        return nc.quantize(
            model, nc.StaticQuantConfig(), lambda prepared: prepared(x), example_inputs=x, backend="reference"
        )

    expected = quantized()
    with torch.autocast("cpu", torch.bfloat16):
        found = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend="reference")
    found(x)
    found = nc.convert(found)
    assert found(x).dtype == torch.float32
    assert torch.equal(found(x), expected(x))


class Steps(nn.Module):
    """A loop in Python, whose number of rounds a graph fixes."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        state = x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


class Pooled(nn.Module):
    """Images with a norm: their height and width are fixed without asking."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.conv(x).mean((2, 3)))


def test_the_advice_for_another_size_is_one_that_helps(tmp_path):
    auto = torch.export.Dim.AUTO
    x, image = torch.randn(2, 7, 8), torch.randn(2, 3, 8, 8)
    for shapes in (None, {"x": {0: auto, 1: auto}}):
        prepared = prepare(
            Steps().eval(), StaticQuantConfig(), example_inputs=x, dynamic_shapes=shapes, backend="reference"
        )
        with pytest.raises(
            InputError, match="size 7 in dimension 1.*The model fixes it: call prepare\\(\\) for each size"
        ) as caught:
            prepared(torch.randn(2, 9, 8))
        assert "dynamic_shapes" not in str(caught.value)
    with pytest.raises(
        CaptureError, match="The model fixes a dimension that dynamic_shapes says is free.*Dim.AUTO"
    ):
        prepare(
            Steps().eval(),
            StaticQuantConfig(),
            example_inputs=x,
            dynamic_shapes={"x": {1: torch.export.Dim("t")}},
            backend="reference",
        )
    model, other = Pooled().eval(), torch.randn(2, 3, 12, 10)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=image, backend="reference")
    advice = r"torch.export.Dim.AUTO for it, in dynamic_shapes= of prepare\(\)"
    with pytest.raises(InputError, match=advice):
        prepared(other)
    prepared(image)
    nc.save(nc.convert(prepared, measure=False), tmp_path / "q")
    with pytest.raises(InputError, match=advice):
        nc.load(tmp_path / "q", backend="reference")(other)
    shapes = {"x": {0: auto, 2: auto, 3: auto}}
    followed = prepare(
        model, StaticQuantConfig(), example_inputs=image, dynamic_shapes=shapes, backend="reference"
    )
    torch.testing.assert_close(followed(other), model(other))
