"""Memory as oneDNN is told of it.

Sizes of 1 have the strides of a tensor without gaps, whatever torch says.
"""

import itertools
import math
import random

import pytest
import torch
from models import library
from torch import nn

import nc
from nc.backends import available_backends
from nc.kernels.onednn.descriptions import Desc, channels_last_strides, contiguous_strides
from nc.numerics.metrics import worst_sqnr_db

SHAPES = [
    (1,),
    (1, 1),
    (3, 1),
    (1, 50, 32),
    (2, 1, 5),
    (1, 1, 7),
    (1, 4, 1, 3),
    (2, 6, 1, 1),
    (1, 1, 1, 1),
    (2, 1, 3, 4),
    (1, 3, 1, 2, 5),
]


def places(desc):
    """The place in memory of every element, in order."""
    indices = itertools.product(*map(range, desc.sizes))
    return [sum(i * stride for i, stride in zip(index, desc.strides, strict=True)) for index in indices]


def with_any_strides_of_ones(tensor, seed):
    """The same elements; where a size is 1, the stride is drawn."""
    draw = random.Random(seed)  # no secret
    strides = [
        draw.choice((0, 1, 7, 1632)) if n == 1 else s
        for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["rows", "images"])
def test_strides_of_ones_do_not_count(shape, channels_last):
    """Every order of the dimensions, with any strides of ones, is the same memory and the same description.

    No gaps stay no gaps.
    """
    dense = contiguous_strides if not channels_last or len(shape) < 3 else channels_last_strides
    for order in itertools.permutations(range(len(shape))):
        memory = torch.empty([shape[dim] for dim in order])
        tensor = memory.permute([order.index(dim) for dim in range(len(shape))])
        expected = Desc.of(tensor).plain(channels_last=channels_last)
        assert expected.plain(channels_last=channels_last) == expected
        assert places(expected) == places(Desc.of(tensor))
        for seed in range(5):
            assert (
                Desc.of(with_any_strides_of_ones(tensor, seed)).plain(channels_last=channels_last) == expected
            )
        if [dim for dim in order if shape[dim] > 1] == sorted(
            dim for dim in order if shape[dim] > 1
        ) and not channels_last:
            assert expected.strides == contiguous_strides(shape)
    rows = torch.empty_strided(shape, dense(shape))
    assert Desc.of(with_any_strides_of_ones(rows, 0)).plain(channels_last=channels_last).strides == dense(
        shape
    )


def test_slices_and_repeated_tensors_are_described_like_dense_ones():
    x = torch.randn(1, 51, 32)
    dense = Desc.dense((1, 50, 32), torch.float32)
    assert x[:, 1:].stride() == (51 * 32, 32, 1)
    assert Desc.of(x[:, 1:]).plain() == dense
    assert Desc.of(torch.randn(50, 1, 32).permute(1, 0, 2)).plain() == dense
    assert Desc.of(torch.randn(50, 32).expand(1, 50, 32)).plain() == dense
    assert Desc.of(torch.randn(32).expand(50, 32)[None]).plain().strides == (
        0,
        0,
        1,
    )  # what is repeated stays so
    image = torch.empty(2, 8, 1, 1)
    assert Desc.of(image).plain(channels_last=True).strides == channels_last_strides(image.shape)
    assert Desc.of(image.to(memory_format=torch.channels_last)).plain().strides == contiguous_strides(
        image.shape
    )


def test_one_description_of_onednn_for_the_same_memory():
    maker = library().maker
    x = torch.randn(1, 51, 32)
    assert maker.layout(Desc.of(x[:, 1:])) is maker.layout(Desc.dense((1, 50, 32), torch.float32))


class WithToken(nn.Module):
    """A learned row in front of the others, a residual sum with a part of the result.

    Wav2Vec2 and ViT in small.
    """

    def __init__(self):
        super().__init__()
        self.t, self.l = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.l(torch.cat((self.t.expand(x.shape[0], 1, 32), x), 1))[:, 1:]


class Turned(nn.Module):
    """Slices, repeats and other orders of the dimensions around products of all kinds."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.n = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Conv1d(32, 32, 3, padding=1),
            nn.LayerNorm(32),
        )
        self.scale = nn.Parameter(torch.randn(1, 32, 1))

    def forward(self, x):
        y = self.c(torch.cat((x, x[:, :1]), 1).transpose(1, 2))[:, :, 1:] * self.scale
        y = self.n(y.transpose(1, 2) + self.a(x)[:, -1:])
        y = self.b(y.permute(1, 0, 2)).permute(1, 0, 2) - x
        heads = y.view(y.shape[0], y.shape[1], 4, 8).transpose(1, 2)
        y = torch.softmax(heads @ heads.transpose(-1, -2) / math.sqrt(8), -1) @ heads
        return self.a(y.transpose(1, 2).reshape(x.shape)[:, :1]).expand(x.shape) + x


@pytest.mark.skipif(bool(available_backends()["native"]), reason="native can't run")
@pytest.mark.parametrize("make", [WithToken, Turned])
def test_plans_for_a_batch_of_one_agree_with_the_reference(make):
    """Whatever the example's batch was, and however the input lies."""
    example = torch.randn(2, 50, 32)
    model = make().eval()
    with torch.no_grad():
        q, reference = (
            nc.quantize(
                model,
                nc.StaticQuantConfig(),
                run_fn=lambda p: p(example),
                example_inputs=example,
                backend=backend,
            )
            for backend in ("native", "reference")
        )
        for batch in (1, 3, 2):
            inputs = (
                torch.randn(batch, 50, 32),
                torch.randn(batch, 51, 32)[:, 1:],
                torch.randn(50, batch, 32).permute(1, 0, 2),
            )
            for x in inputs:
                assert worst_sqnr_db(reference(x), q(x)) > 35
