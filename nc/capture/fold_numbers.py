"""Numbers that a result is multiplied by, or that are added to it, go into the layers around them.

`layer(x) * s + t` is a layer with another weight and bias, where s and t are numbers or have one for each
channel. So is `layer(s * x + t)` for numbers s and t. With t that holds for a layer that pads nothing,
because zeros are put around `s * x + t`; and x must be the result of an activation: codes of another tensor,
whose values may all be far from 0, would have larger steps without t.

All is computed in float64, and rounded once.
"""

from __future__ import annotations

import torch
from torch import fx

from nc.graph.catalogue import (
    ACTIVATIONS,
    CONVOLUTIONS,
    WEIGHTED,
    computed_options,
    op_name,
    schema_arguments,
)
from nc.graph.fx_utils import add_constant, constant_value, fqn_of
from nc.graph.numbers import OPERATIONS, is_varying, numbers_of
from nc.graph.placement import works_in_place
from nc.graph.views import Conv, Weighted, set_argument


def drop_neutral_numbers(module: fx.GraphModule) -> None:
    """Leave out numbers that change nothing but the sign of a zero: `x * 1`, `x + 0`, of a new value x."""
    if works_in_place(module):
        return  # the two may become different
    for node in list(module.graph.nodes):
        source = next((n for n in node.all_input_nodes if n.op == "call_function"), None)
        numbers = None if source is None else numbers_of(module, node, source)
        if (
            source is not None
            and numbers is not None
            and bool((numbers[0] == 1).all() and not numbers[1].any())
        ):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def fold_numbers_behind(module: fx.GraphModule) -> None:
    """Fold what a layer's result alone is multiplied by, and what is added to it, into the layer."""
    for node in list(module.graph.nodes):
        while _is_layer(module, node) and len(node.users) == 1:
            (user,) = node.users
            numbers = numbers_of(module, user, node)
            if numbers is None:
                break
            factor, term = (_of_channels(each, node) for each in numbers)
            if factor is None or term is None or not _scale_outputs(module, node, factor, term):
                break
            user.replace_all_uses_with(node)
            module.graph.erase_node(user)


def fold_numbers_in_front(module: fx.GraphModule) -> None:
    """Fold numbers that a tensor is multiplied by, or that are added to it, into the layers that read it."""
    if works_in_place(module):
        return  # the tensor may be another one when the layers read it
    for node in reversed(list(module.graph.nodes)):
        found = _single_numbers(module, node)
        if found is None:
            continue
        source, factor, term = found
        readers = list(node.users)
        if not all(_is_layer(module, reader) and _takes(reader, node, term) for reader in readers):
            continue
        changed = [new for reader in readers if (new := _for_input(module, reader, factor, term))]
        if len(changed) == len(readers):
            for reader, (weight, moved) in zip(readers, changed, strict=True):
                _set(module, reader, weight, moved)
                set_argument(reader, "input", source)
            module.graph.erase_node(node)


def _single_numbers(
    module: fx.GraphModule, node: fx.Node
) -> tuple[fx.Node, torch.Tensor, torch.Tensor] | None:
    """Return a tensor, and one number each that it is multiplied by and that is added; None for other nodes.

    What is added to something else than an activation is left to the layer before.
    """
    if op_name(node) not in OPERATIONS or not node.users:
        return None
    source = next((n for n in node.all_input_nodes if is_varying(module, n)), None)
    numbers = None if source is None else numbers_of(module, node, source)
    if source is None or numbers is None or any(each.dim() for each in numbers):
        return None
    factor, term = numbers
    return None if bool(term) and not _is_of_activation(module, source) else (source, factor, term)


def _is_of_activation(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a tensor is the result of an activation, or that with numbers."""
    while op_name(node) in OPERATIONS:
        sources = [n for n in node.all_input_nodes if is_varying(module, n)]
        if len(sources) != 1:
            return False
        (node,) = sources
    return op_name(node) in ACTIVATIONS


def _is_layer(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a number can be folded into a node.

    The node must be an fp32 linear or convolution of a computed input, with constant weight, bias and
    options. It must not share its weight, which would then be stored several times.
    """
    if op_name(node) not in WEIGHTED or node.meta["val"].dtype is not torch.float32 or computed_options(node):
        return False
    layer = Weighted.of(node)
    constants = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    is_own = len(layer.weight.users) == 1
    return is_own and all(part.op == "get_attr" for part in constants) and is_varying(module, layer.input)


def _of_channels(value: torch.Tensor, node: fx.Node) -> torch.Tensor | None:
    """Return numbers as [] or [channels] of a layer's result; None where they are for other places."""
    if not value.dim():
        return value
    weight = Weighted.of(node).weight.meta["val"]
    behind = weight.dim() - 2
    channels = node.meta["val"].shape[-1 - behind]
    fits = value.dim() > behind and value.shape[-1 - behind] == value.numel() == channels
    return value.reshape(-1) if fits else None


def _scale_outputs(module: fx.GraphModule, node: fx.Node, factor: torch.Tensor, term: torch.Tensor) -> bool:
    """Change weight and bias; False where fp32 can't hold them, or the channels of groups are mixed."""
    weight, bias = _constants(module, node)
    groups, axis = schema_arguments(node).get("groups", 1), int(op_name(node).startswith("conv_transpose"))
    if axis and groups != 1 and factor.dim():
        return False
    shape = [-1 if factor.dim() and d == axis else 1 for d in range(weight.dim())]
    scaled, moved = _rounded(weight * factor.reshape(shape)), _rounded(bias * factor + term)
    if scaled is None or moved is None:
        return False
    _set(module, node, scaled, moved)
    if "output_mean" in node.meta:  # see `fold_batch_norm`
        node.meta["output_mean"] = node.meta["output_mean"] * factor + term
        node.meta["output_std"] = node.meta["output_std"] * factor.abs()
    return True


def _takes(layer: fx.Node, node: fx.Node, term: torch.Tensor) -> bool:
    """Whether a layer reads a tensor as its input alone, and each of its results sums all of its weight."""
    view = Weighted.of(layer)
    if view.input is not node:
        return False
    name = op_name(layer)
    if not bool(term):
        return True
    return name == "linear" or (name in CONVOLUTIONS and _pads_nothing(layer))


def _pads_nothing(layer: fx.Node) -> bool:
    padding = Conv.of(layer).padding
    return padding == "valid" or not isinstance(padding, str) and not any(padding)


def _for_input(
    module: fx.GraphModule, layer: fx.Node, factor: torch.Tensor, term: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return weight and bias for another input; None where fp32 can't hold them."""
    weight, bias = _constants(module, layer)
    moved = bias + weight.flatten(1).sum(1) * term if bool(term) else bias
    scaled, rounded = _rounded(weight * factor), _rounded(moved)
    return None if scaled is None or rounded is None else (scaled, rounded)


def _constants(module: fx.GraphModule, layer: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias in float64; 0 where there is no bias."""
    view = Weighted.of(layer)
    weight, bias = constant_value(module, view.weight), constant_value(module, view.bias)
    assert weight is not None, "asked for layers with constant weights"
    return weight.double(), torch.zeros((), dtype=torch.float64) if bias is None else bias.double()


def _rounded(value: torch.Tensor) -> torch.Tensor | None:
    """Return fp32 values; None where one becomes infinite, or too small to keep its digits."""
    found = value.float()
    small = (found.abs() < torch.finfo(torch.float32).tiny) & (value != 0)
    return None if bool(small.any()) or not bool(found.isfinite().all()) else found


def _set(module: fx.GraphModule, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Give a layer another weight and bias, with the names of those that it has."""
    view = Weighted.of(node)
    fqn = fqn_of(view.weight)
    if not torch.equal(weight, _constants(module, node)[0].float()):
        set_argument(node, "weight", add_constant(module, node, f"{fqn}_folded", weight, fqn))
    if view.bias is not None or bool(bias.any()):
        own = fqn_of(view.bias) if view.bias is not None else fqn.removesuffix("weight") + "bias"
        channels = node.meta["val"].shape[1 - weight.dim()]
        bias = bias.expand(channels).contiguous()
        set_argument(node, "bias", add_constant(module, node, f"{fqn}_folded_bias", bias, own))
