"""The native backend: the common suite on the int8 operators of stock PyTorch."""

import contextlib
import dataclasses
import inspect
import os
import subprocess
import sys

import pytest
import torch
from models import (
    MLP,
    WHY_NO_PLANS,
    Function,
    ResidualCNN,
    assert_all_int8,
    assert_same_but_for_ties,
    quantized,
    worst_db,
)
from suites.backend_suite import MODELS, BackendSuite
from suites.reports import said
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from nc import (
    BackendUnavailableError,
    ConfigError,
    NCWarning,
    StaticQuantConfig,
    UnsupportedError,
    VerificationError,
    available_backends,
    compare,
    convert,
    load,
    prepare,
)
from nc.backends import get_backend
from nc.backends.native import OPS, executors, fuse, passes, regions
from nc.backends.native.plans import code_products
from nc.graph.catalogue import op_name
from nc.graph.saturation import narrow
from nc.kernels import cpu
from nc.profiling import onednn_verbose

pytestmark = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)


#: Products of two activations in fp32.
NO_PRODUCTS = StaticQuantConfig().set_local("matmul", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))


@pytest.fixture
def without_plans(monkeypatch):
    """No oneDNN library to call, as in a torch that hides it well."""
    monkeypatch.setenv("NC_ONEDNN", "none")


class TestNative(BackendSuite):
    backend = "native"

    @pytest.mark.parametrize("name", MODELS)
    def test_what_was_asked_runs_in_int8(self, converted, name):
        _, q = converted(name)
        report = q.report()
        assert_all_int8(report)  # every one of these models has a plan
        assert report.sqnr_db >= self.agreement

    def test_a_residual_block_stays_in_codes(self, converted):
        q = converted("residual")[1]
        report = q.report()
        assert report.quantize_outside <= 2  # the input, and the pooled features
        assert report.dequantize_outside <= 1  # in front of the average pool


def kernels(monkeypatch, model, inputs, config=None):
    """The quantized model, and the oneDNN operators that its graph calls, the last one that was lowered."""
    found = []
    fuse = passes.fuse

    def spy(module, **options):
        fuse(module, **options)
        found[:] = (
            n
            for n in module.graph.nodes
            if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "onednn"
        )

    monkeypatch.setattr(passes, "fuse", spy)
    return quantized(model.eval(), inputs, config, "native"), found


def test_codes_that_nobody_needs_any_more_are_added_to_without_a_copy(monkeypatch):
    """In a chain of residual blocks each block's input is read last by the block's own sum."""

    def forward(self, x):
        y = F.relu(self.stem(x))
        for first, second in self.blocks:
            y = F.relu(second(F.relu(first(y))) + y)
        return self.head(y)

    convolutions = nn.ModuleList(
        nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)) for _ in range(3)
    )
    model = Function(
        forward, stem=nn.Conv2d(3, 8, 3, padding=1), blocks=convolutions, head=nn.Conv2d(8, 4, 1)
    )
    x = torch.randn(2, 3, 8, 8)
    q = quantized(model.eval(), x, None, "native")
    assert (names_of(q).count("contiguous"), names_of(q).count("clone")) == (3, 0)
    for shape in ((2, 3, 8, 8), (1, 3, 1, 1), (3, 3, 5, 7)):
        x = torch.randn(shape)
        assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize("bias", [None, "mask", "mask and position"])
@pytest.mark.parametrize("scale", ["div", "mul", "none"])
def test_attention_is_one_call(bias, scale):
    def forward(self, x, mask):
        q, k, v = (self.linears[i](x).unflatten(-1, (4, 8)).transpose(1, 2) for i in range(3))
        scores = q @ k.transpose(-1, -2)
        scores = scores / 3.0 if scale == "div" else scores * 0.25 if scale == "mul" else scores
        if bias is not None:
            scores = scores + mask[:, None, None]
        if bias == "mask and position":
            scores = self.position + scores
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Function(forward, linears=nn.ModuleList(nn.Linear(32, 32) for _ in range(4)))
    model.register_buffer("position", torch.randn(4, 5, 5))
    mask = torch.zeros(3, 5)
    mask[1, 3:] = torch.finfo(torch.float32).min
    q = quantized(model.eval(), (torch.randn(3, 5, 32), mask), NO_PRODUCTS, "native")
    assert names_of(q).count("scaled_dot_product_attention") == 1
    assert not {"softmax", "matmul"} & set(names_of(q))
    x = torch.randn(2, 5, 32)
    assert worst_db([q.reference(x, mask[:2])], [q(x, mask[:2])]) > 60


def test_scores_that_the_model_returns_are_computed():
    def forward(self, x):
        y = self.a(x)
        weights = (y @ y.transpose(-1, -2)).softmax(-1)
        return weights @ y, weights

    x = torch.randn(2, 3, 5, 16)
    q = quantized(Function(forward, a=nn.Linear(16, 16)).eval(), x, NO_PRODUCTS, "native")
    assert "scaled_dot_product_attention" not in names_of(q)
    assert worst_db(q.reference(x), q(x)) > 60


@pytest.mark.parametrize("bias", ["integers", "more heads"])
def test_biases_that_the_call_does_not_take_are_added_as_before(bias):
    def forward(self, x):
        y = self.a(x).unsqueeze(1)
        return self.b(((y @ y.transpose(-1, -2) + self.bias).softmax(-1) @ y).sum(1))

    model = Function(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    model.register_buffer(
        "bias", torch.randint(0, 3, (1, 1, 5, 5)) if bias == "integers" else torch.randn(1, 4, 5, 5)
    )
    x = torch.randn(2, 5, 16)
    q = quantized(model.eval(), x, NO_PRODUCTS, "native")
    assert "scaled_dot_product_attention" not in names_of(q)
    assert worst_db([q.reference(x)], [q(x)]) > 40


def names_of(q):
    """Names of the operators that the lowered graph calls."""
    seen = inspect.getclosurevars(q.engine.report).nonlocals
    module, _ = seen["made"](seen["running"].products)
    return [op_name(n) for n in module.graph.nodes]


@pytest.mark.skipif(
    os.environ.get("NC_ONEDNN") == "package",
    reason="the oneDNN inside torch says what it runs, a packaged one does not",
)
def test_weights_are_laid_out_for_the_example_and_not_anew_at_each_call(monkeypatch):
    """A batch of 1 is traced as 2, for which AMX kernels want another layout (160 outputs).

    Without AMX this holds all the same.
    """
    monkeypatch.setattr(code_products, "why_unavailable", lambda: "left out")  # oneDNN says what it runs
    model = nn.Sequential(nn.Conv2d(576, 160, 1), nn.ReLU6(), nn.Conv2d(160, 960, 1)).eval()
    x = torch.randn(1, 576, 7, 7)
    q = quantized(model, x, None, "native")
    q(x)
    with onednn_verbose.captured() as lines:
        q(x)
    quantizes = [] if WHY_NO_PLANS else ["reorder"]
    assert [kernel.primitive for kernel in onednn_verbose.parse(lines)] == [
        *quantizes,
        "convolution",
        "convolution",
    ]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda y, x: y.masked_fill(torch.where(x > 0, True, False), -1.0), "fails"),
        (lambda y, x: (y, (x > 0.5) ^ True), "something else"),
        (lambda y, x: (y, x.shape[0] ** 2), "something else"),
        (lambda y, x: torch.sub(1, y.sin(), alpha=3), "can't express"),
    ],
)
def test_what_torchscript_reads_otherwise_is_run_by_python(without_plans, function, why):
    x = torch.randn(4, 8)
    q = quantized(
        Function(lambda self, x: function(self.fc(x), x), fc=nn.Linear(8, 8)).eval(), x, None, "native"
    )
    assert why in q.report().details["run by"]
    expected, got = (v if isinstance(v, tuple) else (v,) for v in (q.reference(x), q(x)))
    for a, b in zip(expected, got, strict=True):
        assert (type(a), getattr(a, "dtype", a)) == (type(b), getattr(b, "dtype", b))
    assert worst_db(expected, got) > 60


@pytest.mark.parametrize("transposed", [False, True])
def test_a_reshape_that_is_a_view_stays_one(transposed):
    def forward(self, x):
        y = self.fc(x)
        view = y.t().reshape(8, 2, -1) if transposed else y[:, :2].reshape(-1, 2, 1)
        view.add_(100)
        return self.fc2(y), view

    x = torch.randn(4, 8)
    q = quantized(Function(forward, fc=nn.Linear(8, 8), fc2=nn.Linear(8, 8)).eval(), x, None, "native")
    assert q.report().details["run by"] == "TorchScript: operators of this graph work in place"
    assert worst_db(q.reference(x), q(x)) > 60


def test_bits_of_a_size_are_bits_in_torchscript_too(without_plans):
    """`and` of two numbers is no `&`, though for a batch of 1 both are 1."""
    x = torch.randn(1, 8)
    model = Function(lambda self, x: self.fc(x) * ((x.shape[0] & 1) + (x.shape[0] | 4)), fc=nn.Linear(8, 8))
    q = quantized(model.eval(), x, None, "native")
    assert q.report().details["run by"] == "TorchScript: NC_ONEDNN is 'none'"
    for batch in (1, 2, 3):
        x = torch.randn(batch, 8)
        assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize(
    "activation", [nn.ReLU6(), nn.Hardtanh(-2.0, 1.5), nn.LeakyReLU(0.2)], ids=lambda m: type(m).__name__
)
def test_numbers_of_an_activation_behind_a_linear_reach_torchscript(without_plans, activation):
    model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 4))
    q = quantized(model, 3 * torch.randn(16, 8), None, "native")
    assert q.report().details["run by"].startswith("TorchScript")
    assert not q.report().not_int8
    x = 3 * torch.randn(5, 8)
    assert worst_db(q.reference(x), q(x)) > 40


def test_without_torchscript_python_runs_the_graph(tmp_path):
    """Its switch is read when torch is imported."""
    x = torch.randn(2, 8)
    q = quantized(nn.Linear(8, 4).eval(), x, None, "native")
    q.save(tmp_path / "m")
    code = "import nc, sys; print(nc.load(sys.argv[1], backend='native').report().details['run by'])"
    command = [sys.executable, "-c", code, str(tmp_path / "m")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTORCH_JIT": "0", "NC_ONEDNN": "none"},
    )
    assert "TorchScript is switched off" in done.stdout


def test_what_torchscript_has_no_words_for_is_run_by_python(monkeypatch, without_plans):
    x = torch.randn(2, 8)
    monkeypatch.setattr(executors, "_SPELLING", {})
    q = quantized(nn.Linear(8, 4).eval(), x, None, "native")
    assert q.report().details["run by"].startswith("Python: NC_ONEDNN is 'none'; Operator <function quantize")
    assert q.report().sqnr_db > 60
    assert "run by" in said(q.report())
    assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_zeros_are_put_around_codes(dtype):
    """As TensorFlow's uneven padding is written.

    The pad stands between two convolutions, and works on codes.
    """
    model = Function(
        lambda self, x: self.b(F.pad(F.silu(self.a(x)), (0, 1, 0, 1))),
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(8, 8, 3, stride=2),
    )
    x = torch.randn(2, 3, 9, 9)
    q = quantized(model.eval(), x, StaticQuantConfig(act_dtype=dtype), "native")
    assert names_of(q).count("quantize") == 1  # the model's input
    assert worst_db([q.reference(x)], [q(x)]) > 40


@pytest.mark.parametrize("options", [{"value": 1.5}, {"mode": "reflect"}])
def test_other_padding_stays_where_it_is(options):
    model = Function(
        lambda self, x: self.b(F.pad(self.a(x), (1, 1, 1, 1), **options)),
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(8, 8, 3),
    )
    x = torch.randn(2, 3, 9, 9)
    q = quantized(model.eval(), x, None, "native")
    assert worst_db([q.reference(x)], [q(x)]) > 60


ACTIVATIONS = [
    F.relu,
    F.gelu,
    F.silu,
    F.relu6,
    F.hardswish,
    F.leaky_relu,
    torch.tanh,
    torch.sigmoid,
    lambda x: x.clamp(-1, 1),
]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(8, 8), (16, 8)), (lambda: nn.Conv2d(8, 8, 3, padding=1), (16, 8, 6, 6))],
)
def test_activations_are_computed_by_the_kernel_or_behind_it(act, make, shape, monkeypatch):
    model = Function(lambda self, x: self.b(act(self.a(x))), a=make(), b=make())
    x = torch.randn(shape)
    q, found = kernels(monkeypatch, model, x)
    assert_same_but_for_ties(q.reference(x), q(x))
    if len(shape) == 4 and act in (F.gelu, F.leaky_relu, torch.tanh):
        assert len(found) == 1  # torch's convolution has no such activation: the call is a plan's own
        return
    first = found[0]
    dtype = next(a for a in first.args if isinstance(a, torch.dtype))
    fused = first.args[-3] != "none"
    assert fused == (act is not torch.sigmoid)
    assert dtype == (torch.uint8 if fused else torch.float32)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dims", [1, 3])
def test_activations_behind_convolutions_of_other_ranks(act, dims):
    make = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    model = Function(lambda self, x: self.b(act(self.a(x))), a=make(8, 8, 3, padding=1), b=make(8, 8, 1))
    x = torch.randn(16, 8, *[5] * dims)
    q = quantized(model.eval(), x, None, "native")
    assert q.report().ran_int8 == 2
    assert_same_but_for_ties(q.reference(x), q(x))


@pytest.mark.parametrize("act", [F.relu6, F.hardswish, F.hardtanh, lambda x: x.clamp(-2, 3)])
def test_activations_end_where_they_should(act):
    """With many values beyond their limits."""
    model = Function(lambda self, x: self.b(act(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    x = 20 * torch.randn(32, 8)
    q = quantized(model.eval(), x, None, "native")
    y = model.a(x)
    assert y.min() < -6
    assert y.max() > 6
    assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize("same", [True, False], ids=["read again", "read once"])
def test_what_is_added_to_in_place_is_not_lost(same, monkeypatch):
    def forward(self, x):
        y = F.relu(self.a(x))
        z = F.relu(self.b(y) + y)
        return self.c(z) + (y if same else 0)

    model = Function(
        forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 8, 3, padding=1), c=nn.Conv2d(8, 8, 1)
    )
    x = torch.randn(2, 3, 8, 8)
    q, found = kernels(monkeypatch, model, x)
    assert any("binary" in n.target._overloadname for n in found)
    for _ in range(2):
        assert worst_db([q.reference(x)], [q(x)]) > 60


def test_the_image_may_be_large():
    """ATen's max pool of uint8 counts elements in 8 bits."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(1, 3, 64, 64)
    q = quantized(model, x, None, "native")
    assert worst_db([q.reference(x)], [q(x)]) > 60


def test_what_has_no_kernel_stays_fp32_and_says_so(monkeypatch):
    monkeypatch.setattr("nc.backends.native.OPS", tuple(row for row in OPS if row.kind != "conv_transpose2d"))
    x = torch.randn(2, 8, 6, 6)
    report = quantized(
        nn.Sequential(nn.ConvTranspose2d(8, 8, 3), nn.ReLU()).eval(), x, None, "native"
    ).report()
    assert [(op.asked, op.ran, op.reason) for op in report.ops][0] == (
        "fp32",
        "fp32",
        "backend 'native' has no int8 kernel for conv_transpose2d",
    )


@pytest.mark.parametrize(
    "other", [engine for engine in ("ipex", "reference") if not available_backends()[engine]]
)
def test_an_artefact_of_another_engine_runs_here(tmp_path, other):
    """Never wrong numbers.

    Where this CPU adds products in 16 bits, what the reference was quantized for would saturate and is
    changed.
    """
    x = torch.randn(2, 3, 8, 8)
    q = quantized(ResidualCNN().eval(), x, None, other)
    q.save(tmp_path / "a")
    changes = other == "reference" and not cpu.accumulates_wide()
    with (
        pytest.warns(NCWarning, match="4 of 5 quantized layers could saturate")
        if changes
        else contextlib.nullcontext()
    ):
        native = load(tmp_path / "a", backend="native")
    assert worst_db([q(x)], [native(x)]) > 30
    assert worst_db([native.reference(x)], [native(x)]) > 40
    assert not compare(native, "reference").disagreements  # what is left are codes at a tie
    assert native.report().ran_int8 == native.report().asked_int8 == 5


def test_weights_that_can_not_saturate_are_taken_as_they_are(tmp_path):
    model = MLP().eval()
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.abs().clamp(min=0.01)
            * torch.tensor([1.0, -1.0]).repeat(parameter.shape[-1])[: parameter.shape[-1]]
        )
    x = torch.randn(4, 16)
    q = quantized(model, x, StaticQuantConfig(post=()), "reference")
    q.save(tmp_path / "a")
    native = load(tmp_path / "a", backend="native")
    assert worst_db([q(x)], [native(x)]) > 60


def test_wrong_numbers_are_noticed(monkeypatch):
    real = regions.codes_behind
    monkeypatch.setattr(regions, "codes_behind", lambda node: real(node) and (0.5, 7, torch.uint8))
    with pytest.raises(
        VerificationError, match="The native backend computes something else than the quantized graph"
    ):
        quantized(MLP().eval(), torch.randn(4, 16), None, "native")


@pytest.mark.parametrize("faulty", ["0", "3", "7"])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_broken_kernel_is_named(monkeypatch, kind, faulty):
    """One layer of four gets scales of another model.

    The error names it, wherever it is, and its advice helps.
    """
    layers = [nn.Linear(8, 8) if kind == "linear" else nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    a, b, c, d = layers
    model = nn.Sequential(a, nn.ReLU(), nn.Identity(), b, nn.Identity(), c, nn.ReLU(), d).eval()
    x = torch.randn(4, 8) if kind == "linear" else torch.randn(2, 8, 6, 6)
    real = fuse._scales

    def wrong(module, region, scales):
        return real(
            module, region, scales.flip(0) * 3 if region.anchor.meta["operator"] == faulty else scales
        )

    monkeypatch.setattr(fuse, "_scales", wrong)
    with pytest.raises(
        VerificationError, match=f"The first operator that differs is '{faulty}'; give it fp32"
    ):
        quantized(model, x, None, "native")
    monkeypatch.setattr(
        regions, "codes_behind", lambda node: None
    )  # a kernel that gives fp32 is searched for in the same way
    with pytest.raises(VerificationError, match=f"The first operator that differs is '{faulty}'"):
        quantized(model, x, None, "native")
    fp32 = StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")
    q = quantized(model, x, StaticQuantConfig().set_local(faulty, fp32), "native")
    assert worst_db([q.reference(x)], [q(x)]) > 40


class Halves:
    """An executor that gives something else on the second call too."""

    name, products = "halves", False

    def __init__(self, why="", fault=None):
        self.why, self.fault, self.built = why, fault, 0

    def why_not(self, module):
        return self.why

    def build(self, lowered, example, reference=None):
        self.built += 1
        running = executors.PYTHON.build(lowered, example)
        call = running.call
        return dataclasses.replace(
            running, call=lambda *inputs: [y if self.fault is None else self.fault(y) for y in call(*inputs)]
        )


def test_executors_are_tried_in_order_and_python_is_the_last(monkeypatch):
    x = torch.randn(2, 8)

    def run_by(*asked):
        monkeypatch.setattr(executors, "EXECUTORS", asked)
        q = quantized(nn.Linear(8, 4).eval(), x, None, "native")
        assert worst_db([q.reference(x)], [q(x)]) > 60
        return q.report().details.get("run by")

    refuses, halves, right, unused = Halves("not here"), Halves(fault=lambda y: y / 2), Halves(), Halves()
    assert run_by(right) is None
    assert run_by(refuses, right, unused) == "halves: not here"
    assert (refuses.built, unused.built) == (0, 0)
    assert (
        run_by(refuses, halves)
        == "Python: not here; halves computes something else: 6.0 dB, expected at least 20"
    )
    assert run_by() == "Python: there is no other executor"


def test_a_torch_without_the_operators(monkeypatch):
    monkeypatch.setattr("nc.backends.native._NEEDED", ("qlinear_prepack", "no_such_operator"))
    with pytest.raises(
        BackendUnavailableError, match="has no onednn::no_such_operator: pip install 'torch>=2.8'"
    ):
        quantized(MLP().eval(), torch.randn(4, 16), None, "native")


SEQUENCES = {
    "a single row": ((nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (16,), 2),
    "an image without a batch": ((nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), (3, 8, 8), 2),
    "a row of samples without a batch": ((nn.Conv1d(3, 8, 3), nn.ReLU()), (3, 8), 1),
    "uneven padding": (
        (nn.Conv2d(3, 8, 4, padding="same"), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same")),
        (2, 3, 8, 8),
        2,
    ),
    "circular padding": (
        (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        (2, 3, 8, 8),
        2,
    ),
    "dilated depthwise": (
        (nn.Conv2d(8, 8, 3, groups=8, dilation=2), nn.ReLU6(), nn.Conv2d(8, 8, 1)),
        (2, 8, 9, 9),
        2,
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_odd_shapes_run_in_int8_or_say_why_not(name):
    layers, shape, int8 = SEQUENCES[name]
    x = torch.randn(shape)
    q = quantized(nn.Sequential(*layers).eval(), x, None, "native")
    report = q.report()
    assert report.ran_int8 == int8
    assert all("it runs in fp32, between dequantize and quantize" in op.reason for op in report.not_int8)
    assert worst_db([q.reference(x)], [q(x)]) > 60


REFUSED = {
    "matmul": (
        lambda self, x: self.a(x) @ self.b(x)[0, 0, 0],
        nn.Conv2d,
        "matmul",
        "one of its inputs is a vector",
    ),
    "add": (lambda self, x: F.relu(self.a(x)) + F.relu(self.b(x)), nn.Conv2d, "add", "precedes it"),
    "sum that is read elsewhere": (
        lambda self, x: (lambda y, z: (y + z, y * z))(self.a(x), self.b(x)),
        nn.Conv2d,
        "add",
        "no int8 kernel of a linear or conv2d directly precedes it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_has_its_reason(name):
    """Graphs that were planned for the reference, which has every kernel."""
    forward, layer, operator, why = REFUSED[name]
    x = torch.randn(2, 8, 8, 8)
    config = StaticQuantConfig().set_local("add", StaticQuantConfig()) if operator == "add" else None
    graph = quantized(
        Function(forward, a=layer(8, 8, 1), b=layer(8, 8, 1)).eval(), x, config, "reference"
    ).graph
    graph, _ = narrow(graph, get_backend("native").capabilities())  # as `load` does, for CPUs without VNNI
    runs = {run.operator: run for run in get_backend("native").lower(graph).report().ops}
    assert runs[operator].ran == "fp32"
    no_products = operator == "matmul" and WHY_NO_PLANS
    assert ("matmul has no oneDNN int8 kernel in torch" if no_products else why) in runs[operator].reason
    assert runs[operator].reason.endswith("; it runs in fp32, between dequantize and quantize")


@pytest.mark.parametrize("shape", [(16,), (3, 8, 8)])
def test_no_rows_at_all(shape):
    model = nn.Sequential(nn.Linear(16, 4)) if len(shape) == 1 else nn.Sequential(nn.Conv2d(3, 4, 3))
    q = quantized(model.eval(), torch.randn(3, *shape), None, "native")
    empty = torch.randn(0, *shape)
    assert q(empty).shape == q.reference(empty).shape


class Encoder(nn.Module):
    """Attention, layer norms and gelu between linears."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu"),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        return self.head(self.layer(x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(ResidualCNN, (2, 3, 8, 8)), pytest.param(Encoder, (2, 5, 32), marks=pytest.mark.exhaustive)],
)
def test_compiled_is_the_same_model(make, shape, tmp_path):
    model, x = make().eval(), torch.randn(shape)
    prepared = prepare(
        model, NO_PRODUCTS if make is Encoder else StaticQuantConfig(), example_inputs=x, backend="native"
    )
    prepared(x)
    q = convert(prepared, compile=True)
    assert q.report().ran_int8 == q.report().asked_int8 > 0
    assert "between the kernels: compiled by torch.compile" in q.report().summary()
    for batch in (x, torch.randn(5, *shape[1:])):
        assert worst_db([q.reference(batch)], [q(batch)]) > 50
    with pytest.raises(UnsupportedError, match="Models converted with compile=True have none"):
        q.report(profile_inputs=x)
    q.save(tmp_path / "a")
    assert worst_db([q(x)], [load(tmp_path / "a", backend="native", compile=True)(x)]) > 60


def test_compile_says_what_it_needs(monkeypatch):
    x = torch.randn(4, 16)
    prepared = prepare(MLP().eval(), StaticQuantConfig(), example_inputs=x, backend="native")
    prepared(x)
    with pytest.raises(
        ConfigError, match="compile=True is for backend=\"native\"; 'reference' has no such option"
    ):
        convert(prepared, backend="reference", compile=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        BackendUnavailableError,
        match="compile=True needs a C\\+\\+ compiler, and 'no-such-compiler' is not found",
    ):
        convert(prepared, compile=True)


OTHER_CODES = StaticQuantConfig().set_local("b", StaticQuantConfig(act_sym=True))


def test_linears_that_read_the_same_codes_are_one_call(monkeypatch):
    """Also without a bias, of other sizes, and where views follow.

    Not those that compute something behind them.
    """

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return (
            a.view(*a.shape[:2], 4, -1).transpose(1, 2) @ b.view(*b.shape[:2], 4, -1).permute(0, 2, 3, 1),
            F.relu(self.c(x)),
            self.d(x).sin(),
        )

    layers = {
        "a": nn.Linear(16, 32),
        "b": nn.Linear(16, 32, bias=False),
        "c": nn.Linear(16, 8),
        "d": nn.Linear(16, 4),
    }
    q, found = kernels(monkeypatch, Function(forward, **layers), torch.randn(2, 5, 16), NO_PRODUCTS)
    assert [node.meta["operators"] for node in found] == [["a", "b", "d"], ["c", "relu"]]
    assert q.report().ran_int8 == q.report().asked_int8 == 4
    for shape in ((2, 5, 16), (1, 7, 16), (3, 1, 16)):
        x = torch.randn(shape)
        assert worst_db(q.reference(x), q(x)) > 60
    assert not compare(q, "reference").disagreements
    x = torch.randn(2, 5, 16)
    profiled = {op.operator: op.kernel for op in q.report(profile_inputs=x).ops}
    assert "(u8, s8 -> f32)" in profiled["a"]
    assert profiled["b"] == profiled["d"] == "in the kernel of a"


def test_what_is_returned_lies_in_one_piece():
    """Whoever got a tensor of his own from the fp32 model may view it as he likes."""
    model = Function(
        lambda self, x: (self.a(x), self.b(x).view(-1), self.c(x).tanh()),
        **{name: nn.Linear(16, 8) for name in "abc"},
    )
    x = torch.randn(4, 16)
    assert all(y.is_contiguous() for y in quantized(model.eval(), x, None, "native")(x))


@pytest.mark.parametrize(
    ("config", "calls"), [(StaticQuantConfig(), [["a", "b"]]), (OTHER_CODES, [["a"], ["b"]])]
)
def test_linears_of_different_codes_are_not_merged(monkeypatch, config, calls):
    """One tensor, quantized in two ways."""
    model = Function(lambda self, x: torch.sin(self.a(x)) * self.b(x), a=nn.Linear(16, 8), b=nn.Linear(16, 8))
    _, found = kernels(monkeypatch, model, torch.randn(4, 16), config)
    assert [node.meta["operators"] for node in found] == calls


@pytest.mark.parametrize("act_algo", ["minmax", "percentile", "kl"])
def test_another_default_dtype_changes_nothing(act_algo):
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.GELU()
    ).eval()
    x, config = torch.randn(2, 3, 6, 6), StaticQuantConfig(act_algo=act_algo)
    expected = quantized(model, x, config, "native")(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(quantized(model, x, config, "native")(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


FORKED = """
import os, signal, sys, warnings
import torch, nc
from nc.kernels.c_code import openmp
openmp._PAUSE = sys.argv[3]
torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 62 * 62, 10)).eval()
x = torch.randn(4, 3, 64, 64)
q = nc.quantize(model, getattr(nc, sys.argv[1])(), lambda m: m(x), example_inputs=x, backend=sys.argv[2], measure=False)
expected = q(x)
if not os.fork():
    signal.alarm(60)  # ends a process that waits for ever
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = torch.allclose(q(x), expected, atol=1e-4) and torch.allclose(q(x[:2]), expected[:2], atol=1e-4)
    said = [str(w.message) for w in caught if "forked from one that computed on 2 threads" in str(w.message)]
    where = os.path.basename(caught[0].filename) if said else ""
    print(same, len(said), torch.get_num_threads(), where, flush=True)
    os._exit(0)
print(os.wait()[1], torch.get_num_threads())
"""


def forked(config, backend, function):
    """What a forked process and its parent print."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, config, backend, function],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.stdout.split("\n")[:2] or done.stderr


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("config", ["StaticQuantConfig", "DynamicQuantConfig"])
@pytest.mark.sample(1)
def test_a_forked_process_has_threads_of_its_own(config, backend):
    """OpenMP's threads do not survive a fork, and a call would wait for them for ever."""
    assert forked(config, backend, "omp_pause_resource_all") == ["True 0 2 ", "0 2"]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("config", ["StaticQuantConfig", "DynamicQuantConfig"])
@pytest.mark.sample(1)
def test_a_forked_process_without_threads_of_its_own_goes_on_with_one(config, backend):
    assert forked(config, backend, "no_such_function") == ["True 1 1 <string>", "0 2"]


@pytest.mark.filterwarnings("ignore")  # of the trace
@pytest.mark.parametrize(
    ("transform", "instead"),
    [
        (lambda q, x: torch.jit.trace(q, x), "export_pt2"),
        (lambda q, x: torch.export.export(q, (x,)), "export_pt2"),
        (lambda q, x: q(FakeTensorMode().from_tensor(x)), "export_pt2"),
        (lambda q, x: torch.func.vmap(q)(x[None]), "larger batch"),
        (lambda q, x: torch.func.jvp(q, (x,), (x,)), "no derivatives"),
    ],
)
def test_what_torch_calls_without_memory_names_what_to_do(transform, instead):
    x = torch.randn(4, 16)
    q = quantized(MLP(), x, None, "native")
    with pytest.raises(UnsupportedError, match=instead):
        transform(q, x)
    assert torch.isfinite(q(x)).all()


def test_torch_compile_leaves_the_engine_alone():
    """Also with sizes that have no plan yet, inside a larger model, and for what calls it."""
    x = torch.randn(4, 16)
    q = quantized(MLP(), x, None, "native")
    outer = Function(
        lambda self, x: self.last(self.inner(2 * x)).relu(), inner=q, last=nn.Linear(*2 * q(x).shape[1:])
    ).eval()
    for model in (q, outer):
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            for rows in (4, 2, 7, 9):
                torch.testing.assert_close(compiled(x[:1].expand(rows, 16)), model(x[:1].expand(rows, 16)))


@pytest.mark.filterwarnings("ignore")  # of the trace
def test_a_trace_is_refused_before_a_kernel_runs():
    """Else it depends on the kernels whether the trace fails, or has what they wrote as constants."""
    x = torch.randn(4, 16)
    q = quantized(MLP(), x, None, "native")
    with pytest.raises(UnsupportedError) as caught:
        torch.jit.trace(q, x)
    assert "constants of the trace" in str(caught.value.__cause__)
