"""Attention of int8 codes as one function in C, against the same codes in float64.

Sizes, strides, masks, and what is left to oneDNN.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Attention, Function, quantized
from suites.cpus import as_cpu
from suites.int8_attention import Case, case, codes, heads
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends import available_backends
from nc.backends.native.operators import int8_attention
from nc.graph.fx_utils import call_function
from nc.kernels import caches, tuning
from nc.kernels.c_code import abi, openmp
from nc.numerics.metrics import worst_sqnr_db
from nc.process.unavailable import Unavailable

_WHY = available_backends()["native"] or int8_attention.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]
_WHY_NOT_BATCHES = _WHY or int8_attention.why_not_batches()
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module", autouse=True)
def batches():
    """Let the function compute padded batches, also with instruction sets with which oneDNN is faster."""
    with pytest.MonkeyPatch.context() as patch:
        use_for_batches(patch, *int8_attention._ISAS)
        yield


def use_for_batches(patch, *isas):
    patch.setattr(tuning, "INT8_ATTENTION", dataclasses.replace(tuning.INT8_ATTENTION, value=isas))


@pytest.mark.parametrize("isa", int8_attention.isas())
def test_instruction_sets(isa, monkeypatch):
    """Each that this CPU has, with sizes that are no multiple of its vectors."""
    monkeypatch.setattr(int8_attention, "_ISAS", (isa,))
    for keys, width, wide in ((1, 1, 1), (7, 5, 9), (23, 31, 17), (33, 64, 40)):
        case(rows=6, keys=keys, width=width, wide=wide, zeros=(130, 5, -7, 120)).check()
    mask = torch.zeros(2, 1, 6, 37)
    mask[:, :, 3], mask[:, :, 4, 2] = -torch.inf, torch.nan
    got = case(rows=6, keys=37, before=[("add", mask)], zeros=(128, 0, 0, 77)).check()
    assert (got[:, :, 3:5] == 77).all()


@pytest.mark.parametrize("isa", int8_attention.isas())
def test_sums_do_not_saturate(isa, monkeypatch):
    """Pairs of products of the largest codes need more than 16 bits."""
    monkeypatch.setattr(int8_attention, "_ISAS", (isa,))
    q, k, v = (torch.full((1, 2, 20, 64), code) for code in (255, -128, -128))
    k[:, :, 10:] += 1
    sides = q.to(torch.uint8), k.to(torch.int8), v.to(torch.int8)
    Case(*sides, zeros=(0, 0, 0, 0), scale=1e-4, dtype=torch.float32).check()


@pytest.mark.parametrize("width", [1, 3, 4, 15, 16, 31, 64, 80, 512])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 64, 65, 197])
def test_sizes(keys, width):
    case(rows=5, keys=keys, width=width, wide=width + 1 if width < 512 else 512).check()


@settings(max_examples=60)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 5, 40, 90, 40, 70))),
    zeros=st.tuples(st.integers(0, 255), st.integers(-128, 127), st.integers(-128, 127), st.integers(0, 255)),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
    threads=st.integers(1, 3),
)
def test_any_sizes(sizes, zeros, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case(*sizes, zeros=zeros, dtype=dtype, scale=1 / 300).check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_heads_are_divided_among_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case(batch=1, count=1, rows=333, keys=400).check()
        case(batch=1, count=2, rows=130, keys=400).check()
    finally:
        torch.set_num_threads(before)


def masks(batch, count, rows, keys):
    some = torch.where(torch.rand(batch, 1, 1, keys) > 0.4, 0.0, LOWEST)
    some[..., 0] = 0
    causal = torch.full((rows, keys), -torch.inf).triu(1)[None, None]
    return {
        "of keys": [("add", some)],
        "causal": [("add", causal)],
        "of heads": [("add", torch.randn(1, count, rows, keys))],
        "whole": [("add", torch.randn(batch, count, rows, keys))],
        "of rows": [("mul", torch.rand(batch, 1, rows, 1))],
        "one number": [("mul", torch.tensor([[[[0.3]]]]))],
        "two dimensions": [("add", torch.randn(rows, keys))],
        "several": [
            ("mul", torch.rand(batch, 1, rows, 1)),
            ("add", some),
            ("add", torch.randn(1, count, rows, keys)),
        ],
        "repeated": [("add", torch.randn(batch, 1, rows, keys).expand(batch, count, rows, keys))],
    }


@pytest.mark.parametrize("name", masks(2, 3, 9, 37))
def test_what_follows_the_scores(name):
    case(rows=9, keys=37, before=masks(2, 3, 9, 37)[name]).check()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_what_follows_the_result(dtype):
    seen = (torch.rand(2, 1, 9, 1) > 0.3).float()
    case(behind=[("mul", seen)], dtype=dtype).check()
    case(
        behind=[("mul", seen), ("add", torch.randn(3, 1, 8))],
        before=masks(2, 3, 9, 11)["several"],
        dtype=dtype,
    ).check()


@pytest.mark.parametrize("more", [0, 1])
def test_more_tensors_than_a_call_holds_are_left_to_onednn(more):
    half = abi.CONSTANTS.most_followers // 2
    before = [("add", torch.randn(2, 1, 1, 11) / half) for _ in range(half)]
    behind = [("mul", torch.rand(2, 1, 9, 1) + 0.5) for _ in range(half + more)]
    case(before=before, behind=behind, dtype=torch.float32).check(whole=not more)


def test_rows_that_see_nothing():
    """Their probabilities are no numbers, and their codes 0, as from oneDNN.

    All others are as without these rows.
    """
    mask = torch.zeros(2, 1, 9, 11)
    mask[0, :, 3], mask[1, :, 8, 2], mask[1, :, 1, 4], mask[1, :, 2] = (
        -torch.inf,
        torch.nan,
        torch.inf,
        LOWEST,
    )
    got = case(before=[("add", mask)], zeros=(128, 0, 0, 77)).check()
    for batch, row in ((0, 3), (1, 8), (1, 1)):
        assert (got[batch, :, row] == 77).all()


@pytest.mark.parametrize("dims", [3, 4])
def test_dimensions(dims):
    if dims == 3:
        Case(codes(5, 9, 16, dtype=torch.uint8), codes(5, 20, 16), codes(5, 20, 12)).check()
    else:
        Case(codes(2, 3, 9, 16, dtype=torch.uint8), codes(2, 3, 20, 16), codes(2, 3, 20, 12)).check()


def test_keys_that_heads_share():
    shared = codes(2, 2, 1, 20, 16).expand(2, 2, 3, 20, 16).reshape(2, 6, 20, 16)
    Case(heads(2, 9, 6, 16, torch.uint8), shared, shared).check()
    one = codes(2, 1, 20, 16).expand(2, 6, 20, 16)
    Case(heads(2, 9, 6, 16, torch.uint8), one, one).check()
    Case(heads(2, 9, 6, 16, torch.uint8), codes(1, 6, 20, 16), codes(2, 1, 20, 16)).check()


def test_what_stands_around_the_result_stays():
    """Rows of 13 bytes side by side."""
    q, k, v = heads(1, 9, 2, 13, torch.uint8), heads(1, 21, 2, 13), heads(1, 21, 2, 13)
    assert torch.equal(
        Case(q, k, v).check(),
        torch.cat([Case(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]).check() for i in (0, 1)], 1),
    )


def test_keys_and_values_of_a_head_stay_in_the_second_cache(monkeypatch):
    bytes_of_code = int8_attention._bytes_of_code(int8_attention.isas()[0])
    monkeypatch.setattr(caches, "second", lambda: 2 * (8 + 8) * bytes_of_code * 4096)
    case(keys=4097, rows=2).check(whole=False)
    case(keys=4096, rows=2).check()


def test_what_is_left_to_onednn():
    case(width=513, rows=3).check(whole=False)
    case(dim=3).check()
    # what a key has does not lie side by side
    Case(heads(2, 9, 3, 8, torch.uint8), codes(2, 3, 8, 11), heads(2, 11, 3, 8), in_rows=False).check(
        whole=False
    )


def test_another_dimension_is_no_attention():
    # oneDNN computes it, which sums such codes without saturation on all CPUs
    q, k, v = heads(2, 11, 3, 8, torch.uint8), heads(2, 11, 3, 8) // 2, heads(2, 11, 3, 8) // 2
    attention = Case(q, k, v, dim=2)
    call = attention.planned()
    (got,) = call(*attention.inputs)
    (expected,) = attention.module(*attention.inputs)
    assert (got.int() - expected.int()).abs().max() <= 1


class Weights(nn.Module):
    """Gives its probabilities too."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).mT / 4, -1)
        return weights @ self.value(x), weights


def test_probabilities_that_are_returned_are_computed():
    x = torch.randn(2, 7, 16)
    q = quantized(Weights().eval(), x, None, "native")
    for expected, got in zip(q.reference(x), q(x), strict=True):
        assert worst_sqnr_db([expected], [got]) > 35
    assert not [
        step
        for step in q.engine.steps([x])
        if any(int8_attention.NAME in k.implementation for k in step.kernels)
    ]
    scores, values = (op.refused for op in q.report().ops if op.kind == "matmul")
    why = "its scores or probabilities are read elsewhere too"
    assert (scores, values) == ((), (("c:int8_attention", why),))
    assert f"kernel c:int8_attention is not used for 1 layers: {why}" in q.report().summary()
    assert "computed by torch" not in q.report().details


def refused(attention):
    """Why a plan computes an attention in parts."""
    call = attention.planned()
    call(*attention.inputs)
    call(*attention.inputs)
    return [why for kernels in call.passed_over().values() for _, why in kernels]


def test_attention_in_parts_has_its_reason(monkeypatch):
    assert refused(case()) == []
    assert refused(case(width=513, rows=3)) == ["a head is wider than 512"]
    module = case().module
    monkeypatch.setattr(int8_attention, "_function", lambda: Unavailable("there is no C compiler"))
    assert refused(case()) == ["there is no C compiler"]
    (softmax,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.softmax.int)
    assert int8_attention.why_in_parts(softmax) == ""


def test_products_that_are_no_attention_have_no_reason():
    model = Function(lambda m, x: m.a(x) @ m.b(x).mT, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    q = quantized(model.eval(), torch.randn(2, 7, 16), None, "native")
    assert [op.refused for op in q.report().ops] == [()] * 3


@pytest.mark.skipif(
    bool(_WHY_NOT_BATCHES), reason="profiles are measured in another process, where oneDNN is faster"
)
@pytest.mark.parametrize("shape", [(1, 40, 32), (3, 7, 32)])
@pytest.mark.needs_plans
def test_the_report_says_which_function_computed_both_products(shape):
    x = torch.randn(shape)
    q = quantized(Attention(32, 4).eval(), x, nc.StaticQuantConfig(), "native")
    scores, values = (op for op in q.report(profile_inputs=x).ops if op.kind == "matmul")
    assert [scores.ran, values.ran] == ["int8", "int8"]
    assert scores.kernel == f"in the kernel of {values.operator}"
    assert values.kernel == f"function c:{int8_attention.NAME} (u8, s8, s8 -> u8)"
    for each in (x, torch.randn(2, 19, 32)):
        assert worst_sqnr_db([q.reference(each)], [q(each)]) > 40


def test_where_onednn_is_faster_it_takes_the_parts(monkeypatch):
    best = int8_attention.isas()[0]
    use_for_batches(monkeypatch)
    assert int8_attention.why_unavailable() == ""
    assert int8_attention.why_not_batches() == f"oneDNN is faster with {best}"
    assert refused(case()) == [f"oneDNN is faster with {best}"]
    case().check(whole=False)


def test_a_cpu_without_avx2_takes_the_parts(monkeypatch):
    as_cpu(monkeypatch)
    assert int8_attention.why_unavailable() == "there is no avx2"
    assert refused(case()) == ["there is no avx2"]


def test_a_machine_without_the_function_takes_the_parts(monkeypatch):
    monkeypatch.setattr(int8_attention, "_function", lambda: Unavailable("there is no C compiler"))
    case().check(whole=False)


def test_an_attention_that_changes_something_meanwhile_is_computed_in_parts():
    """The mask would be read after it has changed."""
    module = case(before=masks(2, 3, 9, 11)["of heads"]).module
    softmax = next(node for node in module.graph.nodes if node.target is torch.ops.aten.softmax.int)
    (scores,) = softmax.all_input_nodes
    (probabilities,) = softmax.users
    assert int8_attention.is_scores(scores)
    assert int8_attention.why_in_parts(probabilities) == ""
    with module.graph.inserting_before(softmax):
        call_function(module.graph, torch.ops.aten.add_.Tensor, (scores.all_input_nodes[2], 1.0))
    assert not int8_attention.is_scores(scores)
    assert int8_attention.why_in_parts(probabilities) == "something is changed in place meanwhile"


def test_threads_that_are_changed_between_calls():
    x = torch.randn(1, 150, 32)
    q = quantized(Attention(32, 1).eval(), x, None, "native")
    before, expected = torch.get_num_threads(), q(x)
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            assert openmp.threads() == threads
            assert torch.equal(q(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.needs_plans
def test_a_decomposed_attention_with_a_mask_of_its_own():
    def forward(self, x, mask):
        q, k, v = (f(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for f in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)

    layers = {name: nn.Linear(32, 32) for name in ("query", "key", "value")}
    x, mask = torch.randn(3, 20, 32), torch.rand(3, 1, 20, 20) > 0.4
    mask[1, :, 4] = False
    q = quantized(Function(forward, **layers).eval(), (x, mask), None, "native")
    assert any(
        int8_attention.NAME in k.implementation for step in q.engine.steps([x, mask]) for k in step.kernels
    )
    assert worst_sqnr_db([q.reference(x, mask)], [q(x, mask)]) > 35
