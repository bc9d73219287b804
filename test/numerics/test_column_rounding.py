"""Columns rounded one after the other, against GPTQ as the paper writes it."""

import pytest
import torch

from nc.numerics.column_rounding import DAMP, Pairs, factored, round_columns
from nc.numerics.int16_pairs import largest_pair, quantize_pairs


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


def test_inputs_that_are_always_zero_get_the_nearest_codes():
    weight, scale, hessian = problem(1, 6, 12, 30, seed=2)
    hessian[:, 3], hessian[:, :, 3] = 0, 0
    codes = round_columns(weight, scale, factored(hessian), (-127, 127))
    assert torch.equal(codes[:, :, 3], torch.round(weight / scale)[:, :, 3])


def test_a_hessian_without_a_factor_gives_none():
    weight, scale, hessian = problem(2, 3, 4, 10, seed=3)
    hessian[1] = -hessian[1]
    assert factored(hessian) is None
