"""Masks and rows of tables as functions in C.

Against torch's operators, with dimensions that stay repeated and without.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WHY_NO_PLANS, Function, library, quantized
from torch import fx, nn
from torch.nn import functional as F

from nc.backends import available_backends
from nc.backends.native import operators
from nc.backends.native import planned as planning
from nc.backends.native.operators import embedding, int8_attention
from nc.backends.native.operators import mask as masks
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.execution_plan import AtenCall
from nc.errors import InputError
from nc.graph.catalogue import name_operators
from nc.kernels import caches
from nc.kernels.onednn.runner import PythonRunner, runner
from nc.numerics.metrics import worst_sqnr_db

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]
aten = torch.ops.aten
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def repeated(monkeypatch):
    """Who reads the output of a plan takes repeated dimensions."""
    repeat(monkeypatch)


@pytest.fixture(params=["written out", "repeated"])
def strides(request, monkeypatch):
    """Whether results may keep repeated dimensions."""
    if request.param == "repeated":
        repeat(monkeypatch)
    return request.param


def repeat(patch):
    patch.setattr(masks, "_READERS", {*masks._READERS, "output"})
    patch.setattr(int8_attention, "why_not_batches", lambda: "")


def planned(function, run_by=None, otherwise=lambda: pytest.fail("no plan")):
    source = library()
    module = fx.symbolic_trace(function)
    name_operators(module.graph)
    return planning.PlannedModel(module, source, run_by or runner(source.maker.library)[0], otherwise)


def of_torch(call):
    """Names of torch's operators in the plans of a model."""
    return [e.step.name for plan in call._plans.values() for e in plan.entries if isinstance(e, AtenCall)]


def check(function, *inputs, torch_calls=()):
    """A plan gives what torch gives, for two inputs of the same sizes."""
    call = planned(function)
    for given_ in (inputs, [x.flip(-1) for x in inputs]):
        (expected,), (got,) = function(*given_), call(*given_)
        assert got.dtype is expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
    assert of_torch(call) == list(torch_calls)
    return got


def mask(*sizes):
    return torch.rand(sizes) > 0.5


BINARY = {
    "and": aten.logical_and.default,
    "&": aten.bitwise_and.Tensor,
    "__and__": aten.__and__.Tensor,
    "or": aten.logical_or.default,
    "|": aten.bitwise_or.Tensor,
    "__or__": aten.__or__.Tensor,
}


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(sorted(BINARY)),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    ones=st.lists(st.booleans(), min_size=10, max_size=10),
    shorter=st.integers(0, 4),
    repeats=st.booleans(),
)
def test_two_masks(name, sizes, ones, shorter, repeats):
    """Of all broadcasts."""
    shapes = [[1 if one else n for one, n in zip(o, sizes, strict=False)] for o in (ones[:5], ones[5:])]
    x, y = mask(*shapes[0]), mask(*shapes[1][shorter:])
    with pytest.MonkeyPatch.context() as patch:
        if repeats:
            repeat(patch)
        got = check(lambda x, y: (aten.logical_not.default(BINARY[name](x, y)),), x, y)
    changing = [
        max(a, b) for a, b in zip(x.shape, ([1] * shorter + list(y.shape))[-len(sizes) :], strict=True)
    ]
    assert repeats or got.is_contiguous()
    assert not repeats or got.untyped_storage().nbytes() <= torch.Size(changing).numel()


@pytest.mark.parametrize("left", [True, False])
def test_a_mask_of_constants_that_are_all_true_is_the_other_one(strides, left):
    true, x = torch.ones(1, 1, 4, 1, dtype=torch.bool), mask(2, 1, 1, 5)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("true", true)

        def forward(self, x):
            both = aten.logical_and.default(*((self.true, x) if left else (x, self.true)))
            return (both,)

    got = check(Graph(), x)
    assert got.stride(2) == (0 if strides == "repeated" else 5)


def test_a_constant_that_hides_something(strides):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("causal", torch.ones(5, 5, dtype=torch.bool).tril())

        def forward(self, x):
            return (aten.logical_and.default(self.causal, x),)

    check(Graph(), mask(2, 1, 1, 5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("to", [torch.bool, torch.float32, torch.bfloat16])
def test_conversions(strides, dtype, to):
    x = torch.tensor([[0, 1, -3, 2**40, -(2**40), 5, 1, 0]], dtype=torch.float64).to(dtype)
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([[float("nan"), -0.0, 1e-40, float("inf")]]).to(dtype)], 1)
    call = planned(lambda x: (aten.to.dtype(x, to),))
    for given_ in (x, x.flip(1)):
        torch.testing.assert_close(call(given_)[0], given_.to(to), rtol=0, atol=0, equal_nan=True)
    assert not of_torch(call)


def test_conversions_that_torch_does(strides):
    x = torch.randn(3, 7)
    check(lambda x: (aten.to.dtype(x, torch.int64),), x, torch_calls=["aten::to"])
    check(lambda x: (aten.to.dtype(x, torch.int32),), mask(3, 7), torch_calls=["aten::to"])
    got = check(lambda x: (aten.to.device(x, torch.device("cpu"), torch.bool),), x)
    assert got.dtype is torch.bool
    copy = planned(lambda x: (aten.to.dtype(x, torch.float32, False, True),))
    assert copy(x)[0].data_ptr() != x.data_ptr()


def test_a_conversion_keeps_the_order_of_dimensions():
    x = mask(3, 7)
    (got,) = planned(lambda x: (aten.to.dtype(aten.transpose.int(x, 0, 1), torch.float32),))(x)
    assert got.stride() == x.t().float().stride()
    assert torch.equal(got, x.t().float())


def test_fill(strides):
    x, y = mask(2, 1, 1, 9), torch.randn(2, 1, 4, 1)
    check(lambda x: (aten.masked_fill.Scalar(aten.zeros_like.default(x, dtype=torch.float32), x, LOWEST),), x)
    check(
        lambda x: (aten.masked_fill.Scalar(aten.ones_like.default(x, dtype=torch.float32), x, -torch.inf),), x
    )
    check(lambda x, y: (aten.masked_fill.Scalar(y, x, 3),), x, y)
    check(
        lambda x, y: (aten.masked_fill.Scalar(y, x, 3),), x, y.bfloat16(), torch_calls=["aten::masked_fill"]
    )
    check(lambda x, y: (aten.masked_fill.Scalar(y, x, 3),), x, y.long(), torch_calls=["aten::masked_fill"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_choice(strides, dtype):
    x, y = ((10 * torch.randn(sizes)).to(dtype) for sizes in ((2, 3, 1, 9), (9,)))
    check(
        lambda m, x, y: (aten.where.self(m, x, y),),
        mask(2, 1, 4, 1),
        x,
        y,
        torch_calls=["aten::where"] * (dtype is torch.int64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice_of_a_number(strides, dtype):
    x, by_torch = torch.randn(2, 3, 1, 9).to(dtype), ["aten::where"] * (dtype is not torch.float32)
    check(lambda m, x: (aten.where.ScalarOther(m, x, LOWEST),), mask(2, 1, 4, 1), x, torch_calls=by_torch)
    check(lambda m, x: (aten.where.ScalarSelf(m, 3, x),), mask(2, 1, 4, 1), x, torch_calls=by_torch)


def test_choice_of_two_dtypes(strides):
    check(
        lambda m, x, y: (aten.where.self(m, x, y),),
        mask(4),
        torch.randn(4),
        torch.randn(4).bfloat16(),
        torch_calls=["aten::where"],
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sizes", [(3, 1, 1, 5), (3, 2, 4, 700), (6,)])
def test_any(strides, keep, sizes):
    x = mask(*sizes)
    x[:1] = False
    check(lambda x: (aten.any.dim(x, -1, keep),), x)
    names = [] if strides == "repeated" else ["aten::any"]
    check(
        lambda x: (aten.any.dim(aten.expand.default(aten.unsqueeze.default(x, 0), [4, *sizes]), -1, keep),),
        x,
        torch_calls=names,
    )


def test_any_of_what_lies_otherwise(strides):
    x = mask(3, 4)
    names = ["aten::any"]
    check(lambda x: (aten.any.dim(x, 0, False),), x, torch_calls=names)
    check(lambda x: (aten.any.dim(aten.transpose.int(x, 0, 1), -1, False),), x, torch_calls=names)


def test_large_masks_are_left_to_torch():
    x = mask(300, 300)
    check(lambda x: (aten.logical_not.default(x),), x, torch_calls=["aten::logical_not"])
    check(lambda x: (aten.any.dim(x, -1, False),), x, torch_calls=["aten::any"])


POSITIONS = {
    "all": (torch.arange(4)[:, None, None, None], torch.arange(9)[None, None, None, :]),
    "every second": (torch.arange(0, 4, 2)[:, None], torch.arange(1, 9, 3)),
    "the first dimension": (torch.arange(1, 4),),
    "a diagonal": (torch.arange(4), torch.arange(4) + 2),
    "two dimensions": (torch.arange(4).view(2, 2),),
    "one": (torch.tensor(3), torch.tensor(2)),
    "the same": (torch.zeros(5, dtype=torch.int64), torch.arange(5)),
}
OTHERS = {
    "in another order": (torch.tensor([2, 0, 1]),),
    "backwards": (torch.arange(3, -1, -1),),
    "from behind": (torch.tensor([-1, 0]),),
    "two dimensions, not in steps": (torch.tensor([[0, 1], [1, 3]]),),
    "nothing": (torch.zeros(0, dtype=torch.int64),),
    "32 bits": (torch.arange(3, dtype=torch.int32),),
}


def gathered(positions, first=0):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            for i, each in enumerate(positions):
                self.register_buffer(f"index{i}", each)

        def forward(self, x):
            x = aten.slice.Tensor(x, 0, first, first + 4)
            return (
                aten.logical_not.default(
                    aten.index.Tensor(x, [getattr(self, f"index{i}") for i in range(len(positions))])
                ),
            )

    return Graph()


@pytest.mark.usefixtures("repeated")
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_in_even_steps_are_a_view(name):
    names = ["aten::logical_not"] * (name == "one")  # of a tensor without dimensions
    check(gathered(POSITIONS[name]), mask(4, 9), torch_calls=names)
    check(gathered(POSITIONS[name], first=1), mask(6, 9), torch_calls=names)


@pytest.mark.usefixtures("repeated")
@pytest.mark.parametrize("name", OTHERS)
def test_other_positions_are_gathered(name):
    empty = name == "nothing"  # of which the C code takes nothing either
    check(gathered(OTHERS[name]), mask(4, 9), torch_calls=["aten::index"] + ["aten::logical_not"] * empty)


@pytest.mark.usefixtures("repeated")
def test_positions_out_of_range():
    with pytest.raises(IndexError):
        planned(gathered((torch.arange(2, 6),)))(mask(4, 9))


def test_who_sees_the_result_gets_one_of_its_own():
    """Neither a view of the input, nor repeated dimensions."""
    x = mask(4, 9)
    (got,) = planned(lambda x: (aten.index.Tensor(x, [torch.arange(4)]),))(x)
    assert got.data_ptr() != x.data_ptr()

    def both(x):
        return aten.zeros_like.default(x), aten.view.default(
            aten.logical_not.default(aten.expand.default(x, [3, 4, 9])), [-1]
        )

    zeros, whole = planned(both)(x)
    assert zeros.is_contiguous()
    assert torch.equal(whole, ~x.repeat(3, 1).view(-1))


class Table(nn.Module):
    """Rows of a table, and an operator of torch's that reads them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(11, 6))

    def forward(self, x):
        return (aten.cumsum.default(aten.embedding.default(self.table, x), 0),)


@pytest.mark.parametrize("by", ["C", "ctypes"])
def test_an_index_out_of_range_does_not_count_as_sizes_without_a_plan(by):
    """The next call with the same sizes has a plan."""
    source = library()
    module = Table()
    call = planned(module, PythonRunner(source.maker.library) if by == "ctypes" else None)
    for bad in (11, -1):
        with pytest.raises(IndexError, match="out of range"):
            call(torch.tensor([3, bad]))
    good = torch.tensor([3, 10])
    for _ in range(2):
        assert torch.equal(call(good)[0], module.table[good].cumsum(0))
    with pytest.raises(IndexError, match="embedding: an index is out of range"):
        call(torch.tensor([3, 11]))


class Encoder(nn.Module):
    """Tokens with an attention that takes a mask of them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.attention = nn.Embedding(50, 32), nn.Embedding(40, 32), Layer()

    def forward(self, ids, seen):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1])[None])
        return self.attention(x, (seen != 0)[:, None, None, :].expand(-1, 1, ids.shape[1], -1))


class Layer(Function):
    def __init__(self):
        def forward(self, x, mask):
            q, k, v = (
                f(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)

        super().__init__(forward, **{name: nn.Linear(32, 32) for name in ("query", "key", "value")})


def tokens(batch=3, length=20):
    ids, seen = torch.randint(0, 50, (batch, length)), torch.randint(0, 2, (batch, length))
    seen[:, 0], seen[-1] = 1, 0  # and a row that sees nothing
    return ids, seen


@pytest.mark.needs_plans
def test_a_whole_model_gives_the_same_with_operators_of_torch(monkeypatch):
    model, inputs = Encoder().eval(), tokens()
    q = quantized(model, inputs, None, "native", padding="computed")
    steps = q.engine.steps(list(inputs))
    of_masks = {target for row in (*masks.OPERATORS, *embedding.OPERATORS) for target in row.targets}
    known = {target: row for target, row in operators.table().items() if target not in of_masks}
    monkeypatch.setattr(operators, "table", lambda: known)
    without = quantized(model, inputs, None, "native", padding="computed")
    assert sum(not step.kernels for step in without.engine.steps(list(inputs))) > sum(
        not step.kernels for step in steps
    )
    for given_ in (inputs, tokens(), tokens(5, 33), tokens(1, 2)):
        assert torch.equal(q(*given_), without(*given_))
        assert worst_sqnr_db([q.reference(*given_)], [q(*given_)]) > 30


def test_masks_for_products_of_oneDNN(monkeypatch):
    """Which take none with repeated dimensions."""
    monkeypatch.setattr(caches, "second", lambda: 0)
    inputs = tokens()
    q = quantized(Encoder().eval(), inputs, None, "native", padding="computed")
    assert not any(
        int8_attention.NAME in str(k) for step in q.engine.steps(list(inputs)) for k in step.kernels
    )
    assert worst_sqnr_db([q.reference(*inputs)], [q(*inputs)]) > 35


def test_a_token_that_the_table_has_not():
    ids, seen = tokens()
    q = quantized(Encoder().eval(), (ids, seen), None, "native")
    expected = q(ids, seen)
    for bad in (50, -1):
        wrong = ids.clone()
        wrong[1, 3] = bad
        with pytest.raises(
            InputError, match="index out of range" if WHY_NO_PLANS else "tokens: an index is out of range"
        ):
            q(wrong, seen)
    assert torch.equal(q(ids, seen), expected)


def test_a_cast_to_the_same_dtype_is_no_reader(monkeypatch):
    """It gives the mask itself, and who reads that sees its strides."""
    monkeypatch.setattr(int8_attention, "why_not_batches", lambda: "")
    x = mask(3, 1)

    def function(x):
        same = aten.to.dtype(aten.logical_not.default(aten.expand.default(x, [3, 5])), torch.bool)
        return aten.view.default(same, [-1]), same

    flat, same = planned(function)(x)
    assert torch.equal(flat, ~x.expand(3, 5).reshape(-1))
    assert same.is_contiguous()


def test_the_dtype_of_a_pad():
    """Pads wait for their readers."""
    x, m = torch.randn(2, 5, 16), mask(2, 5, 18)

    def forward(self, x, m):
        y = F.pad(self.linear(x), (1, 1))
        return y * m.type_as(y)

    q = quantized(Function(forward, linear=nn.Linear(16, 16)).eval(), (x, m), None, "native")
    assert worst_sqnr_db([q.reference(x, m)], [q(x, m)]) > 35


def test_inputs_that_are_wrong_leave_nothing():
    call = planned(Table())
    for n in range(2, 30):
        with pytest.raises(IndexError):
            call(torch.full((n,), 11))
    assert not call._plans
    assert not call._used
