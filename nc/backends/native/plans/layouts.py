"""Memory layouts of tensors, and copies to other layouts."""

from __future__ import annotations

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import need
from nc.kernels.onednn.descriptions import (
    DST,
    SRC,
    Attributes,
    Desc,
    channels_last_strides,
    contiguous_strides,
)


def flat(*tensors: PlanTensor) -> list[Desc]:
    """Layouts of tensors that are treated element by element.

    They have one dimension if all tensors have the same strides and no gaps; else all their dimensions.

    Kernels for one dimension are faster, and do not fall back to reference kernels for an unusual order of
    the dimensions.
    """
    first = tensors[0].tensor
    if all(
        t.tensor.shape == first.shape and t.tensor.stride() == first.stride() and is_dense(t.tensor)
        for t in tensors
    ):
        return [Desc.dense((first.numel(),), t.tensor.dtype) for t in tensors]
    strides = tensors[0].desc.plain().strides
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    return [Desc.of(t.tensor.permute(order)) for t in tensors]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a new tensor that keeps the order of the dimensions in memory."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements and no gaps, whatever the order of its dimensions."""
    return tensor.numel() > 0 and tuple(tensor.stride()) == dense_strides(tensor)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether strides are those of [N, ..., C].

    Where a size is 1 its stride does not count for torch, but kernels are chosen by it.
    """
    return tuple(tensor.stride()) == channels_last_strides(tensor.shape)


def copy(recorder: Recorder, source: PlanTensor, target: PlanTensor, node: fx.Node) -> None:
    """Copy values to memory of another layout."""
    if recorder.only_c:
        dtype = source.tensor.dtype
        need(dtype in c_functions.FLOATS, f"nothing in C copies {dtype} to another layout")
        c_functions.apply(recorder, node, "copy", target, source)
        return
    maker = recorder.maker
    primitive = maker.reorder(maker.layout(source.desc), maker.layout(target.desc), Attributes())
    recorder.call(primitive, {SRC: source, DST: target}, node)


def in_rows(recorder: Recorder, x: PlanTensor, node: fx.Node) -> PlanTensor:
    """Return a contiguous (row-major) tensor: itself, or a copy."""
    if x.tensor.is_contiguous():
        return x
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


def channels_last(recorder: Recorder, x: PlanTensor, node: fx.Node) -> PlanTensor:
    """Return a tensor in channels-last memory format: itself, or a copy."""
    if is_channels_last(x.tensor):
        return x
    result = recorder.new(x.tensor.shape, channels_last_strides(x.tensor.shape), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result
