"""Products in C for CPUs with AVX2 and no VNNI: against float64, for every shape, operation and sum.

And where oneDNN stays in charge.
"""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import Attention, Function, quantized
from suites.avx2_products import OPERATIONS, ZERO_POINTS, check, multiply, paired
from torch import nn
from torch.nn import functional as F

from nc.backends import available_backends, cpu
from nc.backends.native.operators import avx2
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.operands import PlanTensor, WeightToPack
from nc.kernels.onednn.descriptions import BinaryOp, Desc, Eltwise, Geometry, Sum
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import quantize_per_tensor
from nc.process.unavailable import Unavailable

_WHY = (
    available_backends()["native"]
    or c_functions.why_unavailable()
    or ("" if "avx2" in cpu.detected() else "this CPU has no AVX2")
)
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY)]

ADDED = "nothing", "codes", "fp32", "other"


@pytest.fixture
def without_vnni(monkeypatch):
    """A CPU that has AVX2 only: graphs are quantized for it, and run as on one."""
    monkeypatch.setattr(cpu, "features", lambda: ("avx2",))


def fits(added, to_codes):
    return (
        added == "nothing"
        or (added == "codes" and to_codes is torch.uint8)
        or (added == "fp32" and to_codes is None)
    )


@settings(max_examples=150)
@given(
    rows=st.integers(1, 130),
    inputs=st.integers(1, 100).map(lambda n: 4 * n),
    outputs=st.integers(1, 70),
    gap=st.sampled_from([0, 3]),
    operation=st.sampled_from(list(OPERATIONS)),
    added=st.sampled_from(ADDED),
    to_codes=st.sampled_from(list(ZERO_POINTS)),
    zero_point=st.sampled_from([0, 3, 255]),
    threads=st.integers(1, 3),
)
@example(
    rows=61,
    inputs=4,
    outputs=8,
    gap=0,
    operation=None,
    added="codes",
    to_codes=torch.uint8,
    zero_point=128,
    threads=2,
)
@example(
    rows=1,
    inputs=4096,
    outputs=9,
    gap=0,
    operation=None,
    added="nothing",
    to_codes=None,
    zero_point=1,
    threads=1,
)
@example(
    rows=3,
    inputs=40_000,
    outputs=17,
    gap=0,
    operation=None,
    added="nothing",
    to_codes=None,
    zero_point=7,
    threads=1,
)
def test_a_linear(rows, inputs, outputs, gap, operation, added, to_codes, zero_point, threads):
    added = added if fits(added, to_codes) or (added == "other") else "nothing"
    x = torch.randint(0, 256, (rows, inputs + gap), dtype=torch.uint8)[:, :inputs]
    weight = paired(outputs, inputs)
    exact = (x.double() - zero_point) @ weight.double().T
    check(
        x,
        weight,
        exact,
        ((rows, outputs), (outputs, 1)),
        operation,
        added,
        to_codes,
        threads,
        zero_point=zero_point,
    )


@settings(max_examples=150)
@given(
    images=st.integers(1, 3),
    channels=st.integers(16, 70),
    sizes=st.tuples(st.integers(5, 20), st.integers(5, 20)),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    steps_=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 4)] * 4),
    flat=st.booleans(),
    operation=st.sampled_from(list(OPERATIONS)),
    added=st.sampled_from(["nothing", "codes", "fp32"]),
    to_codes=st.sampled_from(list(ZERO_POINTS)),
    zero_point=st.sampled_from([0, 3, 255]),
    threads=st.integers(1, 3),
)
def test_a_depthwise_convolution(
    images,
    channels,
    sizes,
    window,
    steps_,
    dilations,
    pads,
    flat,
    operation,
    added,
    to_codes,
    zero_point,
    threads,
):
    added = added if fits(added, to_codes) and channels % 16 == 0 else "nothing"
    dims = 1 if flat else 2
    window, dilations = window[:dims], dilations[:dims]
    geometry = Geometry(steps_[:dims], pads[:dims], pads[2 : 2 + dims], dilations, window=window)
    sizes = tuple(
        max(size, d * (k - 1) + 1) for size, d, k in zip(sizes[:dims], dilations, window, strict=True)
    )
    x = torch.randint(0, 256, (images, *sizes, channels), dtype=torch.uint8).movedim(-1, 1)
    weight = torch.randint(-127, 128, (channels, 1, *window), dtype=torch.int8)
    around = [
        n for pair in zip(reversed(geometry.before), reversed(geometry.after), strict=True) for n in pair
    ]
    convolve = F.conv1d if flat else F.conv2d
    exact = convolve(
        F.pad(x.double() - zero_point, around),
        weight.double(),
        stride=steps_[:dims],
        dilation=dilations,
        groups=channels,
    )
    shape = tuple(exact.shape)
    strides = torch.empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1).stride()
    rows = exact.movedim(1, -1).reshape(-1, channels)
    options = {"zero_point": zero_point, "geometry": geometry, "groups": channels}
    check(x, weight, rows, (shape, strides), operation, added, to_codes, threads, **options)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(128, 384, 1536), (1, 512, 512), (3136, 64, 24), (49, 960, 160)]
)
def test_the_number_of_threads_changes_no_bit(rows, inputs, outputs):
    """Rows are shared, or outputs: whatever divides better."""
    x, weight = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8), paired(outputs, inputs)
    exact, results = (x.double() - 5) @ weight.double().T, []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        shape = (rows, outputs), (outputs, 1)
        results.append(
            check(x, weight, exact, shape, Eltwise("swish", 1.0), "nothing", None, threads, zero_point=5)
        )
    assert all(torch.equal(results[0], result) for result in results)


class Block(nn.Module):
    """An inverted residual: a stem, 1 x 1, depthwise, 1 x 1 with a sum, and a linear."""

    def __init__(self):
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, 24, 3, 2), nn.Conv2d(24, 72, 1)
        self.depth, self.down, self.fc = (
            nn.Conv2d(72, 72, 5, 1, 2, groups=72),
            nn.Conv2d(72, 24, 1),
            nn.Linear(24, 10),
        )

    def forward(self, x):
        x = F.relu6(self.stem(x))
        y = x + self.down(F.silu(self.depth(F.relu6(self.up(x)))))
        return self.fc(y.mean((2, 3)))


def kernels(q):
    return {op.operator: op.kernel for op in q.report().ops if op.kernel}


@pytest.mark.needs_plans
def test_a_model_runs_them_and_computes_the_same(without_vnni, monkeypatch):
    x = torch.randn(2, 3, 33, 33)
    model = Block().eval()
    q = quantized(model, x, None, "native")
    found = kernels(q)
    assert {name: kernel.split("(")[0].strip() for name, kernel in found.items() if "c:" in kernel} == {
        "up": "function c:product avx2",
        "depth": "function c:depthwise avx2",
        "down": "function c:product avx2",
        "fc": "function c:product avx2",
    }
    assert found["stem"].startswith("convolution")
    assert not q.report().not_int8
    monkeypatch.setattr(avx2, "why_unavailable", lambda: "left out")
    other = quantized(model, x, None, "native")
    assert all("c:" not in kernel for kernel in kernels(other).values())
    for size, batch in itertools.product((33, 20), (1, 3)):
        y = torch.randn(batch, 3, size, size)
        assert worst_sqnr_db(q(y), other(y)) > 35
        assert worst_sqnr_db(q.reference(y), q(y)) > 35


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Linear(6, 8), (4, 6)),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (4, 8)),
        (nn.Conv2d(8, 8, 3), (1, 8, 9, 9)),
        (nn.Conv2d(8, 8, 1, stride=2), (1, 8, 9, 9)),
        (nn.Conv2d(8, 8, 1, padding=1), (1, 8, 9, 9)),
        (nn.Conv2d(8, 8, 1, groups=2), (1, 8, 9, 9)),
        (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 9, 9)),
        (nn.Conv2d(16, 32, 3, groups=16), (1, 16, 9, 9)),
        (nn.Conv2d(16, 16, 9, groups=16), (1, 16, 9, 9)),
        (nn.Conv3d(16, 16, 3, groups=16), (1, 16, 5, 5, 5)),
    ],
)
def test_what_they_can_not_do_is_left_to_onednn(without_vnni, layer, size):
    x = torch.randn(size)
    q = quantized(nn.Sequential(layer).eval(), x, None, "native")
    assert q.report().not_int8 == ()
    assert not any("c:product" in kernel or "c:depthwise" in kernel for kernel in kernels(q).values())
    assert worst_sqnr_db(q.reference(x), q(x)) > 35


@pytest.mark.parametrize("feature", ["avx512f", "avx_vnni", "avx512_vnni", "amx_int8"])
def test_other_cpus_have_kernels_in_onednn(monkeypatch, feature):
    monkeypatch.setattr(cpu, "features", lambda: ("avx2", feature))
    assert feature in avx2.why_unavailable()
    monkeypatch.setattr(cpu, "features", lambda: ())
    assert avx2.why_unavailable() == "this CPU has no avx2"


@pytest.mark.needs_plans
def test_without_a_compiler_onednn_computes(without_vnni, monkeypatch):
    monkeypatch.setattr(avx2, "_functions", lambda: Unavailable("there is no C compiler"))
    x = torch.randn(4, 16)
    q = quantized(nn.Linear(16, 8).eval(), x, None, "native")
    assert next(iter(kernels(q).values())).startswith("matmul")


@pytest.mark.needs_plans
def test_sums_of_two_tensors_in_codes_and_in_fp32(without_vnni):
    """In place, into what the graph has made free."""
    x = torch.randn(5, 32)
    model = Function(
        lambda self, x: self.c(F.relu(self.a(x) + self.b(x))),
        a=nn.Linear(32, 16),
        b=nn.Linear(32, 16),
        c=nn.Linear(16, 4),
    )
    q = quantized(model, x, None, "native")
    assert any("c:product" in kernel for kernel in kernels(q).values())
    for rows in (5, 1, 64):
        y = torch.randn(rows, 32)
        assert worst_sqnr_db(q.reference(y), q(y)) > 35


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(
    ("bias", "code"), [(1e12, 255), (-1e12, 0), (float("inf"), 255), (-float("inf"), 0), (float("nan"), 0)]
)
def test_results_that_no_code_has_room_for(bias, code, dtype):
    x, weight = torch.zeros(7, 8, dtype=torch.uint8), paired(20, 8)
    result = torch.empty(7, 20, dtype=dtype)
    a = {"x_scale": 1.0, "x_zero_point": 0, "output_scale": 0.01, "output_zero_point": 9}
    product = avx2.Product(
        PlanTensor(x, None),
        PlanTensor(result, None),
        WeightToPack("w", weight),
        torch.ones(1),
        torch.full((20,), bias),
        (),
    )
    assert multiply(a, product)
    assert (result == code + torch.iinfo(dtype).min).all()


@pytest.mark.parametrize("channels", [24, 32])
def test_channels_that_are_computed_twice_are_not_added_in_place(channels):
    x = torch.zeros(1, 6, 6, channels, dtype=torch.uint8).movedim(-1, 1)
    a = {"x_scale": 1.0, "x_zero_point": 0, "output_scale": 0.01, "output_zero_point": 9}
    geometry = Geometry((1, 1), (1, 1), (1, 1), (1, 1), window=(3, 3))
    result = torch.full((1, 6, 6, channels), 5, dtype=torch.uint8).movedim(-1, 1)
    given_ = (
        PlanTensor(x, None),
        PlanTensor(result, None),
        WeightToPack("w", torch.ones(channels, 1, 3, 3, dtype=torch.int8)),
        torch.ones(1),
        None,
    )
    product = avx2.Product(*given_, (Sum(1.0, 0, torch.uint8),), geometry=geometry, groups=channels)
    assert multiply(a, product) is (channels % 16 == 0)


def test_what_is_added_may_have_gaps_between_its_rows():
    """Then oneDNN adds it."""
    x, weight, wide = torch.randint(0, 256, (5, 8), dtype=torch.uint8), paired(16, 8), torch.randn(5, 40)
    a = {"x_scale": 1.0, "x_zero_point": 0}
    for other, done in ((wide[:, :16], False), (wide[:, :16].contiguous(), True)):
        given_ = (
            PlanTensor(x, None),
            PlanTensor(torch.empty(5, 16), None),
            WeightToPack("w", weight),
            torch.ones(1),
            None,
        )
        product = avx2.Product(*given_, (BinaryOp("add", Desc.of(other)),), PlanTensor(other, None))
        assert multiply(a, product) is done


def test_a_sum_with_a_part_of_a_wider_tensor(without_vnni):
    parts = {"a": nn.Linear(32, 16), "b": nn.Linear(32, 16)}
    model = Function(lambda self, x, y: self.b(x) + torch.chunk(y, 2, -1)[0] + self.a(x).tanh(), **parts)
    inputs = torch.randn(5, 32), torch.randn(5, 32)
    q = quantized(model, inputs, None, "native")
    assert worst_sqnr_db(q.reference(*inputs), q(*inputs)) > 35


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.needs_plans
def test_linears_give_products_of_activations_their_codes_in_7_bits(without_vnni, monkeypatch, in_c):
    """Within the kernel, also those that a large input takes beyond the 7 bits.

    No operator of torch stands between.
    """
    if not in_c:
        monkeypatch.setattr(avx2, "why_unavailable", lambda: "left out")
    x = torch.randn(2, 6, 32)
    q = quantized(Attention().eval(), x, None, "native")
    flat = q.graph.signature.bind((x,), {})
    steps_ = q.engine.profile(flat).steps
    assert [step.operators for step in steps_ if step.name == "onednn::qlinear_pointwise"] == [
        ("query",),
        ("key", "value"),
        ("out",),
    ]
    assert not [step.name for step in steps_ if "clamp" in step.name or step.name == "quantize_per_tensor"]
    kernel = next(step.kernel for step in steps_ if step.operators == ("key", "value"))
    assert kernel.startswith("function c:product avx2" if in_c else "matmul")
    assert kernel.endswith("(u8, s8 -> s8)")
    (codes,) = {
        n.args[3:5]
        for n in q.graph.module.graph.nodes
        if n.target is quantize_per_tensor and n.args[4] - n.args[3] == 127
    }
    assert codes == (64, 191)  # less 128, -64 to 63
    for size in (1, 5):
        assert worst_sqnr_db(q.reference(size * x), q(size * x)) > 35
