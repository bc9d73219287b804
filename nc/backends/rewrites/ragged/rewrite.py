"""Make the graph over rows of tokens of one over padded texts, or say why there is none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.rewrites.ragged import masks
from nc.backends.rewrites.ragged.attentions import (
    OtherAttention,
    TokenAttention,
    attentions,
    dead_terms,
    leave_rounding_out,
)
from nc.backends.rewrites.ragged.distances import Distances, distances_of
from nc.backends.rewrites.ragged.masks import HIDDEN, Computed, Meaning, Unlike, inputs_read, values_of
from nc.backends.rewrites.ragged.origins import Mixed, Origins, Text, TextSizes, TokenOrigin, is_of_tokens
from nc.graph.catalogue import op_name, schema_arguments
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    call_operator,
    copy_module,
    drop_unused,
    give_values_of,
    gives_tensor,
    sizes_of,
    take_over,
)
from nc.graph.placement import works_in_place
from nc.graph.signature import Signature
from nc.graph.tensor_meta import Size, Traced, name_of, without_env
from nc.graph.views import Binary, returned
from nc.ops import segment_attention, segment_bias, segment_sum
from nc.process.unavailable import Unavailable

_aten = torch.ops.aten
#: TextSizes for which origins are computed: of several texts, and of rows.
_PROVED = ((3, 5), (1, 7))
#: Operators that look up rows by integers.
_LOOK_UPS = frozenset({"embedding", "quant_embedding", "index_select", "gather", "index"})
#: More tokens than any text has.
_ANY = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A graph over rows of tokens.

    Its inputs are the user's as one text, [1, rows], then the values that are computed `beforehand`,
    likewise; the rows that are picked, int64 [texts] each; `places`, int64 [rows], the place of each row in
    its text; `starts`, int32 [texts + 1], where each text begins, and the number of rows; and `firsts`,
    int64 [texts], the same without the last.

    Attributes:
        module: the graph; what it gives for tokens is [1, rows, ...].
        padded: the one over padded texts that computes the same, where that is not the given one.
        beforehand: flat inputs → integers of tokens that depend on other tokens, [texts, length], then places
            of picked tokens, [texts].
        apart: the graph of those values; None: there are none.
        mask: number of the flat input that masks tokens; None: no token is masked.
        of_tokens: for each output, whether it has a row for each token; else it has one for each text.
        firsts: outputs read the first token of each text, which must be a real one.
        picked: number of tokens of each text that outputs read by their places; they must be real ones.
        length: name of the size that is the length of padded texts.
        longest: the most tokens of a text in this graph.
        positions: the most tokens of a text in the other one; None: any number.
        together: real tokens of a text must follow each other.
        from_begin: and the first one must be real.
    """

    module: fx.GraphModule
    padded: fx.GraphModule | None
    beforehand: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    apart: fx.GraphModule | None
    mask: int | None
    of_tokens: tuple[bool, ...]
    firsts: bool
    picked: int
    length: str
    longest: int
    positions: int | None
    together: bool
    from_begin: bool


class _No(Exception):
    """Why a graph is not ragged."""


def ragged(module: fx.GraphModule, signature: Signature) -> Ragged | Unavailable | None:
    """Return the graph over rows of tokens, or why there is none; None where its inputs are not texts."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if not inputs or not all(gives_tensor(node) for node in inputs):
        return None
    if inputs[0].meta["val"].dtype.is_floating_point or len(sizes_of(inputs[0])) != 2:
        return None
    try:
        return _rewritten(module, signature)
    except (_No, Mixed, OtherAttention, Unlike) as error:
        return Unavailable(str(error))
    except Exception as error:  # an operator that is followed in another way than it works
        return Unavailable(f"it can't be followed: {type(error).__name__}: {str(error).splitlines()[0]}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What was found out about a graph.

    Attributes:
        module: a copy, to be changed.
        inputs: its inputs.
        mask: that one of them that masks tokens.
        found: attentions.
        meanings: of what is added to the scores of each of them.
        distances: what some of them add by distance.
        ones: products of rows with what is 1 for real tokens, and the rows.
        origins: of its values.
        length: name of the size that is the length of texts.
        places: the most tokens of a text.
    """

    module: fx.GraphModule
    inputs: Sequence[fx.Node]
    mask: fx.Node | None
    found: Sequence[TokenAttention]
    meanings: Mapping[TokenAttention, Meaning]
    distances: Mapping[TokenAttention, Distances]
    ones: Mapping[fx.Node, fx.Node]
    origins: Origins
    length: str
    places: int

    @property
    def longest(self) -> int:
        """Return the most tokens of a text in the graph over rows."""
        tables = [each.table.shape[-1] for each in self.meanings.values() if each.table is not None]
        distances = [each.most for each in self.distances.values()]
        return min(self.places, masks.MOST_TOKENS, *tables, *distances)


def _rewritten(module: fx.GraphModule, signature: Signature) -> Ragged:
    """Return the graph over rows; raises why there is none."""
    read = _read(module, signature)
    outputs = [read.origins.values[leaf] for leaf in returned(read.module)]
    of_tokens = tuple(isinstance(value, TokenOrigin) and value.has_tokens for value in outputs)
    before = [node for node in read.origins.beforehand if node in _live(read.module, read.found, read.ones)]
    picked = list(dict.fromkeys(read.origins.picks.values()))
    apart, count = _apart(read.module, read.inputs, [*before, *picked])
    padded = copy_module(read.module, lazy=True)[0] if read.distances else None
    _change(read, before)
    tables = [each for each in read.meanings.values() if each.table is not None]
    return Ragged(
        module=read.module,
        padded=padded,
        beforehand=functools.partial(_beforehand, apart, count),
        apart=apart,
        mask=None if read.mask is None else list(read.inputs).index(read.mask),
        of_tokens=of_tokens,
        firsts=bool(read.origins.firsts),
        picked=len(picked),
        length=read.length,
        longest=read.longest,
        positions=None if read.places == _ANY else read.places,
        together=bool(tables) or bool(read.distances),
        from_begin=not all(each.by_distance for each in tables),
    )


# ---- what is known of a graph ----


def _read(given: fx.GraphModule, signature: Signature) -> _Read:
    """Find out all that the rewriting needs; raises why there is none."""
    if works_in_place(given) or signature.effects or signature.reads:
        msg = "operators of the graph work in place, or Python reads values of its inputs"
        raise _No(msg)
    module, _ = copy_module(given, lazy=True)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = attentions(module)
    if not found:
        msg = "it has no attention over tokens"
        raise _No(msg)
    leave_rounding_out(found)
    mask = _mask_of(found)
    texts, length = _free_sizes(inputs, mask)
    _check_mask(module, mask)
    values = functools.partial(_values, module, inputs, mask)
    places = min(_most_places(signature, module, length), _most_looked_up(module, values, length))
    meanings = _meanings(found, values, places, masked=mask is not None)
    distances = _distances(found, values, places, meanings)
    ones = _always_one(module, mask, values, length, places)
    live = _live(module, found, ones)
    proofs = [_proved(module, inputs, mask, found, ones, live, TextSizes(*n, texts, length)) for n in _PROVED]
    origins = proofs[0]
    return _Read(module, inputs, mask, found, meanings, distances, ones, origins, length, places)


def _check_mask(module: fx.GraphModule, mask: fx.Node | None) -> None:
    """Raise `_No` where the input that masks are computed from holds tokens: then it is not 0 or 1."""
    for node in module.graph.nodes:
        name = op_name(node)
        if mask is None or name not in _LOOK_UPS:
            continue
        indices = node.all_input_nodes[:1] if name == "quant_embedding" else node.all_input_nodes[1:]
        if any(mask in inputs_read(index) for index in indices if not _is_place(index)):
            msg = f"masks are computed from {mask.name}, which holds tokens"
            raise _No(msg)


def _is_place(node: fx.Node) -> bool:
    """Return whether a node gives the place of a largest value, whatever the values are."""
    return op_name(node) == "argmax" or (op_name(node) == "to" and _is_place(node.all_input_nodes[0]))


def _free_sizes(inputs: Sequence[fx.Node], mask: fx.Node | None) -> tuple[frozenset[str], str]:
    """Return the names of sizes that are the number of texts, and of the one that is their length."""
    names = [sizes_of(node) for node in inputs]
    tokens = [each for node, each in zip(inputs, names, strict=True) if node is not mask] or names
    if any(len(each) != 2 for each in names) or len({each[1] for each in tokens}) != 1:
        msg = "its inputs are not tokens of texts of one length"
        raise _No(msg)
    if any(name.isdigit() for each in names for name in each):
        msg = "its inputs have fixed sizes"
        raise _No(msg)
    texts, length = frozenset(each[0] for each in names), tokens[0][1]
    if length in texts:
        msg = "its inputs have as many texts as tokens"
        raise _No(msg)
    return texts, length


def _mask_of(found: Sequence[TokenAttention]) -> fx.Node | None:
    """Return the input that masks of attention are computed from."""
    read = {source for each in found for term in each.terms for source in inputs_read(term.value)}
    if len(read) > 1:
        msg = f"masks of attention read {', '.join(sorted(node.name for node in read))}"
        raise _No(msg)
    return next(iter(read), None)


def _most_places(signature: Signature, module: fx.GraphModule, length: str) -> int:
    """Return the most tokens that a text may have."""
    conditions = signature.conditions
    high = _ANY
    for node in module.graph.nodes:
        if op_name(node) == "slice" and length in sizes_of(node):
            size = sizes_of(node.all_input_nodes[0])[sizes_of(node).index(length)]
            high = min(high, int(size)) if size.isdigit() else high
    tensors = [i for i, leaf in enumerate(signature.leaves) if len(leaf.dims) == 2]

    def fits(n: int) -> bool:
        sizes = {f"in{i}_{dim}": size for i in tensors for dim, size in enumerate((2, n))}
        return all(each.holds(sizes) for each in conditions if set(each.names()) <= sizes.keys())

    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _most_looked_up(module: fx.GraphModule, values: Callable[[fx.Node], Computed], length: str) -> int:
    """Return the most tokens for which tables have rows that are looked up by places."""
    high = _ANY
    for node in module.graph.nodes:
        if op_name(node) not in ("embedding", "index_select"):
            continue
        table, index = node.all_input_nodes[0], node.all_input_nodes[-1]
        if table.op != "get_attr" or length not in sizes_of(index) or inputs_read(index):
            continue
        dim = 0 if op_name(node) == "embedding" else schema_arguments(node)["dim"]
        rows = int(getattr(module, str(table.target)).shape[dim])
        found = values(index)(torch.ones(1, min(rows + 8, high), dtype=torch.int64))
        wrong = ((found < 0) | (found >= rows)).reshape(-1, found.shape[-1]).any(0)
        places = wrong.nonzero()
        high = min(high, int(places[0])) if len(places) else high
    return high


def _values(
    module: fx.GraphModule, inputs: Sequence[fx.Node], mask: fx.Node | None, node: fx.Node
) -> Computed:
    """Return what computes a value of a mask and places."""

    def values(given: torch.Tensor) -> torch.Tensor:
        all_inputs = {
            each: given.to(each.meta["val"].dtype)
            if each is mask
            else torch.zeros(given.shape, dtype=each.meta["val"].dtype)
            for each in inputs
        }
        (found,) = values_of(module, [node], all_inputs)
        assert isinstance(found, torch.Tensor)
        return found

    return values


def _meanings(
    found: Sequence[TokenAttention], values: Callable[[fx.Node], Computed], places: int, *, masked: bool
) -> dict[TokenAttention, Meaning]:
    """Return what is added to the scores of each attention; layers have the same masks."""
    known: dict[object, Meaning] = {}
    for each in found:
        key = each.causal, *((term.value, term.hides) for term in each.terms)
        if key not in known:
            known[key] = _meaning(each, values, places, masked=masked)
        known[each] = known[key]
    return {each: known[each] for each in found}


def _meaning(
    attention: TokenAttention, values: Callable[[fx.Node], Computed], places: int, *, masked: bool
) -> Meaning:
    """Return what is added to the scores of an attention for real tokens."""
    terms = [(values(term.value), term.hides) for term in attention.terms]

    def added(mask: torch.Tensor) -> torch.Tensor:
        texts, n = mask.shape
        lowest = torch.finfo(torch.float32).min
        total = torch.zeros(1, 1, 1, 1, dtype=torch.float32)
        for value, hides in terms:
            each = value(mask)
            if each.dim() > 4:
                msg = f"a mask has the sizes {tuple(each.shape)}"
                raise Unlike(msg)
            each = each[(None,) * (4 - each.dim())]
            if each.dtype is torch.bool:
                each = torch.where(each != hides, 0.0, lowest)
            total = (total + each.float()).clamp(min=lowest)
        if attention.causal:
            total = total.expand(-1, -1, n, n).where(torch.ones(n, n, dtype=torch.bool).tril(), lowest)
        return total.expand(texts, -1, n, n)

    try:
        return masks.meaning(added, places, masked=masked)
    except Unlike as error:
        msg = f"masks of {attention.result.name}: {error}"
        raise _No(msg) from None


def _distances(
    found: Sequence[TokenAttention],
    values: Callable[[fx.Node], Computed],
    places: int,
    meanings: Mapping[TokenAttention, Meaning],
) -> dict[TokenAttention, Distances]:
    """Return what attentions add to scores by distance."""
    known = {}
    for each in found:
        if not each.distances:
            continue
        try:
            if meanings[each].table is not None:
                msg = "something is added by places besides"
                raise Unlike(msg)
            known[each] = distances_of(each.distances, values, places)
        except Unlike as error:
            msg = f"scores of {each.result.name}: {error}"
            raise _No(msg) from None
    return known


def _always_one(
    module: fx.GraphModule,
    mask: fx.Node | None,
    values: Callable[[fx.Node], Computed],
    length: str,
    places: int,
) -> dict[fx.Node, fx.Node]:
    """Return products of rows with what is 1 for real tokens, and the rows.

    `nc/capture/decompose.py` multiplies attention by whether a query sees any key, and models that are given
    no mask make one of ones.
    """
    read: frozenset[fx.Node] = frozenset(() if mask is None else (mask,))
    found: dict[fx.Node, fx.Node] = {}
    known: dict[fx.Node, bool] = {}
    for node in module.graph.nodes:
        if op_name(node) != "mul":
            continue
        for rows, other in (Binary.of(node).sides, Binary.of(node).sides[::-1]):
            if not gives_tensor(rows) or not gives_tensor(other):
                continue
            of_heads = sizes_of(other)[2:] == [length, "1"]
            # sums over tokens need the product with a mask that is given
            if not of_heads and (mask is not None or sizes_of(other)[1:] != [length, "1"]):
                continue
            if inputs_read(other) != read or inputs_read(rows) == read:
                continue
            if other not in known:
                known[other] = masks.is_one(values(other), places)
            if known[other]:
                found[node] = rows
    return found


def _live(
    module: fx.GraphModule, found: Sequence[TokenAttention], ones: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """Return the nodes that are needed once masks are left out."""
    dropped = dead_terms(found)
    read_instead = {node: [rows] for node, rows in ones.items()}
    read_instead |= {each.result: list(each.sides) for each in found if each.distances}
    needed: set[fx.Node] = set()
    waiting = [leaf for leaf in returned(module) if isinstance(leaf, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            read = read_instead.get(node, node.all_input_nodes)
            waiting += [source for source in read if source not in dropped.get(node, ())]
    return needed


def _proved(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    mask: fx.Node | None,
    found: Sequence[TokenAttention],
    ones: Mapping[fx.Node, fx.Node],
    live: set[fx.Node],
    sizes: TextSizes,
) -> Origins:
    """Return the origins of all values; raises `Mixed` where one comes from several tokens."""
    given = {node: TokenOrigin.tokens(sizes.texts, sizes.length) for node in inputs}
    inner = {node for each in found for node in each.between}
    dead = {node for node in module.graph.nodes if node not in live and node.op == "call_function"}
    origins = Origins(module, sizes, given, inner | dead)
    known: dict[fx.Node, Callable[[], Any]] = {
        each.result: functools.partial(_attended, origins, each, sizes) for each in found
    }
    known |= {node: functools.partial(origins.values.__getitem__, rows) for node, rows in ones.items()}
    origins.compute({node: call for node, call in known.items() if node in live}, mask)
    for leaf in returned(module):
        _check_output(leaf, origins, sizes)
    return origins


def _attended(origins: Origins, each: TokenAttention, sizes: TextSizes) -> TokenOrigin:
    """Return the origin of an attention, that of its queries.

    Keys and values must be all tokens of a text; raises `Mixed`.
    """
    why = f"{each.result.name} is not an attention of tokens to all tokens of their text"
    sides = [origins.values.get(side) for side in each.sides]
    query, key, value = sides
    if (
        not isinstance(query, TokenOrigin)
        or not isinstance(key, TokenOrigin)
        or not isinstance(value, TokenOrigin)
    ):
        raise Mixed(why)
    key = key.moved(lambda x: x.mT) if each.turned else key
    rows = [side.along([-1], why) for side in (query, key, value)]
    tokens = TokenOrigin.tokens(sizes.texts, sizes.length)
    for row in rows:
        for have, want in ((row.text, tokens.text), (row.place, tokens.place)):
            # heads may be in the dimension of the texts, which is the first
            heads = have.shape[0] // sizes.texts if have.dim() == 3 else 1
            wanted = want.repeat_interleave(heads, 0)[:, :, None]
            wanted = wanted[:, None] if have.dim() == 4 else wanted
            if have.shape[-2] != sizes.length or not torch.equal(wanted.expand_as(have), have):
                raise Mixed(why)
    width = value.shape[-1]
    return rows[0].moved(lambda x: x.expand(*x.shape[:-1], width))


def _check_output(leaf: Any, origins: Origins, sizes: TextSizes) -> None:
    """Check that an output has a row for each token, or one for each text; raises `Mixed`."""
    value = origins.values[leaf] if isinstance(leaf, fx.Node) else None
    if isinstance(value, Text):
        return
    if isinstance(value, TokenOrigin) and is_of_tokens(value, sizes):
        return
    msg = f"an output, {leaf}, has neither a row for each token nor one for each text"
    raise Mixed(msg)


# ---- what is computed with padding ----


def _apart(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]
) -> tuple[fx.GraphModule | None, int]:
    """Return a graph of some nodes alone, and their number."""
    if not nodes:
        return None, 0
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in nodes))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(module, graph), len(nodes)


def _beforehand(
    module: fx.GraphModule | None, count: int, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    if module is None:
        return []
    found: list[torch.Tensor] = list(module(*inputs))
    assert len(found) == count
    return found


# ---- the new graph ----


def _change(read: _Read, before: Sequence[fx.Node]) -> None:
    """Change the graph to one over rows."""
    module, graph = read.module, read.module.graph
    last = read.inputs[-1]
    rows = without_env(read.inputs[0].meta["val"].shape[1])
    shapes: list[tuple[str, torch.dtype, tuple[int | Size, ...]]] = [
        ("firsts", torch.int64, (Size("texts", 2),)),
        ("starts", torch.int32, (Size("ends", 3),)),
        ("places", torch.int64, (rows,)),
    ]
    added = {}
    for name, dtype, shape in shapes:
        with graph.inserting_after(last):
            added[name] = graph.placeholder(name)
        added[name].meta["val"] = Traced(dtype, shape)
    rows_of_picked = {}
    for node in reversed(dict.fromkeys(read.origins.picks.values())):
        with graph.inserting_after(last):
            given = graph.placeholder(f"{node.name}_rows")
        given.meta["val"] = Traced(torch.int64, (Size("texts", 2),))
        rows_of_picked[node] = given
    for node in reversed(before):
        with graph.inserting_after(last):
            given = graph.placeholder(f"{node.name}_of_tokens")
        given.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(given)
    for node, same in read.ones.items():
        node.replace_all_uses_with(same)
    for node in graph.nodes:
        if op_name(node) == "contiguous":  # a copy that no later operator needs: none reads strides
            node.replace_all_uses_with(schema_arguments(node)["self"])
    _keep_texts_apart(read, added["starts"], added["places"])
    for node, dim in read.origins.positions.items():
        if node.users:
            _place(graph, node, dim, added["places"])
    for node in read.origins.firsts:
        _take_first(graph, node, added["firsts"])
    for node, place in read.origins.picks.items():
        _take(graph, node, schema_arguments(node)["self"], rows_of_picked[place])
    for node in read.origins.sums:
        _sum_by_text(graph, node, added["starts"])
    texts = frozenset(sizes_of(node)[0] for node in read.inputs)
    _count_texts(graph, read.origins, added["firsts"], texts)
    _name_texts(graph, read.origins, added["firsts"].meta["val"].shape[0], texts)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    drop_unused(module)
    graph.lint()


def _keep_texts_apart(read: _Read, starts: fx.Node, places: fx.Node) -> None:
    """Let each attention add what keeps texts apart."""
    graph = read.module.graph
    made: list[tuple[torch.Tensor | None, fx.Node]] = []
    for each in read.found:
        if each.distances:
            _attend_by_distance(read, each, starts)
            continue
        table = read.meanings[each].table
        same = (node for known, node in made if _is_same(known, table))
        bias = next(same, None)
        if bias is None:
            bias = _bias(read, table, starts, places)
            made.append((table, bias))
        each.set_term(graph, bias)


def _attend_by_distance(read: _Read, each: TokenAttention, starts: fx.Node) -> None:
    """Let one operator compute an attention with scores by distance."""
    graph, distances = read.module.graph, read.distances[each]
    constants = [
        None
        if value is None
        else add_constant(read.module, each.result, f"{each.result.name}_{name}", value, name)
        for name, value in (
            ("of_queries", distances.of_queries),
            ("of_keys", distances.of_keys),
            ("query_columns", distances.query_columns),
            ("key_columns", distances.key_columns),
        )
    ]
    with graph.inserting_before(each.result):
        call = call_operator(graph, segment_attention, *each.sides, starts, *constants, each.scale)
    take_over(call, each.result)
    give_values_of(call, each.result)
    inner = [node for node in (*each.between, each.result) if "operator" in node.meta]
    call.meta["operators"] = [node.meta["operator"] for node in inner]
    each.result.replace_all_uses_with(call)


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _bias(read: _Read, table: torch.Tensor | None, starts: fx.Node, places: fx.Node) -> fx.Node:
    graph, after = read.module.graph, starts
    while after.next.op == "placeholder":
        after = after.next
    constant = None
    if table is not None:
        lowest = torch.finfo(torch.float32).min
        table = table.masked_fill(table < HIDDEN, lowest)
        constant = after = add_constant(read.module, after.next, "by_places", table, "by_places")
    with graph.inserting_after(after):
        node = call_operator(graph, segment_bias, starts, places, constant, read.longest)
    heads, length = 1 if table is None else table.shape[0], without_env(places.meta["val"].shape[0])
    node.meta["val"] = Traced(torch.float32, (1, heads, length, length))
    return node


def _place(graph: fx.Graph, node: fx.Node, dim: int, places: fx.Node) -> None:
    """Let a node give places of tokens in their texts instead of all places in order."""
    with graph.inserting_before(node):
        if op_name(node) != "arange":
            new = call_function(graph, _aten.index_select.default, (node.all_input_nodes[0], dim, places))
        elif node.meta["val"].dtype is torch.int64:
            new = places
        else:
            new = call_function(graph, _aten.to.dtype, (places, node.meta["val"].dtype))
    if new is not places:
        new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


def _take_first(graph: fx.Graph, node: fx.Node, firsts: fx.Node) -> None:
    """Let a node give the first row of each text."""
    source = schema_arguments(node)["self"]
    if schema_arguments(node)["dim"] not in (1, 1 - len(sizes_of(source))):
        msg = f"{node.name} takes the first token of values that are not [texts, tokens, ...]"
        raise _No(msg)
    _take(graph, node, source, firsts)


def _take(graph: fx.Graph, node: fx.Node, source: fx.Node, numbers: fx.Node) -> None:
    """Let a node give one row of each text, by their numbers."""
    dtype = source.meta["val"].dtype
    rest = [without_env(n) for n in source.meta["val"].shape[2:]]
    count = numbers.meta["val"].shape[0]
    with graph.inserting_before(node):
        rows = call_function(graph, _aten.index_select.default, (source, 1, numbers))
        rows.meta["val"] = Traced(dtype, (1, count, *rest))
        one = call_function(graph, _aten.select.int, (rows, 0, 0))
        one.meta["val"] = Traced(dtype, (count, *rest))
    node.replace_all_uses_with(one)


def _sum_by_text(graph: fx.Graph, node: fx.Node, starts: fx.Node) -> None:
    """Let a node sum the rows of each text."""
    source, val = schema_arguments(node)["self"], node.meta["val"]
    with graph.inserting_before(node):
        new = call_operator(graph, segment_sum, source, starts, bool(schema_arguments(node)["keepdim"]))
    new.meta["val"] = val
    node.replace_all_uses_with(new)


def _size_name(node: fx.Node) -> str:
    """Return the name of the size that a node gives."""
    return sizes_of(node.all_input_nodes[0])[int(schema_arguments(node)["dim"])]


def _name_texts(graph: fx.Graph, origins: Origins, count: int | Size, texts: frozenset[str]) -> None:
    """Let values of texts have their number as a size: that of the inputs is 1 now."""
    for node in graph.nodes:
        if isinstance(origins.values.get(node), Text) and gives_tensor(node):
            val = node.meta["val"]
            shape = [count if name_of(size) in texts else without_env(size) for size in val.shape]
            node.meta["val"] = Traced(val.dtype, tuple(shape))


def _count_texts(graph: fx.Graph, origins: Origins, firsts: fx.Node, texts: frozenset[str]) -> None:
    """Let values of texts have as many as there are, where the graph reads the number from inputs."""
    count = None
    for node in list(graph.nodes):
        if not isinstance(origins.values.get(node), Text) or not gives_tensor(node):
            continue
        for source in node.all_input_nodes:
            if gives_tensor(source) or isinstance(source.meta.get("val"), (list, tuple)):
                continue
            if not op_name(source).startswith("sym_size") or _size_name(source) not in texts:
                msg = f"{node.name} ({op_name(node)}) of whole texts reads a size that is not their number"
                raise _No(msg)
            if count is None:
                last = [each for each in graph.nodes if each.op == "placeholder"][-1]
                with graph.inserting_after(last):
                    count = call_function(graph, _aten.sym_size.int, (firsts, 0))
                count.meta.update({"val": source.meta["val"]} if "val" in source.meta else {})
            node.replace_input_with(source, count)
