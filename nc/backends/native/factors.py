"""A permutation between a product and the sum behind it goes behind the sum.

Then the kernel of the product adds too. The blocks of ConvNeXt have that: `input + permute(linear(x))`.
"""

from __future__ import annotations

import torch
from torch import fx

from nc.backends.native.fuse import reads_codes
from nc.backends.native.regions import is_sum, only_user
from nc.graph.catalogue import kind_of_node, schema_arguments
from nc.graph.fx_utils import call_function, give_values_of, take_over
from nc.graph.placement import works_in_place
from nc.graph.views import Binary

_aten = torch.ops.aten


def sum_first(module: fx.GraphModule) -> None:
    """`other + permute(product)` → `permute(permuted other + product)`."""
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        move = only_user(node) if kind_of_node(node) == "linear" and reads_codes(node) else None
        add = only_user(move) if move is not None and move.target is _aten.permute.default else None
        if move is None or add is None or not is_sum(add, move):
            continue
        given = schema_arguments(move)["dims"]
        dims = [dim % len(given) for dim in given]
        left, right = Binary.of(add).sides
        other = right if left is move else left
        with module.graph.inserting_before(add):
            moved = call_function(
                module.graph, _aten.permute.default, (other, [dims.index(dim) for dim in range(len(dims))])
            )
            total = call_function(module.graph, _aten.add.Tensor, (node, moved))
            result = call_function(module.graph, _aten.permute.default, (total, dims))
        take_over(total, add)
        give_values_of(total)
        give_values_of(result, add)
        moved.meta["val"] = total.meta["val"] = node.meta["val"]
        result.meta["val"] = add.meta["val"]
        add.replace_all_uses_with(result)
        module.graph.erase_node(add)
        module.graph.erase_node(move)
