"""MX and NVFP4 weights against torchao's."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from nc.formats import PRESETS, SCALE_MODES
from nc.numerics import bits, mx
from nc.numerics.formats import values
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp4": torch.float4_e2m1fn_x2,
}


def weights(rows, columns, dtype, *, near):
    """Of many magnitudes, with values at the largest element times powers of two, and with `near` next to it."""
    weight = torch.randn(rows, columns) * torch.logspace(-6, 6, rows).unsqueeze(1)
    weight[: rows // 2, ::32] = dtype.largest * torch.exp2(
        torch.randint(-8, 8, (rows // 2, columns // 32)).float()
    )
    if near:
        weight[: rows // 4, ::32] = torch.nextafter(weight[: rows // 4, ::32], torch.tensor(math.inf))
    weight[rows // 4 : rows // 3, ::32] = torch.exp2(torch.randint(-8, 8, (1, columns // 32)).float())
    return weight


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_is_torchaos(name, mode):
    form = replace(PRESETS[name], scale_mode=mode)
    # torchao's rceil multiplies by the reciprocal of the largest element in fp32, which errs by a bit next to
    # it; ours is exact
    weight = weights(64, 256, form.dtype, near=mode != "rceil")
    scale, data = to_mx(weight, ELEMENTS[name], 32, ScaleCalculationMode[mode.upper()])
    found = choose(weight, form, "minmax")
    codes = encode(weight, found, form)
    amax = weight.reshape(64, -1, 32).abs().amax(2)
    assert torch.equal(mx.shared_codes(amax, form.dtype, mode), scale.view(torch.uint8).reshape(64, -1))
    assert torch.equal(found.scale, scale.float().reshape(64, -1))
    theirs = bits.unpack(data, 4, 256) if name == "mxfp4" else data.view(torch.uint8)
    table = values(form.dtype)
    assert torch.equal(table[codes.int()], table[theirs.int()])  # 0 and -0 are equal


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_exponents_of_extremes_are_torchaos(mode):
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-130, 2.0**-126, 2.0**-120, 1e38, 2.0**127, math.nan])
    weight = torch.zeros(len(amax), 32)
    weight[:, 3] = amax
    scale, _ = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode.upper()])
    ours = mx.shared_codes(amax, PRESETS["mxfp8_e4m3"].dtype, mode)
    assert ours.tolist() == scale.view(torch.uint8).flatten().tolist()


def test_nvfp4_is_torchaos_where_it_does_not_clamp():
    form = PRESETS["nvfp4"]
    weight = torch.randn(64, 256) * 0.02
    weight[0, :16] *= 5e-5
    tensor = per_tensor_amax_to_scale(weight.abs().max())
    scale, data = nvfp4_quantize(weight, 16, tensor)
    found = choose(weight, form, "minmax")
    assert torch.equal(found.outer.scale, tensor.reshape(1, 1))
    ours = (found.scale / tensor).to(torch.float8_e4m3fn).float()
    clamped = ours < 2.0**-6  # torchao's least scale of a block; ours keeps subnormal ones
    assert clamped.sum() == 1
    assert torch.equal(ours[~clamped], scale.float().reshape(64, -1)[~clamped])
    table = values(form.dtype)
    one, other = (
        table[c.int()].reshape(64, -1, 16) for c in (encode(weight, found, form), bits.unpack(data, 4, 256))
    )
    # torchao multiplies by reciprocals, which moves what is next to a tie
    assert (one == other)[~clamped].float().mean() > 0.999
    units = (weight.reshape(64, -1, 16) / found.scale.unsqueeze(2))[~clamped]
    different = (one != other)[~clamped]
    assert (
        (units[different].abs().unsqueeze(1) - torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
        .abs()
        .amin(1)
        < 1e-5
    ).all()
