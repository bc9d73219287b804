"""Small operators as functions in C: for a few thousand elements a call of torch takes longer than the work.

They are for tensors in fp32 and bf16. What they can't do is left to other handlers, and to torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.functions import (
    FLOATS,
    MOST_DIMS,
    MOST_ELEMENTS,
    NUMBERS,
    apply,
    as_fp32,
    bits,
    converted,
    function,
    merged,
    new,
    why_unavailable,
)
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Later, Traced, check_sizes
from nc.graph.catalogue import first_input, op_name
from nc.kernels.c_code import openmp

_aten = torch.ops.aten
#: The widest head of an attention.
_WIDEST = 512


def image_to_codes(recorder: Recorder, node: fx.Node, x: Traced, scale: float, zero_point: int) -> Traced | None:
    """uint8 codes of images with three channels, with these next to each other: oneDNN took 3 times as long for 224 x 224."""
    tensor = x.tensor
    if (
        why_unavailable()
        or tensor.dim() != 4
        or tensor.shape[1] != 3
        or not tensor.numel()
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    images, channels, rows, columns = tensor.shape
    result = recorder.new(tensor.shape, (channels * rows * columns, 1, channels * columns, channels), torch.uint8)
    recorder.call_function(function("image"), [images, rows * columns, bits(1.0 / scale), zero_point, openmp.threads()], [result, x], node)
    return result


def _read(recorder: Recorder, value: Any) -> Traced | None:
    """Return a tensor that the C code can read."""
    x = recorder.read(value)
    if x is None or x.tensor.dtype not in FLOATS or x.tensor.is_neg():  # what a view negates is not so in memory
        return None
    return x if 0 < x.tensor.numel() <= MOST_ELEMENTS and x.tensor.dim() <= MOST_DIMS else None


def _unary(operation: str) -> Handler:
    def handler(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
        x = _read(recorder, a.get("self", a.get("input")))
        if x is None or not x.tensor.dim():
            return None
        result = new(recorder, x.tensor.shape, x.tensor.dtype)
        apply(recorder, node, operation, result, x)
        return result

    return handler


def _binary(operation: str) -> Handler:
    def handler(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
        given = recorder.read(a["self"]) or a["self"], recorder.read(a["other"]) or a["other"]
        x, y = (_operand(recorder, value) for value in given)
        if x is None or y is None or a.get("alpha", 1) != 1:
            return None
        # a number does not decide about the dtype
        dtype = torch.result_type(*(value.tensor if isinstance(value, Traced) else 1.0 for value in given))  # type: ignore[arg-type]
        dims = max(x.tensor.dim(), y.tensor.dim())
        shapes = [(1,) * (dims - side.tensor.dim()) + tuple(side.tensor.shape) for side in (x, y)]
        sizes = [n if m == 1 else m for m, n in zip(*shapes, strict=True)]  # torch.broadcast_shapes imports sympy
        if dtype not in FLOATS or not sizes:
            return None
        result = new(recorder, sizes, dtype)
        apply(recorder, node, operation, result, x, y)
        return result

    return handler


def _operand(recorder: Recorder, value: Any) -> Traced | None:
    """Return a tensor, or a number as a tensor."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Traced(torch.tensor(float(value), dtype=torch.float32), None)
    return _read(recorder, value)


def gelu(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::gelu`."""
    result: Traced | None = _unary("gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf")(recorder, node, a)
    return result


def power(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::pow` by 2."""
    result: Traced | None = _unary("square")(recorder, node, a) if a["exponent"] == 2 else None
    return result


def copied(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::clone` and `aten::contiguous`."""
    x = _read(recorder, a["self"])
    if x is None or not x.tensor.dim() or a.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return None
    if x.tensor.is_contiguous() and node.target is _aten.contiguous.default:
        return x
    if a.get("memory_format") is not torch.contiguous_format and node.target is _aten.clone.default and not x.tensor.is_contiguous():
        return None  # the strides of the result are those of the input
    return converted(recorder, node, x, x.tensor.dtype)


def reshape(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::reshape` where that is a copy."""
    x = _read(recorder, a["self"])
    if x is None or x.tensor.is_contiguous():
        return None
    if x.tensor.reshape(a["shape"]).untyped_storage().data_ptr() == x.tensor.untyped_storage().data_ptr():
        return None
    result = converted(recorder, node, x, x.tensor.dtype)
    return Traced(result.tensor.reshape(a["shape"]), result.root)


def concatenation(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::cat`."""
    parts = [_read(recorder, value) for value in a["tensors"] if not isinstance(value, Traced) or value.tensor.numel()]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts) or len({(p.tensor.dtype, p.tensor.dim()) for p in found}) > 1 or not found[0].tensor.dim():
        return None
    axis, sizes = a["dim"] % found[0].tensor.dim(), list(found[0].tensor.shape)
    sides = {(*p.tensor.shape[:axis], *p.tensor.shape[axis + 1 :]) for p in found}
    check_sizes(len(sides) == 1, node, *(p.tensor.shape for p in found))
    sizes[axis] = sum(p.tensor.shape[axis] for p in found)
    result, start = new(recorder, sizes, found[0].tensor.dtype), 0
    for part in found:
        target = result.tensor.narrow(axis, start, part.tensor.shape[axis])
        apply(recorder, node, "copy", Traced(target, result.root), part)
        start += part.tensor.shape[axis]
    return result


def mean(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::mean` over the last dimension."""
    x = _read(recorder, a["self"])
    if x is None or not x.tensor.dim() or not a["dim"] or len(a["dim"]) > 1 or a["dim"][0] % x.tensor.dim() != x.tensor.dim() - 1:
        return None
    if a["dtype"] not in (None, x.tensor.dtype) or not x.tensor.is_contiguous():
        return None
    *sizes, width = x.tensor.shape
    result = new(recorder, [*sizes, 1], x.tensor.dtype)
    kind = FLOATS[x.tensor.dtype]
    recorder.call_function(function("mean"), [kind, kind, x.tensor.numel() // width, width, width], [result, x], node)
    return result if a["keepdim"] else Traced(result.tensor.squeeze(-1), result.root)


def layer_norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::layer_norm` over the last dimension."""
    x = _read(recorder, a["input"])
    return None if x is None else _norm(recorder, node, a, x, (a["weight"], a["bias"]), is_layer_norm=True)


def rms_norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::rms_norm` over the last dimension, of any number of elements: oneDNN has none, and torch's is seven operators."""
    x = recorder.read(a["input"])
    if why_unavailable() or x is None or x.tensor.dtype not in FLOATS or x.tensor.is_neg() or not x.tensor.numel():
        return None
    if a["eps"] is None and x.tensor.dtype is not torch.float32:
        return None
    return _norm(recorder, node, a, x, (a["weight"], None), is_layer_norm=False)


def rms_norm_to_codes(recorder: Recorder, node: fx.Node, later: Later, scale: float, zero_point: int, dtype: torch.dtype) -> Traced | None:
    """Return the same in fp32, as codes."""
    x = recorder.read(later.named["input"])
    if why_unavailable() or x is None or x.tensor.dtype is not torch.float32 or x.tensor.is_neg() or not x.tensor.numel():
        return None
    given = later.named["weight"], None
    return _norm(recorder, later.node, later.named, x, given, is_layer_norm=False, codes=(dtype, scale, zero_point))


def _norm(
    recorder: Recorder,
    node: fx.Node,
    a: Mapping[str, Any],
    x: Traced,
    given: Sequence[Any],
    *,
    is_layer_norm: bool,
    codes: tuple[torch.dtype, float, int] | None = None,
) -> Traced | None:
    """Return a norm of the rows of x; `given` are weight and bias, `codes` what the result is quantized to."""
    constants = [recorder.constant(value) for value in given]
    if len(a["normalized_shape"]) != 1 or not x.tensor.dim() or not x.tensor.is_contiguous():
        return None
    if any((constant is None) != (value is None) for constant, value in zip(constants, given, strict=True)):
        return None
    width = x.tensor.shape[-1]
    check_sizes(width == a["normalized_shape"][0], node, x.tensor.shape, a["normalized_shape"])
    dtype, scale, zero_point = (x.tensor.dtype, 1.0, 0) if codes is None else codes
    result = new(recorder, x.tensor.shape, dtype)
    eps = bits(torch.finfo(torch.float32).eps if a["eps"] is None else a["eps"])
    factors = [torch.empty(0, dtype=torch.float32) if t is None else as_fp32(recorder, node, Traced(t, None)) for t in constants]
    numbers = [NUMBERS[dtype], NUMBERS[x.tensor.dtype], x.tensor.numel() // width, width, eps, int(is_layer_norm), openmp.threads()]
    numbers += [bits(1.0 / scale), zero_point]
    recorder.call_function(function("norm"), numbers, [result, x, *factors], node)
    return result


def place(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::index_copy_` with one index."""
    x, index, source = recorder.read(a["self"]), recorder.read(a["index"]), recorder.read(a["source"])
    if x is None or index is None or source is None or x.root is None or index.tensor.dtype is not torch.int64 or index.tensor.numel() != 1:
        return None
    axis = a["dim"] % max(x.tensor.dim(), 1)
    if (
        x.tensor.is_neg()
        or source.tensor.is_neg()
        or x.tensor.dtype != source.tensor.dtype
        or not source.tensor.numel()
        or source.tensor.dim() != x.tensor.dim()
    ):
        return None
    one = source.tensor.select(axis, 0)
    to = x.tensor.select(axis, 0)
    check_sizes(one.shape == to.shape and source.tensor.shape[axis] == 1, node, x.tensor.shape, source.tensor.shape)
    sizes, (ys, xs) = merged(to.shape, [to.stride(), one.stride()])
    size = x.tensor.element_size()
    if len(sizes) == 1:
        sizes, ys, xs = (1, *sizes), (0, *ys), (0, *xs)
    if len(sizes) != 2 or ys[1] != 1 or xs[1] != 1:
        return None
    numbers = [sizes[1] * size, sizes[0], ys[0] * size, xs[0] * size, x.tensor.stride(axis) * size, x.tensor.shape[axis], 1, 1]
    recorder.call_function(function("place"), numbers, [x, source, index], node)
    return x


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::scaled_dot_product_attention` of one query per head; keys that heads share are read where they lie."""
    query, mask = recorder.read(a["query"]), recorder.read(a["attn_mask"])
    if query is None or a["dropout_p"] or a["is_causal"] or query.tensor.dim() != 4 or query.tensor.shape[2] != 1:
        return None
    key, value = (_shared(recorder, a[name]) for name in ("key", "value"))
    if key is None or value is None or key.tensor.dim() != 4 or value.tensor.dim() != 4:
        return None
    batch, heads, _, width = query.tensor.shape
    (_, of_key, keys, _), wide = key.tensor.shape, value.tensor.shape[3]
    check_sizes(key.tensor.shape[3] == width, node, query.tensor.shape, key.tensor.shape)
    given = (query, key, value, *((mask,) if mask is not None else ()))
    if (
        any(v.tensor.is_neg() for v in given)
        or any(v.tensor.dtype not in FLOATS for v in given[:3])
        or max(width, wide) > _WIDEST
        or heads % of_key
        or not keys
    ):
        return None
    if any(v.tensor.shape[:2] != (batch, of_key) or v.tensor.stride(3) != 1 for v in (key, value)) or query.tensor.stride(3) != 1:
        return None
    if of_key != heads and not (a["enable_gqa"] or isinstance(a["key"], Later)) or value.tensor.shape[2] != keys:
        return None
    kind, mask_dtype, mask_strides = 0, 0, (0, 0, 0)
    if mask is not None:
        if mask.tensor.dtype not in (torch.bool, *FLOATS) or mask.tensor.dim() > 4:
            return None
        kind, mask_dtype = (1, 0) if mask.tensor.dtype is torch.bool else (2, FLOATS[mask.tensor.dtype])
        spread = mask.tensor.expand(batch, heads, 1, keys).stride()
        mask_strides = spread[0], spread[1], spread[3]
    result = new(recorder, (batch, heads, 1, wide), query.tensor.dtype)
    dtypes = (*(FLOATS[v.tensor.dtype] for v in (*given[:3], result)), mask_dtype)
    strides = [stride for v, count in ((query, 2), (key, 3), (value, 3), (result, 2)) for stride in v.tensor.stride()[:count]]
    factor = a["scale"] if a["scale"] is not None else width**-0.5
    numbers = [batch, heads, heads // of_key, keys, width, wide, kind, *dtypes, *strides, *mask_strides, bits(factor), openmp.threads()]
    recorder.call_function(function("attention"), numbers, [result, *given], node)
    return result


def is_repeated(node: fx.Node) -> bool:
    """Whether a reshape only repeats heads for attention: it waits, because a kernel can read the same head twice."""
    source, readers = first_input(node), list(node.users)
    if source is None or op_name(source) != "expand" or not readers:
        return False
    return all(reader.target is _aten.scaled_dot_product_attention.default for reader in readers)


def _shared(recorder: Recorder, value: Any) -> Traced | None:
    """Keys or values; those that were repeated for heads, before that."""
    if isinstance(value, Later) and value.node.target is _aten.reshape.default:
        x, sizes = recorder.read(value.named["self"]), value.named["shape"]
        if x is not None and x.tensor.dim() == 5 and x.tensor.stride(2) == 0 and sizes[1] == x.tensor.shape[1] * x.tensor.shape[2]:
            return Traced(x.tensor[:, :, 0], x.root)
    return recorder.read(value)


HANDLERS: Mapping[Any, Handler] = {
    _aten.add.Tensor: _binary("add"),
    _aten.sub.Tensor: _binary("sub"),
    _aten.mul.Tensor: _binary("mul"),
    _aten.div.Tensor: _binary("div"),
    _aten.pow.Tensor_Scalar: power,
    _aten.gelu.default: gelu,
    _aten.layer_norm.default: layer_norm,
    _aten.rms_norm.default: rms_norm,
    _aten.clone.default: copied,
    _aten.contiguous.default: copied,
    _aten.reshape.default: reshape,
    _aten.cat.default: concatenation,
    _aten.mean.dim: mean,
    _aten.index_copy_.default: place,
    _aten.scaled_dot_product_attention.default: attention,
} | {
    getattr(_aten, name).default: _unary(name)
    for name in ("neg", "abs", "sqrt", "rsqrt", "reciprocal", "relu", "exp", "sigmoid", "silu", "tanh", "cos", "sin")
}
LATER = {_aten.reshape.default: is_repeated}
