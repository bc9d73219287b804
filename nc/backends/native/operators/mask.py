"""Masks of attention as functions in C.

Each call of torch's in a plan gives the GIL up and takes it back, for which threads wait.

Most masks say the same for all rows, and torch writes them out. Here a dimension along which nothing changes
stays repeated, where only operators of masks, and products, read the result: nobody else sees its strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from nc.backends.native.operators import dynamic_attention, float_attention, int8_attention
from nc.backends.native.operators.bf16_attention import bf16_attention
from nc.backends.native.operators.matmul import product
from nc.backends.native.plans.c_functions import (
    DTYPES,
    FLOATS,
    MOST_DIMS,
    MOST_ELEMENTS,
    apply,
    available,
    function,
    new,
)
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Way, need
from nc.backends.native.regions import only_user
from nc.graph.catalogue import first_input, schema_arguments
from nc.graph.fx_utils import give_values_of
from nc.graph.placement import works_in_place
from nc.graph.views import Binary, set_argument

_aten = torch.ops.aten
_READ_BY_OTHERS = "what reads it needs it written out"
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


def restore_masks(module: fx.GraphModule) -> None:
    """Let attention read a mask of booleans where the graph adds a term and multiplies the result for it.

    `nc/capture/decompose.py` writes a mask so. Attention as one operator gives zeros to a query that sees no
    key by itself. Not where operators work in place: there a value depends on when it is read.
    """
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        reader = only_user(node) if _is_attention(node) else None
        bias = schema_arguments(node)["attn_mask"] if reader is not None else None
        mask = _added(bias) if isinstance(bias, fx.Node) else None
        if reader is None or mask is None or _multiplied(reader, node) is not mask:
            continue
        set_argument(node, "attn_mask", mask)
        reader.replace_all_uses_with(node)
        give_values_of(node, reader)
        module.graph.erase_node(reader)


def _is_attention(node: fx.Node) -> bool:
    """Return whether a node is an attention as one operator, of torch or with roundings."""
    rounded = bf16_attention(), dynamic_attention.dynamic_attention()
    return node.target in (_aten.scaled_dot_product_attention.default, *rounded)


def _added(bias: fx.Node) -> fx.Node | None:
    """Return the mask of booleans that gives a term: 0 where it is true, else the lowest number."""
    filled = schema_arguments(bias) if bias.target is _aten.masked_fill.Scalar else {}
    zeros, hidden = filled.get("self"), filled.get("mask")
    if not _calls(zeros, _aten.zeros_like.default) or not _calls(hidden, _aten.logical_not.default):
        return None
    mask = first_input(hidden)
    same = first_input(zeros) is mask and filled["value"] == torch.finfo(torch.float32).min
    return mask if same and mask is not None and mask.meta["val"].dtype is torch.bool else None


def _multiplied(reader: fx.Node, attention: fx.Node) -> fx.Node | None:
    """Return the mask of which a product with the result takes whether a query sees any key."""
    is_product = reader.target is _aten.mul.Tensor and Binary.of(reader).sides[0] is attention
    converted = Binary.of(reader).sides[1] if is_product else None
    seen = first_input(converted) if _calls(converted, _aten.to.dtype) else None
    if not _calls(seen, _aten.any.dim):
        return None
    how = schema_arguments(seen)
    return how["self"] if how["keepdim"] and how["dim"] in (-1, how["self"].meta["val"].dim() - 1) else None


def _calls(node: object, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target


def convert(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::to` another dtype, and `aten::type_as`: what becomes a mask, or a floating-point number."""
    x, other = _read(recorder, a["self"], *DTYPES), recorder.optional(a.get("other"))
    dtype = a["dtype"] if other is None else other.tensor.dtype
    need(x.tensor.dim(), "its input has no dimension")
    need(dtype in (torch.bool, *FLOATS), f"its result is {dtype}")
    need(a.get("memory_format") in (None, torch.preserve_format), "it asks for other strides")
    need(a.get("device") in (None, torch.device("cpu")), "it asks for another device")
    if dtype != x.tensor.dtype:
        return _elementwise(recorder, node, "copy", dtype, x)
    need(not a.get("copy"), "it is a copy in the same dtype")
    return x


def both(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Return the logical and of two masks."""
    left, right = (_read(recorder, a[name], torch.bool) for name in ("self", "other"))
    for mask, rest in ((left, right), (right, left)):
        if mask.root is None and not recorder.follow and mask.tensor.all() and _may_repeat(node):
            return PlanTensor(rest.tensor.expand(_sizes(mask, rest)), rest.root)
    return _elementwise(recorder, node, "mul", torch.bool, left, right)


def either(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Return the logical or of two masks."""
    return _elementwise(
        recorder,
        node,
        "add",
        torch.bool,
        *(_read(recorder, a[name], torch.bool) for name in ("self", "other")),
    )


def inverse(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Return the logical not of a mask."""
    return _elementwise(recorder, node, "not", torch.bool, _read(recorder, a["self"], torch.bool))


def fill(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::masked_fill` with a number."""
    value = PlanTensor(torch.tensor(float(a["value"]), dtype=torch.float32, device="cpu"), None)
    mask, x = _read(recorder, a["mask"], torch.bool), _read(recorder, a["self"], torch.float32)
    return _elementwise(recorder, node, "select", torch.float32, mask, value, x)


def choose(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::where` of two tensors of the same dtype."""
    mask, *sides = (_read(recorder, a[name], *DTYPES) for name in ("condition", "self", "other"))
    dtype, *others = {side.tensor.dtype for side in sides}
    need(mask.tensor.dtype is torch.bool, "its condition is not a mask")
    need(not others and dtype in (torch.bool, *FLOATS), "its sides have several dtypes, or integers")
    return _elementwise(recorder, node, "select", dtype, mask, *sides)


def choose_number(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::where` of a tensor and a number, or of a number and a tensor."""
    mask = _read(recorder, a["condition"], torch.bool)
    sides = [
        PlanTensor(torch.tensor(float(side), dtype=torch.float32, device="cpu"), None)
        if isinstance(side, (int, float))
        else _read(recorder, side, torch.float32)
        for side in (a["self"], a["other"])
    ]
    return _elementwise(recorder, node, "select", torch.float32, mask, *sides)


def any_of_row(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::any` over the last dimension of a mask."""
    x = _read(recorder, a["self"], torch.bool)
    need(x.tensor.numel() and x.tensor.dim(), "its mask has no element")
    need(a["dim"] % x.tensor.dim() == x.tensor.dim() - 1, "it is not over the last dimension")
    *sizes, _ = x.tensor.shape
    if _may_repeat(node):
        x = PlanTensor(_begin(x.tensor, _changing(x.tensor)), x.root)
    need(
        x.tensor.is_contiguous() and x.tensor.numel() <= MOST_ELEMENTS,
        f"its mask has gaps, or more than {MOST_ELEMENTS} elements",
    )
    *rows, width = x.tensor.shape
    result = new(recorder, (*rows, 1), torch.bool)
    # the mean of a mask is 0 where nothing of it is true
    kind = DTYPES[torch.bool]
    fields = {"to": kind, "of": kind, "rows": x.tensor.numel() // width, "width": width, "stride": width}
    recorder.call_function(function("mean"), fields, [result, x], node)
    whole = result.tensor.expand((*sizes, 1))
    return PlanTensor(whole if a["keepdim"] else whole.squeeze(-1), result.root)


def _constant_like(value: float) -> Way:
    """Compute `aten::zeros_like` and `aten::ones_like`: nothing of the tensor counts but its sizes."""

    def way(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        x = recorder.read(a["self"])
        need(_may_repeat(node), _READ_BY_OTHERS)
        need(a["device"] in (None, torch.device("cpu")), "it asks for another device")
        dtype = x.tensor.dtype if a["dtype"] is None else a["dtype"]
        return PlanTensor(torch.full((), value, dtype=dtype, device="cpu").expand(x.tensor.shape), None)

    return way


def gather(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::index` by constant positions in even steps, which is a view."""
    x, indices = recorder.read(a["self"]), [recorder.constant(value) for value in a["indices"]]
    need(
        indices and all(index.dtype is torch.int64 and index.numel() for index in indices),
        "its positions are not int64, or there is none",
    )
    need(not recorder.follow, "its positions may change between calls")
    need(_may_repeat(node), _READ_BY_OTHERS)
    sizes = _sizes(*(PlanTensor(index, None) for index in indices))
    strides, offset = [0] * len(sizes), x.tensor.storage_offset()
    for index, places, stride in zip(indices, x.tensor.shape, x.tensor.stride(), strict=False):
        steps = _even_steps(index)
        need(
            index.min() >= 0 and index.max() < places, "one of its positions is negative or past the last one"
        )
        offset += int(index.flatten()[0]) * stride
        for dim, step in enumerate(steps, len(sizes) - len(steps)):
            strides[dim] += step * stride
    need(min(strides, default=0) >= 0, "its positions go backwards")
    rest = slice(len(indices), None)
    view = x.tensor.as_strided((*sizes, *x.tensor.shape[rest]), (*strides, *x.tensor.stride()[rest]), offset)
    return PlanTensor(view, x.root)


def _read(recorder: Recorder, value: Any, *dtypes: torch.dtype) -> PlanTensor:
    """Return a tensor of one of these dtypes that the C code can read."""
    x = recorder.read(value)
    need(x.tensor.dtype in dtypes, f"one of its tensors is {x.tensor.dtype}")
    need(not x.tensor.is_neg(), "a view negates one of its tensors, which memory does not show")
    return x


def _elementwise(
    recorder: Recorder, node: fx.Node, operation: str, dtype: torch.dtype, *operands: PlanTensor
) -> PlanTensor:
    """Return a new tensor; dimensions along which no operand changes stay repeated where that may be."""
    sizes = _sizes(*operands)
    spread = [PlanTensor(operand.tensor.expand(sizes), operand.root) for operand in operands]
    if _may_repeat(node):
        small = _changing(*(x.tensor for x in spread))
    else:
        need(
            all(_is_in_order(x.tensor) for x in spread),
            "torch keeps the order of its dimensions, which is not that of rows",
        )
        small = sizes
    need(0 < len(sizes) <= MOST_DIMS, f"it has no dimension, or more than {MOST_DIMS}")
    need(0 < math.prod(small) <= MOST_ELEMENTS, f"it has no element, or more than {MOST_ELEMENTS}")
    result = new(recorder, small, dtype)
    apply(recorder, node, operation, result, *(PlanTensor(_begin(x.tensor, small), x.root) for x in spread))
    return PlanTensor(result.tensor.expand(sizes), result.root)


def _sizes(*given: PlanTensor) -> tuple[int, ...]:
    """Sizes of what tensors give together."""
    dims = max(x.tensor.dim() for x in given)
    shapes = [(1,) * (dims - x.tensor.dim()) + tuple(x.tensor.shape) for x in given]
    return tuple(
        next((n for n in each if n != 1), 1) for each in zip(*shapes, strict=True)
    )  # torch.broadcast_shapes imports sympy


def _changing(*spread: torch.Tensor) -> tuple[int, ...]:
    """Sizes of tensors that are equally large; 1 for dimensions along which none of them changes."""
    return tuple(
        n if any(x.stride(dim) for x in spread) else min(n, 1) for dim, n in enumerate(spread[0].shape)
    )


def _is_in_order(x: torch.Tensor) -> bool:
    """Return whether no dimension has a larger stride than an earlier one."""
    strides = [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride]
    return strides == sorted(strides, reverse=True)


def _begin(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the first elements of a tensor."""
    return x[tuple(slice(n) for n in sizes)]


def _even_steps(index: torch.Tensor) -> tuple[int, ...]:
    """By how much positions grow along each dimension; raises `Refused` where that is not always as much."""
    first = index[(0,) * index.dim()]
    steps = tuple(
        int(index.select(dim, 1)[(0,) * (index.dim() - 1)] - first) if n > 1 else 0
        for dim, n in enumerate(index.shape)
    )
    even = first.reshape((1,) * index.dim())
    for dim, (n, step) in enumerate(zip(index.shape, steps, strict=True)):
        even = even + (step * torch.arange(n, device="cpu")).reshape((-1, *(1,) * (index.dim() - dim - 1)))
    need(torch.equal(even, index), "its positions are in uneven steps")
    return steps


def _may_repeat(node: fx.Node) -> bool:
    """Return whether the strides of a result don't matter to those who read it.

    That is so for operators of masks and attention in C.
    """
    return all(
        user.target in _READERS
        or _is_attention_in_c(user)
        or (user.target in _GIVE_IT_ON and _may_repeat(user))
        for user in node.users
    )


def _is_attention_in_c(node: fx.Node) -> bool:
    """Return whether a node is an attention, or a product of one, for which there is a function in C.

    oneDNN and torch would need the mask written out.
    """
    if node.target is product():
        return not int8_attention.why_not_batches()
    if node.target is dynamic_attention.dynamic_attention():
        return not dynamic_attention.why_unavailable()
    return _is_attention(node) and not float_attention.why_unavailable()


def _where_available(way: Way) -> Way:
    """Return a way that asks for the functions in C first."""

    def checked(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        available()
        return way(recorder, node, a)

    return checked


_OF_MASKS: Mapping[Any, Way] = {
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
    _aten.where.ScalarOther: choose_number,
    _aten.where.ScalarSelf: choose_number,
    _aten.any.dim: any_of_row,
    _aten.zeros_like.default: _constant_like(0.0),
    _aten.ones_like.default: _constant_like(1.0),
    _aten.index.Tensor: gather,
}
#: Conversions to the same dtype give the tensor itself.
_CONVERSIONS = {target for target, way in _OF_MASKS.items() if way is convert}
_GIVE_IT_ON = {*_VIEWS, *_CONVERSIONS}
_READERS = {*_OF_MASKS} - _CONVERSIONS
OPERATORS = tuple(
    PlannedOperator((target,), {"C": _where_available(way)}) for target, way in _OF_MASKS.items()
)
