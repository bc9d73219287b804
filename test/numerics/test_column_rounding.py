"""Columns rounded one after the other, against GPTQ as the paper writes it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nc.formats import TensorFormat
from nc.numerics.column_rounding import DAMP, Pairs, factored, round_columns
from nc.numerics.int16_pairs import largest_pair, quantize_pairs
from nc.numerics.weights import pairs_fit, pairs_of_columns, quantize_weight


def problem(groups, outputs, columns, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups, outputs, columns, generator=generator)
    mixed = torch.randn(groups, columns, columns, generator=generator)
    x = mixed @ torch.randn(groups, columns, rows, generator=generator)
    hessian = x.double() @ x.double().transpose(1, 2)
    scale = weight.abs().amax(2, keepdim=True) / 127
    return weight, scale, hessian


def of_the_paper(weight, scale, hessian, limits):
    """Algorithm 1 of arXiv 2210.17323 in float64: the inverse, from which rounded columns are eliminated."""
    diagonal = hessian.diagonal()
    damped = hessian + DAMP * diagonal.mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse, current = torch.linalg.inv(damped), weight.double().clone()
    codes = torch.zeros_like(current)
    for k in diagonal.argsort(descending=True, stable=True).tolist():
        codes[:, k] = torch.round(current[:, k] / scale[:, 0].double()).clamp(*limits)
        error = (current[:, k] - codes[:, k] * scale[:, 0]) / inverse[k, k]
        current -= error[:, None] * inverse[k][None]
        inverse = inverse - inverse[:, k : k + 1] @ inverse[k : k + 1] / inverse[k, k]
        inverse[k, :] = inverse[:, k] = 0
    return codes


@pytest.mark.parametrize(
    ("groups", "outputs", "columns"), [(1, 5, 7), (3, 2, 9), (1, 1, 1), (2, 4, 150), (1, 3, 256)]
)
def test_the_codes_are_those_of_the_paper(groups, outputs, columns):
    weight, scale, hessian = problem(groups, outputs, columns, 2 * columns, seed=columns)
    codes = round_columns(weight, scale, factored(hessian), (-127, 127))
    expected = torch.stack(
        [of_the_paper(*each, (-127, 127)) for each in zip(weight, scale, hessian, strict=True)]
    )
    # a value near the middle between two codes may be rounded either way in fp32, and changes those behind it
    assert (codes.double() != expected).double().mean() < 0.02
    assert (codes.double() - expected).abs().max() <= 2


def test_the_loss_is_below_that_of_the_nearest_codes():
    weight, scale, hessian = problem(4, 16, 64, 256, seed=0)

    def loss(codes):
        change = (codes * scale - weight).double()
        return (change @ hessian * change).sum((1, 2))

    nearest = torch.round(weight / scale)
    assert bool(
        (loss(round_columns(weight, scale, factored(hessian), (-127, 127))) < 0.5 * loss(nearest)).all()
    )


def test_codes_stay_within_limits():
    weight, scale, hessian = problem(2, 4, 20, 40, seed=1)
    codes = round_columns(weight, scale / 2, factored(hessian), (-64, 63))
    assert int(codes.min()) == -64
    assert int(codes.max()) == 63


@pytest.mark.parametrize("columns", [64, 65])
def test_pairs_stay_within_their_limit_and_lose_less_than_the_nearest_codes_that_do(columns):
    weight, _, hessian = problem(1, 40, columns, 200, seed=4)
    nearest, scale = quantize_pairs(weight.transpose(0, 1))
    nearest, scale = nearest.transpose(0, 1), scale.reshape(1, -1, 1)
    partners = torch.arange(columns) ^ 1
    partners[partners >= columns] = columns - 1
    free = round_columns(weight, scale, factored(hessian), (-127, 127))
    found = round_columns(weight, scale, factored(hessian), (-127, 127), Pairs(partners, 128))

    def loss(codes):
        change = (codes * scale - weight).double()
        return float((change @ hessian * change).sum())

    assert largest_pair(free.to(torch.int8)) > 128
    assert largest_pair(found.to(torch.int8)) <= 128
    assert loss(found) < 0.7 * loss(nearest)


PAIRED = TensorFormat(dtype="int8", symmetric=True, granularity="per_channel", narrow=True, paired=True)


def sums_of_products(codes, groups):
    """All sums of codes with one sign that a kernel without VNNI may multiply by 255, by brute force.

    It adds neighbouring input channels of each place of the window. With one input channel it adds any two
    places, a place beside itself among them; depthwise convolutions of at most two dimensions have kernels
    that add in 32 bits.
    """
    outputs, channels = codes.shape[:2]
    flat = codes.reshape(outputs, channels, -1).tolist()
    one_channel = channels == 1 and len(flat[0][0]) > 1 and not (codes.dim() < 5 and outputs == groups > 1)
    for row in flat:
        if one_channel:
            pairs = itertools.combinations_with_replacement(row[0], 2)
        else:
            pairs = (
                pair
                for place in zip(*row, strict=True)
                for pair in itertools.zip_longest(place[0::2], place[1::2], fillvalue=0)
            )
        yield from (abs(a + b) if a * b > 0 else max(abs(a), abs(b)) for a, b in pairs)


@given(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 5]),
    st.sampled_from([(), (1,), (2,), (9,), (3, 3), (1, 4), (2, 1, 3)]),
    st.booleans(),
    st.sampled_from([1.0, 0.7]),
)
def test_all_sums_fit_16_bits_for_all_shapes(seed, groups, channels, window, smooth, narrow):
    """Inputs that are alike, as in waves, move the errors of all codes into one; narrow scales clip weights."""
    generator = torch.Generator().manual_seed(seed)
    outputs = groups * (1 + seed % 40)
    weight = torch.randn(outputs, channels, *window, generator=generator)
    groups = groups if window else 1
    codes, scale = quantize_weight(weight, PAIRED, 0, groups)
    assert max(sums_of_products(codes, groups)) <= 128
    columns = weight[0].numel()
    x = torch.randn(groups, columns, 2 * columns, generator=generator)
    if smooth:
        x = torch.sin(
            6 * x[:, :1] + 0.3 * torch.arange(columns)[:, None] * torch.rand(1, generator=generator)
        )
    hessian = x.double() @ x.double().transpose(1, 2)
    matrix = weight.reshape(groups, -1, columns)
    steps = narrow * scale.reshape(groups, -1, 1)
    found = round_columns(
        matrix,
        steps,
        factored(hessian),
        (PAIRED.quant_min, PAIRED.quant_max),
        pairs_of_columns(weight, groups),
    )
    found = found.reshape(weight.shape).to(torch.int8)
    assert max(sums_of_products(found, groups)) <= 128
    assert pairs_fit(found, 0, groups)


def test_inputs_that_are_always_zero_get_the_nearest_codes():
    weight, scale, hessian = problem(1, 6, 12, 30, seed=2)
    hessian[:, 3], hessian[:, :, 3] = 0, 0
    codes = round_columns(weight, scale, factored(hessian), (-127, 127))
    assert torch.equal(codes[:, :, 3], torch.round(weight / scale)[:, :, 3])


def test_a_hessian_without_a_factor_gives_none():
    weight, scale, hessian = problem(2, 3, 4, 10, seed=3)
    hessian[1] = -hessian[1]
    assert factored(hessian) is None
