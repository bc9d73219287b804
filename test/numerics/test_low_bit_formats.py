"""Scales of low-bit weights.

Shared exponents, two levels, storage formats, and range rules, against float64 by hand and brute force.
"""

import math
from dataclasses import replace

import pytest
import torch

from nc import ConfigError
from nc.formats import (
    PRESETS,
    SCALE_DTYPES,
    SCALE_MODES,
    DoubleQuant,
    TensorFormat,
    dtype,
    input_groups,
    low_bit,
)
from nc.numerics import mx
from nc.numerics.group_ranges import RULES, choose
from nc.numerics.groups import GroupParams, decode, encode, join
from nc.numerics.packed_weight import pack
from nc.numerics.stored_scales import LIMITS, round_scale, second_level

KQUANT = DoubleQuant(6, 8, "fp16")
FORMS = {
    str(form): form
    for form in (
        *(low_bit(dtype=f"int{bits}", group_size=32, scale_dtype="fp16") for bits in range(2, 9)),
        *(
            low_bit(dtype=f"uint{bits}", group_size=64, symmetric=False, scale_dtype="bf16")
            for bits in range(2, 9)
        ),
        low_bit(dtype="int4", group_size=-1),
        low_bit(dtype="int4", group_size=64, symmetric=False, float_zero=True, scale_dtype="fp16"),
        low_bit(dtype="int4", group_size=32, scale_dtype="e8m0"),
        low_bit(dtype="int4", group_size=16, symmetric=False, scale_dtype="e8m0"),
        low_bit(dtype="int4", group_size=32, double_quant=KQUANT),
        low_bit(dtype="int4", group_size=32, symmetric=False, double_quant=DoubleQuant(8, -1, "fp32")),
        low_bit(dtype="int4", group_size=32, symmetric=False, float_zero=True, double_quant=KQUANT),
        low_bit(dtype="int4", group_size=32, scale_dtype="e4m3", tensor_scale=True),
        low_bit(dtype="nf4", group_size=64),
        low_bit(dtype="nf4", group_size=64, double_quant=DoubleQuant(8, 256, "fp32")),
        low_bit(dtype="af4", group_size=64, scale_dtype="fp16"),
        *PRESETS.values(),
    )
}
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def solved(weight, form, rule="wls", importance=None):
    found = choose(weight, form, rule, importance)
    return found, pack(encode(weight, found, form), found, form)


def loss(weight, packed):
    return (packed.dequantize().double() - weight.double()).square().sum().item()


def heavy(rows, columns):
    return torch.distributions.StudentT(4.0).sample((rows, columns)) * 0.02


@EACH
def test_what_is_stored_is_what_codes_were_chosen_for(form):
    weight = heavy(8, 1024)
    found, packed = solved(weight, form)
    again = packed.params
    for name in ("scale", "zero", "minimum"):
        one, other = getattr(found, name), getattr(again, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert torch.equal(packed.dequantize(), decode(encode(weight, found, form), found, form))
    assert torch.equal(packed.unpacked(), encode(weight, found, form))
    assert loss(weight, packed) < 0.25 * weight.double().square().sum()
    assert TensorFormat.from_dict(form.to_dict()) == form


@EACH
def test_size_is_that_of_the_formula(form):
    form = form if form.group_size == -1 else replace(form, granularity=input_groups(128))
    weight = torch.randn(256, 4096) * 0.02
    _, packed = solved(weight, form, "minmax")
    assert packed.bytes * 8 / weight.numel() == pytest.approx(form.bits_per_weight(4096, 256), rel=0.02)
    assert packed.bytes * 8 / weight.numel() < form.bits + 0.6


@EACH
@pytest.mark.parametrize("rule", RULES)
def test_zeros_constants_and_tiny_groups(form, rule):
    weight = heavy(6, 512)
    weight[0] = 0
    weight[1, :256] = 0
    weight[2] = 0.3
    weight[3] = -0.3
    weight[4] *= 1e-9
    weight[5, :128] *= 1e-30
    _, packed = solved(weight, form, rule)
    for name, tensor in packed.tensors().items():
        assert tensor.float().isfinite().all(), name
        assert "scale" not in name or (tensor.float() != 0).all(), name
    result = packed.dequantize()
    assert result.isfinite().all()
    assert (result[0] == 0).all()
    assert (result[1, :256] == 0).all()
    step = {"powers": 0.5}.get("powers" if form.powers else "", 0.0) + 2.0 ** -(form.bits - 1)
    assert (result[2:4] - weight[2:4]).abs().max() <= 0.3 * step * (1.1 if form.bits > 2 else 1.0) + 1e-6
    assert (result[4]).abs().max() < 1e-5


def test_a_weight_of_zeros():
    for form in FORMS.values():
        _, packed = solved(torch.zeros(4, 256), form)
        assert (packed.dequantize() == 0).all()
        assert all(
            (t.float() != 0).all() and t.float().isfinite().all()
            for n, t in packed.tensors().items()
            if n.endswith("scale")
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [1e-3, 4e-4, 1e-5, 3e-7, 1e-7, 1e-12])
def test_subnormal_scales_of_fp16_are_exact_and_never_zero(amax, rule):
    form = low_bit(dtype="int4", group_size=32, scale_dtype="fp16")
    weight = torch.linspace(-1, 1, 64).reshape(2, 32) * amax
    found, packed = solved(weight, form, rule)
    steps = packed.scale.double() * 2**24
    assert torch.equal(steps, steps.round())
    assert (steps.abs() >= 1).all()
    assert torch.equal(packed.scale.float(), found.scale)
    # half a step of the scale's grid times 8, and half a scale
    assert (
        packed.dequantize() - weight
    ).abs().max() <= 0.5 * found.scale.abs().max() + 8 * 2.0**-25 + 0.15 * amax


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_scales_are_rounded_to_nearest_within_limits(scale_dtype):
    least, most = LIMITS[scale_dtype]
    x = torch.cat([torch.randn(1000).abs() * torch.logspace(-12, 8, 1000), torch.tensor([0.0, 1e-45, 3e38])])
    rounded = round_scale(x, scale_dtype)
    assert rounded.isfinite().all()
    assert torch.equal(rounded.to(SCALE_DTYPES[scale_dtype]).float(), rounded)
    assert (rounded.min(), rounded.max()) == (least, most) or scale_dtype in ("fp32", "bf16", "e8m0")
    digits = {"fp32": 24, "bf16": 8, "fp16": 11, "e4m3": 4, "e8m0": 1}[scale_dtype]
    held = x.double().clamp(least, most)
    unit = {"fp16": 2.0**-24, "e4m3": 2.0**-9}.get(scale_dtype, 0.0)
    assert (
        (rounded.double() - held).abs() <= torch.maximum(held * 2.0**-digits, torch.tensor(unit / 2))
    ).all()
    if scale_dtype != "e8m0":
        assert torch.equal(round_scale(-x[:-3], scale_dtype), -rounded[:-3]) or scale_dtype in (
            "fp16",
            "e4m3",
        )


def test_weights_too_large_for_their_scales_are_refused():
    weight = torch.full((2, 64), 65504.0 * 8)
    for form in (
        low_bit(dtype="int4", group_size=32, scale_dtype="fp16"),
        low_bit(dtype="int4", group_size=32, scale_dtype="e4m3"),
    ):
        with pytest.raises(
            ConfigError, match=r"largest one in (fp16|e4m3) is .* Use scale_dtype='bf16' or 'fp32'"
        ):
            choose(weight, form)
    _, packed = solved(weight, low_bit(dtype="int4", group_size=32, scale_dtype="bf16"))
    assert torch.allclose(packed.dequantize(), weight, rtol=0.01)
    _, packed = solved(weight, PRESETS["nvfp4"])
    assert torch.allclose(packed.dequantize(), weight, rtol=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "nf4", "symmetric": False},
        {"dtype": "int4", "float_zero": True},
        {"dtype": "int4", "symmetric": False, "float_zero": True, "scale_dtype": "e8m0"},
        {"dtype": "int4", "tensor_scale": True, "double_quant": KQUANT},
        {"dtype": "int4", "scale_mode": "round"},
        {"dtype": "int4", "scale_dtype": "fp8"},
    ],
)
def test_formats_that_cannot_be(options):
    with pytest.raises(ConfigError):
        low_bit(**options)


@pytest.mark.parametrize("options", [{"bits": 9}, {"bits": 0}, {"group_size": 0}, {"outer_dtype": "e8m0"}])
def test_double_quantization_that_cannot_be(options):
    with pytest.raises(ConfigError):
        DoubleQuant(**options)


# shared exponents

ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "mxint8")
EMAX = dict(zip(ELEMENTS, (8, 15, 2, 4, 2, 0), strict=True))
MANTISSA = dict(zip(ELEMENTS, (3, 2, 3, 2, 1, 6), strict=True))


def exponent_by_hand(amax, name, mode):
    """In exact arithmetic; frexp gives a fraction in [0.5, 1) and an exponent."""
    if amax == 0:
        return -127
    fraction, power = math.frexp(amax)
    if mode == "even":
        rounded = math.floor(
            fraction * 2 ** (MANTISSA[name] + 1) + 0.5
        )  # half up, as adding half to the bits does
        found = power - 1 + (rounded == 2 ** (MANTISSA[name] + 1)) - EMAX[name]
    elif mode == "rceil":
        found = next(
            e for e in range(power - EMAX[name] - 3, power + 3) if dtype(name).largest * 2.0**e >= amax
        )
    else:
        found = power - 1 + (mode == "ceil" and fraction != 0.5) - EMAX[name]
    return max(-127, min(127, found))


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_shared_exponents(name, mode):
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    around = torch.cat(
        [powers * k for k in (1.0, 1.5, 1.75, 1.875, 1.9375, dtype(name).largest / 2 ** EMAX[name])]
    )
    amax = torch.cat(
        [
            around,
            torch.nextafter(around, torch.tensor(math.inf)),
            torch.nextafter(around, torch.tensor(0.0)),
            torch.rand(500),
        ]
    )
    amax = amax[amax.isfinite()]
    codes = mx.shared_codes(amax, dtype(name), mode)
    assert codes.tolist() == [exponent_by_hand(a, name, mode) + 127 for a in amax.tolist()]
    assert torch.equal(mx.scales(codes).double(), torch.exp2(codes.double() - 127))


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_blocks_of_zeros_and_of_what_is_no_number(mode):
    codes = mx.shared_codes(torch.tensor([0.0, math.inf, math.nan]), dtype("fp4_e2m1"), mode)
    assert codes.tolist() == [0, 255, 255]
    assert mx.scales(codes)[1:].isnan().all()


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8"])
def test_minmax_follows_the_mode_and_other_rules_are_no_worse(name, mode):
    form = replace(PRESETS[name], scale_mode=mode)
    weight = heavy(16, 256)
    amax = weight.reshape(16, -1, 32).abs().amax(2)
    found, packed = solved(weight, form, "minmax")
    wanted = [[2.0 ** exponent_by_hand(a, str(form.dtype), mode) for a in row] for row in amax.tolist()]
    assert found.scale.tolist() == wanted
    assert packed.scale.dtype == torch.float8_e8m0fnu
    by_wls = solved(weight, form, "wls")[1]
    assert loss(weight, by_wls) <= loss(weight, packed)
    neighbours = (by_wls.params.scale / found.scale).unique()
    assert set(neighbours.tolist()) <= {0.5, 1.0, 2.0}
    if mode in ("ceil", "rceil"):
        assert (weight.reshape(16, -1, 32).abs() / found.scale.unsqueeze(2)).max() <= form.dtype.largest


# two levels


def test_nvfp4_by_hand():
    form = PRESETS["nvfp4"]
    weight = heavy(8, 256)
    weight[0, :16] *= 5e-5  # its scale is subnormal in E4M3
    found, packed = solved(weight, form, "minmax")
    tensor = weight.abs().max() / (448 * 6)
    inner = (weight.reshape(8, -1, 16).abs().amax(2) / 6 / tensor).to(torch.float8_e4m3fn)
    assert torch.equal(packed.outer_scale, tensor.reshape(1, 1))
    assert torch.equal(packed.scale.float(), inner.float())
    assert packed.scale[0, 0].float() < 2.0**-6
    assert torch.equal(found.scale, inner.float() * tensor)


@pytest.mark.parametrize("groups", [1, 5, 8, 9, 12, 17])
@pytest.mark.parametrize("float_zero", [False, True])
def test_double_quantization_by_hand(groups, float_zero):
    double = DoubleQuant(6, 4, "fp16")
    form = low_bit(
        dtype="int4", group_size=16, symmetric=not float_zero, float_zero=float_zero, double_quant=double
    )
    scale = torch.rand(3, groups) * 0.1
    minimum = -torch.rand(3, groups) if float_zero else None
    found = second_level(GroupParams(scale, None, minimum), form)
    count = double.outer_count(groups)
    size = math.ceil(groups / count)
    assert found.outer.scale.shape == (3, count)
    for row in range(3):
        for start in range(0, groups, size):
            part = slice(start, start + size)
            outer = (scale[row, part].max() / 63).to(torch.float16).float()
            codes = (scale[row, part] / outer).round().clamp(1, 63)
            assert torch.equal(found.scale[row, part], codes * outer)
            assert codes.max() == 63
            if float_zero:
                least = (minimum[row, part].min() / 63).to(torch.float16).float()
                assert torch.equal(
                    found.minimum[row, part], (minimum[row, part] / least).round().clamp(0, 63) * least
                )
    packed = pack(torch.zeros(3, groups * 16, dtype=torch.uint8), found, form)
    assert packed.scale.dtype == torch.uint8
    assert packed.outer_scale.dtype == torch.float16
    assert torch.equal(packed.params.scale, found.scale)
    if float_zero:
        assert torch.equal(packed.params.minimum, found.minimum)
    wanted = form.bits_per_weight(groups * 16)
    assert packed.bytes * 8 / (3 * groups * 16) == pytest.approx(wanted)


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form.two_levels], ids=str)
def test_groups_one_after_the_other_with_outer_scales_of_the_whole(form):
    weight = heavy(8, 1024)
    whole = choose(weight, form)
    size, groups = form.group(1024), 1024 // form.group(1024)
    parts = [
        choose(weight[:, i * size : (i + 1) * size], form, outer=whole.outer.of_groups(i, 1, groups))
        for i in range(groups)
    ]
    joined = join(parts, outer=whole.outer)
    for name in ("scale", "zero", "minimum"):
        one, other = getattr(whole, name), getattr(joined, name)
        assert one is other is None or torch.equal(one, other)
    assert torch.equal(pack(encode(weight, joined, form), joined, form).params.scale, whole.scale)


# least squares


def best_possible(group, form, h):
    """The least weighted square error of one group over a dense grid of scales, with any zero point or the best minimum, in float64."""
    w, h = group.double(), h.double()
    steps = 2**form.bits - 1
    if form.symmetric:
        integers = torch.arange(-form.middle, form.middle)
        values = torch.tensor(form.dtype.values or integers.tolist(), dtype=torch.float64)
        scales = torch.linspace(0.1, 2.0, 3000).double() * w.abs().max() / values.abs().max()
        scales = torch.cat([scales, -scales]) if form.dtype.kind == "integer" else scales
        q = values[((w / scales.unsqueeze(1)).unsqueeze(2) - values).abs().argmin(2)]
        return _residuals(w, q, h).min().item()
    span = w.max().clamp(min=0) - w.min().clamp(max=0)
    scales = torch.linspace(0.2, 1.2, 200).double() * span / steps
    if not form.float_zero:
        zeros = torch.arange(steps + 1).reshape(1, -1, 1).double()
        q = (w / scales.reshape(-1, 1, 1)).round().clamp(min=-zeros, max=steps - zeros)
        return _residuals(w, q, h).min().item()
    lows = w.min() + torch.linspace(-0.1, 0.6, 140).double().reshape(1, -1, 1) * span
    q = ((w - lows) / scales.reshape(-1, 1, 1)).round().clamp(0, steps)
    centred = q - (q * h).sum(-1, keepdim=True) / h.sum()  # a free minimum takes the means out
    return _residuals(w - (w * h).sum() / h.sum(), centred, h).min().item()


def _residuals(w, q, h):
    """The error of each q with the scale that fits it best."""
    return (h * w * w).sum() - (h * w * q).sum(-1).square() / (h * q * q).sum(-1).clamp(min=1e-30)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({"dtype": "int2"}, 1.02),
        ({"dtype": "int3"}, 1.04),
        ({"dtype": "int4"}, 1.05),
        ({"dtype": "int2", "symmetric": False}, 1.03),
        ({"dtype": "int4", "symmetric": False}, 1.08),
        ({"dtype": "int4", "symmetric": False, "float_zero": True}, 1.12),
        ({"dtype": "nf4"}, 1.05),
        ({"dtype": "fp4_e2m1"}, 1.05),
    ],
    ids=str,
)
def test_least_squares_come_near_the_best(options, within, weighted):
    form = low_bit(group_size=32, **options)
    weight = torch.cat([torch.randn(6, 32), heavy(6, 32)])
    importance = torch.rand(32) ** 2 if weighted else None
    rms = weight.square().mean(1, keepdim=True).sqrt()
    h = (
        weight.abs() + rms if importance is None else importance.expand(12, 32)
    )  # without data, large weights matter more
    _, packed = solved(weight, form, "wls", importance)
    errors = ((packed.dequantize() - weight).double().square() * h).sum(1)
    best = torch.tensor(
        [best_possible(group, form, each) for group, each in zip(weight, h, strict=True)], dtype=torch.float64
    )
    assert (errors >= best * 0.97).all()
    assert (errors / best).mean() <= within
    by_minmax = ((solved(weight, form, "minmax")[1].dequantize() - weight).double().square() * h).sum(1)
    assert (errors <= by_minmax * (1 + 1e-6)).all()


@EACH
def test_least_squares_are_better_than_the_other_rules(form):
    weight = heavy(32, 512)
    by_wls, by_mse, by_minmax = (
        loss(weight, solved(weight, form, rule, torch.ones(512))[1]) for rule in ("wls", "mse", "minmax")
    )
    assert by_wls <= by_minmax
    assert by_wls <= by_mse * 1.005


def test_importance_moves_the_scale_to_what_matters():
    form = low_bit(dtype="int3", group_size=64)
    weight = heavy(64, 256)
    importance = torch.logspace(-2, 2, 256)[torch.randperm(256)]

    def weighted(packed):
        return ((packed.dequantize() - weight).double().square() * importance).sum()

    assert weighted(solved(weight, form, "wls", importance)[1]) < 0.9 * weighted(solved(weight, form)[1])


def test_signs_of_scales():
    weight = heavy(32, 256)
    assert (choose(weight, low_bit(dtype="int4", group_size=32)).scale < 0).any()
    for form in FORMS.values():
        if form.two_levels or form.powers or form.dtype.kind == "float":
            assert (choose(weight, form).scale > 0).all()


def test_a_rule_that_does_not_exist_is_no_other_one():
    with pytest.raises(ValueError, match="no rule for the ranges of groups is called 'tight'"):
        choose(torch.randn(4, 32), low_bit(dtype="int4", group_size=32), "tight")
