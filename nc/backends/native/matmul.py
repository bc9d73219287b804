"""Products of two activations that read codes, and what is done with their result → one call that a plan makes a primitive of."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from nc.backends.native.fuse import put
from nc.backends.native.operators import product
from nc.backends.native.regions import codes_behind, only_user
from nc.graph.catalogue import is_float_tensor, kind_of_node, op_name
from nc.graph.fx_utils import call_operator
from nc.graph.views import Binary, Dequantize, Quantize, set_argument
from nc.ops import dequantize_per_tensor, quantize_per_tensor

#: uint8 codes and their zero points, as int8.
_SHIFT = 128
#: What a kernel does with its result: an addition of, or a product with, another tensor.
_WITH_TENSORS = {torch.ops.aten.add.Tensor: "add", torch.ops.aten.mul.Tensor: "mul"}
_WITH_NUMBERS = ("mul", "div")


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
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
    """Give the second input of each product its uint8 codes less 128, as int8: kernels take nothing else there.

    Where nothing else computes with the codes they become int8 altogether, so that a graph with more outputs runs the same kernels.
    """
    for node in list(module.graph.nodes):
        if kind_of_node(node) != "matmul" or why_not_product(node) or reads_int8(node):
            continue
        codes = Dequantize.of(Binary.of(node).right).codes
        right_sides = [(user, value) for value in codes.users for user in value.users if _is_right_side(user, value)]
        shared = any(user.op != "output" and not _is_only_right(user, value) for value in codes.users for user in value.users)
        with module.graph.inserting_after(codes):
            new = _shifted(module, codes)
        if not shared:
            for value in list(codes.users):
                value.args = (new, *Quantize.of(new).qparams, torch.int8)
        else:
            with module.graph.inserting_after(new):
                value = call_operator(module.graph, dequantize_per_tensor, new, *Quantize.of(new).qparams, torch.int8)
            value.meta.update(right_sides[0][1].meta)
            for user, _ in right_sides:
                set_argument(user, "right", value)
    _drop_unread(module)


def _is_right_side(node: fx.Node, value: fx.Node) -> bool:
    """Whether a product that has a kernel reads a value on its right side."""
    return kind_of_node(node) == "matmul" and not why_not_product(node) and Binary.of(node).right is value


def _is_only_right(node: fx.Node, value: fx.Node) -> bool:
    return _is_right_side(node, value) and Binary.of(node).left is not value


def _shifted(module: fx.GraphModule, codes: fx.Node) -> fx.Node:
    """Return the same quantize node with int8 codes."""
    old = Quantize.of(codes)
    limits = old.quant_min - _SHIFT, old.quant_max - _SHIFT
    new = call_operator(module.graph, quantize_per_tensor, old.input, old.scale, old.numbers[1] - _SHIFT, *limits, torch.int8)
    new.meta.update(codes.meta)
    return new


def fuse_products(module: fx.GraphModule) -> None:
    """Replace every product of codes with int8 codes on its right side."""
    for node in list(module.graph.nodes):
        if kind_of_node(node) == "matmul" and reads_int8(node):
            _replace(module, _region_of(node))
    _drop_unread(module)


def why_not_product(node: fx.Node) -> str:
    """Why no kernel multiplies the two sides of a product in int8; "" where one does, and for other operators."""
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
    """Whether a product reads codes as a kernel takes them."""
    return not why_not_product(node) and Dequantize.of(Binary.of(node).right).dtype is torch.int8


def _region_of(node: fx.Node) -> Region:
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
        elif user.target in _WITH_TENSORS and view.alpha == 1 and view.left is not view.right and _fits(node, other):
            how.append(_WITH_TENSORS[user.target])
            others.append(other)
        else:
            break
        nodes.append(user)
    return Region(tuple(nodes), factor, tuple(how), tuple(others))


def _fits(product_: fx.Node, other: object) -> bool:
    """Whether the result of an operation with another tensor has the shape of a product."""
    if not isinstance(other, fx.Node) or not is_float_tensor(other) or other.meta["val"].dtype is not torch.float32:
        return False
    whole, part = product_.meta["val"].shape, other.meta["val"].shape
    return len(part) <= len(whole) and all(str(b) in ("1", str(a)) for a, b in zip(reversed(whole), reversed(part), strict=False))


def _replace(module: fx.GraphModule, region: Region) -> None:
    first, last = region.nodes[0], region.nodes[-1]
    left, right = map(Dequantize.of, Binary.of(first).sides)
    codes = codes_behind(last)
    output = codes if codes is not None else (1.0, 0, torch.float32)
    with module.graph.inserting_before(last):
        arguments = left.codes, *left.numbers, right.codes, *right.numbers, region.factor, list(region.others), list(region.how), *output
        call = module.graph.call_function(product(), arguments)
    put(module, call, region.nodes, converted=codes is not None)


def _drop_unread(module: fx.GraphModule) -> None:
    """Erase conversions that nothing reads any more."""
    for node in reversed(list(module.graph.nodes)):
        if not node.users and node.target in (dequantize_per_tensor, quantize_per_tensor):
            module.graph.erase_node(node)
