"""Transposed convolutions that read codes, and what is done with their result → one call that a plan makes a primitive of."""

from __future__ import annotations

import torch
from torch import fx

from nc.backends.native.fuse import constant, put, why_no_codes
from nc.backends.native.operators import transposed_convolution
from nc.backends.native.regions import region_of
from nc.graph.catalogue import is_transposed
from nc.graph.fx_utils import constant_of
from nc.graph.views import Conv, Dequantize


def fuse_transposed(module: fx.GraphModule) -> None:
    """Replace every transposed convolution that reads codes."""
    for node in list(module.graph.nodes):
        if is_transposed(node) and not why_not_transposed(node):
            _replace(module, node)


def why_not_transposed(node: fx.Node) -> str:
    """Why no kernel computes a transposed convolution in int8; "" where one does, and for other operators."""
    if not is_transposed(node):
        return ""
    if Conv.of(node).input.meta["val"].dim() != Conv.of(node).weight.meta["val"].dim():
        return "its input has no batch dimension, which kernels need"
    return why_no_codes(node)


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    region, conv = region_of(node), Conv.of(node)
    x, weight = Dequantize.of(conv.input), Dequantize.of(conv.weight)
    dims = node.meta["val"].dim() - 2
    stride, padding, dilation = conv.sizes(dims)
    output_padding = [*conv.output_padding] * (dims if len(conv.output_padding) == 1 else 1)
    given = constant_of(module, weight.scale) if isinstance(weight.scale, fx.Node) else torch.tensor([weight.scale], dtype=torch.float32)
    scales = given.float()
    last = region.nodes[-1]
    with module.graph.inserting_before(last):
        arguments = (
            x.codes,
            *x.numbers,
            weight.codes,
            constant(module, f"{node.name}_scales", scales),
            conv.bias,
            stride,
            padding,
            output_padding,
            dilation,
            conv.groups,
            *(region.codes or (1.0, 0, torch.float32)),
            region.activation.name,
            list(region.activation.arguments),
            region.activation.algorithm,
        )
        call = module.graph.call_function(transposed_convolution(), arguments)
    put(module, call, region.nodes, converted=region.codes is not None)
    for side in (conv.input, conv.weight):
        if not side.users:
            module.graph.erase_node(side)
