"""Rotary embeddings in single operators → one call (J. Su et al., arXiv 2104.09864, equation 34, with the halves of a head as pairs).

    y = x * cos + torch.cat((-x[..., n:], x[..., :n]), -1) * sin

as in Llama, Qwen, ModernBERT and GPT-NeoX.
"""

from __future__ import annotations

from torch import fx

from nc.backends.native.norms import is_fp32
from nc.backends.native.operators import rotation
from nc.backends.native.regions import only_user
from nc.graph.catalogue import op_name, schema_arguments, works_in_place
from nc.graph.fx_utils import take_over
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary


def recompose_rotary(module: fx.GraphModule) -> None:
    """Replace every rotary embedding by one call. Not where operators work in place: there a value depends on when it is read."""
    if any(works_in_place(node) for node in module.graph.nodes):
        return
    for node in list(module.graph.nodes):
        found = rotary_of(node)
        if found is None:
            continue
        (x, cosine, sine), inner = found
        with module.graph.inserting_before(node):
            call = module.graph.call_function(rotation(), (x, cosine, sine))
        take_over(call, node)
        call.meta["operators"] = [n.meta["operator"] for n in (node, *inner) if "operator" in n.meta]
        node.replace_all_uses_with(call)
        for old in (node, *inner):
            module.graph.erase_node(old)


def rotary_of(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node, fx.Node], tuple[fx.Node, ...]] | None:
    """x, cos and sin of the rotary embedding whose sum a node is, and the other nodes of it, last first; None where it is none."""
    if op_name(node) != "add" or Binary.of(node).alpha != 1:
        return None
    for straight, turned in (Binary.of(node).sides, Binary.of(node).sides[::-1]):
        if not _is_product(straight, node) or not _is_product(turned, node):
            continue
        for joined, sine in (Binary.of(turned).sides, Binary.of(turned).sides[::-1]):
            found = _turned(joined, turned)
            if found is None or not isinstance(sine, fx.Node):
                continue
            x, inner = found
            left, right = Binary.of(straight).sides
            cosine = right if left is x else left if right is x else None
            if not isinstance(cosine, fx.Node) or {cosine, sine} & {straight, turned, *inner}:
                continue  # it would be computed from what is replaced
            if all(map(is_fp32, (x, cosine, sine))) and same_shape(node.meta["val"].shape, x.meta["val"].shape):
                return (x, cosine, sine), (straight, turned, *inner)
    return None


def _is_product(node: object, reader: fx.Node) -> bool:
    return isinstance(node, fx.Node) and op_name(node) == "mul" and only_user(node) is reader


def _turned(node: object, reader: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return the x of `cat((-x[..., n:], x[..., :n]), -1)`, and the nodes that compute this, last first."""
    if not isinstance(node, fx.Node) or op_name(node) != "cat" or only_user(node) is not reader:
        return None
    a, dims = schema_arguments(node), node.meta["val"].dim()
    if len(a["tensors"]) != 2 or a["dim"] % dims != dims - 1:
        return None
    negative, first = a["tensors"]
    if op_name(negative) != "neg" or len(negative.users) > 1 or len(first.users) > 1:
        return None
    (second,) = negative.all_input_nodes
    x = _half(first, 0)
    return (x, (node, negative, second, first)) if x is not None and len(second.users) == 1 and _half(second, 1) is x else None


def _half(node: fx.Node, which: int) -> fx.Node | None:
    """Return what a node is the first (0) or the second (1) half of, along the last dimension."""
    if op_name(node) != "slice":
        return None
    a = schema_arguments(node)
    source: fx.Node = a["self"]
    *before, width = source.meta["val"].shape
    start, end = a["start"] or 0, a["end"]
    if (
        a["dim"] % (len(before) + 1) != len(before)
        or a["step"] != 1
        or not isinstance(width, int)
        or width % 2
        or not isinstance(start, int)
    ):
        return None
    if end is not None and not isinstance(end, int):
        return None
    begin, stop, _ = slice(start, end).indices(width)
    return source if (begin, stop) == (which * width // 2, (which + 1) * width // 2) else None
