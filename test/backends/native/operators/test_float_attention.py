"""Attention in fp32 as one function in C: against float64, torch, and the graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, quantized, worst_db
from torch import nn
from torch.nn import functional as F

from nc import DynamicQuantConfig
from nc.backends import available_backends
from nc.backends.native.operators import float_attention
from nc.backends.native.plans import row_linears as row_format
from nc.backends.native.plans.attention import fields_of, fields_of_mask, parts_of_rows
from nc.backends.native.plans.operands import PlanTensor
from nc.kernels import caches
from nc.kernels.c_code.calls import call_once

_WHY = available_backends()["native"] or float_attention.why_unavailable()
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]


def attended(q, k, v, mask=None, *, factor=0.3, causal=False, bf16=False, parts=1, threads=2):
    """Result of the function in C."""
    y = torch.full((*q.shape[:3], v.shape[3]), 7.0)
    size = float_attention._room(k.shape[2], q.shape[3], v.shape[3])
    seen = None if mask is None else PlanTensor(mask, None)
    fields = {
        **fields_of(q, k, v, y),
        **fields_of_mask(seen, (*q.shape[:3], k.shape[2])),
        **{"group": q.shape[1] // k.shape[1], "causal": causal, "bf16": bf16},
        **{"factor": factor, "parts": parts, "bytes": size, "threads": threads},
    }
    room = torch.zeros(threads, size, dtype=torch.uint8)
    call_once(float_attention._function(), fields, [y, q, k, v, room, *([] if mask is None else [mask])])
    return y


def exact(q, k, v, mask=None, *, factor=0.3, causal=False):
    """The same in float64, by its definition."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * factor
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = torch.softmax(scores, -1)
    seen = (scores > -torch.inf).any(-1, keepdim=True) | scores.isnan().any(-1, keepdim=True)
    return torch.where(seen, weights, 0.0) @ v


def tensors(batch, heads, rows, keys, width, wide, group=1):
    shapes = (heads, rows, width), (heads // group, keys, width), (heads // group, keys, wide)
    return [torch.randn(batch, *shape) for shape in shapes]


def agree(result, expected):
    assert torch.equal(result.isnan(), expected.isnan())
    scale = expected.nan_to_num().abs().max().clamp(min=1)
    assert ((result.double() - expected).nan_to_num().abs() / scale).max() < 2e-6


@pytest.mark.parametrize("wide", [1, 16, 33, 64, 100])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 65, 197])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 13])
def test_sizes(rows, keys, wide):
    given = tensors(2, 3, rows, keys, 40, wide)
    agree(attended(*given), exact(*given))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 3, 40, 90, 40, 90))),
    group=st.integers(1, 3),
    mask=st.sampled_from(["none", "bool", "float", "of keys", "of rows"]),
    causal=st.booleans(),
    parts=st.integers(1, 3),
    threads=st.integers(1, 3),
)
def test_any_sizes(sizes, group, mask, causal, parts, threads):
    batch, of_key, rows, keys, width, wide = sizes
    given = tensors(batch, of_key * group, rows, keys, width, wide, group)
    masks = {
        "none": None,
        "bool": torch.rand(batch, 1, rows, keys) > 0.5,
        "float": torch.randn(1, of_key * group, rows, keys),
        "of keys": torch.rand(batch, 1, 1, keys) > 0.3,
        "of rows": torch.rand(1, 1, rows, 1) > 0.3,
    }
    result = attended(*given, masks[mask], causal=causal, parts=min(parts, rows), threads=threads)
    agree(result, exact(*given, masks[mask], causal=causal))


def test_a_query_that_sees_no_key_gets_zeros():
    given, mask = tensors(1, 1, 3, 20, 8, 8), torch.ones(3, 20, dtype=torch.bool)
    mask[1] = False
    result = attended(*given, mask)
    assert result[0, 0, 1].eq(0).all()
    agree(result, exact(*given, mask))
    agree(result, F.scaled_dot_product_attention(*given, mask, scale=0.3).double())
    given[2][0, 0, 4] = torch.finfo(torch.float32).max  # hidden, it has no weight at all
    mask[:, 4] = False
    assert attended(*given, mask).abs().max() < 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", range(3))
def test_what_is_no_number_is_seen(which, bad):
    given = tensors(1, 2, 7, 20, 8, 8)
    given[which][0, 1, 3, 2] = bad
    expected = F.scaled_dot_product_attention(*given, scale=0.3)
    result = attended(*given)
    assert torch.equal(result.isfinite(), expected.isfinite())
    assert torch.allclose(result[expected.isfinite()], expected[expected.isfinite()], atol=1e-5)


@pytest.mark.parametrize("size", [100.0, 1e4, 1e18])
def test_large_scores(size):
    q, k, v = tensors(1, 1, 5, 30, 8, 8)
    agree(attended(q * size, k, v), exact(q * size, k, v))


def test_threads_give_the_same_bits():
    given = tensors(1, 3, 50, 70, 64, 64)
    results = [attended(*given, parts=parts, threads=threads) for parts in (1, 2) for threads in (1, 2, 3)]
    assert all(torch.equal(results[0], other) for other in results[1:])


class Attention(nn.Module):
    def __init__(self, *, causal=False, mask=None, heads=4, width=48):
        super().__init__()
        self.heads, self.causal, self.mask = heads, causal, mask
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        batch, rows, width = x.shape
        q, k, v = (f(x).view(batch, rows, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = self.mask if mask is None else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, rows, width))


def names(q, *inputs):
    """Of what computes each step."""
    return [k.implementation.split()[0] for step in q.engine.steps(list(inputs)) for k in step.kernels]


@pytest.mark.skipif(
    bool(row_format.why_unavailable(row_format.CODES)), reason="its linears are not functions in C"
)
def test_attention_with_dynamic_linears_is_five_functions():
    x = torch.randn(2, 30, 48)
    q = quantized(Attention().eval(), x, DynamicQuantConfig(), "native")
    assert names(q, x) == [f"c:{n}" for n in ("round_rows", "row_product", "float_attention", "round_rows", "row_product")]  # fmt: skip
    assert worst_db([q.reference(x)], [q(x)]) > 60
    for sizes in ((1, 1, 48), (3, 17, 48), (2, 200, 48)):
        other = torch.randn(sizes)
        assert worst_db([q.reference(other)], [q(other)]) > 55


@pytest.mark.parametrize("causal", [False, True])
def test_causal_attention(causal):
    x = torch.randn(2, 30, 48)
    q = quantized(Attention(causal=causal).eval(), x, DynamicQuantConfig(), "native")
    assert "c:float_attention" in names(q, x)
    assert worst_db([q.reference(x)], [q(x)]) > 60


def test_a_mask_of_booleans_is_read_as_it_is():
    x, mask = torch.randn(2, 30, 48), torch.arange(30) < torch.tensor([[30], [11]])
    q = quantized(Attention().eval(), (x, mask), DynamicQuantConfig(), "native")
    assert "c:float_attention" in names(q, x, mask)
    assert not [name for name in names(q, x, mask) if name.startswith(("aten::mul", "aten::any"))]
    none = torch.zeros(2, 30, dtype=torch.bool)
    for shown in (mask, ~mask, none):
        assert worst_db([q.reference(x, shown)], [q(x, shown)]) > 55


def test_a_result_that_is_multiplied_for_another_mask_stays_so():
    def compute(m, x, mask, other):
        q, k, v = (f(x).view(2, 30, 4, 12).transpose(1, 2) for f in (m.q, m.k, m.v))
        hidden = torch.logical_not(mask)
        bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(hidden, torch.finfo(torch.float32).min)
        y = torch.softmax(q @ k.transpose(2, 3) * 0.3 + bias, -1) @ v
        return m.out((y * other.any(-1, True).to(torch.float32)).transpose(1, 2).reshape(2, 30, 48))

    layers = {name: nn.Linear(48, 48) for name in ("q", "k", "v", "out")}
    x, mask = torch.randn(2, 30, 48), (torch.arange(30) < torch.tensor([[30], [11]]))[:, None, None]
    other = torch.zeros(2, 1, 30, 4, dtype=torch.bool)
    other[:, :, 3:20, 1] = True
    for asked in (other, mask.expand(2, 1, 30, 30)):
        inputs = (x, mask, asked)
        q = quantized(Function(compute, **layers).eval(), inputs, DynamicQuantConfig(), "native")
        assert "c:float_attention" in names(q, *inputs)
        assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 55


def test_keys_that_do_not_fit_go_to_torch():
    keys = caches.second() // (2 * 48 * 4) // 2 * 4
    x = torch.randn(1, keys, 96)
    q = quantized(Attention(heads=2, width=96).eval(), x[:, :40], DynamicQuantConfig(), "native")
    assert "c:float_attention" in names(q, x[:, :40])
    assert "c:float_attention" not in names(q, x[:, : keys + 64])


@pytest.mark.parametrize(
    ("heads", "threads", "parts"), [(12, 2, 1), (1, 2, 4), (3, 2, 2), (3, 4, 3), (5, 1, 1)]
)
def test_rows_are_divided_where_heads_can_not_be(heads, threads, parts):
    assert parts_of_rows(heads, 1000, threads) == parts
