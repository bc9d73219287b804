"""Convolution kernels by the name under which Inductor knows them."""

from __future__ import annotations

import torch
from torch import fx

from nc.graph.fx_utils import retarget

#: The operator of all convolutions that Inductor knows, under the name that it knows.
_CONVOLUTION = torch.ops.onednn.qconv_pointwise.default
_CONV3D = "onednn::qconv3d_pointwise"
_SYNONYMS = ("onednn::qconv1d_pointwise", "onednn::qconv2d_pointwise", _CONV3D)


def name_convolutions(module: fx.GraphModule) -> None:
    """Replace all convolution kernels by calls of `_CONVOLUTION`.

    Inductor fuses a following relu as a post-operation. The kernel of conv3d has none, so its relu becomes a
    clamp_min, which Inductor does not fuse.
    """
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and getattr(node.target, "_overloadname", "") == "default"
            and node.target._schema.name in _SYNONYMS
        ):
            if node.target._schema.name == _CONV3D:
                for user in [u for u in node.users if u.target is torch.ops.aten.relu.default]:
                    user.target, user.args = torch.ops.aten.clamp_min.default, (node, 0.0)
            retarget(node, _CONVOLUTION)
