"""Low-bit weights as OpenVINO keeps them compressed."""

from __future__ import annotations

import torch
from torch import fx

from nc.backends.rewrites.low_bit import constant, to_dtype, zero_codes
from nc.graph.fx_utils import call_function
from nc.numerics.packed_weight import PackedWeight

_aten = torch.ops.aten


def compressed(module: fx.GraphModule, node: fx.Node, weight: PackedWeight) -> fx.Node:
    """Return the weight as uint8 codes, minus the code of 0, times scales; fp32, shape [N, K]."""
    graph, params = module.graph, weight.params
    rows, groups = params.scale.shape
    codes = constant(module, node, "codes", weight.unpacked().reshape(rows, groups, -1))
    zeros = constant(module, node, "zeros", zero_codes(weight).reshape(rows, groups, 1))
    scales = constant(module, node, "scales", params.scale.reshape(rows, groups, 1))
    with graph.inserting_before(node):
        shifted = call_function(
            graph,
            _aten.sub.Tensor,
            (to_dtype(graph, codes, torch.float32), to_dtype(graph, zeros, torch.float32)),
        )
        values = call_function(graph, _aten.mul.Tensor, (shifted, scales))
        return call_function(graph, _aten.reshape.default, (values, list(weight.shape)))
