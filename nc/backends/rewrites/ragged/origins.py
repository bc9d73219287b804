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
from nc.graph.fx_utils import gives_tensor, sizes_of
from nc.graph.views import called_with
from nc.proof.places import is_pointwise

#: What has no text, or no place in one.
NONE = -1
#: Operators whose result is the same for all elements.
_FILLED = frozenset(
    {"full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
    | {"scalar_tensor", "new_empty", "empty_like"}
)
#: Operators that mix values along one dimension, and keep its size.
_ALONG = frozenset({"softmax", "_softmax", "log_softmax"})
#: Operators that look up elements of their first argument.
_LOOK_UPS = frozenset({"gather", "index_select", "embedding"})
_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm"})
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "any", "all", "var", "argmax", "argmin"})
#: Operators that move values, beside those of the catalogue.
_MOVES = MOVES | {"_unsafe_view", "cat", "concat", "stack", "repeat", "alias", "detach", "expand_as", "to"}
_MOVES |= {"mT", "view_as", "swapdims", "lift_fresh_copy", "repeat_interleave"}


class Mixed(Exception):
    """A value depends on several tokens; the text says which and why that is not known to be right."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenOrigin:
    """Where the elements of a value come from.

    Attributes:
        text: int64, the number of the text of each element; `NONE` for none.
        place: int64, the place of the token in its text; `NONE` for what is of a whole text, or a constant.
    """

    text: torch.Tensor
    place: torch.Tensor

    @staticmethod
    def nothing(shape: Sequence[int]) -> TokenOrigin:
        """Return the origin of a constant."""
        none = torch.tensor(NONE, dtype=torch.int64).expand(tuple(shape))
        return TokenOrigin(none, none)

    @staticmethod
    def tokens(texts: int, length: int) -> TokenOrigin:
        """Return the origin of tokens, shape [texts, length]."""
        shape = texts, length
        return TokenOrigin(torch.arange(texts)[:, None].expand(shape), torch.arange(length).expand(shape))

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        return self.text.shape

    @property
    def is_constant(self) -> bool:
        """Whether no element comes from a text or a place."""
        return bool((self.text == NONE).all() and (self.place == NONE).all())

    @property
    def has_tokens(self) -> bool:
        """Whether elements come from single tokens."""
        return bool((self.place != NONE).any())

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> TokenOrigin:
        """Return the origin of the result of an operator that moves values; `move` is the operator."""
        return TokenOrigin(move(self.text), move(self.place))

    def along(self, dims: Collection[int], why: str) -> TokenOrigin:
        """Return the same with size 1 along some dimensions; raises `Mixed` where it changes along them."""
        found = self
        for dim in dims:
            first = found.moved(lambda x, dim=dim: x.narrow(dim, 0, 1))  # type: ignore[misc] # bound at once
            if not (torch.eq(found.text, first.text).all() and torch.eq(found.place, first.place).all()):
                raise Mixed(why)
            found = first
        return found


def joined(origins: Sequence[TokenOrigin], why: str) -> TokenOrigin:
    """Return the origin of what is computed of several values, element by element; raises `Mixed`."""
    dims = max(each.text.dim() for each in origins)
    shapes = [(1,) * (dims - each.text.dim()) + tuple(each.shape) for each in origins]
    # torch.broadcast_shapes imports sympy
    shape = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*shapes, strict=True))
    found = TokenOrigin.nothing(shape)
    for each in origins:
        wide = each.moved(lambda x: x.expand(tuple(shape)))
        parts = []
        for known, new in ((found.text, wide.text), (found.place, wide.place)):
            if not ((known == new) | (known == NONE) | (new == NONE)).all():
                raise Mixed(why)
            parts.append(torch.where(known == NONE, new, known))
        found = TokenOrigin(*parts)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class TextSizes:
    """TextSizes for which origins are computed, and their names in the graph.

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
        given: origins of the inputs.
        skipped: nodes that are not looked at: only skipped ones and `known` ones read them.

    Attributes:
        values: by node; `Text` for values of whole texts, and sizes as numbers.
        firsts: nodes that take the first token of each text.
        picks: nodes that take one token of each text, and the node that gives the places of these.
        sums: nodes that sum a value over the tokens of a text, which is zero for padding.
        positions: nodes that give places, or rows of a table by places; with the dimension of places.
        beforehand: nodes with one integer for each token that depends on others, or on sizes: they are
            computed with padding.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sizes: TextSizes,
        given: Mapping[fx.Node, TokenOrigin],
        skipped: Collection[fx.Node],
    ) -> None:
        self._module, self._sizes, self._skipped = module, sizes, skipped
        self.values: dict[fx.Node, Any] = dict(given)
        self.firsts: list[fx.Node] = []
        self.picks: dict[fx.Node, fx.Node] = {}
        self.sums: list[fx.Node] = []
        self.positions: dict[fx.Node, int] = {}
        self.beforehand: list[fx.Node] = []
        #: Nodes that are zero for padding.
        self._zero: set[fx.Node] = set()

    def compute(self, known: Mapping[fx.Node, Callable[[], Any]], mask: fx.Node | None) -> None:
        """Find the origins of all nodes.

        Args:
            known: nodes whose origins others compute, from those of nodes before them.
            mask: the input that is zero for padding.

        Raises:
            Mixed: one has none.
        """
        self._zero = set() if mask is None else {mask}
        for node in self._module.graph.nodes:
            if node in known:
                self.values[node] = known[node]()
            elif node in self.values or node in self._skipped or node.op == "output":
                continue
            elif node.op == "get_attr":
                value = getattr(self._module, str(node.target))
                self.values[node] = (
                    TokenOrigin.nothing(value.shape) if isinstance(value, torch.Tensor) else value
                )
            elif node.op == "call_function":
                self.values[node] = self._found(node)
                self._note_zero(node)

    def _note_zero(self, node: fx.Node) -> None:
        """Note whether a node is zero for padding, as products with the mask are, and what moves these."""
        read = [source for source in node.all_input_nodes if gives_tensor(source)]
        zero, name = [source in self._zero for source in read], op_name(node)
        if name == "mul":
            keeps = any(zero)
        elif name in ("type_as", "expand_as", "view_as"):
            keeps = zero[0]
        else:
            keeps = name in _MOVES and bool(zero) and all(zero)
        if keeps:
            self._zero.add(node)

    def _found(self, node: fx.Node) -> Any:
        try:
            return self._of(node)
        except Mixed:
            if not self._is_integer_of_tokens(node) or _reads_floats(node):
                raise
            self.beforehand.append(node)
            return TokenOrigin.tokens(self._sizes.texts, self._sizes.length)

    def _is_integer_of_tokens(self, node: fx.Node) -> bool:
        """Return whether a node gives one integer for each token."""
        names = sizes_of(node)
        if len(names) != 2 or names[0] not in self._sizes.of_texts or names[1] != self._sizes.of_length:
            return False
        return not node.meta["val"].dtype.is_floating_point

    def _of(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg(called_with(node), self.values.__getitem__)
        given = _flat((args, kwargs))
        flat = [value for value in given if isinstance(value, TokenOrigin)]
        if not gives_tensor(node) and not isinstance(node.meta.get("val"), (list, tuple)):
            return _number(node, args, given)
        if any(isinstance(value, (TextNumbers, TextPlaces)) for value in given):
            return self._picked(node, args, given)
        if any(isinstance(value, Text) for value in given):
            if any(each.has_tokens for each in flat):
                raise _mixed(node, "reads a value of a text for each of its tokens")
            return Text()
        if all(each.is_constant for each in flat):
            return self._of_constants(node, args, kwargs)
        if not any(each.has_tokens for each in flat):
            raise _mixed(node, "reads texts, but not their tokens")
        return self._of_tokens(node, args, kwargs, flat)

    def _of_tokens(self, node: fx.Node, args: Any, kwargs: Any, flat: Sequence[TokenOrigin]) -> Any:
        """Return the origin of what is computed of tokens."""
        name, why = op_name(node), _WHY.format(node.name, op_name(node))
        first = args[0] if args else next(iter(kwargs.values()))
        named = schema_arguments(node)
        if name in ("select", "slice") and isinstance(first, TokenOrigin):
            return self._part(node, first, args, kwargs)
        if name in _LOOK_UPS and first.is_constant:
            return _looked_up(node, first, flat[-1])
        if name in _MOVES:
            return _moved(node, args, kwargs)
        if is_pointwise(node):
            _check_numbers(node, _flat((args, kwargs)))
            given = flat if name != "type_as" else flat[:1]  # the second only gives a dtype
            return joined(given, why)
        if kind_of_node(node) == "linear" or name == "quant_linear":
            if not all(each.is_constant for each in flat[1:]):
                raise _mixed(node, "has a weight that is computed from tokens")
            return _widened(first.along([-1], why), args[1].shape[0])
        if kind_of_node(node) == "matmul" and first.shape[-1] == 1:  # nothing is summed
            return joined(flat, why)
        if name == "quant_embedding":
            return first.moved(lambda x: x[..., None].expand(*x.shape, named["features"]))
        if name in _REDUCTIONS and named.get("dim") is not None:
            return self._reduced(node, first, named, why)
        return first.along(_mixed_dims(node, named), why).moved(lambda x: x.expand(first.shape))

    def _part(self, node: fx.Node, x: TokenOrigin, args: Any, kwargs: Any) -> Any:
        """Return what is left of a value; the first token of each text is a value of the text."""
        found = _moved(node, args, kwargs)
        if _set_of(found) == _set_of(x):
            return found
        named = schema_arguments(node)
        dim = named.get("dim", 0) % x.text.dim()
        is_first = op_name(node) == "select" and named["index"] == 0
        if is_first and x.shape[dim] == self._sizes.length and bool((found.place == 0).all()):
            self.firsts.append(node)
            return Text()
        raise _mixed(node, "reads some of the tokens")

    def _picked(self, node: fx.Node, args: Any, given: Sequence[Any]) -> Any:
        """Return what is left where one token of each text is taken, `x[arange(texts), places]`."""
        if op_name(node) == "to" and isinstance(args[0], TextPlaces):
            return args[0]
        x, indices = args[0], args[1] if len(args) > 1 else ()
        is_pick = op_name(node) == "index" and isinstance(x, TokenOrigin) and len(indices) == len(_PICK)
        if not is_pick or not all(map(isinstance, indices, _PICK)):
            raise _mixed(node, "reads numbers or places of whole texts")
        if not is_of_tokens(x, self._sizes):
            raise _mixed(node, "takes tokens of what is not [texts, tokens, ...]")
        self.picks[node] = called_with(node)[0][1][1]
        return Text()

    def _reduced(self, node: fx.Node, x: TokenOrigin, named: Mapping[str, Any], why: str) -> Any:
        """Return what is left of a value whose elements are summed along dimensions, or the like."""
        given = named["dim"]
        dims = sorted({dim % x.text.dim() for dim in ([given] if isinstance(given, int) else given)})
        try:
            found = x.along(dims, why)
        except Mixed:
            names = sizes_of(node.all_input_nodes[0])
            is_along = len(names) == 2 and names[dims[0]] == self._sizes.of_length
            if (
                op_name(node) == "argmax"
                and is_along
                and not named.get("keepdim")
                and not _reads_floats(node)
            ):
                return TextPlaces()
            is_sum = op_name(node) == "sum" and dims == [1] and names[1] == self._sizes.of_length
            if not is_sum or node.all_input_nodes[0] not in self._zero or named.get("dtype") is not None:
                raise
            self.sums.append(node)
            return Text()
        if named.get("keepdim"):
            return found
        return found.moved(lambda y: y.reshape([n for d, n in enumerate(y.shape) if d not in dims]))

    def _of_constants(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the origin of what is computed of constants and sizes."""
        name, names = op_name(node), sizes_of(node)
        if name == "arange" and len(names) == 1 and not names[0].isdigit():
            return self._of_places(node, names[0])
        if name == "slice" and self._sizes.of_length in names:
            dim = names.index(self._sizes.of_length)
            if args[2] not in (None, 0):
                raise _mixed(node, f"takes places from {args[2]} on")
            self.positions[node] = dim
            given = _moved(node, args, kwargs)
            place = torch.arange(self._sizes.length)
            return TokenOrigin(given.text, place.view(-1, *(1,) * (len(names) - dim - 1)).expand(given.shape))
        if all(each.isdigit() for each in names):
            _check_numbers(node, [*args, *kwargs.values()])
            return TokenOrigin.nothing([int(each) for each in names])
        if name in _MOVES:
            return _moved(node, args, kwargs)
        if name in _FILLED and self._is_integer_of_tokens(node):
            self.beforehand.append(node)
            return TokenOrigin.tokens(self._sizes.texts, self._sizes.length)
        if name in _FILLED or name == "embedding" or is_pointwise(node):
            _check_numbers(node, [*args, *kwargs.values()])
            return TokenOrigin.nothing([self._size(node, each) for each in names])
        raise _mixed(node, "is computed from the sizes of the inputs")

    def _of_places(self, node: fx.Node, size: str) -> TokenOrigin | TextNumbers:
        """Return the origin of 0, 1, 2, ..., up to a size of the inputs."""
        named = schema_arguments(node)
        if named.get("start", 0) != 0 or named.get("step", 1) != 1:
            raise _mixed(node, "gives other places than 0, 1, 2, ...")
        if size in self._sizes.of_texts:
            return TextNumbers()
        if size != self._sizes.of_length:
            raise _mixed(node, f"has the size {size}")
        self.positions[node] = 0
        place = torch.arange(self._sizes.length)
        return TokenOrigin(torch.full_like(place, NONE), place)

    def _size(self, node: fx.Node, name: str) -> int:
        if name in self._sizes.of_texts:
            return self._sizes.texts
        if name == self._sizes.of_length:
            return self._sizes.length
        if name.isdigit():
            return int(name)
        raise _mixed(node, f"has the size {name}")


def is_of_tokens(x: TokenOrigin, sizes: TextSizes) -> bool:
    """Return whether a value [texts, length, ...] has in each row what is of this token."""
    tokens = TokenOrigin.tokens(sizes.texts, sizes.length)
    if x.shape[:2] != tokens.shape:
        return False
    shape = (*tokens.shape, *(1,) * (x.text.dim() - 2))
    pairs = ((tokens.text, x.text), (tokens.place, x.place))
    return all(torch.equal(want.reshape(shape).expand(have.shape), have) for want, have in pairs)


class Text:
    """A value of a whole text, or of all texts: nothing about it changes."""


class TextNumbers:
    """The numbers of the texts, 0, 1, 2, ..."""


class TextPlaces:
    """The place of one token in each text, int64 [texts]: it is computed with padding."""


_PICK = (TextNumbers, TextPlaces)

_WHY = "{} ({}) reads several tokens"


def _mixed(node: fx.Node, why: str) -> Mixed:
    return Mixed(f"{node.name} ({op_name(node)}) {why}")


def _mixed_dims(node: fx.Node, named: Mapping[str, Any]) -> Collection[int]:
    """Return the dimensions that an operator mixes; raises `Mixed` for one of which that is not known."""
    name = op_name(node)
    if name in _NORMS:
        return range(-len(named["normalized_shape"]), 0)
    if name == "quantize_dequantize_dynamic":
        if not named["per_token"] or named["right"] is not None:
            raise _mixed(node, "has one range for all tokens")
        return [named["dim"]]
    if name in _ALONG:
        return [named["dim"]]
    raise _mixed(node, "is an operator of which nothing is known over tokens")


def _looked_up(node: fx.Node, table: TokenOrigin, indices: TokenOrigin) -> TokenOrigin:
    """Return the origin of rows of a constant table, or of single elements of it."""
    name = op_name(node)
    if name == "gather":
        return indices
    if name == "embedding":
        return indices.moved(lambda x: x[..., None].expand(*x.shape, table.shape[1]))
    dim = schema_arguments(node)["dim"] % table.text.dim()
    sizes = [*table.shape[:dim], -1, *table.shape[dim + 1 :]]
    rest = (1,) * (table.text.dim() - dim - 1)
    return indices.moved(lambda x: x.view(-1, *rest).expand(sizes))


def _widened(x: TokenOrigin, width: int) -> TokenOrigin:
    """Return the origin of rows of another width."""
    return x.moved(lambda y: y.expand(*y.shape[:-1], width))


def _moved(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of origins, which it moves like values."""
    target: Any = node.target
    if op_name(node) == "to":
        return args[0]

    def part(value: Any, name: str) -> Any:
        if isinstance(value, TokenOrigin):
            return getattr(value, name)
        if isinstance(value, (list, tuple)):
            return [part(v, name) for v in value]
        return value

    results = []
    for name in ("text", "place"):
        given = {key: part(value, name) for key, value in kwargs.items() if key != "dtype"}
        results.append(target(*(part(value, name) for value in args), **given))
    if isinstance(results[0], (list, tuple)):
        return [TokenOrigin(text, place) for text, place in zip(*results, strict=True)]
    return TokenOrigin(*results)


def _set_of(x: TokenOrigin) -> set[tuple[int, int]]:
    """Return the tokens of a value."""
    return set(zip(x.text.flatten().tolist(), x.place.flatten().tolist(), strict=True))


class FreeSize(int):
    """A size that is another one for other texts."""


class FreeNumber(float):
    """A number that is computed of such sizes."""


def _number(node: fx.Node, args: Any, given: Sequence[Any]) -> Any:
    """Return a size, or what is computed of sizes."""
    if op_name(node).startswith("sym_size"):
        if isinstance(args[0], Text):
            return args[0]
        size = args[0].shape[args[1]]
        return size if sizes_of(node.all_input_nodes[0])[args[1]].isdigit() else FreeSize(size)
    if any(isinstance(value, (TokenOrigin, Text)) for value in given):
        raise _mixed(node, "reads a value of a tensor")
    target: Any = node.target
    found = target(*args)
    if not any(isinstance(value, (FreeSize, FreeNumber)) for value in given):
        return found
    return FreeNumber(found) if isinstance(found, float) else FreeSize(found)


def _check_numbers(node: fx.Node, values: Sequence[Any]) -> None:
    """Raise `Mixed` where an operator computes with a size, which is another one with padding."""
    if any(isinstance(value, (FreeSize, FreeNumber)) for value in values):
        raise _mixed(node, "computes with a size of the inputs")


def _reads_floats(node: fx.Node) -> bool:
    """Return whether a value is computed from floating-point ones."""
    seen: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if gives_tensor(each) and each.meta["val"].dtype.is_floating_point:
            return True
        waiting += each.all_input_nodes
    return False


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _flat(v)]
    if isinstance(value, Mapping):
        return [found for v in value.values() for found in _flat(v)]
    return [value]
