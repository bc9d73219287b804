"""Row-major memory wherever an operator computes.

The strides of the first run decide how IPEX compiles, for good and for all shapes.

For the shapes that a fused kernel saw first, IPEX gives its outputs the strides of the profiled run; for any
other shape they are row-major. Which input an output may overwrite depends on that, but is kept once for the
kernel, not for each shape. So where profiled outputs are not row-major, every call with another shape, in any
thread, changes what the calls of known shapes return: garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import MOVES, first_input, input_node, kind_of_node, op_name
from nc.graph.fx_utils import call_function, run_with
from nc.graph.views import Binary
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor

#: What a fused kernel computes with the result of a product.
_ARITHMETIC = ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
_CODES = (quantize_per_tensor, dequantize_per_tensor, dequantize_per_channel)


def make_row_major(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Let operators whose results would keep a permuted input's strides read a contiguous copy of it.

    Args:
        module: QDQ graph; changed in place.
        inputs: flat inputs; run once, since only that shows what strides operators give their results. A free
            dimension of size 1 hides them.

    Returns:
        Names of the operators that were changed.
    """
    found = _permuted(module, inputs)
    for node, permuted in found.items():
        for source in permuted:
            _read_copy(module, node, source)
        for user in [] if permuted else list(node.users):
            _read_copy(module, user, node)
    module.graph.lint()
    module.recompile()
    return [node.meta.get("operator", node.name) for node in found]


def put_batches_outermost(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Let `bmm(a, b)` read b in an order of memory that a kernel exists for.

    oneDNN turns uint8 codes of the second side to int8 with a reorder, and has none for three dimensions of
    which the first is not the outermost one in memory. Keys of `nn.MultiheadAttention` are such.

    Args:
        module: QDQ graph; changed in place.
        inputs: as of `make_row_major`.

    Returns:
        Names of the operators that were changed.
    """
    products = _products(module)
    found: list[fx.Node] = []

    def second_side(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        if node in products and _is_batch_within(env[Binary.of(node).right]):
            found.append(node)
        return value

    run_with(module, inputs, second_side)
    for node in found:
        _read_copy(module, node, Binary.of(node).right)
    module.recompile()
    return [node.meta.get("operator", node.name) for node in found]


def pack_operands_of_products(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Give `a @ b / 8 + mask` a contiguous mask.

    The kernel of a product with fused arithmetic reads an expanded or sliced operand as if it were
    contiguous. The operator gets a contiguous copy.

    Args:
        module: QDQ graph; changed in place.
        inputs: as of `make_row_major`.

    Returns:
        Names of the operators that were changed.
    """
    products = _products(module)
    fused = _computed_with(products, module)
    found: list[tuple[fx.Node, fx.Node]] = []

    def operand(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        if node in fused:
            kept = {first_input(node)} if _writes(node) else set()  # what is written into keeps its memory
            others = [n for n in node.all_input_nodes if n not in fused | products | kept]
            found.extend((node, n) for n in others if _is_permuted(env[n]))
        return value

    run_with(module, inputs, operand)
    for node, source in found:
        _read_copy(module, node, source)
    module.recompile()
    return [node.meta.get("operator", node.name) for node, _ in found]


def _products(module: fx.GraphModule) -> set[fx.Node]:
    """Int8 products of two activations."""
    products = [n for n in module.graph.nodes if kind_of_node(n) == "matmul"]
    sides = {n: Binary.of(n).right for n in products}
    return {n for n in products if isinstance(sides[n], fx.Node) and sides[n].target is dequantize_per_tensor}


def _computed_with(products: set[fx.Node], module: fx.GraphModule) -> set[fx.Node]:
    """Return the arithmetic with the results of products."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if op_name(node) in _ARITHMETIC and not (found | products).isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_batch_within(value: torch.Tensor) -> bool:
    """Return whether a tensor has three dimensions and its first one is not the outermost in memory."""
    return value.dim() == 3 and value.stride(0) < max(value.stride()) and value.shape[0] > 1


def _permuted(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, list[fx.Node]]:
    """Operators whose results are not row-major → those of their inputs that are not.

    The graph is run as it will be: with the copies.
    """
    found: dict[fx.Node, list[fx.Node]] = {}

    def row_major(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        if not _computes(node) or not _is_permuted(value):
            return value
        found[node] = [n for n in node.all_input_nodes if _is_permuted(env[n])]
        return value.contiguous()

    run_with(module, inputs, row_major)
    return found


def _computes(node: fx.Node) -> bool:
    """Return whether a node makes a new tensor; what works in place must keep the memory that it is given."""
    if node.op != "call_function" or node.target in _CODES or op_name(node) in MOVES:
        return False
    return not _writes(node)


def _writes(node: fx.Node) -> bool:
    """Return whether an operator works in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_permuted(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_contiguous()


def _read_copy(module: fx.GraphModule, reader: fx.Node, source: fx.Node) -> None:
    """Let one reader read a contiguous copy of `source`.

    Where `source` is a dequantize, the copy is of what is quantized.
    """
    if source.target is dequantize_per_tensor and input_node(source).target is quantize_per_tensor:
        reader = input_node(source)
        source = input_node(reader)
    with module.graph.inserting_before(reader):
        copy = call_function(module.graph, torch.ops.aten.contiguous.default, (source,))
    copy.meta["val"] = source.meta.get("val")
    reader.replace_input_with(source, copy)
