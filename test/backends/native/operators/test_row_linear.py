"""Linears with a range for each row as functions in C: against float64, the reference, and what torch gives."""

import dataclasses

import pytest
import torch
from c_fuzz import ROW_ACTIVATIONS, unpacked_rows
from models import Function, quantized, worst_db
from row_functions import called, dynamic, product, rounded, weight_for, with_codes
from suites.cpus import as_cpu
from torch import nn
from torch.nn import functional as F

from nc import DynamicQuantConfig
from nc.backends import available_backends
from nc.backends.native.operators import row_linear
from nc.backends.native.plans import row_linears as row_format
from nc.errors import BackendError
from nc.graph.catalogue import kind_of_node
from nc.graph.fx_utils import copy_module
from nc.graph.views import Linear, set_argument
from nc.kernels.c_code import abi
from nc.numerics import affine

_WHY = available_backends()["native"] or row_format.why_unavailable(row_format.CODES)
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]


@pytest.mark.parametrize("act_granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("act_sym", [False, True])
@pytest.mark.parametrize(
    "sizes", [(5, 64, 48), (128, 768, 96), (40, 100, 33), (1, 7, 3), (0, 64, 64), (16, 300, 17)]
)
def test_the_numbers_are_those_of_the_graph(sizes, act_sym, act_granularity):
    rows, inputs, outputs = sizes
    options = {"act_sym": act_sym, "act_granularity": act_granularity}
    q = dynamic(nn.Linear(inputs, outputs), torch.randn(3, inputs), **options)
    spread = torch.randn(rows, inputs) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    for x in (spread, torch.zeros(rows, inputs) + 3, -torch.rand(rows, inputs), torch.zeros(rows, inputs)):
        expected = q.reference(x)
        most = 4e-6 * expected.abs().amax(-1, keepdim=True) if rows else 0
        assert q(x).shape == expected.shape
        assert ((q(x) - expected).abs() <= most + 1e-6).all()
    assert q.report().ops[0].kernel.startswith("function c:row_product")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_what_is_no_number_gives_none(bad):
    q = dynamic(nn.Linear(20, 8), torch.randn(3, 20))
    x = torch.randn(3, 20)
    x[1, 7] = bad
    assert q(x)[1].isnan().all()
    assert q.reference(x)[1].isnan().all()
    assert torch.allclose(q(x)[::2], q.reference(x)[::2], atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_what_is_no_number_gives_none_where_it_has_one_range(bad):
    q = dynamic(nn.Linear(20, 8), torch.randn(3, 20), act_granularity="per_tensor")
    x = torch.randn(3, 20)
    x[1, 7] = bad
    assert q(x).isnan().all()
    assert q.reference(x).isnan().all()
    assert worst_db([q.reference(x[:1])], [q(x[:1])]) > 100


@pytest.mark.parametrize("sizes", [(40,), (2, 3, 40), (2, 1, 3, 2, 40)])
def test_any_number_of_dimensions(sizes):
    x = torch.randn(sizes)
    q = dynamic(nn.Linear(40, 24), x)
    assert called(q, x) == ["round_rows", "row_product"]
    assert worst_db([q.reference(x)], [q(x)]) > 100


def test_linears_that_read_the_same_tensor_are_one():
    model = Function(
        lambda m, x: m.q(x) * m.k(x) + m.v(x).view(3, 3, 8),
        q=nn.Linear(64, 8), k=nn.Linear(64, 8, bias=False), v=nn.Linear(64, 8),
    )  # fmt: skip
    x = torch.randn(3, 3, 64)
    for w_granularity in ("per_channel", "per_tensor"):
        q = dynamic(model, x, w_granularity=w_granularity)
        assert [name for name in called(q, x) if "row" in name] == ["round_rows", "row_product"]
        assert worst_db([q.reference(x)], [q(x)]) > 100
        assert [op.ran for op in q.report().ops if op.kind == "linear"] == ["int8"] * 3


def test_what_goes_with_a_product_keeps_a_linear_alone():
    model = Function(
        lambda m, x: (F.silu(m.gate(x)) * m.up(x), m.returned(x)),
        gate=nn.Linear(64, 32), up=nn.Linear(64, 32), returned=nn.Linear(64, 8),
    )  # fmt: skip
    x = torch.randn(9, 64)
    q = dynamic(model, x)
    assert called(q, x).count("round_rows") == 1
    assert called(q, x).count("row_product") == 3
    assert q(x)[1].is_contiguous()
    assert worst_db(list(q.reference(x)), list(q(x))) > 90


ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "silu": F.silu,
    "hardswish": F.hardswish, "leaky": lambda v: F.leaky_relu(v, 0.1), "relu6": F.relu6, "clamp": lambda v: v.clamp(-0.3, 0.4),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_goes_with_the_product(name):
    model = Function(lambda m, x: ACTIVATIONS[name](m.a(x)), a=nn.Linear(40, 24))
    x = torch.randn(33, 40)
    q = dynamic(model, x)
    assert called(q, x) == ["round_rows", "row_product"]
    assert worst_db([q.reference(x)], [q(x)]) > 100


@pytest.mark.parametrize("how", ["behind", "in front", "activated", "turned", "twice"])
def test_a_sum_goes_with_the_product(how):
    forms = {
        "behind": lambda m, x, y: m.a(x) + y,
        "in front": lambda m, x, y: y + m.a(x),
        "activated": lambda m, x, y: F.gelu(m.a(x)) + y,
        "turned": lambda m, x, y: m.a(x) + y.t().contiguous().t(),
        "twice": lambda m, x, y: m.a(x) + y + y,
    }
    x, y = torch.randn(33, 40), torch.randn(33, 24)
    q = dynamic(Function(forms[how], a=nn.Linear(40, 24)), (x, y))
    assert called(q, x, y).count("row_product") == called(q, x, y).count("round_rows") == 1
    assert worst_db([q.reference(x, y)], [q(x, y)]) > 100


def test_biases_that_are_parts_of_a_constant():
    """Those of torch's attention to other tensors."""
    inputs = tuple(torch.randn(2, 7, 48) for _ in range(3))
    model = Function(
        lambda m, *x: m.attention(*x)[0], attention=nn.MultiheadAttention(48, 3, batch_first=True)
    )
    q = dynamic(model, inputs)
    assert called(q, *inputs).count("row_product") == 4
    assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 100


def refused(q):
    """Why the first linear is computed by FBGEMM, as the report says it."""
    op = next(op for op in q.report().ops if op.kind == "linear")
    assert op.ran == "int8"
    assert "row_product" not in op.kernel
    ((kernel, why),) = op.refused
    assert f"kernel {kernel} is not used for 1 layers: {why}" in q.report().summary()
    assert kernel == "c:row_product"
    return why


def test_linears_that_have_the_function_have_no_reason():
    assert dynamic(nn.Linear(40, 24), torch.randn(3, 40)).report().ops[0].refused == ()


def test_a_bias_that_is_computed_is_left_to_fbgemm():
    x, y = torch.randn(5, 40), torch.randn(24)
    q = dynamic(Function(lambda m, x, y: F.linear(x, m.a.weight, y * 2), a=nn.Linear(40, 24)), (x, y))
    assert "row_product" not in called(q, x, y)
    assert refused(q) == "its bias is computed from the inputs"
    assert worst_db([q.reference(x, y)], [q(x, y)]) > 60


def test_one_linear_of_a_plan_says_why_it_is_left_to_fbgemm():
    def compute(m, x, y):
        return F.linear(m.a(x), m.b.weight, y * 2)

    x, y = torch.randn(5, 40), torch.randn(24)
    q = dynamic(Function(compute, a=nn.Linear(40, 24), b=nn.Linear(24, 24)), (x, y))
    assert called(q, x, y).count("row_product") == 1
    assert [op.refused for op in q.report().ops if op.kind == "linear"] == [
        (),
        (("c:row_product", "its bias is computed from the inputs"),),
    ]


OTHER_GRAPHS = {
    "its input is torch.bfloat16, not fp32": lambda x, linear, weight: x.meta.update(
        val=torch.ones(3, 40, dtype=torch.bfloat16)
    ),
    "its weight is not quantized": lambda x, linear, weight: set_argument(linear, "weight", x),
    "its weight is not a constant": lambda x, linear, weight: set_argument(weight, "codes", x),
    "its weight has a scale for each input": lambda x, linear, weight: set_argument(weight, "axis", 1),
}


@pytest.mark.parametrize("why", OTHER_GRAPHS)
def test_graphs_that_quantization_does_not_make_have_their_reason(why):
    model = nn.Linear(40, 24).eval()
    model.weight.data[:, ::2] = 0.0  # its pairs fit with AVX2, too
    graph = quantized(model, torch.randn(3, 40), DynamicQuantConfig(), "reference").graph
    module, _ = copy_module(graph.module)
    (linear,) = (node for node in module.graph.nodes if kind_of_node(node) == "linear")
    (x,) = (node for node in module.graph.nodes if node.op == "placeholder")
    assert row_linear.why_not_row_linear(linear) == row_linear.why_not_row_linear(x) == ""
    OTHER_GRAPHS[why](x, linear, Linear.of(linear).weight)
    assert row_linear.why_not_row_linear(linear) == why


def test_more_inputs_than_sums_hold_are_left_to_fbgemm(monkeypatch):
    monkeypatch.setattr(abi, "CONSTANTS", dataclasses.replace(abi.CONSTANTS, most_inputs=39))
    q = dynamic(nn.Linear(40, 24), torch.randn(3, 40))
    assert refused(q) == "it has 40 inputs, and its C code takes 1 to 39"


def test_other_sums_stay():
    """Of other shapes, of several readers, and where operators work in place."""
    x, y = torch.randn(33, 40), torch.randn(24)
    q = dynamic(Function(lambda m, x, y: m.a(x) + y, a=nn.Linear(40, 24)), (x, y))
    assert worst_db([q.reference(x, y)], [q(x, y)]) > 100
    q = dynamic(Function(lambda m, x: (lambda v: F.gelu(v) + v)(m.a(x)), a=nn.Linear(40, 24)), x)
    assert worst_db([q.reference(x)], [q(x)]) > 100
    q = dynamic(Function(lambda m, x: F.relu(m.a(x)).add_(1.0) * m.a(x), a=nn.Linear(40, 24)), x)
    assert worst_db([q.reference(x)], [q(x)]) > 100


def test_inputs_that_do_not_lie_in_rows():
    x = torch.randn(2, 40, 9)
    q = dynamic(Function(lambda m, x: m.a(x.transpose(1, 2)), a=nn.Linear(40, 24, bias=False)), x)
    assert called(q, x)[-2:] == ["round_rows", "row_product"]
    for y in (x, torch.randn(2, 9, 40).transpose(1, 2), torch.randn(1, 40, 1)):
        assert worst_db([q.reference(y)], [q(y)]) > 100


def test_one_scale_for_the_whole_weight():
    q = dynamic(nn.Linear(40, 24), torch.randn(3, 40), w_granularity="per_tensor")
    x = torch.randn(5, 40)
    assert called(q, x) == ["round_rows", "row_product"]
    assert worst_db([q.reference(x)], [q(x)]) > 100


def test_each_number_of_threads_gives_the_same():
    q = dynamic(nn.Sequential(nn.Linear(200, 700), nn.GELU(), nn.Linear(700, 100)), torch.randn(70, 200))
    x, before = torch.randn(70, 200), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(q(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


def test_without_the_code_fbgemm_computes(monkeypatch):
    monkeypatch.setattr(row_format, "isas", lambda form: ())
    x = torch.randn(5, 40)
    q = dynamic(nn.Linear(40, 24), x)
    assert refused(q).startswith("there is no ")
    assert worst_db([q.reference(x)], [q(x)]) > 60


def test_weights_count_once():
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    q = dynamic(model, torch.randn(9, 256))
    assert 2 * 256 * 512 <= q.report().weight_bytes < 1.2 * 2 * 256 * 512


def test_torch_computes_none():
    with pytest.raises(BackendError, match="plans have"):
        row_linear.rounded_rows()(torch.ones(2, 3), False, True)


# --- the functions, for each instruction set


SIZES = [(1, 1, 1), (7, 40, 33), (16, 64, 16), (19, 300, 70), (40, 129, 8), (33, 8, 100)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_codes_scales_and_zero_points_are_those_of_affine(on_isa, size, per_row, symmetric):
    for rows, inputs, _ in SIZES:
        x = torch.randn(rows, inputs) * size
        x[-1] = 0.0 if rows > 16 else x[-1].abs()
        memory = rounded(on_isa, x, symmetric=symmetric, per_row=per_row)
        codes, scale, zero_point = unpacked_rows(memory, rows, inputs)
        low, high = (x.amin(1, keepdim=True), x.amax(1, keepdim=True)) if per_row else x.aminmax()
        wanted = affine.choose_qparams(low, high, quant_min=0, quant_max=255, symmetric=symmetric)
        assert torch.equal(scale, wanted[0].expand(rows, 1))
        assert torch.equal(zero_point, wanted[1].expand(rows, 1))
        assert torch.equal(codes.float(), ((x / scale).round() + zero_point).clamp(0, 255))


@pytest.mark.parametrize("symmetric", [False, True])
def test_codes_near_half_a_code_are_those_of_a_division(on_isa, symmetric):
    low, high = -torch.rand(50, 1), torch.rand(50, 1)
    scale, _ = affine.choose_qparams(low, high, quant_min=0, quant_max=255, symmetric=symmetric)
    x = ((torch.arange(-128, 128) + 0.5) * scale).clamp(low, high)
    x = torch.cat([low, high, x, *(x.nextafter(torch.tensor(end)) for end in (-9.0, 9.0))], 1).clamp(
        low, high
    )
    codes, scale, zero_point = unpacked_rows(rounded(on_isa, x, symmetric=symmetric), *x.shape)
    assert torch.equal(codes.float(), ((x / scale).round() + zero_point).clamp(0, 255))


def test_sums_are_exact(on_isa):
    """As integers: all scales are 1."""
    for rows, inputs, outputs in [*SIZES, *((rows, 64 * (1 + rows % 3), 40) for rows in range(1, 41))]:
        memory = rounded(on_isa, torch.randn(rows, inputs))
        codes, scale, zero_point = unpacked_rows(memory, rows, inputs)
        codes[:] = torch.randint(0, 256, codes.shape, dtype=torch.uint8)
        memory = with_codes(memory, codes)
        scale[:] = 1.0
        weight = weight_for(on_isa.isa, outputs, inputs)
        y = product(on_isa, memory, rows, weight, torch.ones(outputs), torch.zeros(outputs))
        expected = (codes.long() - zero_point) @ weight.long().T
        assert expected.abs().max() < 2**24  # fp32 holds them
        assert torch.equal(y, expected.float())


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", [*ROW_ACTIVATIONS, "hardswish"])
def test_what_follows_the_sums(on_isa, name, adds):
    """Scales, bias, activation and what is added, against float64."""
    compute = {**ROW_ACTIVATIONS, "hardswish": lambda v: v * (0.125 * v + 2.0).clamp(0, 1)}[name]
    for rows, inputs, outputs in SIZES:
        x, weight = torch.randn(rows, inputs) * 3, weight_for(on_isa.isa, outputs, inputs)
        memory = rounded(on_isa, x)
        codes, scale, zero_point = unpacked_rows(memory, rows, inputs)
        factors, other = (torch.rand(outputs) * 0.01, torch.randn(outputs)), torch.randn(rows, outputs)
        how = {"name": name, "alpha": 0.125, "beta": 2.0, "other": other if adds else None}
        y = product(on_isa, memory, rows, weight, *factors, **how)
        sums = (codes.double() - zero_point) @ weight.double().T * scale.double()
        before = sums * factors[0].double() + factors[1].double()
        expected = compute(before) + (other if adds else 0.0)
        # near its zero, hardswish makes little of large numbers
        assert ((y - expected).abs() <= 2e-6 * (1 + expected.abs() + before.abs())).all()


@pytest.mark.parametrize("name", ROW_ACTIVATIONS)
def test_what_is_no_number_goes_through_each_activation(on_isa, name):
    x = torch.randn(3, 20)
    x[1, 7] = float("nan")
    weight = weight_for(on_isa.isa, 24, 20)
    how = {"name": name, "alpha": 0.125, "beta": 2.0}
    y = product(on_isa, rounded(on_isa, x), 3, weight, torch.ones(24), torch.zeros(24), **how)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


def test_all_codes_at_their_ends(on_isa):
    """The largest sums that int32 holds, and the largest pairs of those that AVX2 adds in 16 bits."""
    inputs = 65536
    memory = rounded(on_isa, torch.ones(1, inputs))
    assert memory[:64].eq(255).all()
    weight = torch.tensor([[64, 64], [-64, -64], [127, 1], [0, -128], [-127, -1]], dtype=torch.int8)
    if on_isa.isa != "avx2":
        weight = torch.tensor([[-128, -128], [127, 127]], dtype=torch.int8)
    weight = weight.repeat(1, inputs // 2)
    y = product(on_isa, memory, 1, weight, torch.ones(len(weight)), torch.zeros(len(weight)))
    assert torch.allclose(y[0].double(), weight.double().sum(1), rtol=1e-6)


def test_a_weight_whose_pairs_do_not_fit_is_left_to_fbgemm_with_avx2(monkeypatch):
    """Those of a graph that was not made for AVX2."""
    model = nn.Linear(40, 24)
    nn.init.ones_(model.weight)
    graph = quantized(model.eval(), torch.randn(3, 40), DynamicQuantConfig(), "reference").graph
    (linear,) = (node for node in graph.module.graph.nodes if kind_of_node(node) == "linear")
    monkeypatch.setattr(row_format, "isas", lambda form: ("avx2",))
    why = row_linear.why_not_row_linear(linear)
    assert why == "its weight is too large for AVX2, which adds pairs of products in 16 bits"
    monkeypatch.setattr(row_format, "isas", lambda form: ("avx_vnni",))
    assert row_linear.why_not_row_linear(linear) == ""


def test_a_model_that_is_quantized_for_avx2_has_the_function(monkeypatch):
    as_cpu(monkeypatch, "avx2")
    model = nn.Linear(40, 24)
    nn.init.ones_(model.weight)
    q, x = dynamic(model, torch.randn(3, 40)), torch.randn(5, 40)
    assert q.report().ops[0].kernel.startswith("function c:row_product avx2")
    assert (q(x) - q.reference(x)).abs().max() < 1e-5
