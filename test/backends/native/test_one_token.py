"""Small operators in C, against torch in float64: values, strides, dtypes, and what they leave to torch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import library, quantized
from torch import fx, nn
from torch.nn import functional as F

from nc.backends import available_backends
from nc.backends.native import operators
from nc.backends.native import planned as planning
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.execution_plan import AtenCall, FunctionCall
from nc.errors import BackendError
from nc.graph.catalogue import name_operators
from nc.graph.fx_utils import call_function
from nc.kernels.c_code.calls import call_once
from nc.kernels.onednn.runner import PythonRunner, runner
from nc.numerics.metrics import worst_sqnr_db

pytestmark = [
    pytest.mark.isas,
    pytest.mark.skipif(
        bool(available_backends()["native"] or c_functions.why_unavailable()),
        reason=available_backends()["native"] or c_functions.why_unavailable(),
    ),
]
aten = torch.ops.aten
#: Of results in fp32 and bf16, relative to the largest: some roundings of each.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def graph(function):
    """A graph of the ATen operators that a function calls; its arguments are the inputs."""
    module = fx.symbolic_trace(function)
    name_operators(module.graph)
    return module


def planned(function, run_by=None):
    source = library()
    run_by = run_by or runner(source.maker.library)[0]
    never = (lambda: pytest.fail("no plan"),)
    return planning.PlannedModel(graph(function), source, run_by, *never, operators.table(one_token=True))


def calls(call):
    """Names of torch's operators in the plan, and how many functions in C there are."""
    (plan,) = (plan for plan in call._plans.values() if not isinstance(plan, str))
    return [e.step.name for e in plan.entries if isinstance(e, AtenCall)], sum(
        isinstance(e, FunctionCall) for e in plan.entries
    )


def check(function, *inputs, torch_calls=()):
    """The plan computes what torch computes in float64, twice, in functions of C but for `torch_calls`."""
    call = planned(function)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = function(*(x.clone() for x in wide))[0]
    for _ in range(2):
        given_ = [x.clone() for x in inputs]
        (got,) = call(*given_)
        assert got.shape == expected.shape
        largest = expected.abs().max().clamp(min=1e-30)
        assert (got.double() - expected).abs().max() <= CLOSE[got.dtype] * largest
    assert calls(call)[0] == list(torch_calls)
    assert torch_calls or calls(call)[1]
    return got


UNARY = {
    "neg": aten.neg.default,
    "abs": aten.abs.default,
    "rsqrt": aten.rsqrt.default,
    "sqrt": aten.sqrt.default,
    "reciprocal": aten.reciprocal.default,
    "relu": aten.relu.default,
    "exp": aten.exp.default,
    "sigmoid": aten.sigmoid.default,
    "silu": aten.silu.default,
    "tanh": aten.tanh.default,
    "cos": aten.cos.default,
    "sin": aten.sin.default,
    "gelu": aten.gelu.default,
    "gelu_tanh": lambda x: aten.gelu.default(x, approximate="tanh"),
    "square": lambda x: aten.pow.Tensor_Scalar(x, 2),
    "mean": lambda x: aten.mean.dim(x, [-1], True),
    "mean of rows": lambda x: aten.mean.dim(x, [-1]),
    "clone": lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_value(name, dtype):
    x = torch.randn(3, 5, 577).to(dtype)
    check(lambda x: (UNARY[name](x),), x.abs() + 0.1 if "sqrt" in name else x)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "gelu_tanh"])
def test_the_ends_of_functions(name):
    """What overflows, vanishes, or is no number."""
    x = torch.tensor(
        [
            [
                0.0,
                -0.0,
                88.5,
                88.8,
                1e4,
                -87.5,
                -100.0,
                -104.5,
                -1e4,
                float("inf"),
                float("-inf"),
                float("nan"),
                1e-40,
            ]
        ]
    )
    expected = UNARY[name](x)
    (got,) = planned(lambda x: (UNARY[name](x),))(x)
    assert (
        torch.equal(got.isnan(), expected.isnan()) or name == "gelu_tanh"
    )  # which gives zeros for what is far below zero
    known = ~expected.isnan() & ~got.isnan()
    torch.testing.assert_close(got[known], expected[known], rtol=3e-6, atol=1e-37)


def test_exp_is_right_within_two_units():
    x = torch.linspace(-87, 88, 60_000).view(1, -1)
    (got,) = planned(lambda x: (aten.exp.default(x),))(x)
    exact = x.double().exp()
    assert ((got.double() - exact).abs() / exact).max() < 2 * 2**-23


BINARY = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor}


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(BINARY)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ones=st.lists(st.booleans(), min_size=4, max_size=4),
    turned=st.tuples(st.booleans(), st.booleans()),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
)
def test_functions_of_two_values(name, sizes, ones, turned, dtypes):
    """Of all broadcasts, strides and dtypes."""
    torch.manual_seed(0)
    shapes = sizes, [1 if one else size for size, one in zip(sizes, ones, strict=False)]
    x, y = (
        torch.randn(s[::-1]).to(d).permute(*reversed(range(len(s)))) if t else torch.randn(s).to(d)
        for s, t, d in zip(shapes, turned, dtypes, strict=True)
    )
    y = y.abs() + 0.5 if name == "div" else y
    check(lambda x, y: (BINARY[name](x[::1], y),), x, y)


def test_numbers_and_conversions():
    x = torch.randn(2, 9)
    check(lambda x: (aten.add.Tensor(aten.mul.Tensor(x, 1.5), 1e-6),), x)
    check(lambda x: (aten.mul.Tensor(aten.to.dtype(x, torch.bfloat16), 3),), x)
    check(lambda x, y: (aten.type_as.default(x, y),), x.bfloat16(), x)


def test_views_of_inputs_need_no_call():
    """Parts of an input, and of what an operator of torch made, are read where they lie."""
    x = torch.randn(4, 6, 8)
    check(
        lambda x: (
            aten.mul.Tensor(aten.select.int(x, 0, 2), aten.slice.Tensor(aten.select.int(x, 0, 3), 0, 0, 9)),
        ),
        x,
    )
    check(
        lambda x: (aten.neg.default(aten.select.int(aten.flip.default(x, [0]), 1, 4)),),
        x,
        torch_calls=["aten::flip"],
    )
    call = planned(lambda x: (aten.transpose.int(aten.select.int(x, 0, 1), 0, 1),))
    for other in (x, x + 1):
        (got,) = call(other)
        assert torch.equal(got, other[1].T)


def test_parts_put_together():
    x = torch.randn(2, 3, 8)
    half = (
        lambda x: (
            aten.cat.default(
                [aten.neg.default(aten.slice.Tensor(x, -1, 4, 99)), aten.slice.Tensor(x, -1, 0, 4)], -1
            ),
        ),
        x,
    )
    check(*half)
    check(
        lambda x: (aten.cat.default([x, aten.slice.Tensor(x, 1, 3, 3), x], 1),), x
    )  # one part has no elements
    check(lambda x: (aten.neg.default(aten.reshape.default(aten.transpose.int(x, 0, 1), [6, 8])),), x)


class Constants(nn.Module):
    """A function of one tensor that also gets the module, which has these buffers."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 64, 1200])
def test_layer_norm(width, dtype):
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    x = (torch.randn(3, width) * 4 + 1).to(dtype)
    norm = aten.layer_norm.default
    call = planned(
        Constants(lambda self, x: (norm(x, [width], self.weight, self.bias, 1e-3),), weight=weight, bias=bias)
    )
    (got,) = call(x)
    expected = F.layer_norm(x.double(), [width], weight.double(), bias.double(), 1e-3)
    assert (got.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()
    assert calls(call)[0] == []


@pytest.mark.parametrize(("rows", "width"), [(3, 7), (1, 64), (5, 1200), (301, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(rows, width, dtype, eps, has_weight):
    """Of many rows with several threads too."""
    weight, x = torch.randn(width).to(dtype), (torch.randn(2, rows, width) * 1e-2 + 0.02).to(dtype)
    call = planned(
        Constants(
            lambda self, x: (aten.rms_norm.default(x, [width], self.weight if has_weight else None, eps),),
            weight=weight,
        )
    )
    (got,) = call(x)
    wide = x.double()
    expected = wide * torch.rsqrt(
        wide.square().mean(-1, keepdim=True) + (torch.finfo(torch.float32).eps if eps is None else eps)
    )
    expected = expected * weight.double() if has_weight else expected
    assert got.dtype is dtype
    assert (got.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()
    # without eps torch takes that of bf16 or of fp32, depending on its version
    assert bool(calls(call)[0]) is (eps is None and dtype is torch.bfloat16)


def test_what_is_no_number_stays_so_in_a_norm():
    x = torch.randn(4, 33)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    call = planned(lambda x: (aten.rms_norm.default(x, [33], None, 1e-6),))
    (got,) = call(x)
    expected = F.rms_norm(x, [33], None, 1e-6)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_place_in_an_input_is_written_in_place():
    """For any index; one that is no place is an error, and nothing is written."""
    memory, token = torch.zeros(3, 2, 4, 6, 8), torch.randn(2, 4, 1, 8)

    def write(memory, token, index):
        layer = aten.select.int(memory, 0, 1)
        return (aten.neg.default(aten.select.int(aten.index_copy_.default(layer, 2, index, token), 2, 5)),)

    call = planned(write)
    for place in (0, 5, 3):
        expected = memory.clone()
        expected[1, :, :, place] = token[:, :, 0]
        (got,) = call(memory, token, torch.tensor([place]))
        assert torch.equal(memory, expected)
        assert torch.equal(got, -expected[1, :, :, 5])
    assert calls(call)[0] == []
    for place in (-1, 6):
        with pytest.raises(IndexError, match="index_copy"):
            call(memory, token, torch.tensor([place]))
    assert torch.equal(memory, expected)


def test_several_places_are_written_in_place():
    memory, tokens = torch.zeros(3, 2, 4, 6, 8), torch.randn(2, 4, 3, 8)

    def write(memory, tokens, index):
        return (aten.index_copy_.default(aten.select.int(memory, 0, 1), 2, index, tokens),)

    call = planned(write)
    for places in ([0, 1, 2], [5, 0, 3], [2, 2, 4]):
        expected = memory.clone()
        for i, place in enumerate(places):
            expected[1, :, :, place] = tokens[:, :, i]
        call(memory, tokens, torch.tensor(places))
        assert torch.equal(memory, expected)
    assert calls(call)[0] == []
    with pytest.raises(IndexError, match="index_copy"):
        call(memory, tokens, torch.tensor([0, 1, 6]))


def test_rows_of_a_table():
    table = torch.randn(11, 5)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x):
            return (aten.embedding.default(self.table, x),)

    call = planned(Table())
    for ids in (torch.tensor([[3, 0], [10, 3]]), torch.tensor([[1, 2], [4, 4]])):
        assert torch.equal(call(ids)[0], table[ids])
    with pytest.raises(IndexError, match="embedding"):
        call(torch.tensor([[3, 0], [11, 3]]))


MASKS = {
    "none": lambda b, h, n: None,
    "bool": lambda b, h, n: torch.rand(b, 1, 1, n) < 0.5,
    "causal": lambda b, h, n: torch.arange(n) < torch.tensor([4, 5, 6])[:, None],
    "bool per head": lambda b, h, n: torch.rand(1, h, 1, n) < 0.5,
    "biases": lambda b, h, n: torch.randn(b, h, 1, n),
    "hidden": lambda b, h, n: torch.where(torch.rand(b, 1, 1, n) < 0.5, 0.0, torch.finfo(torch.float32).min),
    "infinite": lambda b, h, n: torch.where(torch.rand(n) < 0.5, 0.0, float("-inf")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "of_keys", "queries"), [(4, 4, 1), (6, 2, 1), (6, 2, 3), (3, 1, 3)])
def test_attention(heads, of_keys, queries, mask, dtype):
    """Against softmax(q k^T / sqrt(width) + mask) v in float64, for heads that share keys, and keys in a part of larger memory."""
    torch.manual_seed(0)
    batch, keys, width = 2, 37, 40
    if mask == "causal" and queries == 1:
        pytest.skip("one query")
    q = torch.randn(batch, queries, heads, width).to(dtype).transpose(1, 2) * 3
    k, v = (torch.randn(3, batch, of_keys, keys, width).to(dtype) for _ in "kv")
    hides = MASKS[mask](batch, heads, keys)
    group = heads // of_keys

    def attend(q, k, v, *mask):
        k, v = aten.select.int(k, 0, 1), aten.select.int(v, 0, 2)
        if group > 1:
            k, v = (
                aten.reshape.default(
                    aten.expand.default(aten.unsqueeze.default(t, 2), [batch, of_keys, group, keys, width]),
                    [batch, heads, keys, width],
                )
                for t in (k, v)
            )
        return (aten.scaled_dot_product_attention.default(q, k, v, *mask),)

    masked = (
        (lambda q, k, v, m: attend(q, k, v, m)) if hides is not None else (lambda q, k, v: attend(q, k, v))
    )
    inputs = (
        (q, k, v) if hides is None else (q, k, v, hides if hides.dtype is torch.bool else hides.to(dtype))
    )
    call = planned(masked)
    (got,) = call(*inputs)
    assert calls(call)[0] == []
    k, v = (t.double().repeat_interleave(group, 1) for t in (k[1], v[2]))
    scores = q.double() @ k.mT / width**0.5
    if hides is not None:
        scores = (
            scores.masked_fill(~hides, float("-inf"))
            if hides.dtype is torch.bool
            else scores + hides.to(dtype).double()
        )
    expected = scores.softmax(-1).nan_to_num() @ v
    assert (got.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


def test_a_query_that_sees_nothing_gives_zeros():
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    hidden = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    (got,) = planned(lambda q, k, m: (aten.scaled_dot_product_attention.default(q, k, k, m),))(q, k, hidden)
    assert torch.equal(got, torch.zeros_like(got))


def test_keys_that_are_no_numbers():
    """They reach the result, as in torch, unless they are hidden."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    k[0, 0, 3] = float("nan")
    for mask in (
        torch.ones(1, 1, 1, 5, dtype=torch.bool),
        torch.arange(5).ge(3).view(1, 1, 1, 5),
        torch.arange(5).ne(3).view(1, 1, 1, 5),
    ):
        (got,) = planned(lambda q, k, v, m: (aten.scaled_dot_product_attention.default(q, k, v, m),))(
            q, k, v, mask
        )
        assert torch.equal(got.isnan().all(-1).flatten(), torch.tensor([bool(mask[..., 3]), False]))


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -math.inf])
def test_keys_that_a_float_mask_hides_are_not_read(hidden):
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.tensor([0.0, hidden, 0.5, hidden, hidden]).view(1, 1, 1, 5)
    attend = planned(lambda q, k, v, m: (aten.scaled_dot_product_attention.default(q, k, v, m),))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    k[..., [1, 3, 4], :] = v[..., [1, 3, 4], :] = math.nan
    (got,) = attend(q, k, v, mask)
    assert (got - expected).abs().max() <= 1e-6


def test_a_query_from_which_the_lowest_number_hides_all_keys_gets_their_mean():
    """As in torch: the lowest number plus a score is the lowest number, for each key."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.full((1, 1, 1, 5), torch.finfo(torch.float32).min)
    (got,) = planned(lambda q, k, v, m: (aten.scaled_dot_product_attention.default(q, k, v, m),))(
        q, k, v, mask
    )
    assert (got - v.mean(2, keepdim=True)).abs().max() <= 1e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_over_many_keys_is_divided(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k = torch.randn(1, 5, 1, 64), torch.randn(1, 5, 3000, 64)
        (got,) = planned(lambda q, k: (aten.scaled_dot_product_attention.default(q, k, k),))(q, k)
        expected = F.scaled_dot_product_attention(q.double(), k.double(), k.double())
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()  # sums of 3000 numbers in fp32
    finally:
        torch.set_num_threads(before)


def test_what_has_no_function_is_torchs():
    """Many queries, large tensors, other dtypes, means over other dimensions."""
    q = torch.randn(1, 2, 17, 8)
    check(
        lambda q: (aten.scaled_dot_product_attention.default(q, q, q),),
        q,
        torch_calls=["aten::scaled_dot_product_attention"],
    )
    check(lambda x: (aten.mean.dim(x, [0], True),), torch.randn(3, 4), torch_calls=["aten::mean"])
    check(lambda x: (aten.cos.default(x),), torch.randn(300, 300), torch_calls=["aten::cos"])
    (got,) = planned(lambda x: (aten.add.Tensor(x, 1),))(torch.arange(4))
    assert got.tolist() == [1, 2, 3, 4]


def test_without_the_compiled_runner_functions_are_called_one_by_one():
    x = torch.randn(2, 70)
    call = planned(
        lambda x: (aten.silu.default(aten.mul.Tensor(x, x)),), PythonRunner(library().maker.library)
    )
    (got,) = call(x)
    torch.testing.assert_close(got, F.silu(x * x))
    assert calls(call) == ([], 2)


def by_hand(build, **buffers):
    """A planned graph whose nodes `build` makes: what reads no input would be computed while it is traced."""
    root = nn.Module()
    for name, value in buffers.items():
        root.register_buffer(name, value)
    nodes = fx.Graph()
    nodes.output(build(nodes, nodes.placeholder("x")))
    source = library()
    never = (lambda: pytest.fail("no plan"),)
    run_by = runner(source.maker.library)[0]
    return planning.PlannedModel(
        fx.GraphModule(root, nodes), source, run_by, *never, operators.table(one_token=True)
    )


def test_what_changes_in_place_is_made_in_each_call():
    """A constant that a graph changes must not be that of the call before."""

    def build(nodes, x):
        total = call_function(nodes, aten.full.default, ([2, 3], 1.0))
        row = call_function(nodes, aten.select.int, (total, 0, 0))
        first = call_function(
            nodes, aten.add_.Tensor, (row, call_function(nodes, aten.select.int, (x, 0, 0)))
        )
        return (first, total)

    call = by_hand(build)
    for _ in range(3):
        first, total = call(torch.ones(2, 3))
        assert total.tolist() == [[2.0] * 3, [1.0] * 3]
        assert first.tolist() == [2.0] * 3


def test_a_constant_of_the_model_that_changes_has_no_plan():
    call = by_hand(
        lambda nodes, x: (call_function(nodes, aten.add_.Tensor, (nodes.get_attr("count"), x)),),
        count=torch.zeros(2),
    )
    with pytest.raises(BackendError, match="changes a constant"):
        call.check([torch.ones(2)])


def test_a_view_that_is_conjugated_or_negated():
    """Sizes and strides do not tell that a view has other values than its memory."""
    x = torch.randn(2, 3, dtype=torch.complex64)
    for function in (
        lambda x: (aten.mul.Tensor(aten._conj.default(x), x),),
        lambda x: (aten.neg.default(aten._neg_view.default(aten.view_as_real.default(x))),),
    ):
        call = planned(function)
        for _ in range(2):
            torch.testing.assert_close(call(x)[0], function(x)[0])


def test_a_query_that_is_the_key():
    def function(q):
        return (aten.scaled_dot_product_attention.default(q, q, aten.mul.Tensor(q, 2.0)),)

    check(function, torch.randn(2, 3, 1, 8))


def test_concatenation_of_nothing():
    def function(x):
        return aten.cat.default(
            [aten.slice.Tensor(x, 0, 0, 0), aten.slice.Tensor(x, 0, 0, 0)]
        ), aten.mul.Tensor(x, 2.0)

    assert planned(function)(torch.randn(2, 3))[0].shape == (0, 3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "zero_point"), [*((torch.uint8, z) for z in (0, 114, 255)), (torch.int8, -7)]
)
def test_codes_are_those_of_float64(dtype, zero_point, channels, threads):
    low = 0 if dtype is torch.uint8 else -128
    for images, rows, columns in ((1, 1, 1), (2, 5, 51), (1, 16, 16), (3, 100, 129)):
        x = torch.randn(images, channels, rows, columns) * 100
        x[..., -1, -1] = torch.tensor([float("inf"), float("-inf"), 3e38])[:channels]
        x[0, 0, 0, 0] = 0.625  # between two codes: to the even one
        y = torch.zeros(images, rows * columns, channels, dtype=dtype)
        fields = {"to": c_functions.NUMBERS[dtype], "images": images, "channels": channels}
        fields |= {"pixels": rows * columns, "inverse": 4.0, "zero_point": zero_point, "threads": threads}
        call_once(c_functions.function("codes"), fields, [y, x])
        expected = torch.clamp(torch.round(x.double() * 4) + zero_point, low, low + 255).to(dtype)
        assert torch.equal(y.view(images, rows, columns, channels).permute(0, 3, 1, 2), expected)
    last = channels - 1
    x[0, last, 0, 0] = float("nan")
    call_once(c_functions.function("codes"), fields, [y, x])
    assert y[0, 0, last] == low
    assert torch.equal(y[0, 1:, last], expected[0, last].flatten()[1:])


@pytest.mark.needs_plans
def test_a_plan_quantizes_images_by_the_function():
    x = torch.randn(2, 3, 20, 23)
    q = quantized(nn.Conv2d(3, 8, 3).eval(), x, None, "native")
    kernels = [
        kernel.implementation for step in q.report(profile_inputs=x).profile.steps for kernel in step.kernels
    ]
    assert "c:codes" in kernels
    for each in (x, torch.randn(1, 3, 31, 18), x.to(memory_format=torch.channels_last)):
        assert worst_sqnr_db((q.reference(each),), (q(each),)) > 40
