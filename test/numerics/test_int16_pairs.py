"""Weights for 16-bit pair sums.

The limit holds for every pair, the error is at most that of 7 bits, the engine is exact.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Function
from suites.saturating_nets import NETS

from nc import StaticQuantConfig, available_backends, convert, prepare
from nc.formats import PER_CHANNEL, TensorFormat
from nc.graph import known_codes
from nc.numerics.affine import dequantize
from nc.numerics.int16_pairs import PAIR_LIMIT, limit_pairs, quantize_pairs
from nc.numerics.metrics import sqnr_db
from nc.numerics.weights import quantize_weight

SPEC = TensorFormat(dtype="int8", symmetric=True, granularity="per_channel", narrow=True, paired=True)


def worst_pair(codes):
    """Largest sum of one sign of codes 2i and 2i + 1 of the last dimension, by brute force."""
    worst = 0
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        for a, b in itertools.zip_longest(row[0::2], row[1::2], fillvalue=0):
            worst = max(worst, max(a, 0) + max(b, 0), -min(a, 0) - min(b, 0))
    return worst


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=9))
def test_no_pair_exceeds_the_limit_and_others_are_rounded_only(values):
    x = torch.tensor(values)
    codes = limit_pairs(x)
    assert worst_pair(codes) <= PAIR_LIMIT
    assert int(codes.abs().max()) <= 127
    plain = x.round().clamp(-127, 127)
    for i in range(0, len(values), 2):
        if worst_pair(plain[i : i + 2]) <= PAIR_LIMIT:
            assert torch.equal(codes[i : i + 2], plain[i : i + 2])
        else:  # both give way, and no more than they must
            assert abs(codes[i : i + 2].sum().item()) == PAIR_LIMIT
            assert bool(((plain[i : i + 2] - codes[i : i + 2]).abs() <= 63.5).all())


@given(
    st.integers(0, 2**31),
    st.sampled_from([(4, 1, 16), (3, 9, 8), (2, 1, 7), (1, 4, 5)]),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_the_error_is_at_most_that_of_seven_bits(seed, shape, tail):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).abs().pow(tail)
    codes, scale = quantize_pairs(weight)
    assert worst_pair(codes) <= PAIR_LIMIT
    error = (codes * scale[:, None, None] - weight).square().sum((1, 2))
    step = weight.abs().amax((1, 2), keepdim=True) / 63.5
    seven = ((weight / step).round().clamp(-63, 63) * step - weight).square().sum((1, 2))
    assert bool((error <= seven * 1.001 + 1e-12).all())


def test_normal_weights_keep_most_of_the_eighth_bit():
    weight = torch.randn(64, 1, 384)
    codes, scale = quantize_pairs(weight)
    got = sqnr_db(weight, codes * scale[:, None, None])
    amax = weight.abs().amax((1, 2), keepdim=True)
    seven, eight = (sqnr_db(weight, (weight / (amax / n)).round() * (amax / n)) for n in (63, 127))
    assert seven + 3 < got < eight


def test_all_zero_channels():
    codes, scale = quantize_pairs(torch.stack([torch.zeros(1, 4), torch.ones(1, 4)]))
    assert torch.equal(codes[0], torch.zeros(1, 4))
    assert scale[0] == 1.0


def each_beside_itself(weight):
    return weight.flatten().repeat_interleave(2)


@pytest.mark.parametrize(
    ("shape", "axis", "groups", "inputs"),
    [
        ((6, 9), 0, 1, lambda w: w),
        ((6, 8, 3, 3), 0, 1, lambda w: w.movedim(1, -1)),
        ((6, 1, 3, 3), 0, 6, lambda w: w.movedim(1, -1)),
        ((6, 1, 3, 3), 0, 1, each_beside_itself),
        ((6, 1, 3), 0, 3, each_beside_itself),
        ((6, 1, 3, 3, 3), 0, 6, each_beside_itself),
        ((6, 3, 3), None, 6, each_beside_itself),
        ((6, 8, 1, 1), 0, 1, lambda w: w.movedim(1, -1)),
        ((8, 6, 3), 1, 1, lambda w: w.movedim(0, -1)),
        ((8, 3, 3), None, 2, lambda w: w.reshape(2, 4, 3, 3).movedim(1, -1)),
        ((6, 3, 3), None, 2, lambda w: w.reshape(2, 3, 3, 3).movedim(1, -1)),
    ],
    ids=[
        *(
            "linear",
            "convolution",
            "depthwise",
            "one channel",
            "one channel for two",
            "depthwise 3d",
            "transposed depthwise",
        ),
        *("pointwise", "transposed", "transposed in groups", "odd groups"),
    ],
)
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("algo", ["minmax", "mse"])
def test_pairs_are_neighbouring_input_channels_or_any_two_positions(
    shape, axis, groups, inputs, granularity, algo
):
    weight = torch.randn(shape).abs() + 1.0  # every pair is of one sign
    spec = TensorFormat(
        dtype="int8", symmetric=True, granularity=granularity, algo=algo, narrow=True, paired=True
    )
    codes, scale = quantize_weight(weight, spec, axis, groups)
    assert codes.shape == weight.shape
    assert (
        codes.stride() == torch.empty(shape).stride()
    )  # also where a size of 1 hides it: convolutions take their layout from that
    assert worst_pair(inputs(codes)) <= PAIR_LIMIT
    per_channel = granularity == "per_channel" and axis is not None
    assert scale.shape == ((weight.shape[axis],) if per_channel else ())
    assert sqnr_db(weight, dequantize(codes, scale, 0, spec.granularity.block_size(weight.shape, axis))) > 12


# ---- the engine ----


def extreme_codes(shape, axis, groups):
    """Pairs of input channels at the limit, in either direction and of either sign.

    Other pairs far above it.
    """
    inputs = 1 if axis == 0 else 0
    split = torch.empty(shape if inputs else (groups, shape[0] // groups, *shape[1:]))
    last = split.movedim(1, -1)
    n = last.shape[-1]
    if (
        n == 1 and last.dim() > 2 and not (axis == 0 and groups == shape[0] and len(shape) < 5)
    ):  # any two positions of a window are a pair
        return torch.full(shape, PAIR_LIMIT // 2, dtype=torch.int8)
    first = torch.randint(64, 128, (*last.shape[:-1], -(-n // 2)))
    pair = torch.stack([first, PAIR_LIMIT - first], -1)
    pair = torch.where(torch.rand(first.shape)[..., None] < 0.5, pair, pair.flip(-1))
    pair = pair * torch.where(
        torch.rand(*first.shape[:-1], 1, 1) < 0.5, 1, -1
    )  # one sign per row: sums grow as large as they can
    codes = pair.flatten(-2)[..., :n].movedim(-1, 1)
    return codes.reshape(shape).to(torch.int8).contiguous()


def engine(name):
    why = available_backends()[name]
    return pytest.param(
        name,
        marks=[
            *([pytest.mark.ipex] if name == "ipex" else []),
            pytest.mark.skipif(bool(why), reason=why or "it can run"),
        ],
    )


@pytest.mark.parametrize("backend", [engine("ipex"), engine("native")])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_the_engine_is_exact_at_the_limit(name, dtype, backend, monkeypatch):
    """Every activation at an end of its range, every pair of weights at the limit.

    A sum of 16 bits that saturated would show.
    """
    build, shape = NETS[name]
    if backend == "ipex" and dtype == "int8" and name not in ("linear", "long linear"):
        pytest.skip("oneDNN halves the weights of convolutions of int8 activations itself")
    if backend == "native" and name.startswith("transposed"):
        pytest.skip("stock PyTorch has no int8 kernel for it")

    def quantize_weight(weight, spec, axis, groups=1):
        codes = extreme_codes(weight.shape, axis, groups)
        channels = weight.shape[axis] if spec.granularity == PER_CHANNEL and axis is not None else None
        return codes, torch.full((channels,), 1e-3) if channels else torch.tensor(1e-3)

    monkeypatch.setattr(known_codes, "quantize_weight", quantize_weight)
    x = torch.where(torch.rand(shape) < 0.9, 2.0, -1.0)
    model = Function(lambda self, x: self.layer(x), layer=build()).eval()
    prepared = prepare(model, StaticQuantConfig(act_dtype=dtype, post=()), example_inputs=x, backend=backend)
    prepared(x)
    q = convert(prepared, isolate="never")
    assert q.report().ran_int8 == 1
    assert sqnr_db(q.reference(x), q(x)) > 100
