"""Quantize and dequantize nodes as calls of torch's kernels, and pools of codes."""

from __future__ import annotations

import torch
from torch import fx

from nc.graph.catalogue import first_input, op_name, schema_arguments
from nc.graph.fx_utils import give_values_of, retarget
from nc.graph.views import Dequantize, Quantize
from nc.ops import dequantize_per_tensor, from_bf16, quantize_per_tensor, to_bf16


def quantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """uint8 codes of fp32 values, in the memory format of `x`."""
    codes = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    # `int_repr` would copy them
    return torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage(), 0, codes.size(), codes.stride())


def dequantize(q: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """fp32 values of uint8 codes."""
    return torch._make_per_tensor_quantized_tensor(q, scale, zero_point).dequantize()


#: What the nodes of a lowered graph that change precision call.
CONVERTERS = frozenset({quantize, dequantize, quantize_per_tensor, dequantize_per_tensor, to_bf16, from_bf16})


def pool_codes(module: fx.GraphModule) -> None:
    """Maximum pools between two quantizations with one scale work on the codes themselves."""
    for node in [n for n in module.graph.nodes if op_name(n) == "max_pool2d"]:
        source, users = first_input(node), list(node.users)
        if (
            source is None
            or source.target is not dequantize_per_tensor
            or not all(
                u.target is quantize_per_tensor and Quantize.of(u).qparams == Dequantize.of(source).qparams
                for u in users
            )
        ):
            continue
        a = schema_arguments(node)
        sizes = [
            [*a[key]] * (2 if len(a[key]) == 1 else 1)
            for key in ("kernel_size", "stride", "padding", "dilation")
        ]
        # ATen's own takes uint8 too, but counts the elements of a large image in 8 bits
        retarget(node, torch.ops.quantized.max_pool2d.default)
        node.args, node.kwargs = (Dequantize.of(source).codes, *sizes, a["ceil_mode"]), {}
        give_values_of(node, *users)
        for user in users:
            user.replace_all_uses_with(node)
            module.graph.erase_node(user)
        if not source.users:
            module.graph.erase_node(source)


def _is_of_bytes(dequantize_node: fx.Node) -> bool:
    view = Dequantize.of(dequantize_node)
    return view.codes.op != "get_attr" and view.dtype is torch.uint8


def remaining(module: fx.GraphModule) -> None:
    """Let the quantize and dequantize nodes that no kernel took call torch's own kernels.

    These are for uint8.
    """
    for node in module.graph.nodes:
        if node.target is quantize_per_tensor and Quantize.of(node).dtype is torch.uint8:
            node.args = (Quantize.of(node).input, *Quantize.of(node).qparams)
            retarget(node, quantize)
        elif node.target is dequantize_per_tensor and _is_of_bytes(node):
            node.args = (Dequantize.of(node).codes, *Dequantize.of(node).qparams)
            retarget(node, dequantize)
