"""An int8 operator of a QDQ graph and what follows it → one call of a oneDNN kernel.

What follows are the operators after it and the quantization of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from nc.backends.native.grouped import join, joined
from nc.backends.native.regions import ACTIVATIONS, Region, is_sum, region_of
from nc.backends.native.torch_library import prepack
from nc.graph.catalogue import RECURRENT, kind_of_node, op_name
from nc.graph.fx_utils import call_function, constant_of, give_values_of, run_with
from nc.graph.views import Binary, Conv, Dequantize, Linear, Weighted
from nc.ops import dequantize_per_channel, dequantize_per_tensor
from nc.profiling.nodes import operators_of

onednn = torch.ops.onednn
_CONVOLUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "conv1d": onednn.qconv1d_pointwise.default,
    "conv2d": onednn.qconv2d_pointwise.default,
    "conv3d": onednn.qconv3d_pointwise.default,
}
#: Where `note_shapes` leaves the shape that a convolution reads.
_SHAPE = "reads"


def note_shapes(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> None:
    """Run a graph once and note the input shape of each convolution; do nothing if it has none.

    Programs that pack weights at compile time need these shapes. Those from tracing are wrong: a batch of 1
    was traced as 2. See also `packing.packed`.

    Args:
        module: the graph; the shapes are written into the metadata of its nodes.
        example: flat inputs.
    """
    if any(kind_of_node(n) in _CONVOLUTIONS for n in module.graph.nodes):
        run_with(module, example, _note_shape)


def _note_shape(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
    """Note the shape that a convolution reads."""
    if kind_of_node(node) in _CONVOLUTIONS:
        node.meta[_SHAPE] = list(env[Conv.of(node).input].shape)
    return value


def fuse(module: fx.GraphModule) -> None:
    """Replace every linear and convolution that reads codes.

    The graph packs their weights itself, see `packing.packed`.

    Args:
        module: QDQ graph with unsigned codes.
    """
    for node in list(module.graph.nodes):
        if kind_of_node(node) in ACTIVATIONS and not why_not_int8(node):
            _replace(module, region_of(node))
    for node in [
        n
        for n in reversed(module.graph.nodes)
        if not n.users and n.target in (dequantize_per_tensor, dequantize_per_channel)
    ]:
        module.graph.erase_node(node)


def why_not_int8(node: fx.Node) -> str:
    """Why no oneDNN kernel computes an operator in int8.

    It is "" where `fuse` finds one, and for operators that have no int8 form anywhere.
    """
    kind = kind_of_node(node)
    if kind is None or kind in RECURRENT:
        return ""
    if kind == "add":
        return _why_not_added(node)
    if kind == "linear":
        return why_no_codes(node)
    if kind not in _CONVOLUTIONS:
        return f"{kind} has no oneDNN int8 kernel in torch {torch.__version__}"
    if getattr(node.target, "_overloadname", "default") != "default":
        return "its padding differs from side to side, and kernels take one number for both"
    if Conv.of(node).input.meta["val"].dim() != Conv.of(node).weight.meta["val"].dim():
        return "its input has no batch dimension, which kernels need"
    if why := why_no_codes(node):
        return why
    return (
        ""
        if joined(node)
        else "oneDNN has no fast int8 kernel for it on this CPU, and in plain C++ int8 takes longer than fp32"
    )


def why_no_codes(node: fx.Node) -> str:
    """Why a linear or convolution does not multiply codes by constant codes; "" where it does."""
    x, weight = Weighted.of(node).input, Weighted.of(node).weight
    if weight.target not in (dequantize_per_channel, dequantize_per_tensor):
        return "its weight is not quantized"
    if Dequantize.of(weight).codes.op != "get_attr":
        return "its weight is not a constant"
    if x.target is not dequantize_per_tensor:
        return (
            "its input is not quantized: it reads the result of "
            f"{x.meta.get('operator', op_name(x) or x.name)} as it is"
        )
    return "its input is a constant" if Dequantize.of(x).codes.op == "get_attr" else ""


def _why_not_added(add: fx.Node) -> str:
    """Why no kernel computed an addition as its post-operation, once all kernels have been put in."""
    sides = [side for side in Binary.of(add).sides if isinstance(side, fx.Node) and is_kernel(side)]
    if not sides:
        return "no int8 kernel of a linear or conv2d directly precedes it, to compute it as a post-operation"
    for side in sides:
        names = ", ".join(side.meta["operators"])
        if not is_sum(add, side):
            return "its sides are not two fp32 tensors of the same shape"
        if len(side.users) > 1:
            return f"the result of {names}, which precedes it, is also read elsewhere"
    if any(side.target in (_CONVOLUTIONS["conv1d"], _CONVOLUTIONS["conv3d"]) for side in sides):
        return f"the kernel of {names}, which precedes it, does no additions"
    return f"the kernel of {names}, which precedes it, ends with another post-operation"


def reads_codes(node: fx.Node) -> bool:
    """Return whether a linear or convolution reads codes, and has constant ones as its weight."""
    return not why_no_codes(node)


def _replace(module: fx.GraphModule, region: Region) -> None:
    last = region.nodes[-1]
    with module.graph.inserting_before(last):
        call = (_linear if _kind(region) == "linear" else _convolution)(module, region)
    put(module, call, region.nodes, converted=region.codes is not None or region.bf16)


def put(module: fx.GraphModule, call: fx.Node, nodes: Sequence[fx.Node], *, converted: bool) -> None:
    """Replace nodes by a call.

    The call also replaces the conversions after the last node if it gives what they give.
    """
    last = nodes[-1]
    call.meta.update(
        val=last.meta.get("val"), operators=[name for node in nodes for name in operators_of(node)]
    )
    replaced = list(last.users) if converted else [last]
    give_values_of(call, *replaced)
    for old in replaced:
        old.replace_all_uses_with(call)
        if converted:
            module.graph.erase_node(old)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _kind(region: Region) -> str:
    """Return the kind of the operator that a region begins with."""
    kind = kind_of_node(region.anchor)
    assert kind is not None, f"{region.anchor.name} has no kind"
    return kind


def _output(region: Region) -> tuple[float, int, torch.dtype]:
    if region.codes is not None:
        return region.codes
    return 1.0, 0, torch.bfloat16 if region.bf16 else torch.float32


def _linear(module: fx.GraphModule, region: Region) -> fx.Node:
    linear = Linear.of(region.anchor)
    codes, scales = weight_of(module, linear.weight)
    x = Dequantize.of(linear.input)
    w = _weight(module, region, (codes, None)), *_scales(module, region, scales)
    post = region.activation.name, list(region.activation.arguments), region.activation.algorithm
    arguments: tuple[Argument, ...]
    if region.other is None:
        arguments = (x.codes, *x.qparams, *w, linear.bias, *_output(region), *post)
        return call_function(module.graph, onednn.qlinear_pointwise.default, arguments)
    other, scale, zero_point = _added(module, region, region.other)
    binary = "add" if region.codes is None else "sum"
    arguments = (
        x.codes,
        *x.qparams,
        *w,
        other,
        linear.bias,
        *_output(region),
        scale,
        zero_point,
        binary,
        1.0,
        *post,
    )
    return call_function(module.graph, onednn.qlinear_pointwise.binary, arguments)


def _convolution(module: fx.GraphModule, region: Region) -> fx.Node:
    conv = Conv.of(region.anchor)
    codes, scales = weight_of(module, conv.weight)
    sizes = conv.sizes(codes.dim() - 2)
    together = joined(region.anchor)
    codes, groups = (
        (codes, conv.groups)
        if together == 1
        else (join(codes, conv.groups, together), conv.groups // together)
    )
    x = Dequantize.of(conv.input)
    how = codes, scales, *x.qparams, *sizes, groups, region.anchor.meta.get(_SHAPE)
    w = _weight(module, region, how), *_scales(module, region, scales)
    post = region.activation.name, list(region.activation.arguments), region.activation.algorithm
    arguments: tuple[Argument, ...]
    if region.other is None:
        arguments = (x.codes, *x.qparams, *w, conv.bias, *sizes, groups, *_output(region), *post)
        return call_function(module.graph, _CONVOLUTIONS[_kind(region)], arguments)
    other, scale, zero_point = _added(module, region, region.other)
    arguments = (
        x.codes,
        *x.qparams,
        *w,
        other,
        conv.bias,
        *sizes,
        groups,
        *_output(region),
        scale,
        zero_point,
        "sum",
        1.0,
        *post,
    )
    return call_function(module.graph, onednn.qconv2d_pointwise.binary, arguments)


def _added(module: fx.GraphModule, region: Region, side: fx.Node) -> tuple[fx.Node, float, int]:
    """Return the other side of a region's sum as the kernel takes it, with its scale and zero point.

    These are codes if the kernel writes codes, else fp32 with scale 1 and zero point 0. A kernel that adds in
    place gets a copy, unless nothing else needs the tensor.
    """
    is_linear = _kind(region) == "linear"
    other, scale, zero_point = side, 1.0, 0
    if region.codes is not None:
        other, (scale, zero_point) = Dequantize.of(side).codes, Dequantize.of(side).numbers
    if is_linear and region.codes is None:  # "add" makes a new tensor, but takes no notice of strides
        return call_function(module.graph, torch.ops.aten.contiguous.default, (other,)), scale, zero_point
    format_ = torch.contiguous_format if is_linear else torch.channels_last
    # the kernel adds in place: to a copy, or to the tensor itself where it need not be kept
    own = region.codes is not None and _is_free(other, region, side)
    target = torch.ops.aten.contiguous.default if own else torch.ops.aten.clone.default
    return call_function(module.graph, target, (other,), {"memory_format": format_}), scale, zero_point


def _is_free(codes: fx.Node, region: Region, side: fx.Node) -> bool:
    """Return whether nothing needs the codes that a region adds once it has run.

    A kernel made them, and only kernels before it read them.
    """
    before = [user for user in codes.users if user is not side and user.users]
    own = is_kernel(codes) and len(side.users) == 1
    return own and all(is_kernel(user) and user < region.nodes[-1] for user in before)


def is_kernel(node: fx.Node) -> bool:
    """Return whether a node calls a kernel of oneDNN."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "onednn"


def weight_of(module: fx.GraphModule, node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes, and one fp32 scale for each output."""
    view = Dequantize.of(node)
    codes = constant_of(module, view.codes)
    if isinstance(view.scale, fx.Node):
        return codes, constant_of(module, view.scale)
    return codes, torch.full((codes.shape[0],), view.scale, dtype=torch.float32)


def _weight(module: fx.GraphModule, region: Region, how: tuple[Any, ...]) -> fx.Node:
    """Return a weight as torch's kernel reads it.

    It is a call of the operator that packs it, with these arguments.
    """
    name, operator = region.anchor.name, prepack(_kind(region))
    nodes = [
        constant(module, f"{name}_codes", value) if isinstance(value, torch.Tensor) else value
        for value in how
    ]
    return call_function(module.graph, operator, tuple(nodes))


def _scales(module: fx.GraphModule, region: Region, scales: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    name = region.anchor.name
    zero_points = torch.zeros(len(scales), dtype=torch.int64)
    return constant(module, f"{name}_scales", scales), constant(module, f"{name}_zero_points", zero_points)


def constant(module: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    """Return a new constant, inserted where the graph inserts."""
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, value)
    return module.graph.get_attr(name)
