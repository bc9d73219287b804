"""Which token each element of a value comes from, found by sending numbers of tokens through a graph.

Operators that move values move the numbers too. Those that compute keep them: each of their results may come
from one token only. What mixes tokens has no origin, and the graph is not ragged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import MOVES, kind_of_node, op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS
from nc.graph.views import called_with
from nc.proof.places import is_pointwise

#: What has no text, or no place in one.
NONE = -1
#: Operators whose result is the same for all elements.
_FILLED = frozenset(
    {"full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
    | {"scalar_tensor", "new_empty", "empty_like"}
)
#: Operators that mix a result along dimensions, which an argument names.
_ALONG = {"softmax": "dim", "_softmax": "dim", "log_softmax": "dim", "glu": "dim", "cumsum": "dim"}
_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm"})
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "any", "all", "var"})
#: Operators that move values, beside those of the catalogue.
_MOVES = MOVES | {"_unsafe_view", "cat", "concat", "stack", "repeat", "alias", "detach", "expand_as", "to"}
_MOVES |= {"view_as", "swapdims", "lift_fresh_copy", "repeat_interleave"}


class Mixed(Exception):
    """A value depends on several tokens; the text says which and why that is not known to be right."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where the elements of a value come from.

    Attributes:
        text: int64, the number of the text of each element; `NONE` for none.
        place: int64, the place of the token in its text; `NONE` for what is of a whole text, or a constant.
    """

    text: torch.Tensor
    place: torch.Tensor

    @staticmethod
    def nothing(shape: Sequence[int]) -> Origin:
        """Return that of a constant."""
        return Origin(torch.full(tuple(shape), NONE), torch.full(tuple(shape), NONE))

    @staticmethod
    def tokens(texts: int, length: int) -> Origin:
        """Return that of tokens [texts, length]."""
        shape = texts, length
        return Origin(torch.arange(texts)[:, None].expand(shape), torch.arange(length).expand(shape))

    @property
    def shape(self) -> torch.Size:
        """Sizes of the value."""
        return self.text.shape

    @property
    def is_constant(self) -> bool:
        """Whether no element comes from a text or a place."""
        return bool((self.text == NONE).all() and (self.place == NONE).all())

    @property
    def has_tokens(self) -> bool:
        """Whether elements come from single tokens."""
        return bool((self.place != NONE).any())

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Origin:
        """Return that of what an operator makes that moves values."""
        return Origin(move(self.text), move(self.place))

    def along(self, dims: Collection[int], why: str) -> Origin:
        """Return the same with size 1 along some dimensions; raises `Mixed` where it changes along them."""
        found = self
        for dim in dims:
            first = found.moved(lambda x, dim=dim: x.narrow(dim, 0, 1))  # type: ignore[misc] # bound at once
            if not (torch.eq(found.text, first.text).all() and torch.eq(found.place, first.place).all()):
                raise Mixed(why)
            found = first
        return found


def joined(origins: Sequence[Origin], shape: Sequence[int], why: str) -> Origin:
    """Return the origin of what is computed of several values, element by element; raises `Mixed`."""
    found = Origin.nothing(shape)
    for each in origins:
        wide = each.moved(lambda x: x.expand(tuple(shape)))
        parts = []
        for known, new in ((found.text, wide.text), (found.place, wide.place)):
            if not ((known == new) | (known == NONE) | (new == NONE)).all():
                raise Mixed(why)
            parts.append(torch.where(known == NONE, new, known))
        found = Origin(*parts)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes for which origins are computed, and their names in the graph.

    Attributes:
        texts: number of texts.
        length: number of tokens of each.
        of_texts: names of sizes that are the number of texts.
        of_length: name of the size that is the length.
    """

    texts: int
    length: int
    of_texts: frozenset[str]
    of_length: str


class Origins:
    """Origins of the values of one graph.

    Args:
        module: the graph.
        sizes: for which they are computed.
        given: origins of the inputs, and of nodes whose origins are known otherwise.
        skipped: nodes that are not looked at: their values are read by skipped ones and `given` ones only.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sizes: Sizes,
        given: Mapping[fx.Node, Origin],
        skipped: Collection[fx.Node],
    ) -> None:
        self._module, self._sizes, self._skipped = module, sizes, skipped
        self.values: dict[fx.Node, Any] = dict(given)
        #: Nodes that take the first token of each text.
        self.firsts: list[fx.Node] = []
        #: Nodes that give numbers of places or rows of a table of places, and the dimension of places.
        self.positions: dict[fx.Node, int] = {}

    def compute(self, known: Mapping[fx.Node, Callable[[], Any]]) -> None:
        """Find the origins of all nodes.

        Args:
            known: nodes whose origins others compute, from those of nodes before them.

        Raises:
            Mixed: one has none.
        """
        for node in self._module.graph.nodes:
            if node in known:
                self.values[node] = known[node]()
            elif node in self.values or node in self._skipped or node.op == "output":
                continue
            elif node.op == "get_attr":
                value = getattr(self._module, str(node.target))
                self.values[node] = Origin.nothing(value.shape) if isinstance(value, torch.Tensor) else value
            elif node.op == "call_function":
                self.values[node] = self._of(node)

    def _of(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg(called_with(node), self.values.__getitem__)
        flat = [value for value in _flat((args, kwargs)) if isinstance(value, Origin)]
        why = f"{node.name} ({op_name(node)}) reads several tokens"
        if not isinstance(node.meta.get("val"), (*TENSORS, list, tuple)):
            return _number(node, args, kwargs)
        if any(isinstance(value, Text) for value in _flat((args, kwargs))):
            if any(each.has_tokens for each in flat):
                msg = f"{node.name} ({op_name(node)}) reads a value of a text for each of its tokens"
                raise Mixed(msg)
            return Text()
        if all(each.is_constant for each in flat):
            return self._of_constants(node, args, kwargs)
        if not any(each.has_tokens for each in flat):
            raise Mixed(f"{node.name} ({op_name(node)}) reads texts, but not their tokens")
        return self._of_tokens(node, args, kwargs, flat, why)

    def _of_tokens(
        self, node: fx.Node, args: Any, kwargs: Any, flat: Sequence[Origin], why: str
    ) -> Any:
        name, kind = op_name(node), kind_of_node(node)
        named = schema_arguments(node)
        first = args[0] if args else next(iter(kwargs.values()))
        if name in ("select", "slice") and isinstance(first, Origin):
            return self._part(node, first, args, kwargs, why)
        if name in _MOVES and not (name == "index_select" and first.is_constant):
            return _moved(node, args, kwargs)
        if is_pointwise(node):
            # a tensor that only gives a dtype counts for nothing
            given = flat if name != "type_as" else flat[:1]
            return joined(given, torch.broadcast_shapes(*(each.shape for each in given)), why)
        if kind == "linear" or name == "quant_linear":
            rows = first.along([first.text.dim() - 1], why)
            if not all(each.is_constant for each in flat[1:]):
                raise Mixed(f"{node.name}: its weight is computed from tokens")
            width = args[1].shape[0]
            return rows.moved(lambda x: x.expand(*x.shape[:-1], width))
        if name in ("embedding", "quant_embedding"):
            indices = args[1] if name == "embedding" else args[0]
            if not flat[0].is_constant and name == "embedding":
                raise Mixed(why)
            width = args[0].shape[1] if name == "embedding" else int(named["features"])
            return indices.moved(lambda x: x[..., None].expand(*x.shape, width))
        if name in _NORMS:
            dims = range(first.text.dim() - len(named["normalized_shape"]), first.text.dim())
            return first.along(dims, why).moved(lambda x: x.expand(first.shape))
        if name == "quantize_dequantize_dynamic":
            if not named["per_token"] or named["right"] is not None:
                raise Mixed(f"{node.name}: its range is of all tokens together")
            dim = int(named["dim"])
            return first.along([dim % first.text.dim()], why).moved(lambda x: x.expand(first.shape))
        if name in ("softmax", "_softmax", "log_softmax"):
            dim = int(named["dim"]) % first.text.dim()
            return first.along([dim], why).moved(lambda x: x.expand(first.shape))
        if name in _REDUCTIONS and named.get("dim") is not None:
            return _reduced(first, named, why)
        if name in ("gather", "index_select") and first.is_constant:
            return next(each for each in flat if not each.is_constant)
        raise Mixed(f"{node.name}: nothing is known of {name} over tokens")

    def _part(self, node: fx.Node, x: Origin, args: Any, kwargs: Any, why: str) -> Any:
        """Return what is left of a value; the first token of each text is a value of the text."""
        found = _moved(node, args, kwargs)
        if set(zip(*_pairs(found), strict=True)) == set(zip(*_pairs(x), strict=True)):
            return found
        named = schema_arguments(node)
        dim = int(named.get("dim", 0)) % x.text.dim()
        is_first = op_name(node) == "select" and named["index"] == 0
        if is_first and x.shape[dim] == self._sizes.length and bool((found.place == 0).all()):
            self.firsts.append(node)
            return Text()
        raise Mixed(f"{node.name} ({op_name(node)}) reads some of the tokens")

    def _of_constants(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the origin of what is computed of constants and sizes."""
        shape, name = node.meta["val"].shape, op_name(node)
        names = [str(size) for size in shape]
        if name == "arange" and names == [self._sizes.of_length]:
            self.positions[node] = 0
            place = torch.arange(self._sizes.length)
            return Origin(torch.full_like(place, NONE), place)
        if name == "slice" and self._sizes.of_length in names:
            dim = names.index(self._sizes.of_length)
            if args[2] not in (None, 0):
                raise Mixed(f"{node.name} takes places from {args[2]} on")
            self.positions[node] = dim
            given = _moved(node, args, kwargs)
            place = torch.arange(self._sizes.length)
            return Origin(given.text, place.view(-1, *(1,) * (len(names) - dim - 1)).expand(given.shape))
        free = [n for n in names if not n.isdigit()]
        if not free:
            return Origin.nothing([int(n) for n in names])
        if name in _MOVES:
            return _moved(node, args, kwargs)
        if name in _FILLED or is_pointwise(node):
            return Origin.nothing([self._size(n) for n in names])
        raise Mixed(f"{node.name} ({name}) is computed from the sizes of the inputs")

    def _size(self, name: str) -> int:
        if name in self._sizes.of_texts:
            return self._sizes.texts
        if name == self._sizes.of_length:
            return self._sizes.length
        if name.isdigit():
            return int(name)
        raise Mixed(f"a size is {name}")


class Text:
    """A value of a whole text, or of all texts: nothing about it changes."""


def _moved(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of origins, which it moves like values."""
    target: Any = node.target

    def part(value: Any, name: str) -> Any:
        if isinstance(value, Origin):
            return getattr(value, name)
        if isinstance(value, (list, tuple)):
            return [part(v, name) for v in value]
        return value

    if op_name(node) == "to":
        return args[0]
    results = []
    for name in ("text", "place"):
        given = {key: part(value, name) for key, value in kwargs.items() if key != "dtype"}
        results.append(target(*(part(value, name) for value in args), **given))
    if isinstance(results[0], (list, tuple)):
        return [Origin(text, place) for text, place in zip(*results, strict=True)]
    return Origin(*results)


def _reduced(x: Origin, named: Mapping[str, Any], why: str) -> Origin:
    given = named["dim"]
    dims = sorted({dim % x.text.dim() for dim in ([given] if isinstance(given, int) else given)})
    found = x.along(dims, why)
    if named.get("keepdim"):
        return found
    return found.moved(lambda y: y.reshape([n for d, n in enumerate(y.shape) if d not in dims]))


def _pairs(x: Origin) -> tuple[list[int], list[int]]:
    return x.text.flatten().tolist(), x.place.flatten().tolist()


def _number(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return a size, or what is computed of sizes."""
    name = op_name(node)
    if name.startswith("sym_size"):
        return Text() if isinstance(args[0], Text) else args[0].shape[args[1]]
    if any(isinstance(value, (Origin, Text)) for value in _flat((args, kwargs))):
        raise Mixed(f"{node.name} ({name}) reads a value of a tensor")
    target: Any = node.target
    return target(*args, **kwargs)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _flat(v)]
    if isinstance(value, Mapping):
        return [found for v in value.values() for found in _flat(v)]
    return [value]
