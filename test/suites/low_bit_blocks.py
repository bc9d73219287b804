"""Low-bit linears of every format in C, against float64."""

import torch

from nc.formats.dtypes import DTYPES

INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]


def values_of(packed):
    """The weights in float64, and the magnitude of the terms they are made of.

    By the definition of the format, without its params.
    """
    dtype, inputs, groups = packed.form.dtype, packed.shape[1], packed.scale.shape[1]

    def spread(part, outer):
        part = part.double()
        if outer is not None:
            outer = outer.double()
            part = part * (
                outer
                if outer.numel() == 1
                else outer.repeat_interleave(-(-groups // outer.shape[1]), 1)[:, :groups]
            )
        return part.repeat_interleave(inputs // groups, 1)

    codes, scale = packed.unpacked().long(), spread(packed.scale, packed.outer_scale)
    if dtype.kind == "float":
        weights = torch.tensor(dtype.values, dtype=torch.float64)[codes] * scale
        return weights, weights.abs()
    if packed.minimum is not None:
        weights = codes * scale + spread(packed.minimum, packed.outer_minimum)
    else:
        zero = (
            2 ** (dtype.bits - 1)
            if packed.zero is None
            else packed.params.zero.double().repeat_interleave(inputs // groups, 1)
        )
        weights = (codes - zero) * scale
    return weights, weights.abs() + scale.abs() * 2**dtype.bits


def check(packed, x, result, bias=None, values=None, best="amx"):
    """A result within the bound of products and sums in fp32, where every number is finite.

    AMX rounds weights to bf16 where x is bf16.
    """
    weights, terms = values_of(packed)
    values = x.double() if values is None else values
    bias = torch.zeros(packed.shape[0], dtype=torch.float64) if bias is None else bias.double()
    bound = (packed.shape[1] + 4) * 2**-24 * (values.abs() @ terms.T + bias.abs()) + packed.shape[
        1
    ] * 2.0**-112
    if x.dtype == torch.bfloat16 and best == "amx" and len(x) >= 5:
        bound += 2**-8 * (values.abs() @ weights.abs().T)
    assert ((result.double() - (values @ weights.T + bias)).abs() <= bound).all()
