"""Masks of attention, and rows of tables, as functions in C.

Each call of torch's in a plan gives Python's lock up and takes it back, for which threads wait.

Most masks say the same for all rows, and torch writes them out. Here a dimension along which nothing changes stays repeated, where only
operators of masks, and products, read the result: nobody else sees its strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators import product
from nc.backends.native.plans import int8_attention
from nc.backends.native.plans.functions import (
    DTYPES,
    FLOATS,
    MOST_DIMS,
    MOST_ELEMENTS,
    apply,
    function,
    new,
    why_unavailable,
)
from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Traced

_aten = torch.ops.aten
#: Views that repeated dimensions don't hinder.
_VIEWS = {
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.alias.default,
    _aten.permute.default,
    _aten.transpose.int,
}


def convert(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::to` another dtype, and `aten::type_as`: what becomes a mask, or a floating-point number."""
    x, other = _read(recorder, a["self"], *DTYPES), recorder.read(a.get("other"))
    dtype = a["dtype"] if other is None else other.tensor.dtype
    if x is None or not x.tensor.dim() or dtype not in (torch.bool, *FLOATS):
        return None
    if a.get("memory_format") not in (None, torch.preserve_format) or a.get("device") not in (None, torch.device("cpu")):
        return None
    if dtype != x.tensor.dtype:
        return _elementwise(recorder, node, "copy", dtype, x)
    return None if a.get("copy") else x


def both(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """Return the logical and of two masks."""
    left, right = (_read(recorder, a[name], torch.bool) for name in ("self", "other"))
    if left is None or right is None:
        return None
    for mask, rest in ((left, right), (right, left)):
        if mask.root is None and not recorder.follow and mask.tensor.all() and _may_repeat(node):
            return Traced(rest.tensor.expand(_sizes(mask, rest)), rest.root)
    return _elementwise(recorder, node, "mul", torch.bool, left, right)


def either(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """Return the logical or of two masks."""
    return _elementwise(recorder, node, "add", torch.bool, *(_read(recorder, a[name], torch.bool) for name in ("self", "other")))


def inverse(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """Return the logical not of a mask."""
    return _elementwise(recorder, node, "not", torch.bool, _read(recorder, a["self"], torch.bool))


def fill(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::masked_fill` with a number."""
    value = Traced(torch.tensor(float(a["value"]), dtype=torch.float32, device="cpu"), None)
    mask, x = _read(recorder, a["mask"], torch.bool), _read(recorder, a["self"], torch.float32)
    return _elementwise(recorder, node, "select", torch.float32, mask, value, x)


def choose(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::where` of two tensors of the same dtype."""
    mask, *sides = (_read(recorder, a[name], *DTYPES) for name in ("condition", "self", "other"))
    dtypes = {side.tensor.dtype for side in sides if side is not None}
    if mask is None or mask.tensor.dtype is not torch.bool or len(dtypes) != 1 or not dtypes <= {torch.bool, *FLOATS}:
        return None
    (dtype,) = dtypes
    return _elementwise(recorder, node, "select", dtype, mask, *sides)


def any_of_row(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::any` over the last dimension of a mask."""
    x = _read(recorder, a["self"], torch.bool)
    if x is None or not x.tensor.dim() or a["dim"] % x.tensor.dim() != x.tensor.dim() - 1 or not x.tensor.numel():
        return None
    *sizes, _ = x.tensor.shape
    if _may_repeat(node):
        x = Traced(_begin(x.tensor, _changing(x.tensor)), x.root)
    if not x.tensor.is_contiguous() or x.tensor.numel() > MOST_ELEMENTS:
        return None
    *rows, width = x.tensor.shape
    result = new(recorder, (*rows, 1), torch.bool)
    # the mean of a mask is 0 where nothing of it is true
    numbers = [DTYPES[torch.bool], DTYPES[torch.bool], x.tensor.numel() // width, width, width]
    recorder.call_function(function("mean"), numbers, [result, x], node)
    whole = result.tensor.expand((*sizes, 1))
    return Traced(whole if a["keepdim"] else whole.squeeze(-1), result.root)


def _constant_like(value: float) -> Handler:
    """Handle `aten::zeros_like` and `aten::ones_like`: nothing of the tensor counts but its sizes."""

    def handler(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
        x = recorder.read(a["self"])
        if x is None or not _may_repeat(node) or a["device"] not in (None, torch.device("cpu")):
            return None
        dtype = x.tensor.dtype if a["dtype"] is None else a["dtype"]
        return Traced(torch.full((), value, dtype=dtype, device="cpu").expand(x.tensor.shape), None)

    return handler


def gather(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::index` by constant positions in even steps, which is a view."""
    x, indices = recorder.read(a["self"]), [recorder.constant(value) for value in a["indices"]]
    found = [index for index in indices if index is not None and index.dtype is torch.int64 and index.numel()]
    if x is None or recorder.follow or not found or len(found) < len(indices) or not _may_repeat(node):
        return None
    sizes = _sizes(*(Traced(index, None) for index in found))
    strides, offset = [0] * len(sizes), x.tensor.storage_offset()
    for index, places, stride in zip(found, x.tensor.shape, x.tensor.stride(), strict=False):
        steps = _even_steps(index)
        if steps is None or index.min() < 0 or index.max() >= places:
            return None
        offset += int(index.flatten()[0]) * stride
        for dim, step in enumerate(steps, len(sizes) - len(steps)):
            strides[dim] += step * stride
    if min(strides, default=0) < 0:
        return None
    rest = slice(len(found), None)
    view = x.tensor.as_strided((*sizes, *x.tensor.shape[rest]), (*strides, *x.tensor.stride()[rest]), offset)
    return Traced(view, x.root)


def embedding(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::embedding`: rows of a table."""
    table, indices = recorder.read(a["weight"]), recorder.read(a["indices"])
    if table is None or indices is None or not table.tensor.is_contiguous() or table.tensor.dim() != 2 or not indices.tensor.numel():
        return None
    if indices.tensor.dtype is not torch.int64 or not indices.tensor.is_contiguous() or table.tensor.dtype not in FLOATS:
        return None
    places, width = table.tensor.shape
    size = width * table.tensor.element_size()
    result = new(recorder, (*indices.tensor.shape, width), table.tensor.dtype)
    numbers = [size, indices.tensor.numel(), size, 0, size, places, 0, 0]
    recorder.call_function(function("place"), numbers, [result, table, indices], node)
    return result


def _read(recorder: Recorder, value: Any, *dtypes: torch.dtype) -> Traced | None:
    """Return a tensor of one of these dtypes that the C code can read."""
    x = recorder.read(value)
    return x if x is not None and x.tensor.dtype in dtypes and not x.tensor.is_neg() else None  # what a view negates is not so in memory


def _elementwise(recorder: Recorder, node: fx.Node, operation: str, dtype: torch.dtype, *operands: Traced | None) -> Traced | None:
    """Return a new tensor; dimensions along which no operand changes stay repeated where that may be."""
    given = [operand for operand in operands if operand is not None]
    if len(given) < len(operands):
        return None
    sizes = _sizes(*given)
    spread = [Traced(operand.tensor.expand(sizes), operand.root) for operand in given]
    if _may_repeat(node):
        small = _changing(*(x.tensor for x in spread))
    elif all(_is_in_order(x.tensor) for x in spread):
        small = sizes
    else:
        return None  # torch would keep the order of their dimensions
    if not sizes or len(sizes) > MOST_DIMS or not 0 < math.prod(small) <= MOST_ELEMENTS:
        return None
    result = new(recorder, small, dtype)
    apply(recorder, node, operation, result, *(Traced(_begin(x.tensor, small), x.root) for x in spread))
    return Traced(result.tensor.expand(sizes), result.root)


def _sizes(*given: Traced) -> tuple[int, ...]:
    """Of what tensors give together."""
    dims = max(x.tensor.dim() for x in given)
    shapes = [(1,) * (dims - x.tensor.dim()) + tuple(x.tensor.shape) for x in given]
    return tuple(next((n for n in each if n != 1), 1) for each in zip(*shapes, strict=True))  # torch.broadcast_shapes imports sympy


def _changing(*spread: torch.Tensor) -> tuple[int, ...]:
    """Sizes of tensors that are equally large; 1 for dimensions along which none of them changes."""
    return tuple(n if any(x.stride(dim) for x in spread) else min(n, 1) for dim, n in enumerate(spread[0].shape))


def _is_in_order(x: torch.Tensor) -> bool:
    """Whether no dimension moves by more elements than one in front of it."""
    strides = [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _begin(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the first elements of a tensor."""
    return x[tuple(slice(n) for n in sizes)]


def _even_steps(index: torch.Tensor) -> tuple[int, ...] | None:
    """By how much positions grow along each dimension; None where that is not always as much."""
    first = index[(0,) * index.dim()]
    steps = tuple(int(index.select(dim, 1)[(0,) * (index.dim() - 1)] - first) if n > 1 else 0 for dim, n in enumerate(index.shape))
    even = first.reshape((1,) * index.dim())
    for dim, (n, step) in enumerate(zip(index.shape, steps, strict=True)):
        even = even + (step * torch.arange(n, device="cpu")).reshape((-1, *(1,) * (index.dim() - dim - 1)))
    return steps if torch.equal(even, index) else None


def _may_repeat(node: fx.Node) -> bool:
    """Whether the strides of a result don't matter to those who read it: operators of masks, and attention in C."""
    if int8_attention.why_unavailable():
        return False  # oneDNN would need what follows a product written out
    return all(user.target in _READERS or (user.target in _GIVE_IT_ON and _may_repeat(user)) for user in node.users)


def _where_available(handler: Handler) -> Handler:
    def checked(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Any:
        return None if why_unavailable() else handler(recorder, node, a)

    return checked


_OF_MASKS: Mapping[Any, Handler] = {
    _aten.to.dtype: convert,
    _aten.to.device: convert,
    _aten.type_as.default: convert,
    _aten.logical_and.default: both,
    _aten.bitwise_and.Tensor: both,
    _aten.__and__.Tensor: both,
    _aten.logical_or.default: either,
    _aten.bitwise_or.Tensor: either,
    _aten.__or__.Tensor: either,
    _aten.logical_not.default: inverse,
    _aten.bitwise_not.default: inverse,
    _aten.masked_fill.Scalar: fill,
    _aten.where.self: choose,
    _aten.any.dim: any_of_row,
    _aten.zeros_like.default: _constant_like(0.0),
    _aten.ones_like.default: _constant_like(1.0),
    _aten.index.Tensor: gather,
}
#: Conversions to the same dtype give the tensor itself.
_CONVERSIONS = {target for target, handler in _OF_MASKS.items() if handler is convert}
_GIVE_IT_ON = {*_VIEWS, *_CONVERSIONS}
_READERS = {*_OF_MASKS, product()} - _CONVERSIONS
HANDLERS: Mapping[Any, Handler] = {target: _where_available(h) for target, h in (*_OF_MASKS.items(), (_aten.embedding.default, embedding))}
