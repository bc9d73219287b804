"""torch's int8 convolutions without plans.

Tried before they are used, and in fp32 where their sums are wrong.
"""

import itertools

import pytest
import torch
from models import Function, quantized
from suites.small_llama import random_llama
from torch import nn

import nc
from nc.backends import available_backends
from nc.backends.native import executors, noise_trials
from nc.errors import BackendUnavailableError
from nc.numerics import affine
from nc.numerics.metrics import worst_sqnr_db

pytestmark = [
    pytest.mark.skipif(
        bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
    ),
    pytest.mark.usefixtures("without_plans"),
]
WRONG = "kernel for it whose sums are wrong"


@pytest.fixture
def without_plans(monkeypatch):
    """No oneDNN library to call, and no verdicts of other tests."""
    monkeypatch.setenv("NC_ONEDNN", "none")
    noise_trials._verdicts.cache_clear()
    yield
    noise_trials._verdicts.cache_clear()


@pytest.fixture
def spoil(monkeypatch):
    """Makes one of torch's unary kernels wrong, for inputs of chosen sizes.

    Gives the list of sizes that it has computed.
    """

    def spoiled(dims, is_wrong):
        kernel, seen = noise_trials._UNARY[dims], []

        def run(x, *rest):
            seen.append(tuple(x.shape))
            found = kernel(x, *rest)
            if is_wrong(x.shape):
                found[..., -1] = 0
            return found

        monkeypatch.setattr(noise_trials, "_UNARY", {**noise_trials._UNARY, dims: run})
        return seen

    return spoiled


#: Found wrong with AMX, by oneDNN 3.7 and 3.12.
LAYERS = [
    (nn.Conv1d(8, 32, 16), (2, 8, 60)),
    (nn.Conv2d(16, 32, (3, 16)), (2, 16, 20, 40)),
    (nn.Conv2d(16, 16, 3, 2, (1, 0)), (1, 16, 13, 4)),  # a result of one column
    (nn.Conv2d(128, 32, (1, 3), 2), (3, 128, 16, 4)),
    (nn.Conv2d(8, 16, (5, 1), padding=(1, 0)), (1, 8, 8, 16)),
    (nn.Conv3d(32, 32, (5, 3, 4), 3, (2, 1, 0)), (1, 32, 13, 5, 4)),
]


@pytest.mark.parametrize("behind", [nn.Identity(), nn.Flatten(2)], ids=str)
@pytest.mark.parametrize(("layer", "sizes"), LAYERS, ids=str)
def test_losing_the_plans_costs_no_right_sums(layer, sizes, behind):
    """At the example's sizes and at others."""
    q = quantized(nn.Sequential(layer, nn.ReLU(), behind).eval(), torch.randn(sizes), None, "native")
    report = q.report()
    assert report.details["run by"].startswith("TorchScript")
    op = {each.operator: each for each in report.ops}["0"]
    assert op.ran == "int8" or WRONG in op.reason
    for each in (sizes, (4, *sizes[1:]), (*sizes[:-1], sizes[-1] + 3)):
        x = torch.randn(each)
        assert worst_sqnr_db([q.reference(x)], [q(x)]) > 35


@pytest.mark.parametrize("channels", [8, 64])
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_a_wrong_kernel_is_replaced_and_reported(spoil, dims, channels):
    """With many channels those kernels are tried whose result has few columns."""
    seen = spoil(dims, lambda sizes: True)
    conv = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[dims](channels, 6, 3, padding=1)
    x = torch.randn(2, channels, *[3] * (dims - 2))
    q = quantized(nn.Sequential(conv, nn.ReLU()).eval(), x, None, "native")
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60
    report = q.report()
    assert [(op.operator, op.ran) for op in report.ops] == [("0", "fp32"), ("1", "fp32")]
    op = report.ops[0]
    assert WRONG in op.reason
    assert op.reason.endswith("it runs in fp32, between dequantize and quantize")
    assert report.details["wrong sums, so in fp32"] == f"0 ({' x '.join(map(str, x.shape))})"
    assert seen == [tuple(x.shape)]  # the trial


def test_sizes_that_come_later_are_tried_too(spoil):
    seen = spoil(3, lambda sizes: sizes[0] == 3)
    q = quantized(nn.Sequential(nn.Conv1d(8, 6, 5), nn.ReLU()).eval(), torch.randn(2, 8, 20), None, "native")
    report = q.report()
    assert {op.ran for op in report.ops} == {"int8"}
    assert "wrong sums, so in fp32" not in report.details
    for batch in (2, 3, 4, 3):
        x = torch.randn(batch, 8, 20)
        assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60
    assert seen.count((3, 8, 20)) == 1
    assert q.report().details["wrong sums, so in fp32"] == "0 (3 x 8 x 20)"
    assert {op.ran for op in q.report().ops} == {"int8"}  # for the example


def test_each_distinct_convolution_is_tried_once_and_usual_ones_never(monkeypatch):
    asked = []
    right = noise_trials.trials.adds_up
    monkeypatch.setattr(
        noise_trials.trials,
        "adds_up",
        lambda wanted, run: (asked.append(wanted.source.sizes), right(wanted, run))[1],
    )
    usual = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)
    )
    x = torch.randn(1, 64, 6, 6)
    quantized(usual.eval(), x, None, "native")(x)
    assert asked == []
    same = nn.Sequential(*(each for _ in range(4) for each in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))
    x = torch.randn(1, 8, 6, 6)
    q = quantized(same.eval(), x, None, "native")
    tried_first = len(asked)
    assert 0 < tried_first <= 3  # the first layer reads codes with a zero point, and the last one gives fp32
    q(x)
    assert len(asked) == tried_first
    q(torch.randn(1, 8, 7, 6))
    assert len(asked) == 2 * tried_first


class Sum(nn.Module):
    """A kernel that adds to what another one gave, to codes or to fp32."""

    def __init__(self, groups, codes):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(64, 64, 3, padding=1, groups=groups),
            nn.Conv2d(64, 64, 3, padding=1, groups=groups, bias=False),
        )
        self.end = nn.Conv2d(64, 4, 1) if codes else nn.Identity()

    def forward(self, x):
        return self.end(torch.relu(self.a(x) + self.b(x)))


@pytest.mark.parametrize("verdict", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize(("groups", "codes"), list(itertools.product((1, 4, 64), (True, False))))
def test_sums_are_right_by_either_way(monkeypatch, groups, codes, verdict):
    monkeypatch.setattr(noise_trials, "_is_right", lambda *_: verdict)
    x = torch.randn(2, 64, 9, 9)
    q = quantized(Sum(groups, codes).eval(), x, None, "native")
    ran = {op.operator: op.ran for op in q.report().ops}
    assert {ran[name] for name in ("a", "b", "add", "relu")} == {"int8" if verdict else "fp32"}
    for each in (x, torch.randn(3, 64, 5, 7)):
        before = each.clone()
        assert worst_sqnr_db([q.reference(each)], [q(each)]) > 45
        assert torch.equal(before, each)


ACTIVATIONS = {"none": [], "relu": [], "swish": [], "hardtanh": [-0.5, 0.75], "hardswish": []}


def weight_of(*sizes):
    """Codes of 7 bits: torch's kernels on CPUs with AVX2 alone add pairs of products in 16 bits."""
    return torch.randint(-63, 64, sizes, dtype=torch.int8)


def call(codes_of, weight, activation, dtype, accumulator=None, scales=None):
    """Arguments of one of our operators, for a convolution whose kernels are known to be right.

    64 channels, 8 columns.
    """
    scales = torch.rand(len(weight)) / 1000 + 1e-4 if scales is None else scales
    how = [1, 1], [1, 1], [1, 1], codes_of.shape[1] // weight.shape[1]
    packed = torch.ops.onednn.qconv_prepack(weight, scales, 0.02, 117, *how, list(codes_of.shape))
    inputs = codes_of, 0.02, 117, packed, scales, torch.zeros(len(weight), dtype=torch.int64)
    result = (0.02, 100, dtype) if dtype is torch.uint8 else (1.0, 0, dtype)
    post = activation, ACTIVATIONS[activation], ""
    bias = torch.randn(len(weight))
    if accumulator is None:
        return (*inputs, bias, *how, *result, *post, weight)
    added = (0.01, 90) if accumulator.dtype is torch.uint8 else (1.0, 0)
    return (*inputs, accumulator, bias, *how, *result, *added, "sum", 1.0, *post, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_ways_compute_the_same_and_trials_let_right_kernels_pass(monkeypatch, activation, dtype):
    noise_trials.library()
    monkeypatch.setattr(noise_trials.trials, "fills_tiles_in_part", lambda wanted: True)
    x = torch.randint(0, 256, (2, 64, 8, 8), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    arguments = call(x, weight_of(32, 64, 3, 3), activation, dtype)
    by_torch = torch.ops.nc_tried.qconv(*arguments)
    (verdict,) = noise_trials._verdicts(
        noise_trials._Asked.of(dict(zip(noise_trials._NAMES, arguments[:-1], strict=True)), (32, 64, 3, 3))
    ).values()
    assert verdict
    monkeypatch.setattr(noise_trials, "_is_right", lambda *_: False)
    ours = torch.ops.nc_tried.qconv(*arguments)
    assert (ours.dtype, ours.shape, ours.stride()) == (by_torch.dtype, by_torch.shape, by_torch.stride())
    most = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.uint8: 1.0}[dtype]
    assert float((ours.double() - by_torch.double()).abs().max()) <= most
    assert float(ours.double().std()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_a_sum_is_that_of_float64_by_both_ways(monkeypatch, activation, dtype):
    noise_trials.library()
    monkeypatch.setattr(noise_trials.trials, "fills_tiles_in_part", lambda wanted: True)
    x, weight = (
        torch.randint(0, 256, (2, 64, 8, 8), dtype=torch.uint8),
        weight_of(32, 64, 3, 3),
    )
    other = torch.randint(0, 256, (2, 32, 8, 8), dtype=torch.uint8)
    other = other if dtype is torch.uint8 else other.float() / 64
    arguments = call(x, weight, activation, dtype, other)
    a = dict(zip(noise_trials._NAMES_OF_SUM, arguments, strict=False))
    values = nn.functional.conv2d(
        (x.double() - 117) * 0.02,
        weight.double() * a["w_scale"].double().view(-1, 1, 1, 1),
        a["bias"].double(),
        padding=1,
    )
    values = values + ((other.double() - 90) * 0.01 if dtype is torch.uint8 else other.double())
    values = values.relu() if activation == "relu" else values
    expected = (
        affine.quantize(values.float(), 0.02, 100, 0, 255, dtype=torch.uint8)
        if dtype is torch.uint8
        else values
    )
    for verdict in (None, False):
        if verdict is not None:
            monkeypatch.setattr(noise_trials, "_is_right", lambda *_: False)
        before = other.clone()
        found = torch.ops.nc_tried.qconv_sum(*arguments)
        assert torch.equal(before, other)
        assert float((found.double() - expected.double()).abs().max()) <= (
            1.0 if dtype is torch.uint8 else 1e-4
        )
    asked = noise_trials._Asked.of(a, weight.shape)
    assert list(noise_trials._verdicts(asked).values()) == [True]


@pytest.mark.parametrize("adds", [False, True])
def test_a_trial_notices_a_kernel_that_computes_something_else(monkeypatch, adds):
    """One element near the end of the result is not written."""
    monkeypatch.setattr(noise_trials.trials, "fills_tiles_in_part", lambda wanted: True)
    run = noise_trials._try

    def spoiled(asked, tensors):
        before = tensors[noise_trials.DST].clone()
        run(asked, tensors)
        tensors[noise_trials.DST][-1, :, -2, -1] = before[-1, :, -2, -1]

    geometry = noise_trials.Geometry((1, 1), (1, 1), (1, 1), (1, 1), window=(3, 3), channels=64)
    asked = noise_trials._Asked(
        (32, 64, 3, 3), geometry, 1, True, True, (True, True), torch.uint8, adds, ("relu", (), "")
    )
    assert noise_trials._is_right(asked, (2, 64, 8, 8))
    monkeypatch.setattr(noise_trials, "_try", spoiled)
    assert not noise_trials._is_right(asked, (2, 64, 8, 9))


def test_the_callers_modes_are_of_no_account():
    q = quantized(nn.Sequential(nn.Conv1d(8, 6, 5), nn.ReLU()).eval(), torch.randn(2, 8, 20), None, "native")
    x = torch.randn(3, 8, 20)
    expected = q.reference(x)
    noise_trials._verdicts.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            found = q(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert worst_sqnr_db([expected], [found]) > 60


def test_a_torch_that_compiles_has_right_sums_too(spoil):
    spoil(4, lambda sizes: True)
    model = Function(
        lambda self, x: self.b(torch.relu(self.a(x)) * 2), a=nn.Conv2d(8, 8, 3), b=nn.Conv2d(8, 4, 3)
    )
    x = torch.randn(2, 8, 9, 9)
    q = quantized(model.eval(), x, None, "native", compile=True)
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60
    report = q.report()
    assert {op.operator for op in report.ops if op.ran == "fp32"} >= {"a", "b"}
    assert "wrong sums, so in fp32" in report.details


@pytest.mark.parametrize(
    "sizes", [(1, 64, 2, 8), (1, 65, 8, 8), (1, 64, 8)], ids=["window", "channels", "dimensions"]
)
def test_inputs_that_do_not_fit_are_refused(sizes):
    """torch gives values for a window that is larger than its input by one."""
    noise_trials.library()
    weight = torch.ones(4, 64, 3, 3, dtype=torch.int8)
    arguments = list(call(torch.zeros(1, 64, 8, 8, dtype=torch.uint8), weight, "none", torch.float32))
    arguments[7:9] = [2, 2], [0, 0]
    with pytest.raises(ValueError, match="do not fit"):
        torch.ops.nc_tried.qconv(torch.zeros(sizes, dtype=torch.uint8), *arguments[1:])


@pytest.mark.parametrize("script", [True, False], ids=["TorchScript", "Python"])
def test_linears_of_nothing_keep_their_dimensions(monkeypatch, script):
    if not script:
        monkeypatch.setattr(executors, "EXECUTORS", ())
    model = Function(lambda self, x: self.b(torch.relu(self.a(x)) + x), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    q = quantized(model.eval(), torch.randn(2, 3, 8), None, "native")
    assert q.report().details["run by"].startswith("TorchScript" if script else "Python")
    for sizes in ((0, 3), (3, 0), (2, 5)):
        x = torch.randn(*sizes, 8)
        expected, got = q.reference(x), q(x)
        assert got.shape == expected.shape == (*sizes, 4)
        assert not x.numel() or worst_sqnr_db([expected], [got]) > 60


def test_generation_without_plans_is_refused_with_the_reason_and_the_model_stays_as_it_is():
    model = random_llama(vocab_size=32, pad_token_id=0, eos_token_id=None)
    model = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=32))
    ids = torch.randint(1, 32, (1, 5))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with pytest.raises(BackendUnavailableError, match="NC_ONEDNN is 'none'|no C compiler"):
        nc.accelerate_generation(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
