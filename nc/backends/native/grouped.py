"""Grouped convolutions for which oneDNN has nothing in int8 but plain C++.

That takes longer than the convolution in fp32. Some groups together, with weights of 0 between them, are one
group that gives the same sums and may have a fast kernel.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from nc.errors import BackendUnavailableError
from nc.graph.fx_utils import constant_of
from nc.graph.tensor_meta import hint_of
from nc.graph.views import Conv, Dequantize
from nc.kernels.cpu import accumulates_wide
from nc.kernels.onednn.api import Unimplemented
from nc.kernels.onednn.descriptions import (
    DST,
    SRC,
    WEIGHTS,
    Attributes,
    Desc,
    Geometry,
    channels_last_strides,
)
from nc.kernels.onednn.providers import provider
from nc.numerics.int16_pairs import PAIR_LIMIT, fit

#: How names of oneDNN's kernels in plain C++ begin.
_PLAIN = "ref"
#: Inputs of a joined group; with more the zeros would cost what int8 gains.
_MOST_JOINED = 64


def joined(node: fx.Node) -> int:
    """How many groups of a convolution become one, so that there is a fast kernel on this CPU.

    It is 1 where it has one, and 0 where none helps.
    """
    view = Conv.of(node)
    inputs = tuple(hint_of(size) for size in view.input.meta["val"].shape)
    weight = tuple(int(size) for size in view.weight.meta["val"].shape)
    dims, groups, each = len(weight) - 2, view.groups, weight[1]
    is_depthwise = each == 1 and weight[0] == groups
    if groups == 1 or (is_depthwise and dims < 3) or not all(inputs):  # depthwise ones have kernels
        return 1
    window = (tuple(int(n) for n in numbers) for numbers in view.sizes(dims))
    kernel = functools.partial(_kernel, inputs, weight, groups, *window)
    if not kernel(1).startswith(_PLAIN):
        return 1

    def is_fast(count: int) -> bool:
        name = kernel(count)
        return (
            bool(name)
            and not name.startswith(_PLAIN)
            and (each % 2 == 0 or accumulates_wide() or _fits(node, count))
        )

    counts = (count for count in range(2, min(groups, _MOST_JOINED // each) + 1) if groups % count == 0)
    return next(filter(is_fast, counts), 0)


def join(codes: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """Weights of a convolution with fewer groups.

    Args:
        codes: shape [out, in / groups, ...].
        groups: of the convolution.
        count: how many become one.

    Returns:
        Shape [out, count * in / groups, ...], 0 for inputs of other groups.
    """
    outputs, each, *window = codes.shape
    result = codes.new_zeros(groups // count, count, outputs // groups, count, each, *window)
    for i, own in enumerate(codes.view(groups // count, count, outputs // groups, each, *window).unbind(1)):
        result[:, i, :, i] = own
    return result.view(outputs, count * each, *window)


def _fits(node: fx.Node, count: int) -> bool:
    """Tell whether the codes of other pairs of inputs are small enough.

    16-bit sums add those pairs where groups have an odd number of inputs.
    """
    module = node.graph.owning_module
    assert module is not None
    codes = join(constant_of(module, Dequantize.of(Conv.of(node).weight).codes), Conv.of(node).groups, count)
    return fit(codes.movedim(1, -1), PAIR_LIMIT)


@functools.lru_cache(1024)
def _kernel(
    inputs: tuple[int, ...],
    weight: tuple[int, ...],
    groups: int,
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    count: int,
) -> str:
    """Return the name of oneDNN's kernel for a convolution in which `count` groups are joined to one.

    "" if oneDNN has no such kernel, or is not available.

    Args:
        inputs: shape of the input.
        weight: shape of the weight, before groups are joined.
        groups: number of groups, before they are joined.
        strides: for each spatial dimension.
        pads: for each spatial dimension, on both sides.
        dilations: for each spatial dimension, 1 for none.
        count: number of groups that become one.
    """
    try:
        maker = provider().maker
    except BackendUnavailableError:
        return ""
    how = zip(inputs[2:], weight[2:], strides, pads, dilations, strict=True)
    outputs = [
        (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1
        for size, window, stride, pad, dilation in how
    ]
    shapes = inputs, (inputs[0], weight[0], *outputs)
    source, target = (Desc(sizes, channels_last_strides(sizes), torch.uint8) for sizes in shapes)
    left = groups // count
    sizes = weight[0] // left, count * weight[1], *weight[2:]
    by_groups = Desc.dense((left, *sizes) if left > 1 else sizes, torch.int8)
    geometry = Geometry(strides, pads, pads, dilations, window=weight[2:])
    try:
        attributes = Attributes(
            scales={SRC: 0, WEIGHTS: 3 if left > 1 else 1, DST: 0}, zero_points={SRC: 0, DST: 0}
        )
        return maker.convolution(source, by_groups, None, target, geometry, attributes).kernel
    except Unimplemented:
        return ""
