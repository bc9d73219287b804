"""Low-bit linears in C: instruction sets of this CPU, and what rounding may change."""

import torch
from suites.low_bit import exact
from torch import nn

from nc.kernels.c_code import limit
from nc.kernels.low_bit import compiled
from nc.kernels.low_bit.compiled import NUMBERS

HERE = {name: NUMBERS[name] for name in compiled.usable()}
#: Those to test: under a limit the best one, because each of the others has a run of its own (test/isas.py).
TESTED = list(HERE)[:1] if limit.limit() else list(HERE)


def bound(x, packed, bias):
    """Of products and sums in fp32: relative to the largest that their parts can be.

    A weight, its product and the bias are rounded too.
    """
    scale = (
        packed.params.scale.abs()
        .double()
        .repeat_interleave(packed.shape[1] // packed.params.scale.shape[1], 1)
    )
    return (
        (packed.shape[1] + 3)
        * 2**-24
        * (x.abs() @ (exact(packed).abs() + scale * 2**packed.form.bits).T + bias.double().abs())
    )


def rounded(x, block):
    """What int8 activations stand for, in float64: one scale per row, or per `block` elements of it."""
    parts = (
        x.double().unsqueeze(1)
        if block == -1
        else nn.functional.pad(x.double(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    )
    scale = (parts.abs().amax(-1, keepdim=True) / 127).float().double()
    scale[scale == 0] = 1
    return (torch.round((parts.float() / scale.float()).double()).clamp(-127, 127) * scale).flatten(1)[
        :, : x.shape[1]
    ]
