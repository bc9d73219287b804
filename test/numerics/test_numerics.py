"""Affine quantization against its definition, computed with exact rational numbers or in float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from nc.formats import (
    PER_CHANNEL,
    PER_TENSOR,
    PER_TOKEN,
    TensorFormat,
    dtype,
    per_block,
    per_channel,
    per_group,
)
from nc.numerics import affine
from nc.numerics.affine import TINY_AMAX, block_range, choose_qparams, dequantize
from nc.numerics.metrics import cosine, sqnr_db
from nc.numerics.weights import quantize_weight

CODES = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "narrow": (-127, 127),
    "7-bit": (64, 191),
    "7-bit signed": (-64, 63),
}
FLOAT_MAX = torch.finfo(torch.float32).max

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-6 else 0.0)
codes = st.sampled_from(list(CODES.values()))


def quantize(x, scale, zero_point, low, high, block_size=None):
    """Codes in the dtype that their range needs."""
    return affine.quantize(
        x, scale, zero_point, low, high, dtype=torch.int8 if low < 0 else torch.uint8, block_size=block_size
    )


def qparams(low, high, limits, symmetric=False):
    scale, zero_point = choose_qparams(
        torch.tensor(low), torch.tensor(high), quant_min=limits[0], quant_max=limits[1], symmetric=symmetric
    )
    assert scale.dtype == torch.float32
    assert zero_point.dtype == torch.int64
    return scale.item(), zero_point.item()


def half_even(x: Fraction) -> int:
    return round(x)  # Python rounds fractions half to even, exactly


# ---- qparams from a range ----


@given(ordinary, ordinary, codes)
def test_asymmetric_qparams_are_those_of_the_formula(a, b, limits):
    low, high = min(a, b), max(a, b)
    scale, zero_point = qparams(low, high, limits)
    m, big = min(Fraction(low), 0), max(Fraction(high), 0)
    if max(-m, big) == 0:
        assert (scale, zero_point) == (1.0, max(0, limits[0]))
        return
    exact = (big - m) / (limits[1] - limits[0])
    assert scale == pytest.approx(float(exact), rel=2**-23)
    wanted = limits[0] - m / exact
    assert abs(zero_point - wanted) <= Fraction(1, 2) + Fraction(1, 10**6)
    assert limits[0] <= zero_point <= limits[1]


@given(ordinary, ordinary, codes)
def test_symmetric_qparams_are_those_of_the_formula(a, b, limits):
    low, high = min(a, b), max(a, b)
    scale, zero_point = qparams(low, high, limits, symmetric=True)
    middle = {(0, 255): 128, (64, 191): 128}.get(limits, 0)
    assert zero_point == middle
    amax = max(abs(min(low, 0.0)), max(high, 0.0))
    assert scale == (
        pytest.approx(amax / min(limits[1] - middle, middle - limits[0]), rel=2**-23) if amax else 1.0
    )


@given(ordinary, ordinary, codes, st.booleans(), st.floats(0, 1))
@example(0.1, 1.0, (0, 255), False, 1.0)
@example(-0.3, -0.1, (-128, 127), False, 0.0)
def test_every_value_of_the_range_comes_back_within_half_a_step(a, b, limits, symmetric, where):
    low, high = min(a, b), max(a, b)
    scale, zero_point = qparams(low, high, limits, symmetric)
    x = torch.tensor([low, high, low + where * (high - low)]).clamp(low, high)
    back = dequantize(quantize(x, scale, zero_point, *limits), scale, zero_point)
    assert ((back - x).abs() <= 0.5 * scale * (1 + 1e-4)).all()


@given(floats, floats, codes, st.booleans())
def test_zero_is_exact_and_everything_is_finite_for_any_range(a, b, limits, symmetric):
    scale, zero_point = qparams(min(a, b), max(a, b), limits, symmetric)
    assert 0 < scale < math.inf
    assert 1 / scale < math.inf
    assert quantize(torch.zeros(1), scale, zero_point, *limits).item() == zero_point
    assert dequantize(torch.tensor([zero_point]), scale, zero_point).item() == 0.0


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("amax", [0.0, 1e-45, TINY_AMAX / 2])
def test_all_zero_and_tiny_ranges_get_scale_one(name, symmetric, amax):
    scale, zero_point = qparams(-amax, amax, CODES[name], symmetric)
    assert scale == 1.0
    assert zero_point == ({"uint8": 128, "7-bit": 128}.get(name, 0) if symmetric else max(0, CODES[name][0]))
    assert quantize(torch.full((3,), amax), scale, zero_point, *CODES[name]).tolist() == [zero_point] * 3


def test_a_range_that_is_just_not_tiny_keeps_its_scale():
    scale, _ = qparams(0.0, TINY_AMAX * 1.01, (0, 255))
    assert scale == pytest.approx(TINY_AMAX * 1.01 / 255, rel=1e-6)


@pytest.mark.parametrize("value", [3.7, -3.7, 1e-20, -1e30])
@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_a_constant_is_exact(name, value):
    scale, zero_point = qparams(value, value, CODES[name])
    assert scale == pytest.approx(abs(value) / 255, rel=1e-6)
    x = torch.tensor([value])
    assert dequantize(
        quantize(x, scale, zero_point, *CODES[name]), scale, zero_point
    ).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_range_wider_than_float32_does_not_overflow(name, symmetric):
    scale, zero_point = qparams(-FLOAT_MAX, FLOAT_MAX, CODES[name], symmetric)
    limits = CODES[name]
    expected = (
        2 * FLOAT_MAX / (limits[1] - limits[0]) if not symmetric else FLOAT_MAX / (limits[1] - zero_point)
    )
    assert scale == pytest.approx(expected, rel=1e-6)
    back = dequantize(
        quantize(torch.tensor([FLOAT_MAX, -FLOAT_MAX]), scale, zero_point, *limits).float(), scale, zero_point
    )
    assert back.sign().tolist() == [1.0, -1.0]


def test_symmetric_uint8_has_its_zero_in_the_middle():
    assert qparams(-2.0, 1.0, (0, 255), symmetric=True) == (pytest.approx(2.0 / 127), 128)
    assert quantize(torch.tensor([-2.0, 0.0, 2.0]), 2.0 / 127, 128, 0, 255).tolist() == [1, 128, 255]


def test_seven_bit_codes_end_at_127():
    scale, zero_point = qparams(0.0, 1.0, (0, 127))
    assert (scale, zero_point) == (pytest.approx(1 / 127), 0)
    assert quantize(torch.tensor([-1.0, 0.5, 1.0, 9.0]), scale, zero_point, 0, 127).tolist() == [
        0,
        64,
        127,
        127,
    ]


def test_ranges_of_one_sign_are_widened_to_zero():
    assert qparams(1.0, 2.0, (0, 255)) == (pytest.approx(2 / 255), 0)
    assert qparams(-2.0, -1.0, (0, 255)) == (pytest.approx(2 / 255), 255)


def test_qparams_of_many_channels_are_those_of_each():
    low, high = torch.tensor([-1.0, 0.0, -5.0]), torch.tensor([2.0, 0.0, -1.0])
    scales, zeros = choose_qparams(low, high, quant_min=-127, quant_max=127, symmetric=True)
    for i in range(3):
        assert qparams(low[i].item(), high[i].item(), (-127, 127), True) == (
            scales[i].item(),
            zeros[i].item(),
        )


# ---- codes ----


@given(
    st.lists(ordinary, min_size=1, max_size=20),
    st.floats(2**-10, 2**10, width=32),
    st.integers(0, 255),
    codes,
)
def test_codes_are_those_of_the_definition(values, scale, zero_point, limits):
    """`clamp(half_even(x / s) + z, a, b)`, with the one fp32 rounding of x / s that the definition has."""
    got = quantize(torch.tensor(values), scale, zero_point, *limits)
    for x, code in zip(values, got.tolist(), strict=True):
        ratio = Fraction(float(np.float32(x) / np.float32(scale)))
        assert code == min(max(half_even(ratio) + zero_point, limits[0]), limits[1])


@pytest.mark.parametrize("zero_point", [2, 3])
def test_ties_round_to_even_before_the_zero_point_is_added(zero_point):
    x = torch.tensor([-1.25, -0.75, -0.25, 0.25, 0.75, 1.25])  # exact ties at scale 0.5
    assert quantize(x, 0.5, zero_point, 0, 255).tolist() == [zero_point + r for r in (-2, -2, 0, 0, 2, 2)]


def test_torchs_fake_quantization_is_the_same_family():
    x = torch.arange(-4.0, 4.0, 0.25)
    for zero_point in (10, 11):
        fake = torch.fake_quantize_per_tensor_affine(x, 0.5, zero_point, 0, 255)
        assert torch.equal(dequantize(quantize(x, 0.5, zero_point, 0, 255), 0.5, zero_point), fake)


def test_the_division_is_a_division():
    """Multiplying by 1 / s gives another code for some of these near-ties."""
    scale = np.float32(0.1)
    x = np.arange(0.05, 25, 0.1, dtype=np.float32)
    codes = [half_even(Fraction(float(v))) for v in x / scale]
    assert codes != [half_even(Fraction(float(v))) for v in x * (np.float32(1) / scale)]
    assert quantize(torch.from_numpy(x), torch.tensor(scale), 0, 0, 255).tolist() == codes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_computed_in_fp32(dtype):
    x = torch.linspace(-3, 3, 101).to(dtype)
    assert torch.equal(quantize(x, 0.03, 100, 0, 255), quantize(x.float(), 0.03, 100, 0, 255))


@given(
    st_np.arrays(
        np.float32,
        st_np.array_shapes(min_dims=1, max_dims=4, max_side=4),
        elements=st.floats(-9, 9, width=32),
    ),
    st.data(),
)
def test_per_channel_is_per_tensor_along_each_index(values, data):
    axis = data.draw(st.integers(0, values.ndim - 1))
    scale = torch.tensor(
        data.draw(
            st.lists(st.floats(2**-7, 1, width=32), min_size=values.shape[axis], max_size=values.shape[axis])
        )
    )
    x = torch.from_numpy(values)
    block = per_channel(axis).block_size(x.shape)
    q = quantize(x, scale, 0, -127, 127, block)
    back = dequantize(q, scale, 0, block)
    assert q.dtype == torch.int8
    assert q.shape == back.shape == x.shape
    for i in range(values.shape[axis]):
        one = quantize(x.select(axis, i), scale[i].item(), 0, -127, 127)
        assert torch.equal(q.select(axis, i), one)
        assert torch.equal(back.select(axis, i), dequantize(one, scale[i].item(), 0))


@given(codes, st.floats(2**-10, 2**10, width=32), st.data())
def test_codes_survive_a_round_trip(limits, scale, data):
    zero_point = data.draw(st.integers(*limits))
    q = torch.arange(limits[0], limits[1] + 1)
    q = q.to(torch.uint8 if limits[0] >= 0 else torch.int8)
    assert torch.equal(quantize(dequantize(q, scale, zero_point), scale, zero_point, *limits), q)


def test_dtype_of_codes_is_the_one_asked_for():
    assert affine.quantize(torch.zeros(1), 1.0, 3, 0, 7, dtype=torch.uint8).dtype == torch.uint8
    assert affine.quantize(torch.zeros(1), 1.0, 3, 0, 7, dtype=torch.int8).dtype == torch.int8


# ---- blocks ----


GRANULARITIES = [
    PER_TENSOR,
    PER_CHANNEL,
    per_channel(1),
    PER_TOKEN,
    per_group(-1, 4),
    per_group(0, 3),
    per_block((3, 2)),
    per_block((6, 8)),
    per_block((1, 1)),
]


def brute_force(x, block, limits, symmetric):
    """Codes and values of every element, each from the range of its own block, in float64."""
    x, block = x.double().numpy(), np.array(block)
    codes, values = np.zeros(x.shape, dtype=np.int64), np.zeros(x.shape)
    for corner in np.ndindex(*(np.array(x.shape) // block)):
        where = tuple(slice(c * b, (c + 1) * b) for c, b in zip(corner, block, strict=True))
        low, high = min(x[where].min(), 0.0), max(x[where].max(), 0.0)
        middle = (limits[0] + limits[1] + 1) // 2
        if symmetric:
            scale, zero = max(-low, high) / min(limits[1] - middle, middle - limits[0]), middle
        else:
            scale = (high - low) / (limits[1] - limits[0])
            zero = min(max(limits[0] - np.round(low / scale), limits[0]), limits[1])
        codes[where] = np.clip(np.round(x[where] / scale) + zero, *limits)
        values[where] = (codes[where] - zero) * scale
    return codes, values


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4", "int2", "uint3"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_any_granularity_against_brute_force(granularity, name, symmetric):
    torch.manual_seed(0)
    x, of = torch.randn(6, 8), dtype(name)
    limits, block = (of.quant_min, of.quant_max), granularity.block_size(x.shape, 0)
    low, high = block_range(x, block)
    assert low.shape == high.shape == tuple(s // b for s, b in zip(x.shape, block, strict=True))
    scale, zero_point = choose_qparams(
        low, high, quant_min=of.quant_min, quant_max=of.quant_max, symmetric=symmetric
    )
    codes = affine.quantize(x, scale, zero_point, *limits, dtype=of.storage, block_size=block)
    wanted, values = brute_force(x, block, limits, symmetric)
    assert codes.dtype == of.storage
    assert codes.tolist() == wanted.tolist()
    assert np.allclose(
        dequantize(codes, scale, zero_point, block).double().numpy(), values, rtol=1e-6, atol=1e-7
    )


def test_blocks_in_three_dimensions_and_other_memory_formats():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 10).transpose(0, 2)
    block = (5, 3, 2)
    scale, zero_point = choose_qparams(*block_range(x, block), quant_min=0, quant_max=15, symmetric=False)
    codes = quantize(x, scale, zero_point, 0, 15, block)
    assert codes.tolist() == brute_force(x, block, (0, 15), False)[0].tolist()
    channels_last = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    codes = quantize(
        channels_last, torch.rand(4) + 0.1, 0, -127, 127, per_channel(0).block_size(channels_last.shape)
    )
    assert codes.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("algo", ["minmax", "mse"])
def test_weights_of_any_granularity_are_quantized_block_by_block(granularity, algo):
    torch.manual_seed(0)
    weight = torch.randn(6, 8)
    spec = TensorFormat(dtype=dtype("int4"), symmetric=True, granularity=granularity, algo=algo, narrow=True)
    codes, scale = quantize_weight(weight, spec, 0)
    block = granularity.block_size(weight.shape, 0)
    assert scale.numel() == weight.numel() // math.prod(block)
    assert scale.dim() == (0 if block == (6, 8) else 1 if granularity.name == "per_channel" else 2)
    grid = [s // b for s, b in zip(weight.shape, block, strict=True)]
    whole = TensorFormat(dtype=dtype("int4"), symmetric=True, algo=algo, narrow=True)
    for n, corner in enumerate(np.ndindex(*grid)):
        where = tuple(slice(c * b, (c + 1) * b) for c, b in zip(corner, block, strict=True))
        one, one_scale = quantize_weight(weight[where], whole, 0)
        assert torch.equal(codes[where], one)
        assert scale.flatten()[n] == one_scale


# ---- metrics ----


def test_sqnr_of_known_tensors():
    assert sqnr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(
        10 * math.log10(25 / 0.25)
    )
    assert sqnr_db(torch.ones(3), torch.zeros(3)) == 0.0
    assert sqnr_db(torch.ones(4), torch.ones(4) * 0.99) == pytest.approx(40.0, abs=1e-4)


@given(st_np.arrays(np.float32, (7,), elements=st.floats(-100, 100, width=32)), st.floats(-1, 1))
def test_sqnr_is_its_formula_in_float64(values, noise):
    other = values + np.float32(noise)
    difference = ((values.astype(np.float64) - other.astype(np.float64)) ** 2).sum()
    signal = (values.astype(np.float64) ** 2).sum()
    got = sqnr_db(torch.from_numpy(values), torch.from_numpy(other))
    if difference == 0:
        assert got == math.inf
    elif signal == 0:
        assert got == -math.inf
    else:
        assert got == pytest.approx(10 * math.log10(signal / difference), abs=1e-9)


def test_sqnr_of_values_that_are_not_finite():
    masked = torch.tensor([1.0, -math.inf])
    assert sqnr_db(masked, masked.clone()) == math.inf
    assert sqnr_db(masked, torch.tensor([1.0, 0.0])) == -math.inf
    assert sqnr_db(masked, torch.tensor([0.9, -math.inf])) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(torch.ones(2), torch.tensor([1.0, math.nan])) == -math.inf
    assert sqnr_db(torch.zeros(2), torch.ones(2)) == -math.inf


def test_sqnr_does_not_overflow():
    assert sqnr_db(torch.full((2,), 1e30), torch.full((2,), 1.1e30)) == pytest.approx(20.0, abs=1e-3)


def test_cosine_of_rows():
    a, b = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 3.0]])
    assert cosine(a, b).tolist() == pytest.approx([0.0, 1.0])
