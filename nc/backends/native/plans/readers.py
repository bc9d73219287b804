"""Readers of a node, and the layout that its result needs for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from nc.backends.native.plans.layouts import dense_strides
from nc.backends.native.qdq_rewrites import quantize
from nc.backends.native.regions import only_user
from nc.graph.catalogue import op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS, same_shape
from nc.kernels.onednn.descriptions import channels_last_strides, contiguous_strides
from nc.ops import quantize_per_tensor

_aten = torch.ops.aten
#: Constant pads of codes: a convolution pads by itself.
PADS = (_aten.pad.default, _aten.constant_pad_nd.default)
#: Dimensions of images and of volumes.
SPATIAL = (4, 5)


def only_quantized(node: fx.Node) -> bool:
    """Return whether one quantize node is all that reads a node."""
    return len(node.users) == 1 and next(iter(node.users)).target in (quantize, quantize_per_tensor)


def strides_of_codes(node: fx.Node, x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor's codes that suit the codes' readers."""
    images = x.dim() in SPATIAL and _read_by_convolutions(node)
    return channels_last_strides(x.shape) if images else dense_strides(x)


def _read_by_convolutions(node: fx.Node) -> bool:
    """Return whether some convolution reads a node's codes, perhaps padded."""
    names = "onednn.qconv", "nc_native.qconv"
    return any(
        str(user.target).startswith(names) or (user.target in PADS and _read_by_convolutions(user))
        for user in node.users
    )


def strides_of(node: fx.Node, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return strides with which the transpose or permute of a result needs no copy for its only reader."""
    reader = only_user(node)
    while reader is not None and op_name(reader) in ("view", "reshape") and _have_same_shape(reader, node):
        reader = only_user(reader)
    order = list(range(len(sizes)))
    if reader is not None and reader.target is _aten.transpose.int:
        moved = schema_arguments(reader)
        i, j = moved["dim0"] % len(sizes), moved["dim1"] % len(sizes)
        order[i], order[j] = j, i
    elif reader is not None and reader.target is _aten.permute.default:
        order = [dim % len(sizes) for dim in schema_arguments(reader)["dims"]]
    strides = [0] * len(sizes)
    for dim, stride in zip(order, contiguous_strides([sizes[dim] for dim in order]), strict=True):
        strides[dim] = stride
    return tuple(strides)


def _have_same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, TENSORS) and isinstance(y, TENSORS) and same_shape(x.shape, y.shape)
