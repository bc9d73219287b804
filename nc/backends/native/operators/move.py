"""Operators that move tensors.

They are copies, reshapes, concatenations, and what is written to a place of another tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.elementwise import in_c
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import converted, function, merged
from nc.backends.native.plans.layouts import copy, dense_strides
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.readers import SPATIAL
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.kernels.onednn.descriptions import (
    DST,
    DTYPES,
    MULTIPLE_SRC,
    channels_last_strides,
    contiguous_strides,
)

_aten = torch.ops.aten
#: Indices that are written one by one.
_MOST_PLACES = 16
_A_VIEW = "it is a view"


def duplicate(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::clone` and `aten::contiguous` by oneDNN: a copy, or the tensor itself if its strides fit."""
    x = _readable(recorder, a["self"])
    wanted = a.get("memory_format")
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


def duplicate_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::clone` and `aten::contiguous` in C."""
    x, wanted = in_c(recorder, a["self"]), a.get("memory_format")
    need(x.tensor.dim(), "its input has no dimension")
    need(
        wanted in (None, torch.preserve_format, torch.contiguous_format),
        f"its result has the memory format {wanted}",
    )
    if x.tensor.is_contiguous() and node.target is _aten.contiguous.default:
        return x
    keeps_order = wanted is not torch.contiguous_format and node.target is _aten.clone.default
    need(
        x.tensor.is_contiguous() or not keeps_order,
        "the strides of its result are those of its input, which has gaps",
    )
    return converted(recorder, node, x, x.tensor.dtype)


def reshape(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::reshape` by oneDNN where that is a copy."""
    x = _readable(recorder, a["self"])
    need(_must_copy(x.tensor, a["shape"]), _A_VIEW)
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return PlanTensor(result.tensor.reshape(a["shape"]), result.root)


def reshape_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::reshape` in C where that is a copy."""
    x = in_c(recorder, a["self"])
    need(_must_copy(x.tensor, a["shape"]), _A_VIEW)
    result = converted(recorder, node, x, x.tensor.dtype)
    return PlanTensor(result.tensor.reshape(a["shape"]), result.root)


def concatenation(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::cat` by oneDNN."""
    parts = [_readable(recorder, value) for value in a["tensors"]]
    tensors = [part.tensor for part in parts]
    need(len(parts) > 1, "it has one tensor alone")
    need(
        len({(t.dtype, t.dim()) for t in tensors}) == 1,
        "its tensors have several dtypes or numbers of dimensions",
    )
    axis = a["dim"] % tensors[0].dim()
    sizes = _joined(tensors, axis)
    images = tensors[0].dim() in SPATIAL and all(
        tuple(t.stride()) == channels_last_strides(t.shape) for t in tensors
    )
    result = recorder.new(
        sizes, channels_last_strides(sizes) if images else contiguous_strides(sizes), tensors[0].dtype
    )
    primitive = recorder.maker.concat(tuple(part.desc for part in parts), result.desc, axis)
    recorder.call(primitive, {MULTIPLE_SRC + i: part for i, part in enumerate(parts)} | {DST: result}, node)
    return result


def concatenation_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::cat` in C, part by part."""
    parts = [
        in_c(recorder, value)
        for value in a["tensors"]
        if not isinstance(value, PlanTensor) or value.tensor.numel()
    ]
    need(parts, "none of its tensors has an element")
    tensors = [part.tensor for part in parts]
    need(
        len({(t.dtype, t.dim()) for t in tensors}) == 1,
        "its tensors have several dtypes or numbers of dimensions",
    )
    need(tensors[0].dim(), "its tensors have no dimension")
    axis = a["dim"] % tensors[0].dim()
    sides = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    check_sizes(len(sides) == 1, node, *(t.shape for t in tensors))
    result, start = c_functions.new(recorder, _joined(tensors, axis), tensors[0].dtype), 0
    for part in parts:
        target = result.tensor.narrow(axis, start, part.tensor.shape[axis])
        c_functions.apply(recorder, node, "copy", PlanTensor(target, result.root), part)
        start += part.tensor.shape[axis]
    return result


def place(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::index_copy_` with few indices, in C."""
    x, index, source = recorder.read(a["self"]), recorder.read(a["index"]), recorder.read(a["source"])
    need(x.root is not None, "it writes into a constant")
    few = index.tensor.dim() <= 1 and index.tensor.numel() <= _MOST_PLACES
    need(index.tensor.dtype is torch.int64 and few, "it has many indices, or one that is not int64")
    axis = a["dim"] % max(x.tensor.dim(), 1)
    need(
        not x.tensor.is_neg() and not source.tensor.is_neg(),
        "a view negates one of its tensors, which memory does not show",
    )
    need(x.tensor.dtype == source.tensor.dtype, "its tensors have several dtypes")
    need(
        source.tensor.numel() and source.tensor.dim() == x.tensor.dim(),
        "what it writes has no element, or other dimensions",
    )
    one = source.tensor.select(axis, 0)
    to = x.tensor.select(axis, 0)
    check_sizes(
        one.shape == to.shape and source.tensor.shape[axis] == index.tensor.numel(),
        node,
        x.tensor.shape,
        source.tensor.shape,
    )
    sizes, (ys, xs) = merged(to.shape, [to.stride(), one.stride()])
    size = x.tensor.element_size()
    if len(sizes) == 1:
        sizes, ys, xs = (1, *sizes), (0, *ys), (0, *xs)
    need(len(sizes) == 2 and ys[1] == xs[1] == 1, "what it writes are not rows without gaps")
    fields = {
        "bytes": sizes[1] * size,
        "rows": sizes[0],
        "y_stride": ys[0] * size,
        "x_stride": xs[0] * size,
        "place_stride": x.tensor.stride(axis) * size,
        "places": x.tensor.shape[axis],
        "scatters": True,
        "one_index": True,
        "threads": recorder.threads,
    }
    for i in range(index.tensor.numel()):
        at = index.tensor.reshape(-1)[i : i + 1]
        written = PlanTensor(source.tensor.select(axis, i), source.root)
        recorder.call_function(function("place"), fields, [x, written, PlanTensor(at, index.root)], node)
    return x


def _readable(recorder: Recorder, value: Any) -> PlanTensor:
    """Return a tensor that oneDNN can move."""
    x = recorder.read(value)
    need(
        x.tensor.dtype in DTYPES and x.tensor.numel(),
        f"oneDNN moves no {x.tensor.dtype}, and nothing without elements",
    )
    return x


def _must_copy(x: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether no view of a tensor has this shape."""
    return (
        not x.is_contiguous()
        and x.reshape(shape).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )


def _joined(tensors: Sequence[torch.Tensor], axis: int) -> list[int]:
    """Sizes of a concatenation."""
    sizes = list(tensors[0].shape)
    sizes[axis] = sum(t.shape[axis] for t in tensors)
    return sizes


_COPIES = (_aten.clone.default, _aten.contiguous.default)
OPERATORS = (
    PlannedOperator(_COPIES, {"oneDNN": duplicate}),
    PlannedOperator((_aten.reshape.default,), {"oneDNN": reshape}),
    PlannedOperator((_aten.cat.default,), {"oneDNN": concatenation}),
    PlannedOperator(_COPIES, {"C": duplicate_in_c}, of_one_token=True),
    PlannedOperator((_aten.cat.default,), {"C": concatenation_in_c}, of_one_token=True),
    PlannedOperator((_aten.index_copy_.default,), {"C": place}, of_one_token=True),
)
