"""Move what is between a product and the sum after it.

A constant factor is multiplied into the scales, and a permutation is moved after the sum.

Then the kernel of the product adds too. The blocks of ConvNeXt have both: `input + permute(layer_scale *
linear(x))`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nc.backends.native.fuse import constant, reads_codes, weight_of
from nc.backends.native.regions import is_sum, only_user
from nc.graph.catalogue import kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import call_function, call_operator, constant_value, give_values_of, take_over
from nc.graph.placement import works_in_place
from nc.graph.tensor_meta import TENSORS
from nc.graph.views import Binary, Dequantize, Weighted, set_argument
from nc.ops import dequantize_per_channel
from nc.profiling.nodes import operators_of

_aten = torch.ops.aten
#: Operators that multiply codes → number of dimensions after their channels.
_BEHIND = {"linear": 0, "conv1d": 1, "conv2d": 2, "conv3d": 3}


def fold_factors(module: fx.GraphModule) -> None:
    """Multiply the scales and the bias of a product by the constant that its result is multiplied by.

    The constant is one number, or one per channel.

    Codes stay as they are. Results differ by rounding to fp32 only.
    """
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        while kind_of_node(node) in _BEHIND and reads_codes(node):
            user = only_user(node)
            factor = _factor_of(module, node, user) if user is not None else None
            if user is None or factor is None or not _fold(module, node, factor):
                break
            node.meta["operators"] = [*operators_of(node), *operators_of(user)]
            node.meta["val"] = user.meta["val"]
            give_values_of(node, user)
            user.replace_all_uses_with(node)
            module.graph.erase_node(user)


def sum_first(module: fx.GraphModule) -> None:
    """`other + permute(product)` → `permute(permuted other + product)`."""
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        move = only_user(node) if kind_of_node(node) == "linear" and reads_codes(node) else None
        add = only_user(move) if move is not None and move.target is _aten.permute.default else None
        if move is None or add is None or not is_sum(add, move):
            continue
        given = schema_arguments(move)["dims"]
        dims = [dim % len(given) for dim in given]
        left, right = Binary.of(add).sides
        other = right if left is move else left
        with module.graph.inserting_before(add):
            moved = call_function(
                module.graph, _aten.permute.default, (other, [dims.index(dim) for dim in range(len(dims))])
            )
            total = call_function(module.graph, _aten.add.Tensor, (node, moved))
            result = call_function(module.graph, _aten.permute.default, (total, dims))
        take_over(total, add)
        give_values_of(total)
        give_values_of(result, add)
        moved.meta["val"] = total.meta["val"] = node.meta["val"]
        result.meta["val"] = add.meta["val"]
        add.replace_all_uses_with(result)
        module.graph.erase_node(add)
        module.graph.erase_node(move)


def _factor_of(module: fx.GraphModule, node: fx.Node, user: fx.Node) -> torch.Tensor | None:
    """Return what `user` multiplies a product by, in fp64, of shape [] or [channels].

    Return None if `user` does not multiply by such a factor.
    """
    other = _factor_side(node, user)
    if isinstance(other, int | float):
        value: torch.Tensor | None = torch.tensor(other, dtype=torch.float64, device="cpu")
    else:
        value = constant_value(module, other)
    channels = len(weight_of(module, Weighted.of(node).weight)[0])
    if value is None or value.is_complex() or not _fits_channels(value, node, user.meta.get("val"), channels):
        return None
    value = value.detach().double().reshape(-1) if value.numel() > 1 else value.detach().double().reshape(())
    return 1 / value if op_name(user) == "div" else value


def _factor_side(node: fx.Node, user: fx.Node) -> Any:
    """Return the other side of a product with, or a quotient of, a node; None of others."""
    if op_name(user) not in ("mul", "div") or Binary.of(user).rounding_mode is not None:
        return None
    left, right = Binary.of(user).sides
    if left is node:
        return None if right is node else right
    return left if op_name(user) == "mul" else None


def _fits_channels(value: torch.Tensor, node: fx.Node, result: object, channels: int) -> bool:
    """Tell whether a factor has one number, or one for each channel of the product.

    It must leave the product's shape and fp32.
    """
    behind, dims = _BEHIND[str(kind_of_node(node))], node.meta["val"].dim()
    of_channels = value.numel() == channels and value.dim() > behind and value.shape[-1 - behind] == channels
    same = isinstance(result, TENSORS) and result.dtype is torch.float32 and result.dim() == dims
    has_batch = not behind or dims == behind + 2
    return same and has_batch and value.dim() <= dims and (value.numel() == 1 or of_channels)


def _fold(module: fx.GraphModule, node: fx.Node, factor: torch.Tensor) -> bool:
    """Multiply the scales and bias of a product by a factor.

    Return False if fp32 can't hold the new values, or the bias is not a constant.
    """
    view = Weighted.of(node)
    bias = None if view.bias is None else constant_value(module, view.bias)
    scales = _fp32(weight_of(module, view.weight)[1], factor)
    biases = None if bias is None else _fp32(bias, factor)
    if scales is None or (view.bias is not None and biases is None):
        return False
    with module.graph.inserting_before(node):
        codes = Dequantize.of(view.weight).codes
        weight = call_operator(
            module.graph,
            dequantize_per_channel,
            codes,
            constant(module, f"{node.name}_times", scales),
            None,
            0,
            torch.int8,
        )
        weight.meta["val"] = view.weight.meta.get("val")
        set_argument(node, "weight", weight)
        if biases is not None:
            set_argument(node, "bias", constant(module, f"{node.name}_bias_times", biases))
    return True


def _fp32(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor | None:
    """Products in fp32; None where one becomes infinite or loses digits because it is too small."""
    exact = values.detach().double() * factor
    rounded = exact.float()
    small = (rounded.abs() < torch.finfo(torch.float32).tiny) & (exact != 0)
    return None if bool(small.any()) or not bool(rounded.isfinite().all()) else rounded
