"""Depthwise convolutions in C for CPUs with AVX2 and no VNNI: against float64, for every shape, operation and sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import quantized
from suites.code_products import OPERATIONS, ZERO_POINTS, check, convolve, fits, product_of
from suites.cpus import as_cpu
from torch import nn
from torch.nn import functional as F

from nc.backends import available_backends
from nc.backends.native.operators import depthwise
from nc.backends.native.plans import c_functions
from nc.kernels import cpu
from nc.kernels.onednn.descriptions import Geometry, Sum
from nc.process.unavailable import Unavailable

_WHY = (
    available_backends()["native"]
    or c_functions.why_unavailable()
    or ("" if "avx2" in cpu.detected() else "this CPU has no AVX2")
)
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY)]


@settings(max_examples=150)
@given(
    images=st.integers(1, 3),
    channels=st.integers(16, 70),
    sizes=st.tuples(st.integers(5, 20), st.integers(5, 20)),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    steps_=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 4)] * 4),
    flat=st.booleans(),
    operation=st.sampled_from(list(OPERATIONS)),
    added=st.sampled_from(["nothing", "codes", "fp32"]),
    to_codes=st.sampled_from(list(ZERO_POINTS)),
    zero_point=st.sampled_from([0, 3, 255]),
    threads=st.integers(1, 3),
)
def test_a_depthwise_convolution(
    images,
    channels,
    sizes,
    window,
    steps_,
    dilations,
    pads,
    flat,
    operation,
    added,
    to_codes,
    zero_point,
    threads,
):
    added = added if fits(added, to_codes) and channels % 16 == 0 else "nothing"
    dims = 1 if flat else 2
    window, dilations = window[:dims], dilations[:dims]
    geometry = Geometry(steps_[:dims], pads[:dims], pads[2 : 2 + dims], dilations, window=window)
    sizes = tuple(
        max(size, d * (k - 1) + 1) for size, d, k in zip(sizes[:dims], dilations, window, strict=True)
    )
    x = torch.randint(0, 256, (images, *sizes, channels), dtype=torch.uint8).movedim(-1, 1)
    weight = torch.randint(-127, 128, (channels, 1, *window), dtype=torch.int8)
    around = [
        n for pair in zip(reversed(geometry.before), reversed(geometry.after), strict=True) for n in pair
    ]
    exact = (F.conv1d if flat else F.conv2d)(
        F.pad(x.double() - zero_point, around),
        weight.double(),
        stride=steps_[:dims],
        dilation=dilations,
        groups=channels,
    )
    shape = tuple(exact.shape)
    strides = torch.empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1).stride()
    rows = exact.movedim(1, -1).reshape(-1, channels)
    options = {"zero_point": zero_point, "geometry": geometry, "groups": channels}
    check(convolve, x, weight, rows, (shape, strides), operation, added, to_codes, threads, **options)


@pytest.mark.parametrize("channels", [24, 32])
def test_channels_that_are_computed_twice_are_not_added_in_place(channels):
    x = torch.zeros(1, 6, 6, channels, dtype=torch.uint8).movedim(-1, 1)
    a = {"x_scale": 1.0, "x_zero_point": 0, "output_scale": 0.01, "output_zero_point": 9}
    geometry = Geometry((1, 1), (1, 1), (1, 1), (1, 1), window=(3, 3))
    result = torch.full((1, 6, 6, channels), 5, dtype=torch.uint8).movedim(-1, 1)
    weight, post_ops = torch.ones(channels, 1, 3, 3, dtype=torch.int8), [Sum(1.0, 0, torch.uint8)]
    how = {"geometry": geometry, "groups": channels}
    assert convolve(a, product_of(x, result, weight, torch.ones(1), None, post_ops, **how)) is (
        channels % 16 == 0
    )


@pytest.mark.parametrize("feature", ["avx512f", "avx_vnni", "avx512_vnni", "amx_int8"])
def test_other_cpus_have_kernels_in_onednn(monkeypatch, feature):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", feature))
    assert depthwise.why_unavailable() == f"oneDNN has kernels for {feature}"
    as_cpu(monkeypatch)
    assert depthwise.why_unavailable() == "this CPU has no avx2"


@pytest.mark.needs_plans
def test_without_a_compiler_onednn_computes(monkeypatch):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    monkeypatch.setattr(depthwise, "_function", lambda: Unavailable("there is no C compiler"))
    q = quantized(nn.Conv2d(16, 16, 3, groups=16).eval(), torch.randn(1, 16, 7, 7), None, "native")
    (kernel,) = (op.kernel for op in q.report().ops if op.kernel)
    assert kernel.startswith("convolution")
