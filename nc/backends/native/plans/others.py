"""Operators between the products as primitives: conversions, pools, norms, and what moves tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import rotation
from nc.backends.native.plans import rotary, steps
from nc.backends.native.plans.elementwise import apply, combine, copy, dense_strides, flat, is_dense, sides_of
from nc.backends.native.plans.products import PADS, channels_last, with_qparams
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Later, Traced, check_sizes
from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.kernels.onednn.descriptions import (
    DST,
    DTYPES,
    MULTIPLE_SRC,
    SCALE,
    SHIFT,
    SRC,
    SRC_1,
    Attributes,
    Desc,
    Eltwise,
    Geometry,
    channels_last_strides,
    contiguous_strides,
)
from nc.ops import quantize_per_tensor

_onednn, _aten = torch.ops.onednn, torch.ops.aten
_SPATIAL = (4, 5)
#: Like a `Handler`, for operators that write codes: scale, zero point and dtype of these come last.
WithCodes = Callable[[Recorder, fx.Node, Later, float, int, torch.dtype], Traced | None]


def to_codes(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """fp32 → uint8 codes."""
    return _to_codes(recorder, node, a["0"], a["1"], a["2"], torch.uint8)


def to_int8(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """fp32 → int8 codes, for the second input of a product."""
    if a["dtype"] is not torch.int8:
        return None
    x, scale, zero_point = a["x"], a["scale"], a["zero_point"]
    limits = a["quant_min"], a["quant_max"]
    if limits != (-128, 127):  # a conversion knows the limits of its dtype only
        x = recorder.read(x)
        if x is None or x.tensor.dtype is not torch.float32 or not is_dense(x.tensor):
            return None
        x = apply(recorder, node, x, Eltwise("clip", *((limit - zero_point) * scale for limit in limits)))
    return _to_codes(recorder, node, x, scale, zero_point, torch.int8)


def _to_codes(recorder: Recorder, node: fx.Node, value: Any, scale: float, zero_point: int, dtype: torch.dtype) -> Traced | None:
    if isinstance(value, Later) and value.node.target in _WITH_CODES:
        write = _WITH_CODES[value.node.target]
        result: Traced | None = recorder.first_possible(lambda: write(recorder, node, value, scale, zero_point, dtype))
        if result is not None:
            return result
    x = recorder.read(value)
    if x is None or x.tensor.dtype is not torch.float32:
        return None
    strides = _strides_of_codes(node, x.tensor)
    if dtype is torch.uint8 and x.tensor.dim() == 4 and strides == channels_last_strides(x.tensor.shape):
        codes = steps.image_to_codes(recorder, node, x, scale, zero_point)
        if codes is not None:
            return codes
    result = recorder.new(x.tensor.shape, strides, dtype)
    convert(recorder, node, x, result, DST, scale, zero_point)
    return result


def _strides_of_codes(node: fx.Node, x: torch.Tensor) -> tuple[int, ...]:
    """How the codes of a tensor lie, for what reads them."""
    images = x.dim() in _SPATIAL and _read_by_convolutions(node)
    return channels_last_strides(x.shape) if images else dense_strides(x)


def from_codes(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """uint8 codes → fp32."""
    x, scale, zero_point = recorder.read(a["0"]), a["1"], a["2"]
    if x is None:
        return None
    result = recorder.new(x.tensor.shape, dense_strides(x.tensor), torch.float32)
    convert(recorder, node, x, result, SRC, scale, zero_point)
    return result


def layer_norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::layer_norm` over the last dimension."""
    x, weight, bias = recorder.read(a["input"]), *_factors(recorder, a)
    if x is None or weight is None or bias is None or len(a["normalized_shape"]) != 1 or not _is_plain(x):
        return None
    check_sizes(x.tensor.shape[-1] == a["normalized_shape"][0], node, x.tensor.shape, a["normalized_shape"])
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), torch.float32)
    primitive = recorder.maker.layer_norm(x.desc, result.desc, a["eps"], Attributes())
    recorder.call(primitive, {SRC: x, DST: result, SCALE: weight.contiguous(), SHIFT: bias.contiguous()}, node)
    return result


def _factors(recorder: Recorder, a: Mapping[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias of a layer norm, those it has not as 1 and 0; None where one is no constant."""
    weight, bias = (recorder.constant(a[name]) for name in ("weight", "bias"))
    weight = torch.ones(a["normalized_shape"], dtype=torch.float32, device="cpu") if a["weight"] is None else weight
    bias = torch.zeros(a["normalized_shape"], dtype=torch.float32, device="cpu") if a["bias"] is None else bias
    return weight, bias


def softmax(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::softmax` and `aten::_softmax`."""
    x = recorder.read(a.get("self", a.get("input")))
    if x is None or not _is_plain(x) or a.get("dtype") not in (None, torch.float32):
        return None
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), torch.float32)
    primitive = recorder.maker.softmax(x.desc, result.desc, a["dim"] % x.tensor.dim(), Attributes())
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


def softmax_to_codes(recorder: Recorder, node: fx.Node, later: Later, scale: float, zero_point: int, dtype: torch.dtype) -> Traced | None:
    """Return a softmax that writes codes; kernels for that take no zero point."""
    a = later.named
    x = recorder.read(a.get("self", a.get("input")))
    if x is None or zero_point or not _is_plain(x) or a.get("dtype") not in (None, torch.float32):
        return None
    axis = a["dim"] % x.tensor.dim()
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), dtype)
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = with_qparams(Attributes(), tensors, DST, scale, 0)
    primitive = recorder.maker.softmax(x.desc, result.desc, axis, attributes)
    recorder.call(primitive, tensors, later.node)
    return result


def layer_norm_to_codes(
    recorder: Recorder, node: fx.Node, later: Later, scale: float, zero_point: int, dtype: torch.dtype
) -> Traced | None:
    """Return a layer norm that writes codes; kernels for that take no zero point, but what the norm adds can have it."""
    a = later.named
    x, weight, bias = recorder.read(a["input"]), *_factors(recorder, a)
    if x is None or weight is None or bias is None or len(a["normalized_shape"]) != 1 or not _is_plain(x):
        return None
    check_sizes(x.tensor.shape[-1] == a["normalized_shape"][0], node, x.tensor.shape, a["normalized_shape"])
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), dtype)
    shift = (bias.double() + zero_point * scale).float()
    tensors: dict[int, Any] = {SRC: x, DST: result, SCALE: weight.contiguous(), SHIFT: shift}
    attributes = with_qparams(Attributes(), tensors, DST, scale, 0)
    primitive = recorder.maker.layer_norm(x.desc, result.desc, a["eps"], attributes)
    recorder.call(primitive, tensors, later.node)
    return result


def max_pool(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`quantized::max_pool2d` on codes."""
    x = recorder.read(a["qx"])
    if x is None or a["ceil_mode"] or x.tensor.dim() not in _SPATIAL:
        return None
    return _pool(recorder, node, "max", x, a["kernel_size"], a["stride"], a["padding"], a["dilation"])


def global_mean(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """Means over all positions: `aten::adaptive_avg_pool2d` to one, `aten::mean` of the last two dimensions."""
    x = recorder.read(a.get("self", a.get("input")))
    if x is None or x.tensor.dim() != 4 or x.tensor.dtype is not torch.float32:
        return None
    if "output_size" in a:
        if any(size != 1 for size in a["output_size"]):
            return None
    elif not a.get("dim") or sorted(d % 4 for d in a["dim"]) != [2, 3] or a.get("dtype") not in (None, torch.float32):
        return None
    result = _pool(recorder, node, "mean", x, x.tensor.shape[2:], (1, 1), (0, 0), (1, 1))
    keep = "output_size" in a or a.get("keepdim")
    return result if keep else Traced(result.tensor[:, :, 0, 0], result.root)


def _pool(
    recorder: Recorder,
    node: fx.Node,
    name: str,
    x: Traced,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Traced:
    x = channels_last(recorder, x, node)
    geometry = Geometry(tuple(strides), tuple(pads), tuple(pads), tuple(dilations))
    how = zip(x.tensor.shape[2:], kernel, strides, pads, dilations, strict=True)
    sizes = *x.tensor.shape[:2], *((i + 2 * p - (d * (k - 1) + 1)) // s + 1 for i, k, s, p, d in how)
    check_sizes(min(sizes[2:]) > 0, node, x.tensor.shape, kernel)
    result = recorder.new(sizes, channels_last_strides(sizes), x.tensor.dtype)
    primitive = recorder.maker.pooling(name, x.desc, result.desc, tuple(kernel), geometry)
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


def _binary_to_codes(name: str) -> WithCodes:
    """Return the same where the result is codes that lie as the larger side does."""

    def handler(recorder: Recorder, node: fx.Node, later: Later, scale: float, zero_point: int, dtype: torch.dtype) -> Traced | None:
        sides = sides_of(recorder, later.node, name, later.named)
        if sides is None or tuple(sides[0].tensor.stride()) != _strides_of_codes(node, sides[0].tensor):
            return None
        x, y = sides
        target = Desc(tuple(x.tensor.shape), tuple(x.tensor.stride()), dtype)
        result: Traced | None = recorder.first_possible(lambda: combine(recorder, later.node, name, x, y, target, (scale, zero_point)))
        return result

    return handler


def duplicate(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::clone` and `aten::contiguous`: a copy, or the tensor itself where that lies right."""
    x = recorder.read(a["self"])
    wanted = a.get("memory_format")
    if x is None or x.tensor.dtype not in DTYPES or not x.tensor.numel():
        return None
    if wanted is torch.channels_last and x.tensor.dim() == 4:
        strides = channels_last_strides(x.tensor.shape)
    elif wanted in (None, torch.preserve_format) and node.target is _aten.clone.default:
        strides = dense_strides(x.tensor)
    else:
        strides = contiguous_strides(x.tensor.shape)
    if node.target is _aten.contiguous.default and tuple(x.tensor.stride()) == strides:
        return x
    result = recorder.new(x.tensor.shape, strides, x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


def reshape(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::reshape` where that is a copy."""
    x = recorder.read(a["self"])
    if x is None or x.tensor.dtype not in DTYPES or not x.tensor.numel() or x.tensor.is_contiguous():
        return None
    if x.tensor.reshape(a["shape"]).untyped_storage().data_ptr() == x.tensor.untyped_storage().data_ptr():
        return None  # a view
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return Traced(result.tensor.reshape(a["shape"]), result.root)


def concatenation(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::cat`."""
    parts = [recorder.read(value) for value in a["tensors"]]
    tensors = [part.tensor for part in parts if part is not None and part.tensor.dtype in DTYPES and part.tensor.numel()]
    if len(tensors) < len(parts) or len({(t.dtype, t.dim()) for t in tensors}) > 1 or len(tensors) < 2:
        return None
    axis = a["dim"] % tensors[0].dim()
    sizes = list(tensors[0].shape)
    sizes[axis] = sum(t.shape[axis] for t in tensors)
    images = tensors[0].dim() in _SPATIAL and all(tuple(t.stride()) == channels_last_strides(t.shape) for t in tensors)
    result = recorder.new(sizes, channels_last_strides(sizes) if images else contiguous_strides(sizes), tensors[0].dtype)
    primitive = recorder.maker.concat(tuple(part.desc for part in parts if part is not None), result.desc, axis)
    recorder.call(primitive, {MULTIPLE_SRC + i: part for i, part in enumerate(parts) if part is not None} | {DST: result}, node)
    return result


def convert(recorder: Recorder, node: fx.Node, x: Traced, result: Traced, codes: int, scale: float, zero_point: int) -> None:
    """Convert between fp32 and the codes of one side, `SRC` or `DST`."""
    source, target = flat(x, result)
    in_order = codes == DST and len(source.sizes) == 1
    if in_order and recorder.first_possible(lambda: _scaled(recorder, node, (x, source), (result, target), scale, zero_point)):
        return
    maker = recorder.maker
    tensors: dict[int, Any] = {SRC: x, DST: result}
    attributes = with_qparams(Attributes(), tensors, codes, scale, zero_point)
    recorder.call(maker.reorder(maker.layout(source), maker.layout(target), attributes), tensors, node)


def _scaled(recorder: Recorder, node: fx.Node, x: tuple[Traced, Desc], result: tuple[Traced, Desc], scale: float, zero_point: int) -> bool:
    """Return True after a call that quantizes as a product with 1 and what follows it.

    Two to four times as fast as oneDNN's reorder, and ties are rounded as torch rounds them.
    """
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    attributes = Attributes(post_ops=(Eltwise("linear", 1.0 / scale, float(zero_point)),))
    primitive = recorder.maker.binary("mul", x[1], Desc.of(one), result[1], attributes)
    recorder.call(primitive, {SRC: x[0], SRC_1: one, DST: result[0]}, node)
    return True


def _read_by_convolutions(node: fx.Node) -> bool:
    """Whether some convolution reads a node's codes, perhaps padded."""
    names = "onednn.qconv", "nc_native.qconv"
    return any(str(user.target).startswith(names) or (user.target in PADS and _read_by_convolutions(user)) for user in node.users)


def _is_plain(x: Traced) -> bool:
    return x.tensor.dtype is torch.float32 and x.tensor.is_contiguous() and x.tensor.numel() > 0


def _only_quantized(node: fx.Node) -> bool:
    """Whether one quantize node is all that reads a node."""
    return len(node.users) == 1 and next(iter(node.users)).target in (quantize, quantize_per_tensor)


#: What can write codes itself.
_WITH_CODES: Mapping[Any, WithCodes] = {
    _aten.softmax.int: softmax_to_codes,
    _aten._softmax.default: softmax_to_codes,
    _aten.layer_norm.default: layer_norm_to_codes,
    _aten.rms_norm.default: steps.rms_norm_to_codes,
    rotation(): rotary.rotate_to_codes,
    _aten.add.Tensor: _binary_to_codes("add"),
    _aten.sub.Tensor: _binary_to_codes("sub"),
    _aten.mul.Tensor: _binary_to_codes("mul"),
    _aten.div.Tensor: _binary_to_codes("div"),
}
LATER: Mapping[Any, Callable[[fx.Node], bool]] = dict.fromkeys(_WITH_CODES, _only_quantized)
HANDLERS: Mapping[Any, Handler] = {
    quantize: to_codes,
    quantize_per_tensor: to_int8,
    dequantize: from_codes,
    torch.ops.quantized.max_pool2d.default: max_pool,
    _aten.layer_norm.default: layer_norm,
    _aten.rms_norm.default: steps.rms_norm,
    rotation(): rotary.rotate,
    _aten.softmax.int: softmax,
    _aten._softmax.default: softmax,
    _aten.adaptive_avg_pool2d.default: global_mean,
    _aten.mean.dim: global_mean,
    _aten.clone.default: duplicate,
    _aten.contiguous.default: duplicate,
    _aten.reshape.default: reshape,
    _aten.cat.default: concatenation,
}
