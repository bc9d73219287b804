"""Products of two activations as primitives, on tensors as they lie: nothing is transposed or copied for them.

Where a function in C computes a whole attention (`int8_attention.py`), its last product calls that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.native.operators import product
from nc.backends.native.plans import functions
from nc.backends.native.plans.elementwise import combine
from nc.backends.native.plans.int8_attention import attention, is_probabilities, is_scores
from nc.backends.native.plans.products import in_rows, with_qparams
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Later, Traced
from nc.backends.native.qdq_rewrites import quantize
from nc.backends.native.regions import only_user
from nc.graph.catalogue import op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS, same_shape
from nc.kernels.onednn.descriptions import DST, POST_OP, SRC, SRC_1, WEIGHTS, Attributes, BinaryOp, Desc, contiguous_strides
from nc.kernels.onednn.primitives import Primitive

_aten = torch.ops.aten


def matmul(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`nc_native::qmatmul`."""
    if isinstance(a["left"], Later):
        whole = attention(recorder, node, a, functools.partial(_strides, node))
        if whole is not None:
            return whole
    left, right = recorder.read(a["left"]), recorder.read(a["right"])
    others = [found for value in a["others"] if (found := recorder.read(value)) is not None]
    if left is None or right is None or len(others) < len(a["others"]):
        return None
    if (left.tensor.dtype, right.tensor.dtype) != (torch.uint8, torch.int8) or any(o.tensor.dtype is not torch.float32 for o in others):
        return None
    dims = max(left.tensor.dim(), right.tensor.dim())
    if not functions.why_unavailable():  # oneDNN takes no masks that repeat rows
        others = [functions.as_fp32(recorder, node, other) if 0 in other.tensor.stride() else other for other in others]
    left, right, *others = (_of_dims(value, dims) for value in (left, right, *others))
    # torch.broadcast_shapes imports sympy, which takes longer than all else here
    batch = [b if a == 1 else a for a, b in zip(left.tensor.shape[:-2], right.tensor.shape[:-2], strict=True)]
    sizes = *batch, left.tensor.shape[-2], right.tensor.shape[-1]
    if not math.prod(sizes):
        return recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"])
    if not left.tensor.shape[-1]:
        return None

    def multiply(dtype: torch.dtype, others: Sequence[Traced]) -> Traced:
        return _multiply(recorder, node, a, (left, right), sizes, dtype, others)

    def separately() -> Traced:
        result = multiply(torch.float32, ())
        for name, other in zip(a["how"][:-1], others[:-1], strict=True):
            result = combine(recorder, node, name, result, other)
        codes = None if a["output_dtype"] is torch.float32 else (a["output_scale"], a["output_zero_point"])
        target = Desc(tuple(sizes), _strides(node, sizes), a["output_dtype"])
        return combine(recorder, node, a["how"][-1], result, others[-1], target, codes)

    def expanded() -> Traced:
        return multiply(a["output_dtype"], [recorder.expanded(other, sizes, node) for other in others])

    # kernels know some broadcasts of what follows, but not all
    ways = (lambda: multiply(a["output_dtype"], others), *((separately, expanded) if others else ()))
    result: Traced | None = recorder.first_possible(*ways)
    return result


def _multiply(
    recorder: Recorder,
    node: fx.Node,
    a: Mapping[str, Any],
    sides: tuple[Traced, Traced],
    sizes: Sequence[int],
    dtype: torch.dtype,
    others: Sequence[Traced],
) -> Traced:
    """Return the call; raises Unimplemented where there is no fast kernel for it."""
    others = [_for_amx(recorder, other, sizes, node) for other in others]
    others = [in_rows(recorder, other, node) for other in others]  # oneDNN 3.12 reads others as if they lay like this
    post_ops = tuple(BinaryOp(name, other.desc) for name, other in zip(a["how"], others, strict=False))
    tensors: dict[int, Any] = {POST_OP * (i + 1) | SRC_1: other for i, other in enumerate(others)}
    attributes = with_qparams(Attributes({}, {}, post_ops), tensors, SRC, a["left_scale"] * a["factor"], a["left_zero_point"])
    attributes = with_qparams(attributes, tensors, WEIGHTS, a["right_scale"], a["right_zero_point"])
    if not dtype.is_floating_point:
        attributes = with_qparams(attributes, tensors, DST, a["output_scale"], a["output_zero_point"])
    # where the result lies transposed, oneDNN 3.12 reads wrong addresses for some broadcasts, and crashes
    whole = all(o.tensor.numel() == 1 or o.tensor.shape == tuple(sizes) for o in others)
    rows = Desc.dense(sizes, dtype)
    target = dataclasses.replace(rows, strides=_strides(node, sizes)) if whole else rows
    left, right = sides
    if left.tensor.shape[-1] == 1:  # where the right side has one row, oneDNN 3.12 takes batches to lie one behind the other
        right = in_rows(recorder, right, node)

    def make() -> Primitive:
        return recorder.maker.matmul(left.desc, right.desc, None, target, attributes, keep=True)

    primitive = make()
    if primitive.is_reference and target != rows:  # perhaps because the result would lie in columns
        target = rows
        primitive = make()
    if primitive.is_reference and not others:  # perhaps because of how the sides lie
        left, right = in_rows(recorder, left, node), in_rows(recorder, right, node)
        primitive = make()
    result = recorder.new(target.sizes, target.strides, dtype)
    recorder.call(primitive, tensors | {SRC: left, WEIGHTS: right, DST: result}, node)
    return result


def _for_amx(recorder: Recorder, other: Traced, sizes: Sequence[int], node: fx.Node) -> Traced:
    """Return what follows a product, so that AMX kernels read it right: they take what a batch shares as if each had one of its own.

    With two dimensions of batches, oneDNN 3.12 does so with [1, 1, M, N], and oneDNN 3.7 with [1, B, M, 1].
    """
    shape = tuple(other.tensor.shape)
    shared = len(sizes) == 4 and min(sizes[:3]) > 1 and shape[0] == 1 and shape[2] == sizes[2] and shape[1:] != tuple(sizes[1:])
    return recorder.expanded(other, (sizes[0], *shape[1:]), node) if shared and "amx_int8" in cpu.features() else other


def _strides(node: fx.Node, sizes: Sequence[int]) -> tuple[int, ...]:
    """How a result lies, so that what moves it for its only reader need not copy it."""
    reader = only_user(node)
    while reader is not None and op_name(reader) in ("view", "reshape") and _have_same_shape(reader, node):
        reader = only_user(reader)
    order = list(range(len(sizes)))
    if reader is not None and reader.target is _aten.transpose.int:
        moved = schema_arguments(reader)
        i, j = moved["dim0"] % len(sizes), moved["dim1"] % len(sizes)
        order[i], order[j] = j, i
    elif reader is not None and reader.target is _aten.permute.default:
        order = [dim % len(sizes) for dim in schema_arguments(reader)["dims"]]
    strides = [0] * len(sizes)
    for dim, stride in zip(order, contiguous_strides([sizes[dim] for dim in order]), strict=True):
        strides[dim] = stride
    return tuple(strides)


def _have_same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, TENSORS) and isinstance(y, TENSORS) and same_shape(x.shape, y.shape)


def _of_dims(x: Traced, dims: int) -> Traced:
    return Traced(x.tensor[(None,) * (dims - x.tensor.dim())], x.root)


HANDLERS: Mapping[Any, Handler] = {product(): matmul}
LATER: Mapping[Any, Callable[[fx.Node], bool]] = {product(): is_scores, quantize: is_probabilities}
