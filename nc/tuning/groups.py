"""Operators that the engine couples, so that one decision is made for all of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from nc.graph.catalogue import CONVOLUTIONS, first_input, kind_of_node


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Operators that get the same precision.

    Attributes:
        operators: their names, in execution order.
        pattern: their names with numbers replaced; groups of equal blocks have the same.
    """

    operators: tuple[str, ...]
    pattern: str

    def __str__(self) -> str:
        """Return the names."""
        return " + ".join(self.operators)


def groups_of(
    module: fx.GraphModule, operators: Collection[str], fused: Iterable[Sequence[str]] = ()
) -> tuple[Group, ...]:
    """Return the groups of some operators, in execution order.

    Coupled are calls of one module, linears that read one tensor, the two products of an attention, a sum
    with the convolutions that it adds, and what an engine computes in one step.

    Args:
        module: the captured graph, whose nodes say in `meta` which operator they are.
        operators: names of those that can be quantized.
        fused: names of operators that an engine computes together; others among them are left out.
    """
    nodes = {n: str(n.meta["operator"]) for n in module.graph.nodes if n.meta.get("operator") in operators}
    together: dict[str, frozenset[str]] = {name: frozenset([name]) for name in nodes.values()}
    steps = [[name for name in step if name in together] for step in fused]
    for one, other in itertools.chain(_coupled(nodes), *map(itertools.pairwise, steps)):
        joined = together[one] | together[other]
        together.update(dict.fromkeys(joined, joined))
    order = list(dict.fromkeys(nodes.values()))
    sets = dict.fromkeys(together[name] for name in order)
    found = (tuple(name for name in order if name in each) for each in sets)
    return tuple(Group(names, " + ".join(re.sub(r"\d+", "*", name) for name in names)) for names in found)


def _coupled(nodes: Mapping[fx.Node, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of operators."""
    readers: dict[fx.Node, str] = {}
    calls: dict[str, str] = {}
    for node, name in nodes.items():
        yield calls.setdefault(name.partition("@")[0], name), name
        kind, source = kind_of_node(node), first_input(node)
        if kind == "linear" and source is not None:
            yield readers.setdefault(source, name), name
        elif kind == "matmul":
            first = _behind(source, nodes)
            if first is not None and kind_of_node(first) == "matmul":
                yield nodes[first], name
        elif kind == "add":
            for added in node.all_input_nodes:
                if added in nodes and kind_of_node(added) in CONVOLUTIONS:
                    yield nodes[added], name


def _behind(node: fx.Node | None, nodes: Mapping[fx.Node, str]) -> fx.Node | None:
    """Return the operator that a value comes from, through a softmax and what has one input that counts."""
    softmax = False
    while node is not None and node not in nodes:
        softmax = softmax or "softmax" in str(node.target)
        node = first_input(node)
    return node if softmax else None
