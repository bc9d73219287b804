"""What attention adds to scores by the distance of a key from its query, as DeBERTa does.

The products of a query with vectors of distances are computed for all of these, and `gather` takes that of
each key; likewise for keys (He et al. 2021, arXiv 2006.03654, equation 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx

from nc.backends.rewrites.ragged.masks import Computed, Unlike, inputs_read
from nc.graph.catalogue import kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import constant_value, gives_tensor, sizes_of
from nc.graph.views import Binary, Transpose

#: The most tokens of a text of which distances are computed.
MOST_DISTANCES = 1024
#: Operators that round a value.
ROUNDINGS = frozenset(
    {"quantize_per_tensor", "dequantize_per_tensor", "quantize_dequantize_dynamic", "to_bf16", "from_bf16"}
)
#: Numbers of tokens for which columns are compared.
_SOME = (1, 5, 37)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ByDistance:
    """What is added to scores.

    Attributes:
        rows: queries or keys, [..., tokens, width].
        vectors: of distances, [..., width, columns]; it depends on constants and sizes only.
        column: of each pair, int64 [..., tokens, tokens]; likewise. The first of a pair is of `rows`.
        of_keys: `rows` are keys.
        factor: of the products.
    """

    rows: fx.Node
    vectors: fx.Node
    column: fx.Node
    of_keys: bool
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """A value, apart from numbers that multiply it, rounding and an exchange of its last two dimensions."""

    node: fx.Node
    factor: float = 1.0
    turned: bool = False


def scaled(module: fx.GraphModule, node: fx.Node) -> Scaled:
    """Return what a value is apart from numbers, rounding and an exchange of its last two dimensions."""
    factor, turned = 1.0, False
    while True:
        name = op_name(node)
        if name in ROUNDINGS or name in ("contiguous", "clone"):
            node = node.all_input_nodes[0]
        elif number := factor_of(module, node):
            factor, node = factor * number, Binary.of(node).left
        elif _turns_last_two(node):
            node, turned = node.all_input_nodes[0], not turned
        else:
            return Scaled(node, factor, turned)


def factor_of(module: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the number that a node multiplies its first input by; None for another node."""
    name = op_name(node)
    if name not in ("mul", "div") or Binary.of(node).rounding_mode is not None:
        return None
    number = number_of(module, Binary.of(node).right)
    return number if name == "mul" or number is None else 1 / number


def number_of(module: fx.GraphModule, value: object) -> float | None:
    """Return a number that is the same for all inputs; None for what is not one."""
    if isinstance(value, (int, float)):
        return float(value)
    constant = constant_value(module, value)
    return float(constant) if constant is not None and constant.numel() == 1 else None


def unrounded(node: fx.Node) -> fx.Node:
    """Return a value before it was rounded."""
    while op_name(node) in ROUNDINGS:
        node = node.all_input_nodes[0]
    return node


def by_distance(module: fx.GraphModule, node: object) -> list[ByDistance] | None:
    """Return the parts of a sum that is added to scores; None where one is something else."""
    if not isinstance(node, fx.Node):
        return None
    outer = scaled(module, node)
    if op_name(outer.node) == "add" and Binary.of(outer.node).alpha == 1:
        sides = [side for side in Binary.of(outer.node).sides if number_of(module, side) != 0]
        found = [by_distance(module, side) for side in sides]
        parts = [part for each in found for part in each or ()]
        return None if None in found else [_within(outer, part) for part in parts]
    part = _gathered(module, outer.node) if op_name(outer.node) == "gather" else None
    return None if part is None else [_within(outer, part)]


def _gathered(module: fx.GraphModule, node: fx.Node) -> ByDistance | None:
    """Return what `gather` takes of products with vectors of distances; None where they are others."""
    named = schema_arguments(node)
    products, column = named["self"], named["index"]
    if kind_of_node(products) != "matmul" or named["dim"] not in (-1, products.meta["val"].dim() - 1):
        return None
    # one that leaves heads out, and is added to the scores of all of them
    if any(a == "1" != b for a, b in zip(sizes_of(column)[:-1], sizes_of(products)[:-1], strict=True)):
        return None
    left, right = Binary.of(products).sides
    if not gives_tensor(left) or not gives_tensor(right) or inputs_read(right) or inputs_read(column):
        return None
    rows = scaled(module, left)
    return None if rows.turned else ByDistance(rows.node, right, column, False, rows.factor)


def _within(outer: Scaled, part: ByDistance) -> ByDistance:
    """Return a part of a sum that is scaled."""
    return dataclasses.replace(part, of_keys=part.of_keys != outer.turned, factor=part.factor * outer.factor)


def _turns_last_two(node: fx.Node) -> bool:
    if op_name(node) != "transpose":
        return op_name(node) == "mT"
    view, dims = Transpose.of(node), node.meta["val"].dim()
    return {view.dim0 % dims, view.dim1 % dims} == {dims - 2, dims - 1}


def _columns(column: torch.Tensor) -> torch.Tensor:
    """Return the columns of all distances, int64 [2 * tokens - 1], of those of all pairs; raises `Unlike`."""
    n = column.shape[-1]
    found, rows = column.reshape(-1, n, n), torch.arange(n)
    of_distance = torch.cat([found[0, -1], found[0, 0, 1:]])
    if not bool((found == of_distance[rows[None, :] - rows[:, None] + n - 1]).all()):
        msg = "what is added to scores depends on more than the distance of a key from its query"
        raise Unlike(msg)
    return of_distance


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Arguments of `nc::segment_attention`.

    Attributes:
        of_queries, of_keys: fp32 [heads, columns, width]; None: nothing is added.
        query_columns, key_columns: int32 [2 * distances - 1].
    """

    of_queries: torch.Tensor | None
    of_keys: torch.Tensor | None
    query_columns: torch.Tensor | None
    key_columns: torch.Tensor | None

    @property
    def most(self) -> int:
        """Return the most tokens of a text."""
        column = self.query_columns if self.key_columns is None else self.key_columns
        assert column is not None, "one of them is there"
        return column.shape[0] // 2 + 1


def distances_of(
    parts: Sequence[ByDistance], values: Callable[[fx.Node], Computed], places: int
) -> Distances:
    """Return what attention is given for such parts.

    Args:
        parts: of a sum that is added to scores.
        values: node → what computes it for a mask.
        places: the most tokens of a text.

    Raises:
        Unlike: they depend on more than distances, or vectors of neighbours are not next to each other.
    """
    most = min(places, MOST_DISTANCES)
    found: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in parts:
        if part.of_keys in found:
            msg = "two products of queries, or of keys, are added to scores"
            raise Unlike(msg)
        vectors, columns = _vectors(part, values, most)
        for n in {min(count, most) for count in _SOME}:
            some, of_some = _vectors(part, values, n, texts=2)
            same = vectors[:, columns[most - n : most + n - 1]]
            # heads of the second text follow those of the first
            same = same.repeat(max(1, some.shape[0] // same.shape[0]), 1, 1)
            if not torch.allclose(some[:, of_some], same, rtol=1e-4, atol=1e-6 * float(same.abs().max())):
                msg = "what is added by distance depends on the length of the texts, or their number"
                raise Unlike(msg)
        _check_neighbours(columns)
        found[part.of_keys] = vectors, columns.to(torch.int32)
    none = None, None
    (of_queries, query_columns), (of_keys, key_columns) = found.get(False, none), found.get(True, none)
    return Distances(of_queries, of_keys, query_columns, key_columns)


def _vectors(
    part: ByDistance, values: Callable[[fx.Node], Computed], n: int, texts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors [heads, columns, width], and which of them belongs to each distance of n tokens.

    Heads of several texts may be concatenated.
    """
    mask = torch.ones(texts, n, dtype=torch.int64)
    vectors, column = values(part.vectors)(mask).mT * part.factor, values(part.column)(mask)
    vectors = vectors.reshape(-1, *vectors.shape[-2:]).contiguous()
    return vectors, _columns(column.mT if part.of_keys else column)


def _check_neighbours(columns: torch.Tensor) -> None:
    """Raise `Unlike` where columns of neighbouring distances differ by more than 1, or rise and fall."""
    steps = columns.diff()
    if bool((steps.abs() > 1).any()) or (bool((steps > 0).any()) and bool((steps < 0).any())):
        msg = "vectors of neighbouring distances are not next to each other"
        raise Unlike(msg)
