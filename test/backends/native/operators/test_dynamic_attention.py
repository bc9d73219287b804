"""Attention in int8 with ranges of each call as one function in C: against integers, float64, and the graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, quantized, worst_db
from suites.reports import said
from torch import nn
from torch.nn import functional as F

from nc import DynamicQuantConfig
from nc.backends import available_backends
from nc.backends.native.operators import dynamic_attention
from nc.backends.native.plans.attention import fields_of, fields_of_mask
from nc.backends.native.plans.operands import PlanTensor
from nc.kernels import caches
from nc.kernels.c_code.calls import call_once
from nc.numerics.dynamic import quantize_dequantize_dynamic

_WHY = available_backends()["native"] or dynamic_attention.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.needs_plans]
needs_function = pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")
#: In quanta: so near to half a code, either code is right.
TIE = 1e-3


def attended(q, k, v, mask=None, *, factor=0.3, parts=1, threads=2):
    """Result of the function in C."""
    y = torch.full((*q.shape[:3], v.shape[3]), 7.0)
    size = dynamic_attention._room(k.shape[2], q.shape[3], v.shape[3])
    fields = {
        **fields_of(q, k, v, y),
        **fields_of_mask(None if mask is None else PlanTensor(mask, None), (*q.shape[:3], k.shape[2])),
        **{"factor": factor, "parts": parts, "bytes": size, "threads": threads, "texts": False},
    }
    room = torch.zeros(threads, size, dtype=torch.uint8)
    call_once(dynamic_attention._function(), fields, [y, q, k, v, room, *([] if mask is None else [mask])])
    return y


def exact(q, k, v, mask=None, *, factor=0.3):
    """Attention in float64, by its definition, of sides that are not rounded."""
    weights = torch.softmax(masked(q.double() @ k.double().mT * factor, mask), -1)
    return weights.nan_to_num() @ v.double()


def masked(scores, mask):
    if mask is None:
        return scores
    hidden = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype is torch.bool else None
    return scores + mask.double() if hidden is None else hidden


def affine(x):
    """Codes of rows, uint8; scale and zero point."""
    low, high = (
        x.double().amin(-1, keepdim=True).clamp(max=0),
        x.double().amax(-1, keepdim=True).clamp(min=0),
    )
    scale = (high - low) / 255
    scale = torch.where(torch.maximum(high, -low) < 2.0**-100, 1.0, scale)
    zero = torch.round(-low / scale)
    near = scale.float()
    return (torch.round(x * (1 / near)) + zero).clamp(0, 255), near.double(), zero


def symmetric(x):
    """Codes of rows, int8, and their scale."""
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax < 2.0**-100, 1.0, amax / 127)
    return torch.round(x * (1 / scale)).double(), scale.double()


def of_values(x):
    """The same, where the scale of a row of zeros is that of the smallest other one."""
    amax = x.abs().amax(-1, keepdim=True)
    least = amax.masked_fill(amax < 2.0**-100, torch.inf).amin(-2, True)
    scale = torch.where(amax < 2.0**-100, least.masked_fill(least.isinf(), 127.0), amax) / 127
    return torch.round(x * (1 / scale)).double(), scale.double()


def in_integers(q, k, v, mask=None, *, factor=0.3):
    """What the function is to give, from whole codes, in float64; and by how much codes at ties may change it."""
    (cq, sq, zq), (ck, sk) = affine(q), symmetric(k)
    cv, sv = of_values(v)
    scores = masked((cq - zq) @ ck.mT * sq * sk.mT * factor, mask)
    largest = (scores + sv.mT.log()).amax(-1, keepdim=True)
    seen = largest > -torch.inf
    weights = torch.exp(scores + sv.mT.log() - largest.nan_to_num(neginf=0.0))
    positions = 255 * weights
    codes = torch.round(positions)
    total = (positions / sv.mT).sum(-1, keepdim=True)
    at_tie = ((positions - positions.floor() - 0.5).abs() < TIE).double()
    return [torch.where(seen, part / total, 0.0) for part in (codes @ cv, at_tie @ cv.abs())]


def tensors(batch, heads, rows, keys, width, wide):
    return [torch.randn(batch, heads, *shape) for shape in ((rows, width), (keys, width), (keys, wide))]


def agree(given, mask=None, **options):
    result = attended(*given, mask, **options)
    factor = options.get("factor", 0.3)
    expected, slack = in_integers(*given, mask, factor=factor)
    room = given[2].double().abs().amax() * 2e-6
    assert (result.double() - expected).abs().le(slack * 1.001 + room).all()
    return result


def db(result, expected):
    return 10 * torch.log10(expected.square().sum() / (result - expected).square().sum()).item()


@needs_function
@pytest.mark.parametrize("wide", [1, 16, 33, 64, 100])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 65, 197])
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 23])
def test_sizes(rows, keys, wide):
    agree(tensors(2, 3, rows, keys, 40, wide))


@needs_function
@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 3, 40, 90, 150, 90))),
    mask=st.sampled_from(["none", "bool", "float", "of keys", "of rows"]),
    parts=st.integers(1, 3),
    threads=st.integers(1, 3),
)
def test_any_sizes(sizes, mask, parts, threads):
    batch, heads, rows, keys = sizes[:4]
    masks = {
        "none": None,
        "bool": torch.rand(batch, 1, rows, keys) > 0.5,
        "float": torch.randn(1, heads, rows, keys),
        "of keys": torch.rand(batch, 1, 1, keys) > 0.3,
        "of rows": torch.rand(1, 1, rows, 1) > 0.3,
    }
    agree(tensors(*sizes), masks[mask], parts=min(parts, rows), threads=threads)


@needs_function
@pytest.mark.parametrize("width", [1, 3, 4, 5, 16, 63, 64, 65, 512])
def test_widths(width):
    agree(tensors(1, 2, 18, 33, width, 24), factor=width**-0.5)


@needs_function
def test_parts_of_one_tensor():
    merged = torch.randn(2, 20, 3, 4, 24)
    q, k, v = (merged[:, :, i].transpose(1, 2) for i in range(3))
    assert torch.equal(agree((q, k, v)), attended(*(x.contiguous() for x in (q, k, v))))


@needs_function
def test_it_is_as_accurate_as_8_bits_allow():
    given = tensors(2, 4, 64, 128, 64, 64)
    assert 35 < db(attended(*given, factor=0.125), exact(*given, factor=0.125)) < 60  # fp32 has 130


@needs_function
def test_a_large_weight_that_meets_a_small_value_takes_no_codes_from_the_others():
    q, k, v = tensors(1, 2, 16, 40, 32, 32)
    q[..., 0], k[..., 0, 0] = 4.0, 12.0  # a key that all rows look at, with almost nothing in its value
    v[..., 0, :] *= 1e-3
    expected = exact(q, k, v)
    weights = torch.softmax(q @ k.mT * 0.3, -1)
    plain = quantize_dequantize_dynamic(weights, True, 0, 255, False)
    assert weights[..., 0].min() > 0.9
    assert db(plain.double() @ v.double(), expected) < 15
    assert db(attended(q, k, v), expected) > 22  # the scores of such a key cost the rest


@needs_function
def test_no_token_changes_how_another_one_is_rounded():
    q, k, v = tensors(1, 2, 10, 24, 16, 16)
    mask = torch.ones(10, 24, dtype=torch.bool).tril(3)
    before = attended(q, k, v, mask)
    q[:, :, 6:], k[:, :, 9:], v[:, :, 9:] = 50.0, -30.0, 900.0
    assert torch.equal(attended(q, k, v, mask)[:, :, :6], before[:, :, :6])


@needs_function
@pytest.mark.parametrize("hide", ["bool", "float"])
def test_a_query_that_sees_no_key_gets_zeros(hide):
    given, mask = tensors(1, 1, 7, 20, 8, 8), torch.ones(7, 20, dtype=torch.bool)
    mask[1] = False
    shown = mask if hide == "bool" else torch.zeros(7, 20).masked_fill(~mask, -torch.inf)
    result = agree(given, shown)
    assert result[0, 0, 1].eq(0).all()
    assert result[0, 0, 2].ne(0).all()


@needs_function
def test_hidden_keys_have_no_weight():
    q, k, v = tensors(1, 2, 6, 30, 8, 8)
    mask = torch.arange(30) < 21
    expected = attended(q, k[:, :, :21], v[:, :, :21])
    k[:, :, 21:], v[:, :, 21:] = 1e4, torch.finfo(torch.float32).max
    assert torch.allclose(attended(q, k, v, mask.expand(6, 30)), expected, rtol=1e-5, atol=1e-6)


@needs_function
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen(bad):
    for which, rows in enumerate((slice(3, 4), slice(None), slice(None))):
        given = tensors(1, 2, 21, 20, 8, 8)
        healthy = attended(*given)
        given[which][0, 1, 3, 2] = bad
        result = attended(*given)
        assert result[0, 1, rows].isnan().all()
        healthy[0, 1, rows] = torch.nan
        assert torch.equal(result.nan_to_num(), healthy.nan_to_num())  # only rows that read it
    mask = torch.zeros(21, 20)
    mask[5, 4], mask[6] = torch.nan, torch.nan
    result = attended(*tensors(1, 1, 21, 20, 8, 8), mask)
    assert result.isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [5, 6]


@needs_function
def test_zeros():
    q, k, v = tensors(1, 2, 9, 20, 8, 8)
    for which in range(3):
        given = [q, k, v]
        given[which] = torch.zeros_like(given[which])
        agree(given)
    q[:, :, 3], k[:, :, 4], v[:, :, 5], v[:, :, 6] = 0.0, 0.0, 0.0, 1e-35
    agree((q, k, v))
    assert attended(q, k, torch.zeros_like(v)).eq(0).all()


@needs_function
@pytest.mark.parametrize("size", [1e-3, 100.0, 1e4, 1e18])
def test_large_and_small_scores(size):
    q, k, v = tensors(1, 2, 9, 30, 8, 8)
    mean = attended(q * size, k, v)
    expected, slack = in_integers(q * size, k, v)
    # fp32 scores of this size are that far from real ones
    rough = 1e-6 * size if size < 1e3 else torch.inf
    assert (mean.double() - expected).abs().le(slack + rough + 1e-5).all()
    assert mean.isfinite().all()


@needs_function
def test_keys_without_values_keep_their_weight():
    q, k, v = tensors(1, 2, 9, 30, 8, 8)
    v *= 1e4
    v[:, :, ::2] = 0.0
    assert db(attended(q, k, v), exact(q, k, v)) > 33


@needs_function
def test_values_of_very_different_size():
    q, k, v = tensors(1, 2, 9, 30, 8, 8)
    v *= 10.0 ** torch.linspace(-12, 12, 30)[:, None]
    agree((q, k, v))


@needs_function
def test_threads_give_the_same_bits():
    given = tensors(1, 3, 50, 70, 64, 64)
    results = [attended(*given, parts=parts, threads=threads) for parts in (1, 2) for threads in (1, 2, 3)]
    assert all(torch.equal(results[0], other) for other in results[1:])


def asked(**fields):
    """Ranges of each call for linears, and for matmuls too."""
    return DynamicQuantConfig(**fields).set_local("matmul", DynamicQuantConfig())


class Attention(nn.Module):
    def __init__(self, *, causal=False, heads=4, width=48):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        batch, rows, width = x.shape
        q, k, v = (f(x).view(batch, rows, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, None if mask is None else mask[:, None, None], is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).reshape(batch, rows, width))


def names(q, *inputs):
    """Of what computes each step."""
    return [k.implementation.split()[0] for step in q.engine.steps(list(inputs)) for k in step.kernels]


def ran(q):
    return {op.operator: (op.ran, op.reason) for op in q.report().ops if op.kind == "matmul"}


@needs_function
def test_attention_with_dynamic_linears_is_five_functions():
    x = torch.randn(2, 30, 48)
    q = quantized(Attention().eval(), x, asked(), "native")
    assert names(q, x) == [f"c:{n}" for n in ("round_rows", "row_product", "dynamic_attention", "round_rows", "row_product")]  # fmt: skip
    assert [how for how, _ in ran(q).values()] == ["int8", "int8"]
    assert "function c:dynamic_attention (f32, f32, f32 -> f32)" in said(q.report())
    for sizes in ((2, 30, 48), (1, 1, 48), (3, 17, 48), (2, 200, 48)):
        other = torch.randn(sizes)
        assert worst_db([q.reference(other)], [q(other)]) > 48


@needs_function
def test_causal_attention():
    x = torch.randn(2, 30, 48)
    q = quantized(Attention(causal=True).eval(), x, asked(), "native")
    assert "c:dynamic_attention" in names(q, x)
    assert worst_db([q.reference(x)], [q(x)]) > 48


@needs_function
def test_a_mask_of_booleans_is_read_as_it_is():
    x, mask = torch.randn(2, 30, 48), torch.arange(30) < torch.tensor([[30], [11]])
    q = quantized(Attention().eval(), (x, mask), asked(), "native")
    assert "c:dynamic_attention" in names(q, x, mask)
    assert not [name for name in names(q, x, mask) if name.startswith(("aten::mul", "aten::any"))]
    none = torch.zeros(2, 30, dtype=torch.bool)
    for shown in (mask, ~mask, none):
        assert worst_db([q.reference(x, shown)], [q(x, shown)]) > 48


@needs_function
def test_keys_that_do_not_fit_go_to_torch_in_fp32_which_the_report_says():
    keys = caches.second() // 1000  # each of two rows of 512 codes
    x = torch.randn(1, keys, 512)
    q = quantized(Attention(heads=1, width=512).eval(), x, asked(), "native")
    assert "c:dynamic_attention" not in names(q, x)
    assert {how for how, _ in ran(q).values()} == {"fp32"}
    assert (
        "kernel c:dynamic_attention is not used for 1 layers: keys and values of a head don't fit into the "
        "second cache"
    ) in " ".join(q.report().text(details=True).split())
    assert worst_db([q.reference(x)], [q(x)]) > 48
    assert "c:dynamic_attention" in names(q, x[:, :40])


def test_without_the_function_both_products_run_in_fp32_and_the_report_says_why(monkeypatch):
    monkeypatch.setattr(dynamic_attention, "why_unavailable", lambda: "not here")
    x = torch.randn(2, 30, 48)
    q = quantized(Attention().eval(), x, asked(), "native")
    assert "c:dynamic_attention" not in names(q, x)
    assert set(ran(q).values()) == {("fp32", "not here; it runs in fp32, between dequantize and quantize")}
    assert worst_db([q.reference(x)], [q(x)]) > 48


@needs_function
def test_products_that_are_no_attention_run_in_fp32():
    def compute(m, x):
        scores = m.q(x) @ m.k(x).transpose(-2, -1)
        return torch.softmax(scores, -1) @ m.v(x), scores @ scores

    layers = {name: nn.Linear(24, 24) for name in ("q", "k", "v")}
    x = torch.randn(2, 3, 24, 24)
    q = quantized(Function(compute, **layers).eval(), x, asked(), "native")
    assert {how for how, _ in ran(q).values()} == {"fp32"}
    assert all("attention" in why for _, why in ran(q).values())
    assert worst_db(q.reference(x), q(x)) > 40


@needs_function
def test_torch_computes_the_same():
    q, k, v = tensors(2, 3, 7, 20, 16, 16)
    for mask in (None, torch.randn(7, 20), torch.rand(2, 1, 7, 20) > 0.4):
        computed = dynamic_attention._computed(q, k, v, mask, scale=0.25)
        assert worst_db([computed], [attended(q, k, v, mask, factor=0.25)]) > 50
