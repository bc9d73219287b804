"""Who reads a node, and how its result has to lie for that."""

from __future__ import annotations

import torch
from torch import fx

from nc.backends.native.plans.layouts import dense_strides
from nc.backends.native.qdq_rewrites import quantize
from nc.kernels.onednn.descriptions import channels_last_strides
from nc.ops import quantize_per_tensor

_aten = torch.ops.aten
#: Constant pads of codes: a convolution pads by itself.
PADS = (_aten.pad.default, _aten.constant_pad_nd.default)
#: Dimensions of images and of volumes.
SPATIAL = (4, 5)


def only_quantized(node: fx.Node) -> bool:
    """Whether one quantize node is all that reads a node."""
    return len(node.users) == 1 and next(iter(node.users)).target in (quantize, quantize_per_tensor)


def strides_of_codes(node: fx.Node, x: torch.Tensor) -> tuple[int, ...]:
    """How the codes of a tensor lie, for what reads them."""
    images = x.dim() in SPATIAL and _read_by_convolutions(node)
    return channels_last_strides(x.shape) if images else dense_strides(x)


def _read_by_convolutions(node: fx.Node) -> bool:
    """Whether some convolution reads a node's codes, perhaps padded."""
    names = "onednn.qconv", "nc_native.qconv"
    return any(
        str(user.target).startswith(names) or (user.target in PADS and _read_by_convolutions(user))
        for user in node.users
    )
