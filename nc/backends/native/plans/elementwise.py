"""Functions of each element, and operations of two tensors, as primitives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.recorder import Handler, Recorder
from nc.backends.native.plans.values import Traced
from nc.kernels.onednn.descriptions import DST, SRC, SRC_1, Attributes, Desc, Eltwise

_aten = torch.ops.aten


def _unary(name: str, alpha: float = 0.0, beta: float = 0.0) -> Handler:
    def handler(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
        return _elementwise(recorder, node, a, Eltwise(name, alpha, beta))

    return handler


def gelu(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`aten::gelu`."""
    return _elementwise(recorder, node, a, Eltwise("gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf"))


def _elementwise(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], operation: Eltwise) -> Traced | None:
    x = recorder.read(a.get("self", a.get("input")))
    x = None if x is None or x.tensor.dtype is not torch.float32 else _dense(recorder, node, x)
    return None if x is None else apply(recorder, node, x, operation)


def apply(recorder: Recorder, node: fx.Node, x: Traced, operation: Eltwise) -> Traced:
    """Return a function of each element of a dense fp32 tensor."""
    result = recorder.new(x.tensor.shape, x.tensor.stride(), torch.float32)
    source, target = flat(x, result)
    primitive = recorder.maker.eltwise(operation, source, target, Attributes())
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


def _binary(name: str) -> Handler:
    def handler(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
        sides = sides_of(recorder, node, name, a)
        return None if sides is None else combine(recorder, node, name, *sides)

    return handler


def sides_of(recorder: Recorder, node: fx.Node, name: str, a: Mapping[str, Any]) -> tuple[Traced, Traced] | None:
    """Return the sides of an operation of two fp32 tensors, first a dense one, whose shape the result has."""
    x, y = recorder.read(a["self"]), recorder.read(a["other"])
    if x is None or y is None or a.get("alpha", 1) != 1 or {x.tensor.dtype, y.tensor.dtype} != {torch.float32}:
        return None
    if name in ("add", "mul") and not (_covers(x.tensor, y.tensor) and (is_dense(x.tensor) or not _lies_as(y.tensor, x.tensor))):
        x, y = y, x
    first = _dense(recorder, node, x) if _covers(x.tensor, y.tensor) else None
    if first is None:
        return None
    return first, (_dense(recorder, node, y) or y) if x.tensor.shape == y.tensor.shape else y


def combine(
    recorder: Recorder,
    node: fx.Node,
    name: str,
    x: Traced,
    y: Traced,
    target: Desc | None = None,
    qparams: tuple[float, int] | None = None,
) -> Traced:
    """Return a dense fp32 tensor, and one with another that is not larger.

    Args:
        recorder: of the plan.
        node: what it is for.
        name: one of `BINARY`.
        x: the dense tensor.
        y: the other.
        target: how the result lies; None: as `x`, in fp32.
        qparams: scale and zero point of the result where it is codes.
    """
    second = Traced(y.tensor[(None,) * (x.tensor.dim() - y.tensor.dim())], y.root)
    target = target or Desc(tuple(x.tensor.shape), tuple(x.tensor.stride()), torch.float32)
    result = recorder.new(target.sizes, target.strides, target.dtype)
    attributes = Attributes()
    if qparams is not None:
        scale, zero_point = qparams
        attributes = Attributes(post_ops=(Eltwise("linear", 1.0 / scale, float(zero_point)),))
    left, right, written = flat(x, second, result)
    primitive = recorder.maker.binary(name, left, right, written, attributes)
    recorder.call(primitive, {SRC: x, SRC_1: second, DST: result}, node)
    return result


def _lies_as(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a tensor lies as an operation of another tensor does, whose order of the dimensions counts."""
    return y.shape == x.shape and tuple(y.stride()) == dense_strides(x)


def copy(recorder: Recorder, source: Traced, target: Traced, node: fx.Node) -> None:
    """Copy values to memory of another layout."""
    maker = recorder.maker
    primitive = maker.reorder(maker.layout(source.desc), maker.layout(target.desc), Attributes())
    recorder.call(primitive, {SRC: source, DST: target}, node)


def _dense(recorder: Recorder, node: fx.Node, x: Traced) -> Traced | None:
    """Return the tensor, or a copy without gaps that keeps the order of its dimensions; None where it repeats elements, or has none."""
    if is_dense(x.tensor):
        return x
    if not x.tensor.numel() or any(n > 1 and not stride for n, stride in zip(x.tensor.shape, x.tensor.stride(), strict=True)):
        return None
    result = recorder.new(x.tensor.shape, dense_strides(x.tensor), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


def _covers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether an operation of both has the shape of `x`."""
    return x.dim() >= y.dim() and all(n in (1, m) for m, n in zip(reversed(x.shape), reversed(y.shape), strict=False))


def flat(*tensors: Traced) -> list[Desc]:
    """Layouts of tensors that are treated element by element: of one dimension where all lie alike and without gaps, else as they lie.

    Kernels for one dimension are faster, and do not fall back to reference kernels for an unusual order of the dimensions.
    """
    first = tensors[0].tensor
    if all(t.tensor.shape == first.shape and t.tensor.stride() == first.stride() and is_dense(t.tensor) for t in tensors):
        return [Desc.dense((first.numel(),), t.tensor.dtype) for t in tensors]
    strides = tensors[0].desc.plain().strides
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    return [Desc.of(t.tensor.permute(order)) for t in tensors]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a new tensor that keeps the order of the dimensions in memory."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor of at least one element lies without gaps, whatever the order of its dimensions."""
    return tensor.numel() > 0 and tuple(tensor.stride()) == dense_strides(tensor)


HANDLERS: Mapping[Any, Handler] = {
    _aten.relu.default: _unary("relu"),
    _aten.sigmoid.default: _unary("logistic"),
    _aten.tanh.default: _unary("tanh"),
    _aten.silu.default: _unary("swish", 1.0),
    _aten.hardswish.default: _unary("hardswish", 1 / 6, 0.5),
    _aten.hardsigmoid.default: _unary("hardsigmoid", 1 / 6, 0.5),
    _aten.relu6.default: _unary("clip", 0.0, 6.0),
    _aten.gelu.default: gelu,
    _aten.add.Tensor: _binary("add"),
    _aten.sub.Tensor: _binary("sub"),
    _aten.mul.Tensor: _binary("mul"),
    _aten.div.Tensor: _binary("div"),
}
