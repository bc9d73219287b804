"""Patterns that IPEX 2.8's fuser gets wrong or hangs on, and the rewrite that avoids each.

For these the fuser returns wrong results or does not return. IPEX is archived: none of these will be fixed.
Each pass has a name, which the report shows, and a test that runs the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nc.backends.passes import Pass
from nc.graph.catalogue import (
    BINARY,
    MOVES,
    climb,
    computed_options,
    first_input,
    input_node,
    is_float_tensor,
    kind_of_node,
    op_name,
    schema_arguments,
)
from nc.graph.dataflow import producer
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    call_operator,
    constant_of,
    fqn_of,
    retarget,
    take_over,
)
from nc.graph.tensor_meta import Traced, hint_of, strided
from nc.graph.views import Binary, Conv, Quantize, options, set_argument
from nc.kernels import cpu
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor

#: The end of a dimension, for slices.
_END = 2**63 - 1
#: Relative change of scale that makes two quantize nodes of one tensor different to the fuser: a
#: twenty-thousandth of a code at most.
_NUDGE = 1.0 + 2.0**-20
_aten = torch.ops.aten
#: Convolutions, and those that compute the same where their tensors have a last dimension of size 1 beside.
_ONE_MORE_DIMENSION = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv1d.padding: _aten.conv2d.padding,
    _aten.conv2d.default: _aten.conv3d.default,
    _aten.conv2d.padding: _aten.conv3d.padding,
}
#: Channels of a group that fill half an AMX tile, and a whole one (64 codes).
_HALF_TILE, _TILE = 32, 64
#: Values of a row of a window (its channels times its width) and a stride, from which on the AMX kernels are
#: wrong.
_LONG_ROW, _LONG_STRIDE = 128, 4
_EXTREMES = {
    _aten.max.dim: (_aten.amax.default, _aten.argmax.default),
    _aten.min.dim: (_aten.amin.default, _aten.argmin.default),
}


def same_tensor_twice(module: fx.GraphModule) -> list[str]:
    """Separate the sides of `matmul(y, y)` and `r + r`, at which IPEX splits dequantize nodes endlessly.

    The second side gets its own codes.
    """
    changed = []
    for node in list(module.graph.nodes):
        if kind_of_node(node) in BINARY:
            left, right = map(_codes, Binary.of(node).sides)
            if left is not None and left is right:
                _own_codes(node, "right")
                changed.append(node.meta["operator"])
    return changed


def operand_is_source(module: fx.GraphModule) -> list[str]:
    """Separate the sides of `conv(y) + y` with one int8 y: the fused kernel reads the wrong buffer.

    The added side gets its own codes.
    """
    changed = []
    for node in list(module.graph.nodes):
        if kind_of_node(node) != "add":
            continue
        for name, side, other in _sides(node):
            codes = _codes(side)
            if codes is not None and kind_of_node(other) and codes is _codes(first_input(other)):
                _own_codes(node, name)
                changed.append(node.meta["operator"])
    return changed


def operand_overwritten(module: fx.GraphModule) -> list[str]:
    """Rewrite `linear(x) + s`, where the sum is written into the memory of s.

    That memory may be the caller's, or be read again through a view.

    The pass counts the readers of a value only, not those of its views. The addition gets a copy of s.
    """
    changed = []
    for add in [n for n in module.graph.nodes if op_name(n) in ("add", "add_")]:
        for name, side, other in _sides(add):
            if (
                not is_float_tensor(side)
                or side.target is dequantize_per_tensor
                or not is_float_tensor(other)
            ):
                continue
            if kind_of_node(producer(other)) and _is_read_elsewhere(side, add):
                with module.graph.inserting_before(add):
                    copy = call_function(module.graph, torch.ops.aten.clone.default, (side,))
                copy.meta["val"] = side.meta.get("val")
                set_argument(add, name, copy)
                changed.append(add.meta.get("operator", add.name))
    return changed


def softmax_to_codes(module: fx.GraphModule) -> list[str]:
    """Rewrite a `softmax` quantized with a zero point, or without AVX-512 to int8.

    oneDNN has no such kernel, and the first run fails.

    A copy in between keeps softmax out of the group.
    """
    signed = "avx512f" in cpu.machine_features()
    changed = []
    for node in [n for n in module.graph.nodes if op_name(n) == "softmax"]:
        readers = [r for _, r in _reads(node) if r.target is quantize_per_tensor]
        for reader in [
            r
            for r in readers
            if Quantize.of(r).zero_point != 0 or (Quantize.of(r).quant_min < 0 and not signed)
        ]:
            with module.graph.inserting_before(reader):
                copy = call_function(module.graph, torch.ops.aten.clone.default, (Quantize.of(reader).input,))
            copy.meta["val"] = Quantize.of(reader).input.meta.get("val")
            set_argument(reader, "input", copy)
            changed.append(node.meta.get("operator", node.name))
    return changed


def strided_pointwise(module: fx.GraphModule) -> list[str]:
    """Rewrite 1x1 convolutions with a stride, of 8, 24, 40... channels.

    oneDNN gathers rows in steps of 16 and overwrites those of another thread.

    Instead, fp32 slices before the convolution gather the rows; the values round to the same codes.
    """
    changed = []
    for node in list(module.graph.nodes):
        kind = kind_of_node(node) or ""
        if not kind.startswith("conv") or "transpose" in kind or not _is_strided_pointwise(node):
            continue
        conv = Conv.of(node)
        dequantize, codes = conv.input, _codes(conv.input)
        if codes is None:
            continue
        dims = conv.weight.meta["val"].dim() - 2
        val = dequantize.meta["val"]
        with module.graph.inserting_before(node):
            value = dequantize
            for i, stride in enumerate(conv.sizes(dims)[0]):
                val = strided(val, val.dim() - dims + i, stride)
                value = call_function(
                    module.graph, torch.ops.aten.slice.Tensor, (value, val.dim() - dims + i, 0, _END, stride)
                )
            value = call_function(module.graph, torch.ops.aten.contiguous.default, (value,))
            again = call_operator(module.graph, quantize_per_tensor, value, *options(codes))
            back = call_operator(module.graph, dequantize_per_tensor, again, *options(dequantize))
        value.meta["val"] = again.meta["val"] = back.meta["val"] = val
        set_argument(node, "input", back)
        set_argument(node, "stride", [1] * dims)
        changed.append(node.meta["operator"])
    return changed


def wrong_window(module: fx.GraphModule) -> list[str]:
    """Rewrite windows over few channels, groups or places, see `_is_wrong_window`.

    oneDNN's AMX kernels sum other values.

    With one more dimension, in which the window is 1 wide, they sum the right ones. Those kernels do not step
    over values of other dimensions, but end the process or leave their result as it was. There, and where
    making a kernel ends the process, a copy keeps the convolution out of the group, in fp32.
    """
    if "amx_int8" not in cpu.machine_features():
        return []
    changed = []
    for node in [n for n in module.graph.nodes if n.target in _ONE_MORE_DIMENSION]:
        conv = Conv.of(node)
        codes, weight = _codes(conv.input), conv.weight
        if (
            codes is None
            or weight.target not in (dequantize_per_channel, dequantize_per_tensor)
            or not (_is_wrong_window(conv, node) or _overruns(conv, Quantize.of(codes)))
        ):
            continue
        changed.append(node.meta["operator"])
        if _steps_over_values(conv) or _overruns(conv, Quantize.of(codes)):
            with module.graph.inserting_before(node):
                set_argument(
                    node,
                    "input",
                    _like(call_function(module.graph, _aten.clone.default, (conv.input,)), conv.input),
                )
            continue
        stored = input_node(weight)
        wider = add_constant(
            module, node, f"{node.name}_weight", constant_of(module, stored).unsqueeze(-1), fqn_of(stored)
        )
        with module.graph.inserting_before(node):
            value = _unsqueezed(Quantize.of(codes).input)
            again = _like(call_operator(module.graph, quantize_per_tensor, value, *options(codes)), value)
            back = _like(
                call_operator(module.graph, dequantize_per_tensor, again, *options(conv.input)), value
            )
            kernel = _like(call_operator(module.graph, weight.target, wider, *options(weight)), wider)
        with module.graph.inserting_after(node):
            result = call_function(module.graph, _aten.squeeze.dim, (node, -1))
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)
        set_argument(node, "input", back)
        set_argument(node, "weight", kernel)
        for name, plain in (("stride", 1), ("padding", 0), ("dilation", 1)):
            sizes = getattr(conv, name)
            if not isinstance(sizes, str):  # the words "same" and "valid" hold for any window
                set_argument(node, name, [*sizes, plain])
        retarget(node, _ONE_MORE_DIMENSION[node.target])
    return changed


def _is_wrong_window(conv: Conv, node: fx.Node) -> bool:
    """Return whether AMX kernels may sum other values.

    This was found with two thousand random convolutions, of which all others were right.

    A free size can be one place in a later call; `nc.backends.ipex.single_output` looks for that.
    """
    outputs, channels, *_, width = conv.weight.meta["val"].shape
    if width == 1:
        return False
    long_row = channels * width >= _LONG_ROW
    is_wide = long_row and (channels < _HALF_TILE or (channels < _TILE and conv.stride[-1] >= _LONG_STRIDE))
    of_groups = conv.groups > 1 and channels < _HALF_TILE < outputs // conv.groups
    return bool(is_wide or of_groups or hint_of(node.meta["val"].shape[-1]) == 1)


def _overruns(conv: Conv, source: Quantize) -> bool:
    """Return whether making an AMX kernel may end the process; see `trials.overruns_with_amx`."""
    window = conv.weight.meta["val"].shape[2:]
    dilations = [*conv.dilation] * (len(window) if len(conv.dilation) == 1 else 1)
    is_padded = conv.padding == "same" if isinstance(conv.padding, str) else any(conv.padding)
    is_dilated = any(size > 1 and dilation > 1 for size, dilation in zip(window, dilations, strict=True))
    return bool(source.zero_point) and is_padded and is_dilated


def _steps_over_values(conv: Conv) -> bool:
    """Return whether a stride is longer than the window in another dimension than the last."""
    window = conv.weight.meta["val"].shape[2:]
    strides = conv.sizes(len(window))[0]
    return any(stride > size for stride, size in zip(strides[:-1], window[:-1], strict=True))


def _unsqueezed(node: fx.Node) -> fx.Node:
    """Return a tensor with one more dimension at its end, of size 1; inserted where the graph inserts."""
    val = node.meta["val"]
    value = call_function(node.graph, _aten.unsqueeze.default, (node, -1))
    value.meta["val"] = (
        val.unsqueeze(-1) if isinstance(val, torch.Tensor) else Traced(val.dtype, (*val.shape, 1))
    )
    return value


def _like(node: fx.Node, other: fx.Node) -> fx.Node:
    """Return the node, with the shape of another noted on it."""
    node.meta["val"] = other.meta["val"]
    return node


def _is_strided_pointwise(node: fx.Node) -> bool:
    if computed_options(node):
        return False
    conv = Conv.of(node)
    weight = conv.weight.meta["val"].shape
    pointwise = all(size == 1 for size in weight[2:]) and not any(conv.padding) and conv.groups == 1
    return bool(pointwise and max(conv.stride) > 1 and weight[1] % 16 != 0)


def _is_read_elsewhere(side: fx.Node, add: fx.Node) -> bool:
    """Tell whether the memory of `side` belongs to the caller.

    It counts too if it may be read after `add` through another value.
    """
    memory = climb(side, lambda n: op_name(n) in MOVES)
    before = _ancestors(add)
    return memory.op == "placeholder" or any(
        value is not side and user not in before for value, user in _reads(memory)
    )


def _reads(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads a tensor or a view of it: (the value that is read, the reader)."""
    for user in value.users:
        if op_name(user) in MOVES:
            yield from _reads(user)
        else:
            yield value, user


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = {node}
    stack = [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found]
        found.update(new)
        stack += new
    return found


def bare_layer_norm(module: fx.GraphModule) -> list[str]:
    """Layer norm without weight or bias: the fuser asks for inputs that are not there.

    It gets ones and zeros.
    """
    changed = []
    for node in [n for n in module.graph.nodes if op_name(n) == "layer_norm"]:
        arguments = schema_arguments(node)
        size = arguments["normalized_shape"]
        if not all(isinstance(s, int) for s in size):
            continue
        missing = {
            name: value
            for name, value in (("weight", torch.ones), ("bias", torch.zeros))
            if arguments[name] is None
        }
        for name, value in missing.items():
            arguments[name] = add_constant(module, node, f"{node.name}_{name}", value(*size), "")
        if missing:
            node.args, node.kwargs = tuple(arguments.values()), {}
            changed.append(node.meta.get("operator", node.name))
    return changed


def maximum_with_indices(module: fx.GraphModule) -> list[str]:
    """`x.max(dim)`: the fuser takes it for an operator with one result.

    `amax` and `argmax`, which it becomes, are.
    """
    changed = []
    for node in [n for n in module.graph.nodes if n.target in _EXTREMES]:
        a = schema_arguments(node)
        calls = [(target, (a["self"], a["dim"], a["keepdim"])) for target in _EXTREMES[node.target]]
        for user in list(node.users):
            with module.graph.inserting_before(user):
                _, index = user.args
                part = call_function(module.graph, *calls[index])
            take_over(part, user)
            user.replace_all_uses_with(part)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        changed.append(node.meta.get("operator", node.name))
    return changed


WORKAROUNDS = (
    Pass("same_tensor_twice", same_tensor_twice, avoids="hangs"),
    Pass("operand_is_source", operand_is_source, avoids="returns garbage"),
    Pass(
        "operand_overwritten",
        operand_overwritten,
        avoids="changes the caller's tensor, or one that is still in use",
    ),
    Pass(
        "strided_pointwise",
        strided_pointwise,
        avoids="returns garbage here and there, not the same in each run",
    ),
    Pass("wrong_window", wrong_window, avoids="returns garbage"),
    Pass("softmax_to_codes", softmax_to_codes, avoids="fails on its first run"),
    Pass("bare_layer_norm", bare_layer_norm, avoids="fails on its first run"),
    Pass("maximum_with_indices", maximum_with_indices, avoids="fails on its first run"),
)


def _codes(node: object) -> fx.Node | None:
    """Return the quantize node that a dequantize reads; None for other nodes."""
    if not isinstance(node, fx.Node) or node.target is not dequantize_per_tensor:
        return None
    source = input_node(node)
    return source if source.target is quantize_per_tensor else None


def _sides(node: fx.Node) -> tuple[tuple[str, Any, Any], ...]:
    """Both sides of an operator on two tensors: name, value and the other's value."""
    left, right = Binary.of(node).sides
    return ("left", left, right), ("right", right, left)


def _own_codes(node: fx.Node, name: str) -> None:
    """Give one input of an operator a quantize/dequantize pair that no other shares.

    Its scale differs enough to stay apart.
    """
    dequantize: fx.Node = getattr(Binary.of(node), name)
    old, graph = Quantize.of(input_node(dequantize)), node.graph
    scale = old.numbers[0] * _NUDGE
    with graph.inserting_before(node):
        codes = call_operator(
            graph,
            quantize_per_tensor,
            old.input,
            scale,
            old.zero_point,
            old.quant_min,
            old.quant_max,
            old.dtype,
        )
        value = call_operator(graph, dequantize_per_tensor, codes, scale, old.zero_point, old.dtype)
    codes.meta["val"] = value.meta["val"] = dequantize.meta.get("val")
    set_argument(node, name, value)
