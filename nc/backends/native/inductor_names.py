"""Convolution kernels by the name under which Inductor knows them."""

from __future__ import annotations

import torch
from torch import fx

#: The operator of all convolutions that Inductor knows, under the name that it knows.
_CONVOLUTION = torch.ops.onednn.qconv_pointwise.default
_SYNONYMS = ("onednn::qconv1d_pointwise", "onednn::qconv2d_pointwise", "onednn::qconv3d_pointwise")


def name_convolutions(module: fx.GraphModule) -> None:
    """Let all convolution kernels be calls of that one."""
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "_overloadname", "") == "default" and node.target._schema.name in _SYNONYMS:
            node.target = _CONVOLUTION
