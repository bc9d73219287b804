"""Values at a few places, computed from few places of others, are those of the whole graph."""

import functools

import pytest
import torch
from models import Function
from torch import nn
from torch.nn import functional as F

from nc.capture.capture import capture
from nc.graph.fx_utils import run_with
from nc.proof import few_places
from nc.proof.places import Placing, at, parts_in, with_values
from nc.proof.sizes import KnownSizes, UnknownSizes


def image(*sizes):
    return torch.randn(sizes or (3, 6, 13, 11))


class Cases:
    """Model, its inputs."""

    pointwise = Function(lambda _, x, y: F.gelu(x + y) * 2 - x.clamp(-1, 1)), (image(3, 5, 7), image(5, 1))
    masked = (
        Function(lambda _, x, m: torch.where(m, x, x.new_zeros(()))),
        (image(3, 5, 7), image(3, 1, 7) > 0),
    )
    linear = nn.Linear(7, 9), (image(3, 5, 7),)
    matmul = Function(lambda _, a, b: a @ b), (image(3, 2, 5, 7), image(2, 7, 6))
    softmax = Function(lambda _, x: x.softmax(1) + x.log_softmax(-1)), (image(3, 5, 7),)
    norms = nn.Sequential(nn.LayerNorm(7), nn.GroupNorm(1, 5), nn.RMSNorm(7)), (image(3, 5, 7),)
    convolution = nn.Conv2d(6, 8, 3, padding=1, stride=2), (image(),)
    dilated = nn.Conv2d(6, 8, (3, 2), padding=(2, 1), dilation=(2, 3), groups=2), (image(),)
    same = nn.Conv1d(6, 8, 4, padding="same"), (image(3, 6, 15),)
    depthwise = nn.Conv2d(6, 6, 5, padding=2, groups=6), (image(),)
    deep_convolution = nn.Conv3d(3, 4, 2, padding=1), (image(2, 3, 5, 6, 7),)
    transposed = nn.ConvTranspose2d(6, 4, 3, stride=2), (image(),)
    pools = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)), (image(),)
    adaptive = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 4)), (image(),)
    heads = (
        Function(lambda _, x: x.view(3, 10, 4, 6).transpose(1, 2).reshape(12, 10, 6).permute(2, 0, 1)),
        (image(3, 10, 24),),
    )
    windows = (
        Function(lambda _, x: x.view(2, 4, 3, 2, 5, 7).permute(0, 1, 3, 2, 4, 5).flatten(0, 2).roll(1, 1)),
        (image(2, 12, 10, 7),),
    )
    pieces = (
        Function(
            lambda _, x: torch.cat(
                [x[:, 1:8:2], *x.split([4, 7], 1), x.chunk(2, 2)[0].repeat(1, 1, 2)[:, :, :7]], 1
            )
        ),
        (image(3, 11, 7),),
    )
    selected = Function(lambda _, x: x[:, -1] + x.unbind(1)[2] + x.mean(1) + x.amax((1,))), (image(3, 5, 7),)
    reduced = Function(lambda _, x: x.sum((2, 3), keepdim=True) * x + x.flip(2)), (image(),)
    expanded = Function(lambda _, x: x[:, None].expand(-1, 4, -1, -1).squeeze(0)), (image(3, 1, 7),)
    padded = Function(lambda _, x: F.pad(x, (1, 2, 3, 0))), (image(),)
    upsampled = (
        Function(lambda _, x: F.pixel_shuffle(F.interpolate(x, scale_factor=2.0), 2)),
        (image(2, 8, 4, 6),),
    )
    attention = (
        Function(lambda _, q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)),
        (image(2, 4, 9, 8), image(2, 4, 11, 8), image(2, 4, 11, 6), image(2, 1, 9, 11)),
    )
    causal = (
        Function(lambda _, q: F.scaled_dot_product_attention(q, q, q, is_causal=True)),
        (image(2, 4, 9, 8),),
    )
    embedding = nn.Embedding(20, 7), (torch.randint(20, (3, 9)),)
    slopes = nn.PReLU(6), (image(),)
    instances = nn.InstanceNorm2d(6, affine=True), (image(),)
    unbatched = nn.MaxPool2d(3, 1, 1), (image(6, 13, 11),)
    shared_heads = (
        Function(lambda _, q, k: F.scaled_dot_product_attention(q, k, k)),
        (image(5, 2, 9, 8), image(1, 2, 11, 8)),
    )
    scalars = Function(lambda _, x: x.mean() + x.argmax(-1)), (image(3, 5, 7),)
    recurrent = Function(lambda _, x: torch.stack([x.cumsum(1), x.tril()])), (image(3, 9, 7),)


CASES = [name for name in vars(Cases) if not name.startswith("_")]


def value_of(part, given):
    """Compute a part from the whole values of the nodes that are given."""
    values = {}

    @functools.cache
    def of(part):
        if part.call is None:
            return at(given[part.node], part.places)
        values.update({source: of(source) for source in parts_in(part.arguments)})
        return part.call(*(with_values(argument, values) for argument in part.arguments))

    return of(part)


@pytest.mark.parametrize("name", CASES)
def test_places_are_those_of_the_whole(monkeypatch, name):
    torch.manual_seed(0)
    monkeypatch.setattr(few_places, "_MOST", {rank: (3,) * rank for rank in range(1, 7)})
    model, inputs = getattr(Cases, name)
    module = capture(model.eval(), inputs).module
    whole = {}

    def note(node, value, _):
        whole[node] = value
        return value

    with torch.no_grad():
        run_with(module, inputs, note)
    whole |= {
        n: functools.reduce(getattr, n.target.split("."), module)
        for n in module.graph.nodes
        if n.op == "get_attr"
    }
    sizes = KnownSizes(module, [tensor.shape for tensor in inputs], {})
    parts, seen = Placing(sizes, ()), 0
    for node, value in whole.items():
        if node.op != "call_function":
            continue
        assert sizes.of(node) == (value.shape if isinstance(value, torch.Tensor) else sizes.of(node))
        if isinstance(value, torch.Tensor):
            places = few_places.few(value.shape)
            found = value_of(parts.of(node, places), whole)
            expected = at(value, places)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            seen += any(each is not None for each in places)
    assert seen


def test_places_cover_ends_middle_and_every_position_in_a_block():
    rows, columns = few_places.few((1, 512, 384))[1:]
    assert {0, 255, 256, 511} <= set(rows.tolist())
    assert {0, 191, 192, 383} <= set(columns.tolist())
    assert few_places.few((7, 3)) == (None, None)
    assert {int(index) % 16 for index in few_places.few((512, 64))[0]} == set(range(16))


def test_sizes_that_depend_on_values_are_not_guessed():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.nonzero.default, (x,))
    node.meta["operator_name"] = "nonzero"
    graph.output((node,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(UnknownSizes, match="nonzero"):
        KnownSizes(module, [(3,)], {}).of(node)
