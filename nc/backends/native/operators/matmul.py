"""Products of two activations: those that read codes, and what is done with their result, become one call.

`int8_attention.py` has the ways of plans to compute it: this one, and a function in C for a whole attention.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.fuse import put
from nc.backends.native.operators.elementwise import combine
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.products import with_qparams
from nc.backends.native.plans.readers import strides_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, need
from nc.backends.native.regions import codes_behind, only_user
from nc.backends.native.torch_library import define, stored
from nc.graph.catalogue import is_float_tensor, kind_of_node, op_name
from nc.graph.fx_utils import call_function, call_operator, take_over
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary, Dequantize, Quantize, set_argument
from nc.kernels import cpu
from nc.kernels.onednn.descriptions import (
    DST,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    Attributes,
    BinaryOp,
    Desc,
    contiguous_strides,
)
from nc.kernels.onednn.primitives import Primitive
from nc.numerics import affine
from nc.ops import dequantize_per_tensor, quantize_per_tensor

_aten = torch.ops.aten
_SCHEMA = (
    "qmatmul(Tensor left, float left_scale, int left_zero_point, Tensor right, float right_scale, int "
    "right_zero_point, float factor, Tensor[] others, str[] how, float output_scale, int output_zero_point, "
    "ScalarType output_dtype) -> Tensor"
)


@functools.cache
def product() -> torch._ops.OpOverload:
    """`left @ right * factor`, then "add" or "mul" with each of the others.

    It is a product of uint8 codes and int8 codes, for plans.
    """
    return define(_SCHEMA, _product, _product_like)


def _product(
    left: torch.Tensor,
    left_scale: float,
    left_zero_point: int,
    right: torch.Tensor,
    right_scale: float,
    right_zero_point: int,
    factor: float,
    others: Sequence[torch.Tensor],
    how: Sequence[str],
    output_scale: float,
    output_zero_point: int,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    values = (
        affine.dequantize(left, left_scale, left_zero_point)
        @ affine.dequantize(right, right_scale, right_zero_point)
        * factor
    )
    for name, other in zip(how, others, strict=True):
        values = values + other if name == "add" else values * other
    return stored(values, output_scale, output_zero_point, output_dtype)


def _product_like(
    left: torch.Tensor, _scale: float, _zero_point: int, right: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return torch.matmul(left.float(), right.float()).to(rest[-1])


# ---- how it is found in a graph ----

#: uint8 codes and their zero points, as int8.
_SHIFT = 128
#: What a kernel does with its result: an addition of, or a product with, another tensor.
_WITH_TENSORS = {torch.ops.aten.add.Tensor: "add", torch.ops.aten.mul.Tensor: "mul"}
_WITH_NUMBERS = ("mul", "div")


@dataclasses.dataclass(frozen=True, slots=True)
class ProductRegion:
    """What becomes one call: `(left @ right * factor) how[0] others[0] ...`.

    Attributes:
        nodes: from the product to the last node, in order.
        factor: what the product is multiplied by.
        how: "add" or "mul" for each of the others.
        others: tensors that do not make the result larger.
    """

    nodes: tuple[fx.Node, ...]
    factor: float
    how: tuple[str, ...]
    others: tuple[fx.Node, ...]


def signed(module: fx.GraphModule) -> None:
    """Give the second input of each product its uint8 codes less 128, as int8.

    Kernels take nothing else there.

    Where nothing else computes with the codes they become int8 altogether, so that a graph with more outputs
    runs the same kernels.
    """
    for node in list(module.graph.nodes):
        if kind_of_node(node) != "matmul" or why_not_product(node) or reads_int8(node):
            continue
        codes = Dequantize.of(Binary.of(node).right).codes
        right_sides = [
            (user, value) for value in codes.users for user in value.users if _is_right_side(user, value)
        ]
        shared = any(
            user.op != "output" and not _is_only_right(user, value)
            for value in codes.users
            for user in value.users
        )
        with module.graph.inserting_after(codes):
            new = _shifted(module, codes)
        if not shared:
            for value in list(codes.users):
                value.args = (new, *Quantize.of(new).qparams, torch.int8)
        else:
            with module.graph.inserting_after(new):
                value = call_operator(
                    module.graph, dequantize_per_tensor, new, *Quantize.of(new).qparams, torch.int8
                )
            take_over(value, right_sides[0][1])
            for user, _ in right_sides:
                set_argument(user, "right", value)
    _drop_unread(module)


def _is_right_side(node: fx.Node, value: fx.Node) -> bool:
    """Return whether a product that has a kernel reads a value on its right side."""
    return kind_of_node(node) == "matmul" and not why_not_product(node) and Binary.of(node).right is value


def _is_only_right(node: fx.Node, value: fx.Node) -> bool:
    return _is_right_side(node, value) and Binary.of(node).left is not value


def _shifted(module: fx.GraphModule, codes: fx.Node) -> fx.Node:
    """Return the same quantize node with int8 codes."""
    old = Quantize.of(codes)
    limits = old.quant_min - _SHIFT, old.quant_max - _SHIFT
    new = call_operator(
        module.graph, quantize_per_tensor, old.input, old.scale, old.numbers[1] - _SHIFT, *limits, torch.int8
    )
    take_over(new, codes)
    return new


def fuse_products(module: fx.GraphModule) -> None:
    """Replace every product of codes with int8 codes on its right side."""
    for node in list(module.graph.nodes):
        if kind_of_node(node) == "matmul" and reads_int8(node):
            _replace(module, _region_of(node))
    _drop_unread(module)


def why_not_product(node: fx.Node) -> str:
    """Why no kernel multiplies the two sides of a product in int8.

    It is "" where one does, and for other operators.
    """
    if kind_of_node(node) != "matmul":
        return ""
    for side, which in zip(Binary.of(node).sides, ("first", "second"), strict=True):
        if not isinstance(side, fx.Node) or side.target is not dequantize_per_tensor:
            return f"its {which} input is not quantized"
        if Dequantize.of(side).codes.op == "get_attr":
            return f"its {which} input is a constant"
    if min(side.meta["val"].dim() for side in Binary.of(node).sides) < 2:
        return "one of its inputs is a vector"
    return ""


def reads_int8(node: fx.Node) -> bool:
    """Return whether a product reads codes as a kernel takes them."""
    return not why_not_product(node) and Dequantize.of(Binary.of(node).right).dtype is torch.int8


def _region_of(node: fx.Node) -> ProductRegion:
    """Return the longest region that begins with a product."""
    nodes, factor = [node], 1.0
    how: list[str] = []
    others: list[fx.Node] = []
    while (user := only_user(nodes[-1])) is not None and op_name(user) in ("add", *_WITH_NUMBERS):
        view = Binary.of(user)
        other = view.right if view.left is nodes[-1] else view.left
        if op_name(user) in _WITH_NUMBERS and isinstance(other, (int, float)) and view.left is nodes[-1]:
            number = float(other)
            if others or view.rounding_mode is not None or number <= 0:
                break
            factor = factor * number if op_name(user) == "mul" else factor / number
        elif (
            user.target in _WITH_TENSORS
            and view.alpha == 1
            and view.left is not view.right
            and _fits(node, other)
        ):
            how.append(_WITH_TENSORS[user.target])
            others.append(other)
        else:
            break
        nodes.append(user)
    return ProductRegion(tuple(nodes), factor, tuple(how), tuple(others))


def _fits(product_: fx.Node, other: object) -> bool:
    """Return whether the result of an operation with another tensor has the shape of a product."""
    whole = product_.meta["val"].shape
    return (
        isinstance(other, fx.Node)
        and is_float_tensor(other)
        and other.meta["val"].dtype is torch.float32
        and _is_repeated(other.meta["val"].shape, whole)
    )


def _is_repeated(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Return whether a tensor of one shape can be repeated to another one."""
    return len(part) <= len(whole) and all(
        same_shape([b], [1]) or same_shape([b], [a])
        for a, b in zip(reversed(whole), reversed(part), strict=False)
    )


def _replace(module: fx.GraphModule, region: ProductRegion) -> None:
    first, last = region.nodes[0], region.nodes[-1]
    left, right = map(Dequantize.of, Binary.of(first).sides)
    codes = codes_behind(last)
    output = codes if codes is not None else (1.0, 0, torch.float32)
    with module.graph.inserting_before(last):
        arguments = (
            left.codes,
            *left.numbers,
            right.codes,
            *right.numbers,
            region.factor,
            list(region.others),
            list(region.how),
            *output,
        )
        call = call_function(module.graph, product(), arguments)
    put(module, call, region.nodes, converted=codes is not None)


def _drop_unread(module: fx.GraphModule) -> None:
    """Erase conversions that nothing reads any more."""
    for node in reversed(list(module.graph.nodes)):
        if not node.users and node.target in (dequantize_per_tensor, quantize_per_tensor):
            module.graph.erase_node(node)


# ---- how plans compute it ----


def matmul(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::qmatmul` by oneDNN, on tensors with any strides: nothing is transposed or copied for it."""
    left, right = recorder.read(a["left"]), recorder.read(a["right"])
    others = [recorder.read(value) for value in a["others"]]
    need(
        (left.tensor.dtype, right.tensor.dtype) == (torch.uint8, torch.int8),
        "its sides are not uint8 and int8 codes",
    )
    need(all(other.tensor.dtype is torch.float32 for other in others), "what follows it is not fp32")
    dims = max(left.tensor.dim(), right.tensor.dim())
    if not c_functions.why_unavailable():  # oneDNN takes no masks that repeat rows
        others = [
            c_functions.as_fp32(recorder, node, other) if 0 in other.tensor.stride() else other
            for other in others
        ]
    left, right, *others = (_of_dims(value, dims) for value in (left, right, *others))
    # torch.broadcast_shapes imports sympy, which takes longer than all else here
    batch = [b if a == 1 else a for a, b in zip(left.tensor.shape[:-2], right.tensor.shape[:-2], strict=True)]
    sizes = *batch, left.tensor.shape[-2], right.tensor.shape[-1]
    if not math.prod(sizes):
        return recorder.new(sizes, contiguous_strides(sizes), a["output_dtype"])
    need(left.tensor.shape[-1], "it sums nothing")

    def multiply(dtype: torch.dtype, others: Sequence[PlanTensor]) -> PlanTensor:
        return _multiply(recorder, node, a, (left, right), sizes, dtype, others)

    def separately() -> PlanTensor:
        result = multiply(torch.float32, ())
        for name, other in zip(a["how"][:-1], others[:-1], strict=True):
            result = combine(recorder, node, name, result, other)
        in_fp32 = a["output_dtype"] is torch.float32
        codes = None if in_fp32 else OutputCodes(a["output_scale"], a["output_zero_point"], a["output_dtype"])
        target = Desc(tuple(sizes), strides_of(node, sizes), a["output_dtype"])
        return combine(recorder, node, a["how"][-1], result, others[-1], target, codes)

    def expanded() -> PlanTensor:
        return multiply(a["output_dtype"], [recorder.expanded(other, sizes, node) for other in others])

    # kernels know some broadcasts of what follows, but not all
    rest = {"what follows apart": separately, "what follows expanded": expanded} if others else {}
    return recorder.first_possible({"at once": lambda: multiply(a["output_dtype"], others), **rest})


def _multiply(
    recorder: Recorder,
    node: fx.Node,
    a: Mapping[str, Any],
    sides: tuple[PlanTensor, PlanTensor],
    sizes: Sequence[int],
    dtype: torch.dtype,
    others: Sequence[PlanTensor],
) -> PlanTensor:
    """Return the call; raises Unimplemented where there is no fast kernel for it."""
    others = [_for_amx(recorder, other, sizes, node) for other in others]
    others = [
        in_rows(recorder, other, node) for other in others
    ]  # oneDNN 3.12 reads others as if they were row-major
    post_ops = tuple(BinaryOp(name, other.desc) for name, other in zip(a["how"], others, strict=False))
    tensors: dict[int, Any] = {POST_OP * (i + 1) | SRC_1: other for i, other in enumerate(others)}
    attributes = with_qparams(
        Attributes({}, {}, post_ops), tensors, SRC, a["left_scale"] * a["factor"], a["left_zero_point"]
    )
    attributes = with_qparams(attributes, tensors, WEIGHTS, a["right_scale"], a["right_zero_point"])
    if not dtype.is_floating_point:
        attributes = with_qparams(attributes, tensors, DST, a["output_scale"], a["output_zero_point"])
    # if the result is transposed, oneDNN 3.12 reads wrong addresses for some broadcasts, and crashes
    whole = all(o.tensor.numel() == 1 or o.tensor.shape == tuple(sizes) for o in others)
    rows = Desc.dense(sizes, dtype)
    target = dataclasses.replace(rows, strides=strides_of(node, sizes)) if whole else rows
    left, right = sides
    if (
        left.tensor.shape[-1] == 1
    ):  # if the right side has one row, oneDNN 3.12 assumes that batches are contiguous
        right = in_rows(recorder, right, node)

    def make() -> Primitive:
        return recorder.maker.matmul(left.desc, right.desc, None, target, attributes, keep=True)

    primitive = make()
    if primitive.is_reference and target != rows:  # perhaps because the result would be column-major
        target = rows
        primitive = make()
    if primitive.is_reference and not others:  # perhaps because of the strides of the sides
        left, right = in_rows(recorder, left, node), in_rows(recorder, right, node)
        primitive = make()
    result = recorder.new(target.sizes, target.strides, dtype)
    recorder.call(primitive, tensors | {SRC: left, WEIGHTS: right, DST: result}, node)
    return result


def _for_amx(recorder: Recorder, other: PlanTensor, sizes: Sequence[int], node: fx.Node) -> PlanTensor:
    """Return what follows a product, in a form that AMX kernels read correctly.

    They read a tensor that batches share as if each batch had its own.

    With two batch dimensions, oneDNN 3.12 does so for [1, 1, M, N], and oneDNN 3.7 for [1, B, M, 1].
    """
    shape = tuple(other.tensor.shape)
    shared = (
        len(sizes) == 4
        and min(sizes[:3]) > 1
        and shape[0] == 1
        and shape[2] == sizes[2]
        and shape[1:] != tuple(sizes[1:])
    )
    return (
        recorder.expanded(other, (sizes[0], *shape[1:]), node)
        if shared and "amx_int8" in cpu.machine_features()
        else other
    )


def _of_dims(x: PlanTensor, dims: int) -> PlanTensor:
    return PlanTensor(x.tensor[(None,) * (dims - x.tensor.dim())], x.root)
