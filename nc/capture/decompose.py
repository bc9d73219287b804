"""`scaled_dot_product_attention` → matmul, scale, mask, softmax, matmul.

So each matmul can be quantized and fused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import Argument

from nc.graph.catalogue import is_float_tensor, op_name, schema_arguments
from nc.graph.fx_utils import call_function

aten = torch.ops.aten
Shape = tuple[int | torch.SymInt, ...]


def decompose_attention(module: fx.GraphModule) -> None:
    """Rewrite every attention whose head size is fixed.

    A mask that several layers share is converted once.
    """
    masks: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = {}
    for node in list(module.graph.nodes):
        if op_name(node) != "scaled_dot_product_attention":
            continue
        arguments = schema_arguments(node)
        if (
            isinstance(arguments["query"].meta["val"].shape[-1], int)
            and arguments["query"].meta["val"].dim() >= 3
        ):
            with module.graph.inserting_before(node):
                result = _attention(_Builder(module.graph, node), masks, **arguments)
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)


class _Builder:
    """Inserts calls that carry the module stack of the attention they replace.

    They also carry a fake value for later passes.
    """

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph = graph
        self.origin = origin

    def __call__(
        self, shape: Shape | None, target: Callable[..., object], *args: Argument, **kwargs: Argument
    ) -> fx.Node:
        node = call_function(self.graph, target, args, kwargs)
        node.meta["nn_module_stack"] = self.origin.meta.get("nn_module_stack", {})
        if shape is not None:
            # the shape is given here, not traced: some composite operators refuse fake tensors with free
            # sizes
            node.meta["val"] = self.origin.meta["val"].new_empty(shape)
        return node


def _attention(
    call: _Builder,
    masks: dict[fx.Node, tuple[fx.Node, fx.Node | None]],
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> fx.Node:
    q, k, v = (tuple(n.meta["val"].shape) for n in (query, key, value))
    if enable_gqa and q[-3] != k[-3]:
        k, v = (*k[:-3], q[-3], *k[-2:]), (*v[:-3], q[-3], *v[-2:])
        key = call(k, aten.repeat_interleave.self_int, key, _repeats(call, query, key), -3)
        value = call(v, aten.repeat_interleave.self_int, value, _repeats(call, query, value), -3)
    factor = 1.0 / math.sqrt(q[-1]) if scale is None else float(scale)
    square = (*q[:-1], k[-2])
    scores = call(
        square, aten.matmul.default, query, call((*k[:-2], k[-1], k[-2]), aten.transpose.int, key, -2, -1)
    )
    if factor != 1.0:
        # fusers look for a division. 1/factor is exact if the head size is a power of 4
        scores = call(square, aten.div.Tensor, scores, 1.0 / factor)
    if is_causal:
        scores = call(square, aten.add.Tensor, scores, _causal_bias(call, query, key, square[-2:]))
    attended = None
    if attn_mask is not None:
        if attn_mask not in masks:
            masks[attn_mask] = _bias(call, attn_mask)
        bias, attended = masks[attn_mask]
        scores = call(square, aten.add.Tensor, scores, bias)
    weights = call(square, aten.softmax.int, scores, -1)
    output = call((*q[:-1], v[-1]), aten.matmul.default, weights, value)
    return call((*q[:-1], v[-1]), aten.mul.Tensor, output, attended) if attended is not None else output


def _repeats(call: _Builder, query: fx.Node, grouped: fx.Node) -> int | fx.Node:
    """How many heads of the query share one head of the key or value.

    The graph computes it if the number of heads is free.
    """
    sizes = [n.meta["val"].shape[-3] for n in (query, grouped)]
    if all(isinstance(size, int) for size in sizes):
        return int(sizes[0] // sizes[1])
    heads = [call(None, aten.sym_size.int, n, n.meta["val"].dim() - 3) for n in (query, grouped)]
    return call(None, operator.floordiv, *heads)


def _causal_bias(call: _Builder, query: fx.Node, key: fx.Node, shape: Shape) -> fx.Node:
    rows = call(None, aten.sym_size.int, query, query.meta["val"].dim() - 2)
    columns = call(None, aten.sym_size.int, key, key.meta["val"].dim() - 2)
    lowest = call(shape, aten.full.default, [rows, columns], torch.finfo(torch.float32).min)
    return call(shape, aten.triu.default, lowest, 1)


def _bias(call: _Builder, mask: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the mask as a term to add, and a factor for the result.

    The factor is 0 for rows that attend to nothing, else 1. It is None if all rows attend.
    """
    val = mask.meta["val"]
    shape = tuple(val.shape)
    if val.dtype != torch.bool:
        return (_finite(call, mask, shape)) if _holds_minus_infinity(mask) else (mask, None)
    hidden = call(shape, aten.logical_not.default, mask)
    zeros = call(shape, aten.zeros_like.default, mask, dtype=torch.float32)
    bias = call(shape, aten.masked_fill.Scalar, zeros, hidden, torch.finfo(torch.float32).min)
    row = (*shape[:-1], 1)
    return bias, call(row, aten.to.dtype, call(row, aten.any.dim, mask, -1, True), torch.float32)


def _finite(call: _Builder, mask: fx.Node, shape: Shape) -> tuple[fx.Node, fx.Node]:
    """Return a float mask with -inf as `_bias` gives it.

    It becomes finite, because a row of -inf alone would give NaN.
    """
    row = (*shape[:-1], 1)
    visible = call(shape, aten.gt.Scalar, mask, torch.finfo(torch.float32).min)
    attended = call(row, aten.to.dtype, call(row, aten.any.dim, visible, -1, True), torch.float32)
    return call(shape, aten.clamp.default, mask, torch.finfo(torch.float32).min), attended


def _holds_minus_infinity(mask: fx.Node, depth: int = 12) -> bool:
    """Return whether a mask may hold -inf: it is an input, or the graph makes it with -inf.

    torch's own masks hold -inf. Those of Hugging Face hold the lowest finite number.
    """
    if depth == 0 or not isinstance(mask, fx.Node):
        return False
    if mask.op == "placeholder":
        return is_float_tensor(mask)
    if any(isinstance(a, float) and a == -math.inf for a in mask.args):
        return True
    return any(_holds_minus_infinity(n, depth - 1) for n in mask.all_input_nodes)
