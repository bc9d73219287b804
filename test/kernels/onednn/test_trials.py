"""Convolutions whose kernels of oneDNN are tried before plans take them, because some give wrong sums."""

import dataclasses
import itertools

import pytest
import torch
from models import library, quantized
from suites.reports import said
from torch import nn

from nc.backends import available_backends
from nc.backends.native.plans import products
from nc.kernels import cpu
from nc.kernels.onednn import trials
from nc.kernels.onednn.api import Unimplemented
from nc.kernels.onednn.descriptions import (
    DST,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    Desc,
    Eltwise,
    Geometry,
    Sum,
    channels_last_strides,
)
from nc.numerics.metrics import worst_sqnr_db

pytestmark = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)
CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}
TRANSPOSED = {
    1: nn.functional.conv_transpose1d,
    2: nn.functional.conv_transpose2d,
    3: nn.functional.conv_transpose3d,
}


@pytest.fixture(scope="module")
def maker():
    return library().maker


def wanted_for(
    channels,
    outputs,
    size,
    window,
    stride=1,
    pad=0,
    dilation=1,
    groups=1,
    transposed=False,
    more=0,
    dtype=torch.float32,
    post=(),
):
    """What a plan asks for; numbers hold for all spatial dimensions."""
    dims = len(size)
    weight = (
        torch.empty(channels, outputs // groups, *window)
        if transposed
        else torch.empty(outputs, channels // groups, *window)
    )
    how = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups} | (
        {"output_padding": more} if transposed else {}
    )
    sizes = (TRANSPOSED if transposed else CONVOLUTIONS)[dims](
        torch.empty(2, channels, *size), weight, **how
    ).shape
    source = Desc((2, channels, *size), channels_last_strides((2, channels, *size)), torch.uint8)
    target = Desc(tuple(sizes), channels_last_strides(sizes), dtype)
    geometry = Geometry(
        (stride,) * dims,
        (pad,) * dims,
        (pad - more,) * dims,
        (dilation,) * dims,
        transposed,
        window=tuple(window),
        channels=channels // groups,
    )
    codes = {} if dtype.is_floating_point else {DST: 0}
    attributes = Attributes({SRC: 0, WEIGHTS: 3 if groups > 1 else 1, **codes}, {SRC: 0, **codes}, post)
    return trials.Convolution(source, Desc.dense((outputs,), torch.float32), target, geometry, attributes)


EXPECTED = [
    {"channels": 6, "outputs": 4, "size": (7, 6), "window": (3, 2), "stride": 2, "pad": 1},
    {"channels": 6, "outputs": 4, "size": (9,), "window": (3,), "dilation": 2, "groups": 2},
    {"channels": 3, "outputs": 2, "size": (4, 5, 3), "window": (2, 3, 1), "stride": 2},
    {
        "channels": 4,
        "outputs": 6,
        "size": (5, 4),
        "window": (3, 3),
        "stride": 2,
        "pad": 1,
        "more": 1,
        "transposed": True,
    },
    {
        "channels": 4,
        "outputs": 4,
        "size": (5, 4),
        "window": (1, 2),
        "stride": 3,
        "groups": 2,
        "transposed": True,
    },
    {"channels": 2, "outputs": 3, "size": (4, 3, 3), "window": (3, 2, 2), "dilation": 2, "transposed": True},
]


@pytest.mark.parametrize("most", [2**19, 1], ids=["all places", "some places"])
@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_the_sums_that_are_expected_are_torchs(case, most, monkeypatch):
    """Of float64, with zero points; a trial that expects something else would refuse every kernel."""
    monkeypatch.setattr(trials, "_MOST_PRODUCTS", most)
    wanted = wanted_for(**case)
    x, weight = trials._noise(wanted.source, 0, 255), trials._noise(wanted.weights, -63, 63)
    assert len(set(x.flatten().tolist())) > 50
    grid = trials._grid(wanted)
    dims, transposed, g = len(case["size"]), case.get("transposed", False), wanted.geometry
    by_outputs = weight.reshape(wanted.groups, -1, *weight.shape[-dims - 1 :]).double()
    given = by_outputs.transpose(1, 2).flatten(0, 1) if transposed else by_outputs.flatten(0, 1)
    how = {"stride": g.strides, "padding": g.before, "dilation": g.dilations, "groups": wanted.groups}
    how |= {"output_padding": case.get("more", 0)} if transposed else {}
    expected = (TRANSPOSED if transposed else CONVOLUTIONS)[dims](x.double() - 117, given, **how)
    assert tuple(expected.shape) == wanted.target.sizes
    torch.testing.assert_close(
        trials._sums(wanted, x.float() - 117, weight, grid), trials._at(expected, grid)
    )


def test_both_ends_of_every_dimension_are_looked_at():
    for size, most in itertools.product((1, 2, 5, 50, 500), (6, 13, 60)):
        places = trials._places(size, most)
        assert len(set(places.tolist())) == len(places) == min(size, most)
        assert {0, size - 1} <= set(places.tolist())


POSTS = [
    (),
    (Eltwise("relu", 0.1),),
    (Sum(0.5, 3, torch.uint8), Eltwise("relu")),
    *((each,) for each in products.ACTIVATIONS.values()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("post", POSTS, ids=str)
def test_right_kernels_pass_with_everything_that_may_follow(maker, post, dtype):
    """A kernel that is known to be right: over many channels, in rows of 8 places."""
    if dtype is torch.float32:
        post = tuple(Sum() if isinstance(each, Sum) else each for each in post)
    wanted = wanted_for(64, 32, (8, 8), (3, 3), pad=1, dtype=dtype, post=post)
    primitive = maker.convolution(
        wanted.source, wanted.weights, wanted.bias, wanted.target, wanted.geometry, wanted.attributes
    )
    assert trials.is_right(maker, primitive, wanted)


@pytest.mark.parametrize("change", ["window", "zero", "place"])
def test_a_kernel_that_computes_something_else_is_found(maker, change, monkeypatch):
    """Another dilation, no zero point, and a result of which one place near the end is not written."""
    wanted = wanted_for(64, 32, (8, 8), (3, 3), pad=2, dilation=2)
    primitive = maker.convolution(
        wanted.source, wanted.weights, wanted.bias, wanted.target, wanted.geometry, wanted.attributes
    )
    assert trials.is_right(maker, primitive, wanted)
    run = trials.run_once

    def spoiled(maker, primitive, tensors):
        before = tensors[DST].clone()
        if change == "zero":
            tensors = tensors | {ZERO_POINTS | SRC: torch.tensor([116], dtype=torch.int32)}
        run(maker, primitive, tensors)
        if change == "place":
            tensors[DST][-1, :, -2, -1] = before[-1, :, -2, -1]

    monkeypatch.setattr(trials, "run_once", spoiled)
    if change == "window":
        near = wanted_for(64, 32, (8, 8), (3, 3), pad=1)
        primitive = maker.convolution(
            near.source, near.weights, near.bias, near.target, near.geometry, near.attributes
        )
    assert not trials.is_right(maker, primitive, wanted)


def test_the_next_kernel_is_taken_and_verdicts_are_kept(maker, monkeypatch):
    calls = []

    def right(_, primitive, wanted):
        calls.append(primitive.kernel)
        return len(calls) > 1

    monkeypatch.setattr(trials, "is_right", right)
    monkeypatch.setattr(maker, "verdicts", {})
    wanted = wanted_for(16, 16, (5, 5), (3, 3), stride=2, pad=1, transposed=True)
    primitive, wrong = trials.convolution(maker, wanted, wanted.weights)
    assert wrong == tuple(calls[:1])
    assert primitive.kernel not in wrong
    assert trials.convolution(maker, wanted, wanted.weights)[1] == wrong
    assert len(calls) == 1 + (not primitive.is_reference)
    monkeypatch.setattr(trials, "is_right", lambda *_: False)
    monkeypatch.setattr(maker, "verdicts", {})
    try:
        assert trials.convolution(maker, wanted, wanted.weights)[
            0
        ].is_reference  # plain C++ is what is compared with
    except Unimplemented as error:
        assert primitive.kernel in str(error)  # both are right


class Usual(nn.Module):
    """What most models consist of."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (
            nn.Conv2d(3, 64, 3, padding=1),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.Conv2d(64, 64, 1),
        )
        self.depth, self.fc = nn.Conv2d(64, 64, 3, stride=2, groups=64), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.depth(torch.relu(self.b(torch.relu(self.a(torch.relu(self.stem(x))))))))
        return self.fc(x.mean((2, 3)))


def test_usual_kernels_are_not_tried_and_equal_ones_once(monkeypatch):
    """Counted, because the time of a trial is that of a first call."""
    calls = []
    right = trials.is_right
    monkeypatch.setattr(trials, "is_right", lambda *given: (calls.append(given[1].kernel), right(*given))[1])
    monkeypatch.setattr(library().maker, "verdicts", {})
    x = torch.randn(1, 3, 20, 20)
    quantized(Usual().eval(), x, None, "native")(x)
    assert calls == []
    x = torch.randn(1, 8, 6, 6)
    layers = [nn.ConvTranspose2d(8, 8, 3, padding=1) for _ in range(4)]
    q = quantized(
        nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU()))).eval(), x, None, "native"
    )
    tried = len(calls)
    assert (
        0 < tried <= 4
    )  # the first one reads what is quantized otherwise, and each may be tried with two kernels
    q(x)
    assert len(calls) == tried


LAYERS = [
    (nn.ConvTranspose2d(8, 8, 3, 2, 1, groups=8), (1, 8, 6, 6)),
    (nn.ConvTranspose2d(16, 16, 3, 2, 1, groups=16), (2, 16, 9, 8)),
    (nn.ConvTranspose2d(12, 12, 1, 3, groups=12), (2, 12, 13, 4)),
    (nn.ConvTranspose2d(64, 8, (1, 5), 3, (0, 1), 1), (1, 64, 5, 16)),
    (nn.ConvTranspose2d(48, 32, 4, 3), (2, 48, 13, 13)),
    (nn.ConvTranspose1d(8, 16, 2, 3), (1, 8, 16)),
    (nn.ConvTranspose3d(16, 16, 2, 2, (0, 1, 1), 1), (1, 16, 4, 6, 6)),
    (nn.Conv2d(16, 16, 3, 2, (1, 0)), (1, 16, 13, 4)),  # a result of one column
    (nn.Conv2d(128, 32, (1, 3), 2), (3, 128, 16, 4)),
    (nn.Conv2d(8, 16, (5, 1), padding=(1, 0)), (1, 8, 8, 16)),
    (nn.Conv3d(32, 32, (5, 3, 4), 3, (2, 1, 0)), (1, 32, 13, 5, 4)),
]


@pytest.mark.parametrize(("layer", "sizes"), LAYERS, ids=str)
def test_what_some_kernels_add_up_wrong_is_right(layer, sizes):
    """At the example's sizes and at others."""
    q = quantized(nn.Sequential(layer, nn.ReLU(), nn.Flatten(2)).eval(), torch.randn(sizes), None, "native")
    for each in (sizes, (3, *sizes[1:])):
        x = torch.randn(each)
        assert worst_sqnr_db([q.reference(x)], [q(x)]) > 35


def test_the_report_names_kernels_that_were_passed_over(maker, monkeypatch):
    refused, judge = [], trials.is_right

    def right(own, primitive, wanted):
        found = bool(refused) and judge(own, primitive, wanted)  # the first one is said to be wrong
        if not found:
            refused.append(primitive.kernel)
        return found

    monkeypatch.setattr(trials, "is_right", right)
    monkeypatch.setattr(maker, "verdicts", {})
    if cpu.accumulates_wide():  # weights are large, and kernels without VNNI saturate
        monkeypatch.setattr(trials, "_LARGEST_WEIGHT", 127)
    x = torch.randn(1, 8, 6, 6)
    q = quantized(nn.Sequential(nn.ConvTranspose2d(8, 8, 3, padding=1), nn.ReLU()).eval(), x, None, "native")
    named = "; ".join(f"{kernel} (0)" for kernel in refused)
    assert q.report().details["wrong sums, so not taken"] == named


@pytest.mark.parametrize(
    ("changes", "is_slow"),
    [
        ({}, True),
        ({"window": (3,), "channels": 16, "pad": 1}, True),
        ({"channels": 256}, False),
        ({"pad": 0}, False),
        ({"window": (1, 11), "size": (1, 200)}, False),
        ({"window": (1,)}, False),
        ({"zero_points": {}}, False),
    ],
    ids=str,
)
def test_amx_is_left_out_where_it_sums_weights_in_each_call(changes, is_slow):
    """11 taps over 64 channels: 2.8 ms with AMX, .8 with VNNI, because of a zero point and padding."""
    case = {
        "channels": 64,
        "outputs": 64,
        "size": (200,),
        "window": (11,),
        "pad": 5,
        "dilation": 1,
    } | changes
    zero_points = case.pop("zero_points", {SRC: 0})
    wanted = wanted_for(**case)
    attributes = dataclasses.replace(wanted.attributes, zero_points=zero_points)
    assert trials.is_slow_with_amx(dataclasses.replace(wanted, attributes=attributes)) == is_slow


@pytest.mark.parametrize(
    ("changes", "overruns"),
    [
        ({}, True),
        ({"window": (7, 3)}, True),
        ({"window": (3, 9)}, True),
        ({"window": (3, 3), "size": (56, 56), "outputs": 64}, True),
        ({"dilation": 1}, False),
        ({"pad": 0}, False),
        ({"zero_points": {}}, False),
    ],
    ids=str,
)
def test_kernels_that_write_past_their_memory_are_not_made(maker, changes, overruns):
    """oneDNN's AMX kernels of some dilated windows end the process: "free(): invalid size"."""
    case = {
        "channels": 64,
        "outputs": 16,
        "size": (70, 23),
        "window": (16, 7),
        "pad": 3,
        "dilation": 2,
    } | changes
    zero_points = case.pop("zero_points", {SRC: 0})
    wanted = wanted_for(**case)
    wanted = dataclasses.replace(
        wanted, attributes=dataclasses.replace(wanted.attributes, zero_points=zero_points)
    )
    assert trials.overruns_with_amx(wanted) == overruns
    made = []

    class Watched:
        def convolution(self, *arguments, amx, **options):
            made.append(amx)
            return maker.convolution(*arguments, amx=amx and not overruns, **options)

        def __getattr__(self, name):
            return getattr(maker, name)

    primitive, _ = trials.convolution(Watched(), wanted, wanted.weights)
    assert set(made) == {not overruns}
    assert not (overruns and "amx" in primitive.kernel)


def test_a_model_with_such_a_window_is_quantized():
    x = torch.randn(1, 64, 70, 23)
    q = quantized(nn.Sequential(nn.Conv2d(64, 4, (16, 7), padding=(8, 3), dilation=2)), x)
    assert worst_sqnr_db(q.reference(x), q(x)) > 60
    assert "amx" not in said(q.report())
