"""Floating-point formats of at most 8 bits.

Their values, rounding to them, and weight-only quantization with them.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from nc import ConfigError, WeightOnlyConfig, load, quantize, report, save
from nc.formats import DTYPES, PER_CHANNEL, PER_TENSOR, TensorFormat, dtype, per_block, per_group
from nc.numerics import formats
from nc.numerics.weights import quantize_weight
from nc.ops import dequantize_float, quantize_float

FLOATS = [each for each in DTYPES.values() if each.kind == "float"]
GRANULARITIES = [PER_TENSOR, PER_CHANNEL, per_group(-1, 16), per_block((4, 8))]
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64).sin()

#: name → (largest value, smallest normal one, smallest subnormal one), from the specifications
LIMITS = {
    "fp4_e2m1": (6.0, 1.0, 0.5),
    "fp6_e2m3": (7.5, 1.0, 0.125),
    "fp6_e3m2": (28.0, 0.25, 0.0625),
    "fp8_e4m3": (448.0, 2**-6, 2**-9),
    "fp8_e5m2": (57344.0, 2**-14, 2**-16),
}


@pytest.mark.parametrize("name", LIMITS)
def test_values_are_those_of_the_specification(name):
    largest, normal, subnormal = LIMITS[name]
    exponent, mantissa = (int(digit) for digit in name[-3:].split("m"))
    found = dtype(name)
    assert found.largest == largest
    assert len(found.values) == 2**found.bits == 2 ** (1 + exponent + mantissa)
    finite = [value for value in found.values if math.isfinite(value)]
    assert min(value for value in finite if value > 0) == subnormal
    bias = 1 - math.log2(normal)
    for code, value in enumerate(found.values):
        sign, e, m = (
            code >> (exponent + mantissa),
            code >> mantissa & (2**exponent - 1),
            code & (2**mantissa - 1),
        )
        wanted = 2 ** (1 - bias) * m / 2**mantissa if e == 0 else 2 ** (e - bias) * (1 + m / 2**mantissa)
        assert value == (-wanted if sign else wanted) or not math.isfinite(value)


def test_fp4_and_nf4():
    assert dtype("fp4_e2m1").values[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    nf4 = dtype("nf4").values
    assert (nf4[0], nf4[7], nf4[15]) == (-1.0, 0.0, 1.0)
    assert list(nf4) == sorted(nf4)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_is_what_torch_casts_to(name):
    found = dtype(name)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        formats.dequantize(codes.view(found.storage), 1.0, found).nan_to_num(),
        codes.view(found.storage).float().nan_to_num(),
    )
    torch.manual_seed(0)
    x = torch.randn(100_000) * torch.logspace(-6, 5, 100_000)
    x = torch.cat(
        [
            x,
            (values := torch.tensor(sorted(v for v in found.values if math.isfinite(v))))[1:] / 2
            + values[:-1] / 2,
        ]
    )
    wanted = (
        x.clamp(-found.largest, found.largest).to(found.storage).float()
    )  # torch itself does not saturate
    assert torch.equal(formats.quantize(x, 1.0, found).float(), wanted)


def brute_force(x, found):
    """The nearest value by distance in float64, of two the one with the even code."""
    values = np.array(found.values)
    codes = np.flatnonzero((np.abs(values) <= found.largest) & ~((values == 0) & np.signbit(values)))
    result = []
    for number in np.clip(x.double().flatten().numpy(), values[codes].min(), values[codes].max()):
        distance = np.abs(values[codes] - number)
        nearest = codes[distance == distance.min()]
        result.append(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0])
    return result


@pytest.mark.parametrize("found", FLOATS, ids=str)
def test_rounding_is_that_of_brute_force(found):
    torch.manual_seed(0)
    finite = torch.tensor(sorted({value for value in found.values if math.isfinite(value)}))
    middles = (finite[1:] + finite[:-1]) / 2
    beyond = torch.tensor([math.inf, -math.inf, 1e30, -1e30, 1.01 * found.largest, 0.0, -0.0])
    near = torch.cat([torch.nextafter(middles, torch.tensor(end)) for end in (-math.inf, math.inf)])
    ties = (
        middles if not found.name.startswith(("nf", "af")) else middles[:0]
    )  # where its middles lie is no matter of fp32
    x = torch.cat(
        [finite, ties, near if len(ties) else middles[:0], beyond, torch.randn(2000) * found.largest / 3]
    )
    assert formats.nearest_codes(x, found).tolist() == brute_force(x, found)


@pytest.mark.parametrize(
    ("x", "nearest"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (6.9, 6), (-5, -4)],
)
def test_ties_of_fp4_go_to_the_even_mantissa(x, nearest):
    found = dtype("fp4_e2m1")
    assert formats.dequantize(formats.quantize(torch.tensor([x]), 1.0, found), 1.0, found).item() == nearest


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("found", FLOATS, ids=str)
@pytest.mark.parametrize("algo", ["minmax", "mse"])
def test_operators_and_weights_of_any_granularity(found, granularity, algo):
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    weight[3] = 0
    codes, scale = quantize_weight(
        weight, TensorFormat(dtype=found, symmetric=True, granularity=granularity, algo=algo), 0
    )
    block = granularity.block_size(weight.shape, 0)
    assert (codes.dtype, codes.shape, scale.dtype) == (found.storage, weight.shape, torch.float32)
    assert torch.equal(quantize_float(weight, scale, found.name).view(torch.uint8), codes.view(torch.uint8))
    values = dequantize_float(codes, scale, found.name)
    scale = scale.reshape([size // part for size, part in zip(weight.shape, block, strict=True)])
    for corner in np.ndindex(*scale.shape):
        where = tuple(slice(c * b, (c + 1) * b) for c, b in zip(corner, block, strict=True))
        assert codes.view(torch.uint8)[where].flatten().tolist() == brute_force(
            weight[where] / scale[corner], found
        )
        assert torch.equal(
            values[where], torch.tensor(found.values)[codes.view(torch.uint8)[where].int()] * scale[corner]
        )
        if algo == "minmax" and weight[where].any():
            assert scale[corner] == pytest.approx(weight[where].abs().max().item() / found.largest, rel=1e-6)
    rounded_to_amax = quantize_weight(
        weight, TensorFormat(dtype=found, symmetric=True, granularity=granularity), 0
    )
    power = [
        (v - weight).abs().pow(2.4).sum() for v in (values, dequantize_float(*rounded_to_amax, found.name))
    ]
    assert power[0] <= power[1] * (1 + 1e-6)


@pytest.mark.parametrize("found", FLOATS, ids=str)
def test_operators_have_meta_kernels(found):
    x, scale = torch.empty(4, 8, device="meta"), torch.empty(4, 1, device="meta")
    codes = quantize_float(x, scale, found.name)
    assert (codes.dtype, codes.shape) == (found.storage, x.shape)
    assert dequantize_float(codes, scale, found.name).dtype == torch.float32
    real = torch.randn(4, 8), torch.ones(4, 1)
    assert dequantize_float(
        quantize_float(torch.empty(0, 8), torch.ones(4, 1), found.name), torch.ones(4, 1), found.name
    ).shape == (0, 8)
    torch.library.opcheck(
        dequantize_float,
        (quantize_float(*real, found.name), real[1], found.name),
        test_utils="test_faketensor",
    )


def test_floats_have_no_zero_point_and_use_all_codes():
    for fields in (
        {"symmetric": False},
        {"symmetric": True, "narrow": True},
        {"symmetric": True, "reduce_range": True},
    ):
        with pytest.raises(ConfigError, match="nf4 is a floating-point format"):
            TensorFormat(dtype="nf4", **fields)


# ---- from configuration to report ----


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).eval()


def rounded(weight, found, group):
    rows = weight.detach().reshape(-1, group)
    scale = rows.abs().amax(1, keepdim=True) / found.largest
    values = torch.tensor(found.values).double()
    return (values[brute_force(rows / scale, found)].reshape(rows.shape) * scale).reshape(weight.shape)


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("found", FLOATS, ids=str)
def test_weight_only_from_configuration_to_report(found, group, tmp_path):
    model = mlp()
    q = quantize(model, WeightOnlyConfig(w_dtype=found.name, group_size=group, w_algo="minmax"))
    first, second = (
        rounded(m.weight, found, m.in_features if group == -1 else group) for m in (model[0], model[2])
    )
    expected = (X.double() @ first.T + model[0].bias.double()).relu() @ second.T + model[2].bias.double()
    assert torch.allclose(q(X).double(), expected, rtol=1e-5, atol=1e-6)
    loss = 10 ** (-{4: 13, 6: 22, 8: 20}[found.bits] / 10)
    assert all(layer.form.startswith(found.name) and layer.loss < loss for layer in report(q).layers)
    save(q, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved", model=mlp())(X), q(X))


def test_more_mantissa_costs_less():
    def loss(name):
        return sum(
            layer.loss
            for layer in report(quantize(mlp(), WeightOnlyConfig(w_dtype=name, group_size=32))).layers
        )

    losses = [loss(name) for name in ("fp4_e2m1", "fp6_e3m2", "fp6_e2m3")]
    assert losses == sorted(losses, reverse=True)
