"""Functions of each element, and operations of two tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import FLOATS, MOST_DIMS, MOST_ELEMENTS
from nc.backends.native.plans.layouts import copy, dense_strides, flat, is_dense
from nc.backends.native.plans.operands import Later, PlanTensor
from nc.backends.native.plans.readers import only_quantized, strides_of_codes
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, PlannedOperator, Way, WayToCodes, need
from nc.kernels.onednn.descriptions import DST, SRC, SRC_1, Attributes, Desc, Eltwise

_aten = torch.ops.aten
_SWAPPABLE = ("add", "mul")


def input_of(a: Mapping[str, Any]) -> Any:
    """Return the first argument, which operators call `self` or `input`."""
    return a.get("self", a.get("input"))


def in_c(recorder: Recorder, value: Any) -> PlanTensor:
    """Return a tensor that the functions in C of small operators can read; raises `Refused`."""
    x = recorder.read(value)
    need(x.tensor.dtype in FLOATS, f"its input is {x.tensor.dtype}, neither fp32 nor bf16")
    need(not x.tensor.is_neg(), "its input is negated by a view, which memory does not show")
    few = recorder.only_c or x.tensor.numel() <= MOST_ELEMENTS
    need(x.tensor.numel() and few, f"its input has no element, or more than {MOST_ELEMENTS}")
    need(x.tensor.dim() <= MOST_DIMS, f"its input has more than {MOST_DIMS} dimensions")
    return x


def apply(recorder: Recorder, node: fx.Node, x: PlanTensor, operation: Eltwise) -> PlanTensor:
    """Return a function of each element of a dense fp32 tensor, by oneDNN."""
    result = recorder.new(x.tensor.shape, x.tensor.stride(), torch.float32)
    source, target = flat(x, result)
    primitive = recorder.maker.eltwise(operation, source, target, Attributes())
    recorder.call(primitive, {SRC: x, DST: result}, node)
    return result


def combine(
    recorder: Recorder,
    node: fx.Node,
    name: str,
    x: PlanTensor,
    y: PlanTensor,
    target: Desc | None = None,
    codes: OutputCodes | None = None,
) -> PlanTensor:
    """Return an operation of a dense fp32 tensor and one that is not larger, by oneDNN.

    Args:
        recorder: of the plan.
        node: what it is for.
        name: "add", "sub", "mul" or "div".
        x: the dense tensor.
        y: the other.
        target: layout of the result; None: that of `x`, in fp32.
        codes: what the result is quantized to.
    """
    second = PlanTensor(y.tensor[(None,) * (x.tensor.dim() - y.tensor.dim())], y.root)
    target = target or Desc(tuple(x.tensor.shape), tuple(x.tensor.stride()), torch.float32)
    result = recorder.new(target.sizes, target.strides, target.dtype)
    attributes = Attributes()
    if codes is not None:
        attributes = Attributes(post_ops=(Eltwise("linear", 1.0 / codes.scale, float(codes.zero_point)),))
    left, right, written = flat(x, second, result)
    primitive = recorder.maker.binary(name, left, right, written, attributes)
    recorder.call(primitive, {SRC: x, SRC_1: second, DST: result}, node)
    return result


# ---- functions of each element ----


def _unary(name: str, alpha: float = 0.0, beta: float = 0.0) -> Way:
    def way(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        return _by_onednn(recorder, node, a, Eltwise(name, alpha, beta))

    return way


def _unary_in_c(operation: str) -> Way:
    def way(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        x = in_c(recorder, input_of(a))
        need(x.tensor.dim(), "its input has no dimension")
        result = c_functions.new(recorder, x.tensor.shape, x.tensor.dtype)
        c_functions.apply(recorder, node, operation, result, x)
        return result

    return way


def gelu(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::gelu` by oneDNN."""
    return _by_onednn(recorder, node, a, Eltwise(_gelu(a)))


def gelu_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::gelu` in C."""
    return _unary_in_c(_gelu(a))(recorder, node, a)


def _gelu(a: Mapping[str, Any]) -> str:
    return "gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf"


def square_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::pow` by 2 in C."""
    need(a["exponent"] == 2, "its exponent is not 2")
    return _unary_in_c("square")(recorder, node, a)


def _by_onednn(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], operation: Eltwise) -> PlanTensor:
    x = recorder.read(input_of(a))
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}, not fp32")
    return apply(recorder, node, _dense(recorder, node, x), operation)


# ---- operations of two tensors ----


def _binary(name: str) -> Way:
    def way(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        return combine(recorder, node, name, *_sides(recorder, node, name, a))

    return way


def _binary_to_codes(name: str) -> WayToCodes:
    def way(recorder: Recorder, node: fx.Node, later: Later, codes: OutputCodes) -> PlanTensor:
        x, y = _sides(recorder, later.node, name, later.named)
        strides = tuple(x.tensor.stride())
        need(
            strides == strides_of_codes(node, x.tensor),
            "codes need strides that differ from those of its larger side",
        )
        return combine(
            recorder, later.node, name, x, y, Desc(tuple(x.tensor.shape), strides, codes.dtype), codes
        )

    return way


def _sides(
    recorder: Recorder, node: fx.Node, name: str, a: Mapping[str, Any]
) -> tuple[PlanTensor, PlanTensor]:
    """Return the sides of an operation of two fp32 tensors, first a dense one, whose shape the result has."""
    x, y = recorder.read(a["self"]), recorder.read(a["other"])
    need(a.get("alpha", 1) == 1, "its second side has a factor")
    need(x.tensor.dtype is y.tensor.dtype is torch.float32, "one of its sides is not fp32")
    if name in _SWAPPABLE and not (
        _covers(x.tensor, y.tensor) and (is_dense(x.tensor) or not _lies_as(y.tensor, x.tensor))
    ):
        x, y = y, x
    need(_covers(x.tensor, y.tensor), "its result is larger than its first side")
    first = _dense(recorder, node, x)
    same = x.tensor.shape == y.tensor.shape and _has_each_element_once(y.tensor)
    return first, _dense(recorder, node, y) if same else y


def _binary_in_c(operation: str) -> Way:
    def way(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
        given = recorder.optional(a["self"]) or a["self"], recorder.optional(a["other"]) or a["other"]
        x, y = (_operand(recorder, value) for value in given)
        need(a.get("alpha", 1) == 1, "its second side has a factor")
        # a number does not decide about the dtype
        dtype = torch.result_type(
            *(value.tensor if isinstance(value, PlanTensor) else 1.0 for value in given)  # type: ignore[arg-type]
        )
        sizes = _broadcast(x.tensor.shape, y.tensor.shape)
        need(dtype in FLOATS, f"its result is {dtype}")
        need(sizes, "its result has no dimension")
        result = c_functions.new(recorder, sizes, dtype)
        c_functions.apply(recorder, node, operation, result, x, y)
        return result

    return way


def _operand(recorder: Recorder, value: Any) -> PlanTensor:
    """Return a tensor, or a number as a tensor."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return PlanTensor(torch.tensor(float(value), dtype=torch.float32), None)
    return in_c(recorder, value)


def _broadcast(x: Sequence[int], y: Sequence[int]) -> list[int]:
    """Sizes of an operation of both; torch.broadcast_shapes imports sympy."""
    dims = max(len(x), len(y))
    sides = [(1,) * (dims - len(side)) + tuple(side) for side in (x, y)]
    return [n if m == 1 else m for m, n in zip(*sides, strict=True)]


def _lies_as(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether `y` has the shape and strides of an elementwise result that keeps the order of `x`."""
    return y.shape == x.shape and tuple(y.stride()) == dense_strides(x)


def _covers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether an operation of both has the shape of `x`."""
    return x.dim() >= y.dim() and all(
        n in (1, m) for m, n in zip(reversed(x.shape), reversed(y.shape), strict=False)
    )


def _has_each_element_once(x: torch.Tensor) -> bool:
    """Return whether a tensor has elements, and repeats none."""
    return x.numel() > 0 and not any(
        n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True)
    )


def _dense(recorder: Recorder, node: fx.Node, x: PlanTensor) -> PlanTensor:
    """Return the tensor, or a copy without gaps that keeps the order of its dimensions."""
    if is_dense(x.tensor):
        return x
    need(_has_each_element_once(x.tensor), "its input has no element, or repeats some")
    result = recorder.new(x.tensor.shape, dense_strides(x.tensor), x.tensor.dtype)
    copy(recorder, x, result, node)
    return result


_ELTWISE: Mapping[Any, Way] = {
    _aten.relu.default: _unary("relu"),
    _aten.sigmoid.default: _unary("logistic"),
    _aten.tanh.default: _unary("tanh"),
    _aten.silu.default: _unary("swish", 1.0),
    _aten.hardswish.default: _unary("hardswish", 1 / 6, 0.5),
    _aten.hardsigmoid.default: _unary("hardsigmoid", 1 / 6, 0.5),
    _aten.relu6.default: _unary("clip", 0.0, 6.0),
    _aten.gelu.default: gelu,
}
_UNARY_IN_C = (
    "neg",
    "abs",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "relu",
    "exp",
    "sigmoid",
    "silu",
    "tanh",
    "cos",
    "sin",
)
_OF_ONE_TOKEN: Mapping[Any, Way] = {
    _aten.gelu.default: gelu_in_c,
    _aten.pow.Tensor_Scalar: square_in_c,
    **{getattr(_aten, name).default: _unary_in_c(name) for name in _UNARY_IN_C},
    **{getattr(_aten, name).Tensor: _binary_in_c(name) for name in ("add", "sub", "mul", "div")},
}
OPERATORS = (
    *(PlannedOperator((target,), {"oneDNN": way}) for target, way in _ELTWISE.items()),
    *(
        PlannedOperator(
            (getattr(_aten, name).Tensor,),
            {"oneDNN": _binary(name)},
            {"oneDNN": _binary_to_codes(name)},
            waits=only_quantized,
        )
        for name in ("add", "sub", "mul", "div")
    ),
    *(PlannedOperator((target,), {"C": way}, of_one_token=True) for target, way in _OF_ONE_TOKEN.items()),
)
