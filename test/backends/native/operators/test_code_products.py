"""Products of codes in C: against sums of integers and float64, for every instruction set, shape, operation and sum.

And where oneDNN stays in charge.
"""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import Attention, Function, quantized
from suites.code_products import ADDED, OPERATIONS, ZERO_POINTS, check, fits, multiply, product_of, weight_for
from suites.cpus import as_cpu
from suites.rows_code import isas_to_test
from torch import nn
from torch.nn import functional as F

from nc.backends import available_backends
from nc.backends.native.operators import depthwise
from nc.backends.native.plans import c_functions, code_products
from nc.backends.native.plans import row_linears as row_format
from nc.kernels import cpu
from nc.kernels.onednn.descriptions import BinaryOp, Desc, Eltwise, Sum
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import quantize_per_tensor
from nc.process.unavailable import Unavailable

_WHY = (
    available_backends()["native"]
    or c_functions.why_unavailable()
    or row_format.why_unavailable(row_format.CODES)
)
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY)]
each_isa = pytest.mark.parametrize("isa", isas_to_test() if not _WHY else [])


@pytest.fixture
def without_vnni(monkeypatch):
    """A CPU that has AVX2 only: graphs are quantized for it, and run as on one."""
    as_cpu(monkeypatch, "avx2")


def inputs_for(isa, fours):
    """A number of inputs that an instruction set takes: a multiple of 4, with AMX of 64."""
    return 4 * fours if isa.split()[-1] != "amx" else 64 * (1 + fours // 24)


def compute_on(isa, *, as_plain=True):
    """What `check` computes with."""
    return lambda a, product: multiply(isa, a, product, as_plain=as_plain)


@each_isa
def test_every_operation_and_sum(isa):
    x, weight = torch.randint(0, 256, (37, 64), dtype=torch.uint8), weight_for(isa, 43, 64)
    exact, shape = (x.double() - 9) @ weight.double().T, ((37, 43), (43, 1))
    for operation, added, to_codes, plain in itertools.product(OPERATIONS, ADDED, ZERO_POINTS, (True, False)):
        if fits(added, to_codes):
            compute = compute_on(isa, as_plain=plain)
            check(compute, x, weight, exact, shape, operation, added, to_codes, 1, zero_point=9)


@each_isa
@pytest.mark.parametrize("inputs", [64, 128, 192])
@pytest.mark.parametrize("gap", [0, 5])
def test_sums_are_exact_and_nothing_behind_the_last_row_is_read(isa, inputs, gap):
    """As integers: scales are powers of two. Memory that can't be touched lies behind the last row."""
    a = {"x_scale": 1.0, "x_zero_point": 77}
    for rows in range(1, 41):
        x = torch.randint(0, 256, (rows, inputs + gap), dtype=torch.uint8)[:, :inputs]
        weight, result = weight_for(isa, 40, inputs), torch.full((rows, 40), 7.0)
        assert multiply(isa, a, product_of(x, result, weight, torch.ones(1), None))
        expected = (x.long() - 77) @ weight.long().T
        assert expected.abs().max() < 2**24  # fp32 holds them
        assert torch.equal(result, expected.float())


def case(rows, fours, outputs, gap, operation, added, to_codes, zero_point, threads, as_plain):
    """The arguments by name."""
    return locals()


@each_isa
@settings(max_examples=100)
@given(
    rows=st.integers(1, 70),
    fours=st.integers(1, 100),
    outputs=st.integers(1, 70),
    gap=st.sampled_from([0, 3]),
    operation=st.sampled_from(list(OPERATIONS)),
    added=st.sampled_from(ADDED),
    to_codes=st.sampled_from(list(ZERO_POINTS)),
    zero_point=st.sampled_from([0, 3, 255]),
    threads=st.integers(1, 3),
    as_plain=st.booleans(),
)
@example(**case(61, 1, 8, 0, None, "codes", torch.uint8, 128, 2, True))
@example(**case(61, 1, 8, 0, None, "codes", torch.uint8, 128, 2, False))
@example(**case(1, 1024, 9, 0, None, "nothing", None, 1, 1, True))
@example(**case(3, 10_000, 17, 0, None, "nothing", None, 7, 1, True))
@example(**case(300, 16, 130, 3, Eltwise("relu"), "other", torch.int8, 7, 3, True))
def test_a_linear(isa, rows, fours, outputs, gap, operation, added, to_codes, zero_point, threads, as_plain):
    added, inputs = added if fits(added, to_codes) else "nothing", inputs_for(isa, fours)
    x = torch.randint(0, 256, (rows, inputs + gap), dtype=torch.uint8)[:, :inputs]
    weight = weight_for(isa, outputs, inputs)
    exact = (x.double() - zero_point) @ weight.double().T
    how = operation, added, to_codes, threads
    compute, shape = compute_on(isa, as_plain=as_plain), ((rows, outputs), (outputs, 1))
    check(compute, x, weight, exact, shape, *how, zero_point=zero_point)


@each_isa
def test_all_codes_at_their_ends(isa):
    """The largest sums that int32 holds, and the largest pairs of those that AVX2 adds in 16 bits."""
    inputs = 65536
    weight = torch.tensor([[64, 64], [-64, -64], [127, 1], [0, -128], [-127, -1]], dtype=torch.int8)
    if isa != "avx2":
        weight = torch.tensor([[-128, -128], [127, 127]], dtype=torch.int8)
    weight = weight.repeat(1, inputs // 2)
    for code, zero_point in ((255, 0), (0, 255), (255, 255)):
        x, result = torch.full((2, inputs), code, dtype=torch.uint8), torch.empty(2, len(weight))
        a = {"x_scale": 1.0, "x_zero_point": zero_point}
        assert multiply(isa, a, product_of(x, result, weight, torch.ones(1), None))
        expected = (code - zero_point) * weight.double().sum(1)
        assert torch.allclose(result.double(), expected.expand(2, -1), rtol=1e-6)


@each_isa
def test_more_inputs_than_sums_hold_are_left_to_onednn(isa):
    for inputs, done in ((65536, True), (65600, False)):
        x, weight = torch.zeros(1, inputs, dtype=torch.uint8), torch.zeros(3, inputs, dtype=torch.int8)
        a = {"x_scale": 1.0, "x_zero_point": 0}
        assert multiply(isa, a, product_of(x, torch.empty(1, 3), weight, torch.ones(1), None)) is done


@each_isa
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(128, 384, 1536), (1, 512, 512), (3136, 64, 24), (49, 960, 160)]
)
def test_the_number_of_threads_changes_no_bit(isa, rows, inputs, outputs):
    """Rows are shared, or outputs: whatever divides better."""
    x, weight = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8), weight_for(isa, outputs, inputs)
    exact, results = (x.double() - 5) @ weight.double().T, []
    shape, how = ((rows, outputs), (outputs, 1)), (Eltwise("swish", 1.0), "nothing", None)
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        results.append(check(compute_on(isa), x, weight, exact, shape, *how, threads, zero_point=5))
    assert all(torch.equal(results[0], result) for result in results)


@each_isa
@pytest.mark.parametrize("as_plain", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(
    ("bias", "code"), [(1e12, 255), (-1e12, 0), (float("inf"), 255), (-float("inf"), 0), (float("nan"), 0)]
)
def test_results_that_no_code_has_room_for(isa, bias, code, dtype, as_plain):
    x, weight = torch.zeros(7, 64, dtype=torch.uint8), weight_for(isa, 20, 64)
    result = torch.empty(7, 20, dtype=dtype)
    a = {"x_scale": 1.0, "x_zero_point": 0, "output_scale": 0.01, "output_zero_point": 9}
    product = product_of(x, result, weight, torch.ones(1), torch.full((20,), bias))
    assert multiply(isa, a, product, as_plain=as_plain)
    assert (result == code + torch.iinfo(dtype).min).all()


@each_isa
@pytest.mark.parametrize("as_plain", [True, False])
@pytest.mark.parametrize(("scale", "zero_point"), [(0.01, 0), (1.0, 9), (1.0, 0)])
def test_bounds_hold_before_the_step_to_codes(isa, scale, zero_point, as_plain):
    """Also where the step alone, or the zero point alone, is none."""
    x, weight = torch.randint(0, 256, (9, 64)).to(torch.uint8), weight_for(isa, 20, 64)
    result = torch.empty(9, 20, dtype=torch.uint8)
    a = {"x_scale": 1e-4, "x_zero_point": 3, "output_scale": scale, "output_zero_point": zero_point}
    post_ops = [Eltwise("clip", -0.5, 2.0)]
    product = product_of(x, result, weight, torch.ones(1), None, post_ops)
    assert multiply(isa, a, product, as_plain=as_plain)
    values = ((x.double() - 3) @ weight.double().T * 1e-4).clamp(-0.5, 2.0)
    codes = (values / scale).round() + zero_point
    near = ((values / scale) % 1 - 0.5).abs() < 1e-3
    assert ((result - codes.clamp(0, 255)).abs() <= near).all()


@each_isa
@pytest.mark.parametrize("as_plain", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_added_may_be_no_number(isa, operation, as_plain):
    """It stays so in fp32, and becomes the least code; results beside it are not touched."""
    x, weight = torch.randint(0, 256, (9, 64), dtype=torch.uint8), weight_for(isa, 20, 64)
    a = {"x_scale": 1e-3, "x_zero_point": 3, "output_scale": 0.1, "output_zero_point": 30}
    other, after = torch.randn(9, 20), [] if operation is None else [operation]
    bad = torch.zeros(9, 20, dtype=torch.bool)
    bad[4, 7] = bad[8, 19] = True
    for dtype in ZERO_POINTS:
        results = []
        for values in (other, other.masked_fill(bad, float("nan"))):
            result = torch.empty(9, 20, dtype=dtype or torch.float32)
            post_ops = BinaryOp("add", Desc.of(values)), *after
            product = product_of(x, result, weight, torch.ones(1), None, post_ops, values)
            assert multiply(isa, a, product, as_plain=as_plain)
            results.append(result)
        assert torch.equal(results[0][~bad], results[1][~bad])
        found = results[1][bad]
        assert found.isnan().all() if dtype is None else (found == torch.iinfo(dtype).min).all()


@each_isa
def test_what_is_no_number_in_place_stays_so(isa):
    x, weight = torch.randint(0, 256, (9, 64), dtype=torch.uint8), weight_for(isa, 20, 64)
    result = torch.randn(9, 20)
    result[4, 7] = result[8, 19] = float("nan")
    expected = (x.long() @ weight.long().T) + result
    product = product_of(x, result, weight, torch.ones(1), None, [Sum()])
    assert multiply(isa, {"x_scale": 1.0, "x_zero_point": 0}, product)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.allclose(result, expected, equal_nan=True)


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
        "up": "function c:code_product avx2",
        "depth": "function c:depthwise avx2",
        "down": "function c:code_product avx2",
        "fc": "function c:code_product avx2",
    }
    assert found["stem"].startswith("convolution")
    assert not q.report().not_int8
    for module in (depthwise, code_products):
        monkeypatch.setattr(module, "why_unavailable", lambda: "left out")
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
    assert not any("c:" in kernel for kernel in kernels(q).values())
    assert worst_sqnr_db(q.reference(x), q(x)) > 35


@pytest.mark.parametrize("feature", ["avx512f", "avx_vnni", "amx_int8"])
def test_other_cpus_have_kernels_in_onednn(monkeypatch, feature):
    monkeypatch.setattr(row_format, "isas", lambda form: ("avx2",))
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", feature))
    assert code_products.why_unavailable() == f"oneDNN has kernels for {feature}"
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    assert code_products.why_unavailable() == ""
    for isa, why in (("avx512_vnni", ""), ("avx_vnni", "oneDNN is faster with avx_vnni")):
        monkeypatch.setattr(row_format, "isas", lambda form, isa=isa: (isa,))
        assert code_products.why_unavailable() == why
    monkeypatch.setattr(row_format, "isas", lambda form: ())
    as_cpu(monkeypatch)
    assert code_products.why_unavailable() == "there is no avx2"


@pytest.mark.needs_plans
def test_without_a_compiler_onednn_computes(without_vnni, monkeypatch):
    monkeypatch.setattr(row_format, "_library", lambda: Unavailable("there is no C compiler"))
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
    assert any("c:code_product" in kernel for kernel in kernels(q).values())
    for rows in (5, 1, 64):
        y = torch.randn(rows, 32)
        assert worst_sqnr_db(q.reference(y), q(y)) > 35


@each_isa
def test_what_is_added_may_have_gaps_between_its_rows(isa):
    """Then oneDNN adds it."""
    x, weight, wide = (
        torch.randint(0, 256, (5, 64)).to(torch.uint8),
        weight_for(isa, 16, 64),
        torch.randn(5, 40),
    )
    a = {"x_scale": 1.0, "x_zero_point": 0}
    for other, done in ((wide[:, :16], False), (wide[:, :16].contiguous(), True)):
        post_ops = (BinaryOp("add", Desc.of(other)),)
        product = product_of(x, torch.empty(5, 16), weight, torch.ones(1), None, post_ops, other)
        assert multiply(isa, a, product) is done


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
        monkeypatch.setattr(code_products, "why_unavailable", lambda: "left out")
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
    assert kernel.startswith("function c:code_product avx2" if in_c else "matmul")
    assert kernel.endswith("(u8, s8 -> s8)")
    (codes,) = {
        n.args[3:5]
        for n in q.graph.module.graph.nodes
        if n.target is quantize_per_tensor and n.args[4] - n.args[3] == 127
    }
    assert codes == (64, 191)  # less 128, -64 to 63
    for size in (1, 5):
        assert worst_sqnr_db(q.reference(size * x), q(size * x)) > 35
