"""Products that nc does not quantize, such as those of stacked experts: their weights stay fp32, and the report must say so."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from nc.graph.catalogue import is_float_tensor, kind_of_node, op_name

#: "mm" as a word, or at the end of one: bmm, _grouped_mm, grouped_mm_fallback.
_PRODUCT = re.compile(r"mm(?![a-zA-Z0-9])")


@dataclass(frozen=True, slots=True)
class UnknownProduct:
    """A weight that such a product reads.

    Attributes:
        operator: "namespace::name" of what computes the product, without "aten::".
        weight: name of the parameter.
        shape: of the weight.
    """

    operator: str
    weight: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def unknown_products(module: fx.GraphModule) -> tuple[UnknownProduct, ...]:
    """All of a graph, each weight once."""
    found = {}
    for node in module.graph.nodes:
        if kind_of_node(node) is not None or not _PRODUCT.search(op_name(node)):
            continue
        for source in map(_origin, node.all_input_nodes):
            if source.op == "get_attr" and is_float_tensor(source) and source.meta["val"].dim() > 1:
                name = str(source.meta.get("fqn") or source.target)
                found[name] = UnknownProduct(op_name(node), name, tuple(source.meta["val"].shape))
    return tuple(found.values())


def unknown_text(products: Sequence[UnknownProduct]) -> str:
    """A line about them, the largest weights first."""
    largest = sorted(products, key=lambda product: -product.size)
    shown = ", ".join(f"{product.weight} {list(product.shape)}" for product in largest[:3])
    more = f" and {len(products) - 3} more" if len(products) > 3 else ""
    operators = ", ".join(dict.fromkeys(product.operator for product in products))
    return (
        f"{sum(p.size for p in products) / 1e6:.1f} M weights stay fp32, as nc has no int8 for what reads them ({operators}): {shown}{more}"
    )


def _origin(node: fx.Node) -> fx.Node:
    """What a node is a view or copy of, as far as it reads a single node."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node
