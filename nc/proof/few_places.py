"""Compare an engine's values with the quantized graph at a few places of each, computed from few others.

The places are those that blocks, tails and shares of threads make different: the ends, the middle, and one of
each stretch between, at another position in a block each time. On a mismatch,
`nc.proof.kernels.check_kernels` decides: it compares all places.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import WEIGHTED, kind_of_node
from nc.graph.placement import works_in_place
from nc.graph.views import Quantize, returned
from nc.ops import quantize_per_tensor
from nc.proof.intermediates import Point
from nc.proof.kernels import KernelCheck, as_in_graph, checked
from nc.proof.places import PlacedValue, Places, Placing, at, parts_in, with_values
from nc.proof.rounding_bounds import position, slack_of
from nc.proof.sizes import KnownSizes, UnknownSizes
from nc.proof.teacher_forcing import Local

#: By rank, the most indices of each dimension.
_MOST = {1: (96,), 2: (24, 32), 3: (3, 20, 24), 4: (2, 12, 6, 16), 5: (2, 8, 4, 4, 12)}

#: Places of a block that kernels may treat each in its own way.
_BLOCK = 16


def few(shape: Sequence[int]) -> Places:
    """Return places of a tensor: for equal shapes the same."""
    if not shape:
        return ()
    draw = random.Random(repr(tuple(shape)))
    most = _MOST.get(len(shape), (2,) * max(0, len(shape) - 2) + (6, 12))
    return tuple(_some(size, count, draw) for size, count in zip(shape, most, strict=True))


def _some(size: int, most: int, draw: random.Random) -> torch.Tensor | None:
    """Return indices: None of few; else both ends, both sides of the middle, and one of each stretch."""
    if size <= most:
        return None
    ends = {0, size - 1} if most < 6 else {0, size // 2 - 1, size // 2, size - 1}
    stretches, first = max(0, most - len(ends)), draw.randrange(_BLOCK)
    between = set()
    for i in range(stretches):
        begin, end = i * size // stretches, (i + 1) * size // stretches
        index = begin + (first + i - begin) % _BLOCK
        between.add(index if index < end else draw.randrange(begin, end))
    return torch.tensor(sorted(ends | between), dtype=torch.int64)


class FewPlaces:
    """A comparison of some points of a graph, for one call of an engine.

    Args:
        module: the quantized graph.
        points: all points whose values the engine shows.
        chosen: those that are compared.
        inputs: flat inputs of the call.
        sizes: point's node → the sizes of the engine's value.

    Attributes:
        wanted: node → the parts of the engine's value that `check` needs.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        points: Iterable[Point],
        chosen: Sequence[Point],
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[fx.Node, Sequence[int]],
    ) -> None:
        self._module, self._chosen, self._sizes = module, chosen, sizes
        self._outputs = frozenset(leaf for leaf in returned(module) if isinstance(leaf, fx.Node))
        self._inputs = dict(
            zip((n for n in module.graph.nodes if n.op == "placeholder"), inputs, strict=True)
        )
        if works_in_place(module):
            msg = "operators of the graph work in place"
            raise UnknownSizes(msg)
        known = KnownSizes(module, [tensor.shape for tensor in inputs], sizes)
        for node in sizes:
            known.check(node)
        self._parts = Placing(known, [point.node for point in points])
        #: For each point the part that the engine gives, and that of the graph.
        self._pairs = [self._pair(point.node) for point in chosen]
        self.wanted: dict[fx.Node, list[PlacedValue]] = {}
        self._values: dict[PlacedValue, Any] = {}
        self._slacks: dict[PlacedValue, Any] = {}
        for part in {part: None for pair in self._pairs for each in pair for part in _below(each)}:
            if part.call is None and part.node in self._inputs:
                self._values[part] = at(
                    self._inputs[part.node], part.places
                ).clone()  # calls may change inputs
            elif part.call is None and part.node.op != "get_attr":
                self.wanted.setdefault(part.node, []).append(part)

    def _pair(self, node: fx.Node) -> tuple[PlacedValue, PlacedValue]:
        places = few(self._sizes[node])
        if node.target is quantize_per_tensor:
            return self._parts.of(node, places), self._parts.of(Quantize.of(node).input, places)
        return self._parts.of(node, places), self._parts.computed(node, places)

    @property
    def names(self) -> frozenset[str]:
        """Names of the nodes whose values in the engine `check` needs."""
        return frozenset(node.name for node in self.wanted if node not in self._outputs)

    def see(self, names: Collection[str], value: torch.Tensor) -> None:
        """Keep what is wanted of the engine's value of nodes, which later calls may write over."""
        for node, parts in self.wanted.items():
            for part in parts if node.name in names and node not in self._outputs else ():
                found = as_in_graph(node, at(value, part.places))
                assert found is not None, f"{node.name} is {value.dtype}"
                self._values[part] = found.clone() if _shares(found, value) else found

    def check(self, outputs: Sequence[Any]) -> KernelCheck:
        """Return what the comparison found.

        Args:
            outputs: flat outputs of the call; all other wanted values were seen.
        """
        for leaf, value in zip(returned(self._module), outputs, strict=True):
            for part in self.wanted.get(leaf, ()) if isinstance(leaf, fx.Node) else ():
                self._values[part] = at(value, part.places)
        locals_ = {}
        for point, (_, expected) in zip(self._chosen, self._pairs, strict=True):
            value, slack = self._computed(expected), self._slacks.get(expected)
            if point.node.target is quantize_per_tensor:
                codes = Quantize.of(point.node)
                slack = None if slack is None else slack / codes.scale
                locals_[point.node] = Local(position(value, codes), slack)
            else:
                locals_[point.node] = Local(value, slack)
            self._forget()
        pairs = zip(self._chosen, self._pairs, strict=True)
        read = {point.node: self._values[part] for point, (part, _) in pairs}
        return dataclasses.replace(checked(self._chosen, read, locals_, ()), few_places=True)

    def _forget(self) -> None:
        """Give back what was computed for a point: weights of a large model would be there several times."""
        self._slacks.clear()
        for part in [part for part in self._values if part.call is not None or part.node.op == "get_attr"]:
            del self._values[part]

    def _computed(self, part: PlacedValue) -> Any:
        """Return the value of a part, and note its slack."""
        for each in _below(part):
            if each not in self._values:
                self._values[each] = self._value(each)
                slack = self._slack(each)
                if slack is not None:
                    self._slacks[each] = slack
        return self._values[part]

    def _value(self, part: PlacedValue) -> Any:
        if part.call is None:
            return at(_attribute(self._module, part.node), part.places)
        return part.call(*(with_values(argument, self._values) for argument in part.arguments))

    def _slack(self, part: PlacedValue) -> Any:
        """Return the slack of a part, see `nc.proof.rounding_bounds`."""
        if part.call is None:
            return None
        sources = list(dict.fromkeys(parts_in(part.arguments)))
        known = any(source in self._slacks for source in sources)
        if part.moves or kind_of_node(part.node) in WEIGHTED:
            return self._slack_through(part) if known else None
        env = _Values(self._parts, {source.node: self._values[source] for source in sources})
        slacks = {source.node: self._slacks[source] for source in sources if source in self._slacks}
        if known and len(env) < len(sources):  # a node is read at several places, or twice
            return torch.full_like(self._values[part], torch.inf, dtype=torch.float32)
        return slack_of(part.node, self._values[part], env, slacks)

    def _slack_through(self, part: PlacedValue) -> Any:
        """Return the slack of what moves values, or multiplies them with constants."""
        zeros = {
            source: torch.zeros_like(self._values[source])
            for source in parts_in(part.arguments)
            if source not in self._slacks
        }
        if part.moves:
            known = zeros | self._slacks
            return part.call(*(with_values(argument, known) for argument in part.arguments))  # type: ignore[misc] # computed
        first, weight, _, *rest = part.arguments
        if not isinstance(first, PlacedValue):  # arguments by name
            return torch.full_like(self._values[part], torch.inf, dtype=torch.float32)
        return part.call(self._slacks.get(first, zeros.get(first)), self._values[weight].abs(), None, *rest)  # type: ignore[misc] # as above


class _Values(dict[fx.Node, Any]):
    """Values of nodes; of those that give numbers too."""

    def __init__(self, parts: Placing, values: Mapping[fx.Node, Any]) -> None:
        super().__init__(values)
        self._parts = parts

    def __missing__(self, node: fx.Node) -> Any:
        return self._parts.fact(node)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _below(part: PlacedValue) -> list[PlacedValue]:
    """Return a part and all that it is computed from, each once, sources first."""
    found: dict[PlacedValue, None] = {}
    waiting = [part]
    while waiting:
        last = waiting[-1]
        missing = [source for source in parts_in(last.arguments) if source not in found]
        if missing and last not in found:
            waiting += missing
        else:
            found[waiting.pop()] = None
    return list(found)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return functools.reduce(getattr, str(node.target).split("."), module)
