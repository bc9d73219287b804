"""Linears and attention in bf16 as functions in C: against float64, and the graph."""

import pytest
import torch
from models import Function, quantized, worst_db
from suites.rows_code import code_of, isas_to_test
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig
from nc.backends import available_backends
from nc.backends.native.operators import bf16_attention, float_attention
from nc.backends.native.plans import row_linears as row_format
from nc.kernels import caches, cpu
from nc.kernels.c_code import emulation

_WHY = available_backends()["native"] or row_format.why_unavailable(row_format.BF16)
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]


@pytest.fixture(autouse=True)
def bf16_in_libraries(monkeypatch):
    """Where BF16 is emulated, plans are made as for a CPU whose libraries have it too: what is tested runs in C."""
    if emulation.emulated():
        monkeypatch.setattr(cpu, "machine_features", cpu.code_features)


BF16 = {"w_dtype": "bf16", "act_dtype": "bf16"}


def low(x):
    return x.to(torch.bfloat16).to(torch.float32)


def in_bf16(model, *inputs):
    return quantized(model.eval(), inputs, StaticQuantConfig(**BF16), "native")


def names(q, *inputs):
    """Of what computes each step."""
    return [k.implementation.split()[0] for step in q.engine.steps(list(inputs)) for k in step.kernels]


def agree(result, exact):
    """A result in bf16 is the nearest number of bf16, or where sums are near a tie the next one."""
    scale = exact.abs().clamp(min=exact.abs().max() / 100)
    assert ((result.double() - exact).abs() / scale).max() < 2**-8
    assert ((result.double() - exact).abs() / scale).mean() < 2**-9
    assert torch.equal(result, low(result))


@pytest.mark.parametrize(
    "sizes", [(5, 64, 48), (128, 768, 96), (40, 100, 33), (1, 7, 3), (0, 64, 64), (16, 300, 17), (33, 31, 32)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_numbers_are_those_of_float64(sizes, bias):
    rows, inputs, outputs = sizes
    layer = nn.Linear(inputs, outputs, bias=bias)
    q = in_bf16(layer, torch.randn(3, inputs))
    assert names(q, torch.randn(3, inputs)) == ["c:bf16_rows", "c:row_product"]
    x = torch.randn(rows, inputs)
    result = q(x)
    assert result.shape == (rows, outputs)
    exact = low(x).double() @ low(layer.weight).double().T + (low(layer.bias).double() if bias else 0.0)
    if rows:
        agree(result, exact)
    assert q.report().ops[0].ran == "bf16"
    assert q.report().ops[0].kernel.startswith("function c:row_product")


def test_any_number_of_inputs():
    """More than int32 could sum codes of, more than the second cache holds of one row, and none."""
    for inputs in (70_000, caches.second()):
        layer, x = nn.Linear(inputs, 2), torch.randn(3, inputs)
        q = in_bf16(layer, x)
        assert "c:row_product" in names(q, x)
        agree(q(x), low(x).double() @ low(layer.weight).double().T + low(layer.bias).double())
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(0, 4)
    model = Function(lambda m, x: m.a(x[:, :0]) + m.b(x), a=empty, b=nn.Linear(6, 4))
    x = torch.randn(3, 6)
    q = in_bf16(model, x)
    assert names(q, x).count("c:row_product") == 1
    assert worst_db([q.reference(x)], [q(x)]) > 45


@pytest.mark.parametrize("name", [*row_format.BF16.isas, "emulated amx"])
def test_each_instruction_set(name, monkeypatch):
    if name not in isas_to_test(row_format.BF16):
        pytest.skip(f"the CPU has no {name}")
    code = code_of(row_format.BF16, name)
    monkeypatch.setattr(row_format, "code", lambda form: code)
    layer = nn.Linear(200, 70)
    q = in_bf16(layer, torch.randn(50, 200))
    for rows in (1, 16, 17, 33, 50):
        x = torch.randn(rows, 200)
        assert code.isa in str(q.engine.steps([x])[-1].kernels[0].implementation)
        agree(q(x), low(x).double() @ low(layer.weight).double().T + low(layer.bias).double())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_reaches_its_row_alone(bad):
    q = in_bf16(nn.Linear(20, 8), torch.randn(3, 20))
    x = torch.randn(3, 20)
    x[1, 7] = bad
    assert torch.equal(q(x).isfinite(), q.reference(x).isfinite())
    assert not q(x)[1].isfinite().any()


def test_rounding_is_that_of_torch():
    """Ties and numbers of any size, through an identity."""
    layer = nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(32))
    q = in_bf16(layer, torch.randn(4, 32))
    bits = torch.randint(0, 2**31 - 1, (4000, 32), dtype=torch.int64)
    bits[:2000] = bits[:2000] & ~0xFFFF | 0x8000  # ties
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.where((x.abs() > 1e30) | (x.abs() < 1e-30) | x.isnan(), 1.0 + torch.rand_like(x), x)
    assert torch.equal(q(x), low(x))


def test_linears_that_read_the_same_tensor_are_one_and_what_follows_goes_along():
    model = Function(
        lambda m, x: m.out(F.gelu(m.q(x)) * (m.k(x) * m.v(x))) + x,
        q=nn.Linear(64, 64), k=nn.Linear(64, 64, bias=False), v=nn.Linear(64, 64), out=nn.Linear(64, 64),
    )  # fmt: skip
    x = torch.randn(9, 64)
    q = in_bf16(model, x)
    assert names(q, x).count("c:bf16_rows") == 2
    assert names(q, x).count("c:row_product") == 3
    assert worst_db([q.reference(x)], [q(x)]) > 45
    assert [op.ran for op in q.report().ops if op.kind == "linear"] == ["bf16"] * 4


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "relu6": F.relu6}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_follow_the_rounded_sum(name):
    model = Function(lambda m, x: ACTIVATIONS[name](m.a(x)) + x, a=nn.Linear(48, 48))
    x = torch.randn(30, 48)
    q = in_bf16(model, x)
    assert names(q, x) == ["c:bf16_rows", "c:row_product"]
    sums = low(low(x).double() @ low(model.a.weight).double().T + low(model.a.bias).double())
    expected = ACTIVATIONS[name](sums.double()) + x
    assert ((q(x) - expected).abs() / (1 + expected.abs())).max() < 2**-8
    assert ((q(x) - expected).abs() / (1 + expected.abs())).mean() < 1e-4


class Attention(nn.Module):
    def __init__(self, heads=4, width=48):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        batch, rows, width = x.shape
        q, k, v = (f(x).view(batch, rows, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
        return self.out(y.transpose(1, 2).reshape(batch, rows, width))


def test_a_whole_attention_is_five_functions():
    x = torch.randn(2, 30, 48)
    q = in_bf16(Attention(), x)
    assert names(q, x) == [f"c:{n}" for n in ("bf16_rows", "row_product", "float_attention", "bf16_rows", "row_product")]  # fmt: skip
    assert worst_db([q.reference(x)], [q(x)]) > 45
    assert [op.ran for op in q.report().ops if op.kind in ("linear", "matmul")] == ["bf16"] * 6
    other = torch.randn(3, 17, 48)
    assert worst_db([q.reference(other)], [q(other)]) > 45


def test_a_mask():
    x, mask = torch.randn(2, 30, 48), torch.arange(30) < torch.tensor([[30], [11]])
    q = in_bf16(Attention(), x, mask)
    assert "c:float_attention" in names(q, x, mask)
    for shown in (mask, ~mask, torch.zeros_like(mask)):
        assert worst_db([q.reference(x, shown)], [q(x, shown)]) > 40


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_the_roundings_of_attention_are_those_of_the_graph(kind):
    """The operator by torch, which rounds what each product gives, against float64 and the C code."""
    q, k, v = (low(torch.randn(2, 3, 20, 16)) for _ in range(3))
    mask = {"none": None, "bool": torch.rand(20, 20) > 0.3, "float": torch.randn(20, 20)}[kind]
    found = bf16_attention._computed(q, k, v, mask, scale=0.25)
    scores = low(q.double() @ k.double().mT).double() * 0.25
    if kind != "none":
        scores = scores.masked_fill(~mask, -torch.inf) if kind == "bool" else scores + mask
    exact = low(torch.softmax(scores, -1)).double() @ v.double()
    agree(found, exact)


def test_keys_that_do_not_fit_are_computed_by_torch():
    keys = caches.second() // (2 * 48 * 4) // 2 * 4
    x = torch.randn(1, keys + 64, 96)
    q = in_bf16(Attention(heads=2, width=96), x[:, :40])
    assert "c:float_attention" in names(q, x[:, :40])
    assert "c:float_attention" not in names(q, x)
    assert worst_db([q.reference(x)], [q(x)]) > 40


def test_without_avx512_attention_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(float_attention, "why_unavailable", lambda: "not here")
    x = torch.randn(2, 30, 48)
    q = in_bf16(Attention(), x)
    assert "c:float_attention" not in names(q, x)
    assert worst_db([q.reference(x)], [q(x)]) > 45
