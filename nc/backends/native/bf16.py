"""Products between roundings to bf16 → the same operators on bf16 tensors."""

from __future__ import annotations

from torch import fx

from nc.graph.catalogue import PRODUCTS, input_node, is_float_tensor, kind_of_node
from nc.graph.fx_utils import give_values_of
from nc.ops import from_bf16, to_bf16


def compute_in_bf16(module: fx.GraphModule) -> None:
    """Let every product whose inputs and result are rounded to bf16 read and give bf16."""
    for node in list(module.graph.nodes):
        if not _is_rounded(node):
            continue
        for source in node.all_input_nodes:
            if source.target is from_bf16:
                node.replace_input_with(source, input_node(source))
        (result,) = node.users
        give_values_of(node, result)
        result.replace_all_uses_with(node)
        module.graph.erase_node(result)
        node.meta["bf16"] = True


def why_not_bf16(node: fx.Node) -> str:
    """Why `compute_in_bf16` left an operator alone; "" where it did not."""
    if node.meta.get("bf16"):
        return ""
    if kind_of_node(node) not in PRODUCTS:
        return "it is not a matrix product"
    if [user.target for user in node.users] != [to_bf16]:
        return "its result is not only read rounded to bf16"
    return "" if _is_rounded(node) else "an input of it is not rounded to bf16"


def drop_round_trips(module: fx.GraphModule) -> None:
    """Remove conversions bf16 → fp32 → bf16, which change nothing, and conversions that are not read."""
    for node in list(module.graph.nodes):
        if node.target is to_bf16 and (source := input_node(node)).target is from_bf16:
            node.replace_all_uses_with(input_node(source))
    for node in reversed(list(module.graph.nodes)):
        if node.target in (to_bf16, from_bf16) and not node.users:
            module.graph.erase_node(node)


def _is_rounded(node: fx.Node) -> bool:
    return (
        kind_of_node(node) in PRODUCTS
        and [user.target for user in node.users] == [to_bf16]
        and all(source.target is from_bf16 for source in node.all_input_nodes if is_float_tensor(source))
    )
