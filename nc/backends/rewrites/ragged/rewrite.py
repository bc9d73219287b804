"""Make the graph over rows of tokens of one over padded texts, or say why there is none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.rewrites.ragged import masks
from nc.backends.rewrites.ragged.masks import Meaning, Unlike, computed, read_values
from nc.backends.rewrites.ragged.origins import Mixed, Origin, Origins, Sizes, Text
from nc.graph.catalogue import kind_of_node, op_name, schema_arguments
from nc.graph.fx_utils import add_constant, call_function, call_operator, copy_module, drop_unused
from nc.graph.placement import works_in_place
from nc.graph.qdq import QDQGraph
from nc.graph.tensor_meta import TENSORS, Size, Traced, dim_of, hint_of
from nc.graph.views import Binary, Softmax, returned, set_argument
from nc.ops import segment_bias
from nc.process.unavailable import Unavailable

_aten = torch.ops.aten
#: The longest text of which anything is asked.
_LONGEST = 1 << 16
#: The most tokens of a text in graphs over rows.
MOST_ROWS = 2048
#: Operators that put a factor or a mask before a softmax.
_FACTORS = ("mul", "div")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A graph over rows of tokens.

    Its inputs are those tensors of the user's that hold tokens, as one text [1, rows]; then `places`, int64
    [rows], the place of each row in its text; `starts`, int32 [texts + 1], where each text begins, and the
    number of rows; and `firsts`, int64 [texts], the same without the last.

    Attributes:
        graph: the graph; what it gives for tokens is [1, rows, ...].
        tokens: numbers of the flat inputs that hold tokens, in order.
        mask: number of the flat input that masks them; None: no token is masked.
        of_tokens: for each output, whether it has a row for each token; else one for each text.
        firsts: outputs read the first token of each text, which must be a real one.
        longest: the most tokens of a text.
        together: real tokens of a text must follow each other.
        from_begin: and the first one must be real.
    """

    graph: QDQGraph
    tokens: tuple[int, ...]
    mask: int | None
    of_tokens: tuple[bool, ...]
    firsts: bool
    longest: int
    together: bool
    from_begin: bool


class _No(Exception):
    """Why a graph is not ragged."""


def ragged(graph: QDQGraph) -> Ragged | Unavailable:
    """Return the graph over rows of tokens, or why there is none."""
    try:
        return _Rewriting(graph).done()
    except (_No, Mixed, Unlike) as error:
        return Unavailable(str(error))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    """An attention over tokens.

    Attributes:
        scores: the product of queries and keys.
        added: what is added to the scores, with the node that adds it and the name of its argument.
        softmax: of the scores.
        result: the product with the values.
        between: all nodes from the scores to before the result.
    """

    scores: fx.Node
    added: tuple[tuple[fx.Node, fx.Node], ...]
    softmax: fx.Node
    result: fx.Node
    between: tuple[fx.Node, ...]


class _Rewriting:
    """One rewriting; see `ragged`."""

    def __init__(self, graph: QDQGraph) -> None:
        self._source = graph
        self._module, _ = copy_module(graph.module, lazy=True)
        self._inputs = [node for node in self._module.graph.nodes if node.op == "placeholder"]

    def done(self) -> Ragged:
        """Return the graph; raises `_No`, `Mixed` or `Unlike`."""
        if works_in_place(self._module) or self._source.signature.effects or self._source.signature.reads:
            raise _No("operators of the graph work in place, or Python reads values of it")
        names = [_names(node) for node in self._inputs]
        if not names or any(len(each) != 2 or each[1] != names[0][1] for each in names):
            raise _No("its inputs are not tokens of texts of free length")
        length, batches = names[0][1], frozenset(each[0] for each in names)
        if length.isdigit() or any(name.isdigit() for name in batches):
            raise _No("its inputs have fixed sizes")
        self._length, self._batches = length, batches
        found = [self._attention(node) for node in self._module.graph.nodes if self._is_over_keys(node)]
        if not found:
            raise _No("it has no attention over tokens")
        mask = self._mask(found)
        places = self._longest()
        meanings = self._meanings(found, mask, places)
        ones = self._always_one(mask, places)
        origins = self._origins(found, mask, ones)
        return self._rewritten(found, mask, meanings, ones, origins, places)

    # ---- what there is ----

    def _is_over_keys(self, node: fx.Node) -> bool:
        if op_name(node) not in ("softmax", "_softmax"):
            return False
        names = _names(node)
        return bool(names) and names.count(self._length) == 2

    def _attention(self, softmax: fx.Node) -> _Attention:
        view, names = Softmax.of(softmax), _names(softmax)
        if view.dim not in (-1, len(names) - 1) or names[-1] != self._length or names[-2] != self._length:
            raise _No(f"{softmax.name} is not over keys")
        between, added, node = [softmax], [], view.input
        while kind_of_node(node) != "matmul":
            between.append(node)
            name = op_name(node)
            if name == "add" and Binary.of(node).alpha == 1:
                node, other = self._sides(node)
                if isinstance(other, fx.Node):
                    added.append((between[-1], other))
            elif name in _FACTORS and not isinstance(Binary.of(node).right, fx.Node):
                node = Binary.of(node).left
            else:
                raise _No(f"{node.name} ({name}) is between the scores and the softmax of an attention")
            if not isinstance(node, fx.Node):
                raise _No(f"{softmax.name} is not of scores")
        if any(_names(side)[-2:] == [self._length] * 2 for side in Binary.of(node).sides):
            raise _No(f"{node.name} is not a product of queries and keys")
        between.append(node)
        result = self._weighed(softmax, between)
        return _Attention(node, tuple(added), softmax, result, tuple(between))

    def _sides(self, add: fx.Node) -> tuple[Any, Any]:
        """Return the scores, and what is added to them."""
        left, right = Binary.of(add).sides
        if not isinstance(right, fx.Node) or _names(right).count(self._length) < 2:
            return left, right
        if not isinstance(left, fx.Node) or _names(left).count(self._length) < 2:
            return right, left
        return (left, right) if _is_computed_by_products(left) else (right, left)

    def _weighed(self, softmax: fx.Node, between: list[fx.Node]) -> fx.Node:
        """Return the product of probabilities and values; what rounds the probabilities is `between`."""
        node = softmax
        while True:
            users = list(node.users)
            if len(users) != 1:
                raise _No(f"something else reads the probabilities {node.name}")
            node = users[0]
            if kind_of_node(node) == "matmul":
                if Binary.of(node).left not in between:
                    raise _No(f"{node.name} is not a product of probabilities and values")
                return node
            if op_name(node) not in (
                *("quantize_per_tensor", "dequantize_per_tensor", "quantize_dequantize_dynamic"),
                *("to_bf16", "from_bf16", "dropout"),
            ):
                raise _No(f"{node.name} ({op_name(node)}) is between a softmax and its product with values")
            between.append(node)

    def _mask(self, found: Sequence[_Attention]) -> fx.Node | None:
        read = {source for each in found for _, other in each.added for source in read_values(other)}
        if len(read) > 1:
            raise _No(f"masks of attention read {', '.join(sorted(node.name for node in read))}")
        return next(iter(read), None)

    def _longest(self) -> int:
        """Return the most tokens that a text may have."""
        conditions = self._source.signature.conditions
        places = [
            f"in{i}_1" for i, leaf in enumerate(self._source.signature.leaves) if len(leaf.dims) == 2
        ]
        low, high = 1, _LONGEST
        tables = [
            constant.shape[dim]
            for node in self._module.graph.nodes
            if op_name(node) == "slice" and self._length in _names(node)
            for dim in [_names(node).index(self._length)]
            if isinstance(constant := _constant(self._module, node.all_input_nodes[0]), torch.Tensor)
        ]
        high = min([high, *tables])
        texts = {f"in{i}_0": 2 for i in range(len(self._source.signature.leaves))}

        def fits(n: int) -> bool:
            sizes = texts | dict.fromkeys(places, n)
            return all(c.holds(sizes) for c in conditions if set(c.names()) <= set(sizes))

        if fits(high):
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _values(self, node: fx.Node, mask: fx.Node | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what computes a value that depends on the mask and on places."""

        def values(given: torch.Tensor) -> torch.Tensor:
            inputs = {
                each: given.to(each.meta["val"].dtype)
                if each is mask
                else torch.zeros(given.shape, dtype=each.meta["val"].dtype)
                for each in self._inputs
            }
            (found,) = computed(self._module, [node], inputs)
            return found

        return values

    def _meanings(
        self, found: Sequence[_Attention], mask: fx.Node | None, places: int
    ) -> dict[fx.Node, Meaning]:
        """Return what each node adds to scores."""
        nodes = dict.fromkeys(other for each in found for _, other in each.added)
        if mask is None and nodes:
            raise _No("attention reads a mask that no input of the model gives")
        result = {}
        for node in nodes:
            try:
                result[node] = masks.meaning(self._values(node, mask), places)
            except Unlike as error:
                raise _No(f"the mask {node.name}: {error}") from None
        return result

    def _always_one(self, mask: fx.Node | None, places: int) -> dict[fx.Node, fx.Node]:
        """Return products of rows with what is 1 for real tokens, and what they multiply.

        `nc/capture/decompose.py` multiplies attention by whether a query sees any key.
        """
        found = {}
        for node in self._module.graph.nodes:
            if op_name(node) != "mul" or mask is None:
                continue
            for rows, other in (Binary.of(node).sides, Binary.of(node).sides[::-1]):
                if (
                    isinstance(rows, fx.Node)
                    and isinstance(other, fx.Node)
                    and read_values(other) == {mask}
                    and read_values(rows) != {mask}
                    and self._is_one(other, mask, places)
                ):
                    found[node] = rows
        return found

    def _is_one(self, node: fx.Node, mask: fx.Node, places: int) -> bool:
        names = _names(node)
        if len(names) != 4 or names[2:] != [self._length, "1"]:
            return False
        values = self._values(node, mask)
        for tried in masks._tried(places):
            found = values(tried).expand(tried.shape[0], -1, -1, -1)
            real = tried.bool()[:, None, :, None].expand_as(found)
            if not bool((found[real] == 1).all()):
                return False
        return True

    # ---- proof ----

    def _origins(
        self, found: Sequence[_Attention], mask: fx.Node | None, ones: Mapping[fx.Node, fx.Node]
    ) -> Origins:
        """Prove that all values come from single tokens, for several texts and for one; see `origins`."""
        live = self._live(found, ones)
        result = None
        for texts, length in ((1, 7), (3, 5)):
            sizes = Sizes(texts, length, self._batches, self._length)
            result = _of_graph(self._module, sizes, self._inputs, found, ones, live)
            for leaf in returned(self._module):
                if not isinstance(leaf, fx.Node):
                    raise _No("an output is not a tensor")
                value = result.values[leaf]
                if isinstance(value, Origin) and value.has_tokens:
                    expected = Origin.tokens(texts, length)
                    shape = (texts, length, *(1,) * (value.text.dim() - 2))
                    fits = value.text.dim() >= 2 and value.shape[:2] == (texts, length)
                    if not fits or not all(
                        torch.equal(a.reshape(shape).expand(b.shape), b)
                        for a, b in ((expected.text, value.text), (expected.place, value.place))
                    ):
                        raise _No(f"the output {leaf.name} does not have texts and tokens as first dimensions")
        assert result is not None
        return result

    def _live(self, found: Sequence[_Attention], ones: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """Return the nodes that are needed once masks are left out."""
        dropped = {add: {other} for each in found for add, other in each.added}
        needed: set[fx.Node] = set()
        waiting = [leaf for leaf in returned(self._module) if isinstance(leaf, fx.Node)]
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            if node in ones:
                waiting.append(ones[node])
                continue
            waiting += [n for n in node.all_input_nodes if n not in dropped.get(node, ())]
        return needed

    # ---- the new graph ----

    def _rewritten(
        self,
        found: Sequence[_Attention],
        mask: fx.Node | None,
        meanings: Mapping[fx.Node, Meaning],
        ones: Mapping[fx.Node, fx.Node],
        origins: Origins,
        places: int,
    ) -> Ragged:
        module, graph = self._module, self._module.graph
        of_tokens = tuple(
            isinstance(origins.values[leaf], Origin) and origins.values[leaf].has_tokens
            for leaf in returned(module)
        )
        last = self._inputs[-1]
        given = {}
        for name, dtype, shape in (
            ("firsts", torch.int64, (Size("texts", 2),)),
            ("starts", torch.int32, (Size("ends", 3),)),
            ("places", torch.int64, (_size(self._inputs[0].meta["val"].shape[1]),)),
        ):
            with graph.inserting_after(last):
                given[name] = graph.placeholder(name)
            given[name].meta["val"] = Traced(dtype, shape)
        for node, rows_of in ones.items():
            node.replace_all_uses_with(rows_of)
        tables = [m for m in meanings.values() if m.table is not None]
        longest = min(places, MOST_ROWS, *(m.table.shape[-1] for m in tables if m.table is not None))
        self._mark(found, meanings, given["starts"], given["places"], longest)
        for node, dim in origins.positions.items():
            if node.users:
                self._place(node, dim, given["places"])
        for node in origins.firsts:
            self._take_first(node, given["firsts"])
        self._count_texts(origins, given["firsts"])
        tokens = tuple(i for i, node in enumerate(self._inputs))
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        drop_unused(module)
        graph.lint()
        result = Ragged(
            self._source,
            tokens,
            None if mask is None else self._inputs.index(mask),
            of_tokens,
            bool(origins.firsts),
            longest,
            bool(tables),
            any(not m.by_distance for m in tables),
        )
        return dataclasses.replace(result, graph=dataclasses.replace(self._source, module=module, expected=None))

    def _mark(
        self,
        found: Sequence[_Attention],
        meanings: Mapping[fx.Node, Meaning],
        starts: fx.Node,
        places: fx.Node,
        longest: int,
    ) -> None:
        """Let each attention add what keeps texts apart."""
        graph, made = self._module.graph, {}
        for each in found:
            tables = [meanings[other].table for _, other in each.added]
            if sum(table is not None for table in tables) > 1:
                raise _No(f"several tables are added to the scores {each.scores.name}")
            (add, _), *more = each.added or ((None, None),)
            for other, __ in more:
                other.replace_all_uses_with(self._scores_of(other))
            if add is None:
                add = self._added_to(each)
            key = next((other for _, other in each.added if meanings[other].table is not None), None)
            if key not in made:
                made[key] = self._bias(None if key is None else meanings[key].table, starts, places, longest)
            scores = self._scores_of(add) if each.added else add.args[0]
            add.args, add.kwargs = (scores, made[key]), {}

    def _scores_of(self, add: fx.Node) -> fx.Node:
        return self._sides(add)[0]

    def _added_to(self, each: _Attention) -> fx.Node:
        """Return a new node that adds to the input of a softmax."""
        before = Softmax.of(each.softmax).input
        with self._module.graph.inserting_before(each.softmax):
            add = call_function(self._module.graph, _aten.add.Tensor, (before, 0))
        add.meta["val"] = before.meta["val"]
        set_argument(each.softmax, "input", add)
        return add

    def _bias(
        self, table: torch.Tensor | None, starts: fx.Node, places: fx.Node, longest: int
    ) -> fx.Node:
        graph = self._module.graph
        after = starts
        while after.next.op == "placeholder":
            after = after.next
        constant = None
        if table is not None:
            constant = add_constant(self._module, after.next, "places_bias", table, "places_bias")
            after = constant
        with graph.inserting_after(after):
            node = call_operator(graph, segment_bias, starts, places, constant, longest)
        heads = 1 if table is None else table.shape[0]
        length = places.meta["val"].shape[0]
        node.meta["val"] = Traced(torch.float32, (1, heads, length, length))
        return node

    def _place(self, node: fx.Node, dim: int, places: fx.Node) -> None:
        """Read places of tokens in their texts instead of all places in order."""
        graph = self._module.graph
        with graph.inserting_before(node):
            if op_name(node) == "arange":
                dtype = node.meta["val"].dtype
                new = places
                if dtype is not torch.int64:
                    new = call_function(graph, _aten.to.dtype, (places, dtype))
                    new.meta["val"] = node.meta["val"]
            else:
                new = call_function(graph, _aten.index_select.default, (node.args[0], dim, places))
                new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)

    def _take_first(self, node: fx.Node, firsts: fx.Node) -> None:
        """Read the first row of each text."""
        named, graph = schema_arguments(node), self._module.graph
        source = named["self"]
        names = _names(source)
        dim, text = names.index(self._length), next(
            (i for i, name in enumerate(names) if name in self._batches), None
        )
        if text is None or text > dim:
            raise _No(f"{node.name} takes the first token of values whose first dimension is not the text")
        val = node.meta["val"]
        with graph.inserting_before(node):
            rows = call_function(graph, _aten.index_select.default, (source, dim, firsts))
            shape = [_size(n) for n in source.meta["val"].shape]
            shape[dim] = firsts.meta["val"].shape[0]
            rows.meta["val"] = Traced(val.dtype, tuple(shape))
            if text != 0 or dim != 1:
                raise _No(f"{node.name} takes the first token of values that are not [texts, tokens, ...]")
            one = call_function(graph, _aten.select.int, (rows, 0, 0))
            one.meta["val"] = Traced(val.dtype, tuple(shape[1:]))
        node.replace_all_uses_with(one)

    def _count_texts(self, origins: Origins, firsts: fx.Node) -> None:
        """Let values of texts have as many as there are, where the graph reads the number from inputs."""
        graph, count = self._module.graph, None
        for node in list(graph.nodes):
            if not isinstance(origins.values.get(node), Text) or not isinstance(node.meta.get("val"), TENSORS):
                continue
            for source in node.all_input_nodes:
                if isinstance(source.meta.get("val"), TENSORS):
                    continue
                if source.op != "call_function" or not op_name(source).startswith("sym_size"):
                    raise _No(f"{node.name} reads a size that is computed")
                if dim_of(source.meta["val"]) not in self._batches:
                    raise _No(f"{node.name} reads the length of the texts")
                if count is None:
                    with graph.inserting_after(self._last_input()):
                        count = call_function(graph, _aten.sym_size.int, (firsts, 0))
                    count.meta["val"] = source.meta["val"]
                node.replace_input_with(source, count)

    def _last_input(self) -> fx.Node:
        return [node for node in self._module.graph.nodes if node.op == "placeholder"][-1]


def _of_graph(
    module: fx.GraphModule,
    sizes: Sizes,
    inputs: Sequence[fx.Node],
    found: Sequence[_Attention],
    ones: Mapping[fx.Node, fx.Node],
    live: set[fx.Node],
) -> Origins:
    """Return the origins of a graph; each attention gives rows of its queries."""
    given = {node: Origin.tokens(sizes.texts, sizes.length) for node in inputs}
    inner = {node for each in found for node in each.between}
    results = {each.result: each for each in found}
    dead = {node for node in module.graph.nodes if node not in live and node.op == "call_function"}
    origins = Origins(module, sizes, given, inner | dead)
    known: dict[fx.Node, Callable[[], Any]] = {}
    for node in live:
        if node in results:
            known[node] = functools.partial(_attended, origins, results[node], sizes)
        elif node in ones:
            known[node] = functools.partial(origins.values.__getitem__, ones[node])
    origins.compute(known)
    return origins


def _attended(origins: Origins, each: _Attention, sizes: Sizes) -> Origin:
    """Return the origin of an attention: of its queries; keys and values must be all tokens of the text."""
    query, key = (_rounded(side, origins) for side in Binary.of(each.scores).sides)
    value = _rounded(Binary.of(each.result).right, origins)
    why = f"{each.result.name} is not an attention of tokens to all tokens of their text"
    q, v = query.along([query.text.dim() - 1], why), value.along([value.text.dim() - 1], why)
    k = key.along([key.text.dim() - 2], why)
    expected = Origin.tokens(sizes.texts, sizes.length)
    for rows, turned in ((q, False), (v, False), (k, True)):
        moved = rows.moved(lambda x: x.mT if turned else x)  # noqa: B023 # called at once
        for have, want in ((moved.text, expected.text), (moved.place, expected.place)):
            if have.dim() == 4:
                wanted = want[:, None, :, None]
            elif have.dim() == 3:  # texts and heads in one dimension, the text first
                wanted = want.repeat_interleave(have.shape[0] // sizes.texts, 0)[:, :, None]
            else:
                raise Mixed(why)
            if have.shape[-2] != sizes.length or not torch.equal(wanted.expand_as(have), have):
                raise Mixed(why)
    return q.moved(lambda x: x.expand(*x.shape[:-1], value.shape[-1]))


def _rounded(side: object, origins: Origins) -> Origin:
    found = origins.values[side] if isinstance(side, fx.Node) else None
    if not isinstance(found, Origin):
        raise Mixed(f"a side of an attention is {side}")
    return found


def _is_computed_by_products(node: fx.Node) -> bool:
    """Whether a value depends on a product of activations or weights, which no mask does."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if kind_of_node(each) is not None and kind_of_node(each) != "add":
            return True
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return False


def _names(node: object) -> list[str]:
    """Return the sizes of a tensor, by their names where they are free; [] for what is not a tensor."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(val, TENSORS):
        return []
    return [str(size) if isinstance(size, (Size, int)) else str(dim_of(size)) for size in val.shape]


def _size(size: Any) -> int | Size:
    """Return a size as loaded graphs have it."""
    return size if isinstance(size, (int, Size)) else Size(str(dim_of(size)), hint_of(size))


def _constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    return getattr(module, str(node.target)) if node.op == "get_attr" else None
