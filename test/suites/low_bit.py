"""Low-bit linears for tests of their kernels: weights, layers, exact products."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import nc
from nc.backends.low_bit.engine import LowBitEngine
from nc.formats import dtype
from nc.formats.tensor_format import low_bit
from nc.nn import QuantLinear
from nc.numerics.groups import GroupParams
from nc.numerics.packed_weight import pack
from nc.numerics.stored_scales import round_scale

native = pytest.mark.skipif(bool(nc.available_backends()["native"]), reason="needs AVX2")


def weight(form, outputs=48, inputs=128):
    """A random packed weight of a format, with scales of both signs where it is symmetric."""
    groups = inputs // form.group(inputs)
    count = len(form.dtype.values) or 2**form.bits
    codes = torch.randint(0, count, (outputs, inputs), dtype=torch.uint8)
    if form.dtype.name.startswith("fp8"):
        codes[codes.view(form.dtype.storage).float().isfinite().logical_not()] = 0
    scale = round_scale(torch.rand(outputs, groups) * 0.02 + 0.01, form.scale_dtype)
    zero = None if form.symmetric else torch.randint(0, 2**form.bits, (outputs, groups)).float()
    minimum = round_scale(-torch.rand(outputs, groups) * 0.1, form.scale_dtype) if form.float_zero else None
    if form.symmetric and form.dtype.kind == "integer":
        scale[::3] *= -1
    return pack(codes, GroupParams(scale, None if form.float_zero else zero, minimum), form)


def exact(packed):
    """The weights in float64, by the definition of the format."""
    form, (outputs, inputs) = packed.form, packed.shape
    codes, params = packed.unpacked().reshape(outputs, -1, form.group(inputs)), packed.params
    scale = params.scale.double().unsqueeze(-1)
    if form.dtype.kind == "float":
        table = torch.tensor(form.dtype.values, dtype=torch.float64)
        return (table[codes.long()] * scale).reshape(outputs, inputs)
    if params.minimum is not None:
        return (codes.double() * scale + params.minimum.double().unsqueeze(-1)).reshape(outputs, inputs)
    zero = form.middle if params.zero is None else params.zero.double().unsqueeze(-1)
    return ((codes.double() - zero) * scale).reshape(outputs, inputs)


def form(name="int4", group=32, kind="symmetric", scale_dtype="fp32"):
    return low_bit(
        dtype=dtype(name),
        group_size=group,
        symmetric=kind == "symmetric",
        float_zero=kind == "minimum",
        scale_dtype=scale_dtype,
    )


def layer_with(kernels, packed, act_dtype="fp32", bias=None):
    layer = QuantLinear(packed, bias, act_dtype)
    layer.engine = LowBitEngine("test", tuple(kernels))
    return layer


def ran(call):
    """Names of the operators that a call runs."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return {event.name for event in found.events()}
