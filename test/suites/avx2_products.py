"""Products in C for AVX2, against float64."""

import pytest
import torch
from torch.nn import functional as F

from nc.backends import cpu
from nc.backends.native.operators import avx2
from nc.backends.native.plans.operands import PackedWeights, PlanTensor, WeightToPack
from nc.backends.native.plans.ways import Refused
from nc.kernels.c_code.calls import call_once
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


#: Of a result in fp32, relative to its largest: roundings of a product and a sum, and the error function's
#: 1.5e-7.
CLOSE = 1e-6


class Now:
    """Makes calls instead of recording them."""

    def __init__(self):
        self.weights, self.in_memory = PackedWeights(), lambda weight: weight.tensor

    def call_function(self, function, fields, tensors, node, factors=1):
        call_once(function, fields, [t.tensor if isinstance(t, PlanTensor) else t for t in tensors])


def multiply(a, product):
    """Compute a product now, as on a CPU that has AVX2 only; whether there is a function for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "features", lambda: ("avx2",))
        try:
            avx2.multiply(Now(), None, a, product)
        except Refused:
            return False
    return True


def paired(*shape):
    """Weights that use all codes, whose neighbouring inputs fit 16 bits."""
    values = torch.randint(-127, 128, shape).float().movedim(1, -1)
    return int16_pairs.limit_pairs(values).movedim(-1, 1).to(torch.int8).contiguous()


def check(x, weight, exact, shape, operation, added, to_codes, threads, **options):
    """A product computed now against sums in float64 and what follows them in float64.

    Args:
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
        product = avx2.Product(
            PlanTensor(x, None),
            PlanTensor(result, None),
            WeightToPack("w", weight),
            scales,
            bias,
            (*post_ops, *([] if operation is None else [operation])),
            None if other is None else PlanTensor(other, None),
            **options,
        )
        assert multiply(a, product)
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
