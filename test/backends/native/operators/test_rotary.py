"""Rotary embeddings as one function in C, norms that write codes, and operators on parts of tensors.

Against float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, library, quantized
from torch import fx, nn
from torch.nn import functional as F

from nc.backends import available_backends
from nc.backends.native import planned as planning
from nc.backends.native.operators.rotary import recompose_rotary, rotation, why_not_rotary
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.execution_plan import AtenCall, FunctionCall
from nc.backends.native.qdq_rewrites import quantize
from nc.graph.catalogue import name_operators
from nc.kernels.onednn.runner import runner
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import quantize_per_tensor

_WHY = available_backends()["native"] or c_functions.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]
aten = torch.ops.aten
CODES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def planned(module):
    source = library()
    return planning.PlannedModel(
        module, source, runner(source.maker.library)[0], lambda: pytest.fail("no plan")
    )


def traced(function, *inputs):
    """A graph of the operators that a function calls, with sizes noted."""
    arity = {1: lambda x: function(x), 3: lambda x, y, z: function(x, y, z)}
    module = fx.symbolic_trace(function if isinstance(function, nn.Module) else arity[len(inputs)])
    name_operators(module.graph)

    class Noted(fx.Interpreter):
        def run_node(self, n):
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Noted(module).run(*inputs)
    return module


def entries(call):
    """Names of the functions in C, and of torch's operators, in the plans of a model."""
    found = [e for plan in call._plans.values() for e in plan.entries]
    return [e.function.name for e in found if isinstance(e, FunctionCall)], [
        e.step.name for e in found if isinstance(e, AtenCall)
    ]


def codes_of(x, dtype, scale, zero_point):
    """A node that quantizes."""
    if dtype is torch.uint8:
        return x.tracer.create_proxy("call_function", quantize, (x, scale, zero_point), {})
    return quantize_per_tensor(x, scale, zero_point, -128, 127, torch.int8)


def coded(function, dtype, scale, zero_point):
    """What a function gives as codes."""
    return lambda *x: (codes_of(function(*x), dtype, scale, zero_point),)


def check_codes(got, exact, dtype, scale, zero_point):
    """Codes are those of float64, but for ties within rounding to fp32."""
    low, high = CODES[dtype]
    places = exact / scale + zero_point
    tie = (places - places.floor() - 0.5).abs() < 1e-3
    expected = ((exact / scale).round() + zero_point).clamp(low, high)
    assert got.dtype is dtype
    assert ((got.double() - expected).abs() <= tie).all()


def rotated(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


#: Rows as linears give them: without gaps, heads side by side, or a part of a wider result.
LAYOUTS = {
    "plain": lambda x: aten.slice.Tensor(x, 2, 0, 2**63 - 1),
    "heads": lambda x: aten.transpose.int(x, 1, 2),
    "part": lambda x: aten.transpose.int(aten.slice.Tensor(x, 3, 3, -2), 1, 2),
}


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40)),
    half=st.integers(1, 40),
    how=st.sampled_from(sorted(LAYOUTS)),
    spread=st.sampled_from(["one", "batches", "heads", "two dimensions"]),
    dtype=st.sampled_from([None, *CODES]),
    threads=st.integers(1, 3),
)
def test_any_sizes(sizes, half, how, spread, dtype, threads):
    (batch, count, rows), width = sizes, 2 * half
    given_ = torch.randn(
        *((batch, count, rows) if how == "plain" else (batch, rows, count)), width + 5 * (how == "part")
    )
    x = LAYOUTS[how](given_)
    shape = {
        "one": (1, 1, rows),
        "batches": (batch, 1, rows),
        "heads": (1, count, rows),
        "two dimensions": (rows,),
    }[spread]
    cosine, sine = torch.randn(*shape, width), torch.randn(*shape, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def function(x, cosine, sine):
            result = rotation()(LAYOUTS[how](x), cosine, sine)
            return (result if dtype is None else codes_of(result, dtype, 0.02, 3),)

        call = planned(traced(function, given_, cosine, sine))
        exact = rotated(x.double(), cosine.double(), sine.double())
        for _ in range(2):
            (got,) = call(given_, cosine, sine)
            if dtype is None:
                assert (got - exact).abs().max() <= 1e-6 * exact.abs().max().clamp(min=1)
                assert got.squeeze().stride() == (x * 1.0).squeeze().stride()
            else:
                check_codes(got, exact, dtype, 0.02, 3)
        assert entries(call) == (["rotary"], [])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_without_a_code(dtype):
    low, high = CODES[dtype]
    one, none = torch.ones(1, 2), torch.zeros(1, 2)
    call = planned(traced(coded(rotation(), dtype, 0.1, 5), one, one, none))
    for given_, expected in (
        ((1e30, -1e30), [high, low]),
        ((0.0, -0.0), [5, 5]),
        ((float("nan"), 1.0), [low, low]),
    ):
        assert call(torch.tensor([given_]), one, none)[0].tolist() == [expected]


@pytest.mark.parametrize(
    ("x", "cosine"),
    [
        (torch.randn(2, 3, 514), torch.randn(3, 514)),
        (torch.randn(1, 2, 3, 4, 6), torch.randn(4, 6)),
        (torch.randn(2, 3, 6).double(), torch.randn(3, 6)),
    ],
    ids=["long rows", "five dimensions", "float64"],
)
def test_what_torch_does(x, cosine):
    call = planned(traced(lambda *x: (rotation()(*x),), x, cosine, cosine))
    expected = rotated(x, cosine, cosine)
    torch.testing.assert_close(call(x, cosine, cosine)[0], expected)
    assert entries(call) == ([], ["nc_native::rotation"])


def half(x, which):
    return aten.slice.Tensor(x, -1, *((0, 4) if which == 0 else (4, 2**63 - 1)))


def turned(x, first=0, second=1):
    return aten.cat.default([aten.neg.default(half(x, second)), half(x, first)], -1)


def parts(x, dim, first, second):
    """Two slices next to each other, the first one negative."""
    slices = (aten.slice.Tensor(x, dim, *ends) for ends in (first, second))
    return aten.cat.default([aten.neg.default(next(slices)), next(slices)], dim)


def sums(x, c, other, s, **options):
    return aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(other, s), **options)


ROTARY = {
    "as in Llama": lambda x, c, s: sums(x, c, turned(x), s),
    "sides exchanged": lambda x, c, s: aten.add.Tensor(aten.mul.Tensor(s, turned(x)), aten.mul.Tensor(c, x)),
    "ends as they are": lambda x, c, s: sums(x, c, parts(x, 3, (-4, 8), (0, -4)), s),
}
OTHERS = {
    "halves exchanged": lambda x, c, s: sums(x, c, turned(x, 1, 0), s),
    "of another tensor": lambda x, c, s: sums(x, c, turned(c), s),
    "a difference": lambda x, c, s: aten.sub.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(turned(x), s)),
    "twice the second": lambda x, c, s: sums(x, c, turned(x), s, alpha=2),
    "other parts": lambda x, c, s: sums(x, c, parts(x, 3, (2, 8), (0, 2)), s),
    "another second part": lambda x, c, s: sums(
        x, c, aten.cat.default([aten.neg.default(aten.slice.Tensor(x, 3, 2, 6)), half(x, 0)], 3), s
    ),
    "the second part of another tensor": lambda x, c, s: sums(
        x,
        c,
        aten.cat.default([aten.neg.default(half(aten.expand.default(s, [1, 2, 8, 8]), 1)), half(x, 0)], 3),
        s,
    ),
    "along another dimension": lambda x, c, s: sums(x, c, parts(x, 2, (4, 8), (0, 4)), s),
    "every second": lambda x, c, s: sums(x, c, parts(x, 3, (1, 8, 2), (0, 8, 2)), s),
}


def inputs():
    return torch.randn(1, 2, 8, 8), torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 8)


@pytest.mark.parametrize("name", ROTARY)
def test_single_operators_become_one(name):
    given_ = inputs()
    module = traced(lambda *x: (ROTARY[name](*x),), *given_)
    (expected,) = module(*given_)
    recompose_rotary(module)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [rotation()]
    torch.testing.assert_close(module(*given_)[0], expected)
    torch.testing.assert_close(planned(module)(*given_)[0], expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it(name):
    given_ = inputs()
    module = traced(lambda *x: (OTHERS[name](*x),), *given_)
    recompose_rotary(module)
    assert rotation() not in [n.target for n in module.graph.nodes]
    larger = ["its result is larger than its input"]  # also an embedding of the other tensor
    assert refused(module) == (larger if name == "of another tensor" else [])


def refused(module):
    """Why sums of a graph, which are those of rotary embeddings, are none in one call."""
    return [why for why in map(why_not_rotary, module.graph.nodes) if why]


def test_other_dtypes_stay():
    module = traced(lambda *x: (ROTARY["as in Llama"](*x),), *(x.double() for x in inputs()))
    recompose_rotary(module)
    assert rotation() not in [n.target for n in module.graph.nodes]
    assert refused(module) == ["one of its tensors is not fp32"]


def test_the_report_says_why_a_rotary_embedding_stays():
    def forward(self, x, cosine, sine):
        y = self.a(x)
        other = torch.cat([-y[..., 4:], y[..., :4]], -1)
        return self.b(y * cosine + other * sine), other

    given_ = torch.randn(2, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
    layers = {name: torch.nn.Linear(8, 8) for name in "ab"}
    report = quantized(Function(forward, **layers).eval(), given_, None, "native").report()
    why = "its parts are read elsewhere too"
    assert {op.operator: op.refused for op in report.ops}["add"] == (("c:rotary", why),)
    assert f"kernel c:rotary is not used for 1 layers: {why}" in report.summary()


def test_parts_of_linears_that_became_one():
    """Their halves are slices, too."""
    model = Function(
        lambda m, x, c, s: m.d(torch.cat([-m.a(x), m.b(x)], -1) * s + m.c(x) * c),
        a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 16), d=nn.Linear(16, 4),
    )  # fmt: skip
    given_ = torch.randn(2, 5, 8), torch.randn(5, 16), torch.randn(5, 16)
    q = quantized(model.eval(), given_, None, "native")
    assert worst_sqnr_db([q.reference(*given_)], [q(*given_)]) > 60


def test_parts_that_are_read_elsewhere_stay():
    def function(x, c, s):
        other = turned(x)
        return aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(other, s)), other

    module = traced(function, *inputs())
    recompose_rotary(module)
    assert rotation() not in [n.target for n in module.graph.nodes]
    assert refused(module) == ["its parts are read elsewhere too"]


def test_a_result_larger_than_x_stays():
    x, c, s = torch.randn(1, 1, 8, 8), torch.randn(1, 3, 8, 8), torch.randn(1, 1, 8, 8)
    module = traced(lambda *x: (ROTARY["as in Llama"](*x),), x, c, s)
    recompose_rotary(module)
    assert rotation() not in [n.target for n in module.graph.nodes]
    assert refused(module) == ["its result is larger than its input"]


def test_nothing_changes_where_something_is_changed_in_place():
    def function(x, c, s):
        result = ROTARY["as in Llama"](x, c, s)
        aten.add_.Tensor(c, 1.0)
        return (result,)

    module = traced(function, *inputs())
    recompose_rotary(module)
    assert rotation() not in [n.target for n in module.graph.nodes]


def test_columns_are_torchs():
    x, cosine = torch.randn(2, 6, 4), torch.randn(4, 6)
    call = planned(
        traced(lambda x, c, s: (rotation()(aten.transpose.int(x, 1, 2), c, s),), x, cosine, cosine)
    )
    torch.testing.assert_close(call(x, cosine, cosine)[0], rotated(x.mT, cosine, cosine))
    assert entries(call) == ([], ["nc_native::rotation"])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("width", [1, 31, 64, 511, 512, 700, 1025])
def test_rms_norms_as_codes(width, dtype):
    x, weight = torch.randn(5, 7, width) * torch.logspace(-2, 2, 7).view(7, 1), torch.rand(width) + 0.5

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x):
            return coded(
                lambda x: aten.rms_norm.default(x, [width], self.weight, 1e-5),
                dtype,
                0.02,
                -9 if dtype is torch.int8 else 120,
            )(x)

    call = planned(traced(Norm(), x))
    exact = F.rms_norm(x.double(), [width], weight.double(), 1e-5)
    check_codes(call(x)[0], exact, dtype, 0.02, -9 if dtype is torch.int8 else 120)
    assert entries(call) == (["norm"], [])


@pytest.mark.parametrize("given_weight", [True, False])
@pytest.mark.parametrize("to_codes", [True, False])
def test_layer_norms_without_bias(given_weight, to_codes):
    x, weight = torch.randn(3, 5, 48), torch.rand(48) + 0.5

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x):
            norm = aten.layer_norm.default(x, [48], self.weight if given_weight else None, None, 1e-5)
            return (codes_of(norm, torch.uint8, 0.02, 120) if to_codes else norm,)

    call = planned(traced(Norm(), x))
    exact = F.layer_norm(x.double(), [48], weight.double() if given_weight else None, None, 1e-5)
    (got,) = call(x)
    assert not entries(call)[1]
    if to_codes:
        assert ((got.double() - (exact / 0.02 + 120).clamp(0, 255)).abs() <= 0.501).all()
    else:
        assert (got - exact).abs().max() < 1e-5


PARTS = {
    "gelu": lambda x: aten.gelu.default(aten.slice.Tensor(x, -1, 0, 8)),
    "a product of parts": lambda x: aten.mul.Tensor(
        aten.silu.default(aten.slice.Tensor(x, -1, 0, 8)), aten.slice.Tensor(x, -1, 8, 16)
    ),
    "a sum of parts": lambda x: aten.add.Tensor(
        aten.slice.Tensor(x, -1, 0, 8), aten.slice.Tensor(x, -1, 8, 16)
    ),
    "a difference of parts": lambda x: aten.sub.Tensor(
        aten.slice.Tensor(x, -1, 0, 8), aten.slice.Tensor(x, -1, 8, 16)
    ),
    "parts in another order": lambda x: aten.relu.default(
        aten.transpose.int(aten.slice.Tensor(x, -1, 3, 9), 1, 2)
    ),
}


@pytest.mark.parametrize("to_codes", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_operators_on_parts_of_tensors(name, to_codes):
    x = torch.randn(2, 5, 16)
    call = planned(
        traced(coded(PARTS[name], torch.uint8, 0.02, 120) if to_codes else lambda x: (PARTS[name](x),), x)
    )
    exact = PARTS[name](x.double())
    for _ in range(2):
        (got,) = call(x)
        if to_codes:
            assert ((got.double() - (exact / 0.02 + 120).clamp(0, 255)).abs() <= 0.501).all()
        else:
            assert (got - exact).abs().max() < 1e-5
            assert got.stride() == PARTS[name](x).stride()
    assert entries(call)[1] == []


def test_a_sum_with_a_part_that_repeats_itself_is_torchs():
    x = torch.randn(4, 1)
    call = planned(traced(lambda x: (aten.relu.default(aten.expand.default(x, [4, 6])),), x))
    assert torch.equal(call(x)[0], x.expand(4, 6).relu())


class Attention(Function):
    def __init__(self):
        def forward(self, x, cosine, sine):
            q, k, v = (
                f(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            q, k = (t * cosine + torch.cat((-t[..., 8:], t[..., :8]), -1) * sine for t in (q, k))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

        super().__init__(forward, **{name: nn.Linear(64, 64) for name in ("query", "key", "value")})


@pytest.mark.needs_plans
def test_a_whole_attention():
    angles = torch.outer(torch.arange(20.0), 1 / 100 ** (torch.arange(8) / 8)).repeat(1, 2)[None, None]
    x, given_ = torch.randn(3, 20, 64), (angles.cos(), angles.sin())
    q = quantized(Attention().eval(), (x, *given_), None, "native")
    kernels = [k.implementation for step in q.engine.steps([x, *given_]) for k in step.kernels]
    assert kernels.count("c:rotary") == 2
    assert worst_sqnr_db([q.reference(x, *given_)], [q(x, *given_)]) > 35


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c, s: (lambda r: aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(r, r)))(turned(x)),
        lambda x, c, s: (lambda m: aten.add.Tensor(m, m))(aten.mul.Tensor(turned(x), x)),
    ],
    ids=["a square", "twice"],
)
def test_a_factor_that_is_a_part_of_it(function):
    given_ = inputs()
    module = traced(lambda *x: (function(*x),), *given_)
    (expected,) = module(*given_)
    recompose_rotary(module)
    assert torch.equal(module(*given_)[0], expected)


def test_rows_that_overlap_are_torchs():
    x, factor = torch.randn(12), torch.randn(10)
    call = planned(
        traced(lambda x, c, s: (rotation()(aten.unfold.default(x, 0, 10, 1), c, s),), x, factor, factor)
    )
    torch.testing.assert_close(call(x, factor, factor)[0], rotated(x.unfold(0, 10, 1), factor, factor))
    assert entries(call) == ([], ["nc_native::rotation"])


@pytest.mark.parametrize("first", [True, False])
def test_the_first_side_decides_about_the_order(first):
    x, y, z = torch.randn(2, 5, 16), torch.randn(2, 8, 5), torch.zeros(1)

    def function(x, y, z):
        sides = aten.slice.Tensor(x, 2, 0, 8), aten.transpose.int(y, 1, 2)
        return (aten.add.Tensor(*(sides if first else sides[::-1])),)

    (got,) = planned(traced(function, x, y, z))(x, y, z)
    (expected,) = function(x, y, z)
    assert got.stride() == expected.stride()
    assert torch.equal(got, expected)


def test_nothing_is_left_of_a_way_that_is_given_up():
    """A difference whose first side repeats itself: no copy of the second one."""
    x, y, z = torch.randn(4, 1), torch.randn(4, 16), torch.zeros(1)
    call = planned(
        traced(
            lambda x, y, z: (aten.sub.Tensor(aten.expand.default(x, [4, 8]), aten.slice.Tensor(y, 1, 0, 8)),),
            x,
            y,
            z,
        )
    )
    assert torch.equal(call(x, y, z)[0], x - y[:, :8])
    (plan,) = call._plans.values()
    assert len(plan.entries) == 1
