"""Products of codes in C, pointwise and depthwise, against float64."""

import c_fuzz
import pytest
import torch
from suites.rows_code import code_of
from torch.nn import functional as F

from nc.backends.native.operators import depthwise
from nc.backends.native.plans import code_products, row_linears
from nc.backends.native.plans.operands import PackedWeights, PlanTensor, WeightToPack
from nc.backends.native.plans.ways import Refused
from nc.kernels import cpu
from nc.kernels.onednn.descriptions import BinaryOp, Desc, Eltwise, Sum
from nc.numerics import int16_pairs

OPERATIONS = {
    None: lambda v: v,
    Eltwise("relu"): torch.relu,
    Eltwise("relu", 0.1): lambda v: F.leaky_relu(v, 0.1),
    Eltwise("clip", -0.5, 2.5): lambda v: v.clamp(-0.5, 2.5),
    Eltwise("hardswish", 1 / 6, 0.5): F.hardswish,
    Eltwise("swish", 1.0): F.silu,
    Eltwise("gelu_tanh"): lambda v: F.gelu(v, approximate="tanh"),
    Eltwise("gelu_erf"): F.gelu,
}


#: What a result is in → its zero point; None: fp32.
ZERO_POINTS = {None: 0, torch.uint8: 101, torch.int8: -27}
ADDED = "nothing", "codes", "fp32", "other"


#: Of a result in fp32, relative to its largest: roundings of a product and a sum, and the error function's
#: 1.5e-7.
CLOSE = 1e-6


class Now:
    """Makes calls instead of recording them, with tensors behind which no memory can be touched."""

    def __init__(self):
        self.weights, self.in_memory = PackedWeights(), lambda weight: weight.tensor
        self.threads = torch.get_num_threads()

    def call_function(self, function, fields, tensors, node, factors=1):
        plain = [t.tensor if isinstance(t, PlanTensor) else t for t in tensors]
        c_fuzz.call(function, fields, plain, at_end=True)


def multiply(name, a, product, *, as_plain=True):
    """Compute a pointwise product now; whether there is a function for it.

    Args:
        name: of `isas_to_test`.
        a: arguments of the node.
        product: what to compute.
        as_plain: with the step to codes as a part of scale, bias and bounds where that can be.
    """
    code = code_of(row_linears.CODES, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_linears, "code", lambda form: code)
        patch.setattr(code_products, "why_unavailable", lambda: "")
        if not as_plain:
            patch.setattr(code_products.Finish, "plain", lambda finish: finish)
        try:
            code_products.multiply(Now(), None, a, product)
        except Refused:
            return False
    return True


def convolve(a, product):
    """Compute a depthwise convolution now, as on a CPU that has AVX2 only; whether there is a function for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "machine_features", lambda: ("avx2",))
        try:
            depthwise.convolve(Now(), None, a, product)
        except Refused:
            return False
    return True


def paired(*shape):
    """Weights that use all codes, whose neighbouring inputs fit 16 bits."""
    values = torch.randint(-127, 128, shape).float().movedim(1, -1)
    return int16_pairs.limit_pairs(values).movedim(-1, 1).to(torch.int8).contiguous()


def weight_for(name, outputs, inputs):
    """Any codes; pairs fit 16 bits where AVX2 adds them."""
    return (
        paired(outputs, inputs)
        if name == "avx2"
        else torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    )


def fits(added, to_codes):
    """Whether a plan adds in this way to results of a kind."""
    return (
        added in ("nothing", "other")
        or (added == "codes" and to_codes is torch.uint8)
        or (added == "fp32" and to_codes is None)
    )


def product_of(x, result, weight, scales, bias, post_ops=(), other=None, **options):
    """A product of tensors."""
    other = None if other is None else PlanTensor(other, None)
    given = PlanTensor(x, None), PlanTensor(result, None), WeightToPack("w", weight), scales, bias
    return code_products.Product(*given, tuple(post_ops), other, **options)


def check(compute, x, weight, exact, shape, operation, added, to_codes, threads, **options):
    """A product computed now against sums in float64 and what follows them in float64.

    Args:
        compute: arguments of a node, product → whether it was computed.
        x: codes.
        weight: codes.
        exact: of the product without its zero point, [rows, outputs].
        shape: of the result, and its strides.
    """
    scales = torch.rand(weight.shape[0]) * 0.02 + 0.001
    bias = torch.randn(weight.shape[0])
    a = {
        "x_scale": 0.013,
        "x_zero_point": options.pop("zero_point"),
        "output_scale": 0.037,
        "output_zero_point": ZERO_POINTS[to_codes],
    }
    result = torch.empty_strided(*shape, dtype=to_codes or torch.float32)
    other, post_ops, more = None, (), 0.0
    if added == "codes":
        result.copy_(torch.randint(0, 256, result.shape))
        post_ops, more = (Sum(0.21, 77, torch.uint8),), (result.double() - 77) * 0.21
    elif added == "fp32":
        result.copy_(torch.randn(result.shape))
        post_ops, more = (Sum(),), result.double()
    elif added == "other":
        other = torch.randn(result.shape)
        post_ops, more = (BinaryOp("add", Desc.of(other)),), other.double()
    expected = exact * scales.double() * a["x_scale"] + bias.double()
    expected = (
        expected
        if result.dim() == 2
        else expected.unflatten(0, (result.shape[0], *result.shape[2:])).movedim(-1, 1)
    )
    expected = OPERATIONS[operation](expected + more)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        post_ops = (*post_ops, *([] if operation is None else [operation]))
        assert compute(a, product_of(x, result, weight, scales, bias, post_ops, other, **options))
    finally:
        torch.set_num_threads(before)
    if not to_codes:
        assert (result - expected).abs().max() <= CLOSE * expected.abs().max().clamp(min=1)
        return result
    places = expected / a["output_scale"] + a["output_zero_point"]
    tie = (places - places.floor() - 0.5).abs() < 1e-3
    limits = torch.iinfo(to_codes)
    codes = places.round().clamp(limits.min, limits.max)
    assert ((result.double() - codes).abs() <= tie).all()
    return result
