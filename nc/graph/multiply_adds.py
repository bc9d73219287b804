"""How many multiply-adds an operator does, from the shapes of what it reads and gives."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from nc.graph.catalogue import LOW_BIT, op_name, schema_arguments
from nc.graph.weight_reads import LOOK_UPS, is_elementwise, is_norm, moves

Shape = tuple[int, ...]
#: Node name → shape, for the nodes that give one tensor.
Shapes = Mapping[str, Shape]
#: "mm" as a word, or at the end of one: bmm, _grouped_mm, grouped_mm_fallback.
_PRODUCT = re.compile(r"mm(?![a-zA-Z0-9])")


def multiply_adds(node: fx.Node, shapes: Shapes, *, reads_weights: bool) -> int | None:
    """Multiply-adds of one call; 0 for an operator without products, None where they are not known.

    Args:
        node: a call of a captured graph.
        shapes: of all tensors, as they are in this call.
        reads_weights: of what reads none, and is not known here, is assumed that it has no products, such as
            a softmax.
    """
    name = op_name(node)
    count = _FORMULAS.get(name) or (_matrix_product if _PRODUCT.search(name) else None)
    if count is not None:
        try:
            return count(node, schema_arguments(node), shapes)
        except (
            KeyError,
            IndexError,
            ZeroDivisionError,
        ):  # an overload with other arguments, or an empty tensor
            return None
    is_known = not reads_weights or is_elementwise(node) or moves(node) or name in LOOK_UPS or is_norm(node)
    return 0 if is_known and "::" not in name else None


def _matrix_product(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Return the multiply-adds of `left @ right`, perhaps with a third tensor added.

    Each value of the result is a sum over the last dimension of `left`.
    """
    tensors = [
        shapes[value.name]
        for value in arguments.values()
        if isinstance(value, fx.Node) and value.name in shapes
    ]
    is_added = op_name(node) in ("addmm", "baddbmm", "addbmm", "addmv")
    left = tensors[1 if is_added else 0]
    summed = left[0] if op_name(node) == "addbmm" else 1
    return math.prod(shapes[node.name]) * left[-1] * summed


def _weighted(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Return the multiply-adds of a linear or convolution.

    Of a transposed one each value of the input is multiplied, of others each of the result is a sum.
    """
    weight = shapes[arguments["weight"].name]
    is_transposed = "transpose" in op_name(node) or arguments.get("transposed") is True
    places = shapes[arguments["input"].name] if is_transposed else shapes[node.name]
    return math.prod(places) * math.prod(weight[1:])


def _low_bit(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    return math.prod(shapes[node.name]) * int(arguments["in_features"]) if "in_features" in arguments else 0


def _recurrent(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Every matrix is multiplied once with each step of each sequence."""
    steps = shapes[(arguments.get("input") or arguments.get("data") or arguments["x"]).name]
    matrices = [shapes[p.name] for p in arguments["params"] if len(shapes[p.name]) == 2]
    return math.prod(steps[:-1]) * sum(map(math.prod, matrices))


def _cell(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    rows = math.prod(shapes[arguments["input"].name][:-1])
    return rows * sum(math.prod(shapes[arguments[name].name]) for name in ("w_ih", "w_hh"))


def _bilinear(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    return math.prod(shapes[arguments["input1"].name][:-1]) * math.prod(shapes[arguments["weight"].name])


def _tensordot(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    left = shapes[arguments["self"].name]
    return math.prod(shapes[node.name]) * math.prod([int(left[dim]) for dim in arguments["dims_self"]])


def _einsum(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Return a value per combination of all letters, as if all operands were multiplied at once."""
    operands = [shapes[n.name] for n in arguments["tensors"]]
    if len(operands) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(
        arguments["equation"].replace(" ", "").partition("->")[0].split(","), operands, strict=True
    ):
        before, dots, behind = term.partition("...")
        spread = [f"...{i}" for i in range(len(shape) - len(before) - len(behind), 0, -1)] if dots else []
        for letter, size in zip([*before, *spread, *behind], shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return math.prod(sizes.values()) * (len(operands) - 1)


def _attention(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Count queries times keys, then weights times values."""
    query, key, value = (shapes[arguments[name].name] for name in ("query", "key", "value"))
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _distances(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    return math.prod(shapes[node.name]) * shapes[arguments["x1"].name][-1]


def _vectors(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Return a matrix or vector times a vector."""
    return math.prod(shapes[arguments["self"].name])


def _elements(node: fx.Node, arguments: Mapping[str, Any], shapes: Shapes) -> int:
    return math.prod(shapes[node.name])


_WEIGHTED = (
    "linear",
    "convolution",
    "_convolution",
    *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)),
)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_dynamic", "gru_dynamic")
_FORMULAS: dict[str, Callable[[fx.Node, Mapping[str, Any], Shapes], int]] = {
    **dict.fromkeys(_WEIGHTED, _weighted),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    **dict.fromkeys(LOW_BIT, _low_bit),
    **dict.fromkeys(("matmul", "linalg_matmul", "inner"), _matrix_product),
    **dict.fromkeys(("mv", "dot", "vdot"), _vectors),
    "torchvision::deform_conv2d": _weighted,
    "bilinear": _bilinear,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "cdist": _distances,
    "mul": _elements,
}
