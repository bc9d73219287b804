"""Compute a value of a graph at a few places, from as few places of other values as that needs.

Places are a product of indices, one set for each dimension. Each operator says which places of its arguments
it reads for some places of its result. Where it is not known here, it reads all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import ACTIVATIONS, CONVOLUTIONS, kind_of_node, op_name, schema_arguments
from nc.graph.views import Conv, DynamicQDQ, Embedding, Linear, called_with
from nc.proof.sizes import KnownSizes, Shape

#: For each dimension the indices, in ascending order; None: all.
Places = tuple[torch.Tensor | None, ...]

#: Operators of one element each, beside those that torch says so of.
_POINTWISE = frozenset(
    {
        *ACTIVATIONS,
        *("quantize_per_tensor", "dequantize_per_tensor", "to_bf16", "from_bf16"),
        *("clone", "contiguous", "to", "_to_copy", "dropout"),
    }
)
#: Operators that give the same values in another shape.
_SHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"})
#: Operators → number of leading dimensions that they treat index by index; the others they mix.
_LEADING = {
    **dict.fromkeys(("group_norm", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "batch_norm"), 1),
    "instance_norm": 1,
    **{f"{kind}_pool{n}d": 2 for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), 2),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d"), 2),
}
#: Operators that mix values along some dimensions and keep their number, and the argument that says which.
_ALONG = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum"), "dim"),
    **dict.fromkeys(("flip", "roll"), "dims"),
}
#: Operators that reduce dimensions.
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "any", "all"})
#: Operators that divide a tensor along a dimension into a list of tensors.
_DIVISIONS = frozenset({"split", "chunk", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlacedValue:
    """Some places of a node's value.

    Attributes:
        node: whose value it is.
        places: which of its places; () where the value is not a tensor.
        call: computes them from `arguments`, in which values take the place of parts; None: they are given.
        arguments: of the call; parts may be in lists.
        moves: the call moves values, and nothing else.
    """

    node: fx.Node
    places: Places
    call: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()
    moves: bool = False


class Placing:
    """Makes parts of the values of one graph for inputs of known sizes.

    Args:
        sizes: of its values.
        given: nodes whose values are known.
    """

    def __init__(self, sizes: KnownSizes, given: Collection[fx.Node]) -> None:
        self._sizes, self._given = sizes, frozenset(given)
        self._made: dict[tuple[fx.Node, tuple[Any, ...]], PlacedValue] = {}

    def fact(self, node: fx.Node) -> Any:
        """Return the `Shape` of what a node gives, a list of those, or a number."""
        return self._sizes.of(node)

    def shape(self, node: fx.Node) -> Shape:
        """Return the shape of a node's tensor."""
        found: Shape = self._sizes.of(node)
        return found

    def of(self, node: fx.Node, places: Places) -> PlacedValue:
        """Return the part of a node's value at these places; of a list all."""
        key = node, tuple(None if each is None else tuple(each.tolist()) for each in places)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._part(node, places)
        return found

    def whole(self, node: fx.Node) -> PlacedValue:
        """Return all of a node's value."""
        fact = self.fact(node)
        return self.of(node, (None,) * len(fact) if isinstance(fact, Shape) else ())

    def _part(self, node: fx.Node, places: Places) -> PlacedValue:
        if node in self._given or node.op in ("placeholder", "get_attr"):
            return PlacedValue(node, places)
        return self.computed(node, places)

    def computed(self, node: fx.Node, places: Places) -> PlacedValue:
        """Return a part of what a node calls, also where its value is given."""
        rule = _rule_of(node) if places else None
        found = None if rule is None else rule(self, node, places)
        if found is None:
            args, kwargs = called_with(node)
            found = PlacedValue(node, (None,) * len(places), *_call(self, node, args, kwargs))
        then = tuple(each if read is None else None for each, read in zip(places, found.places, strict=True))
        if all(each is None for each in then):
            return found
        return PlacedValue(node, places, lambda value: at(value, then), (found,), moves=True)

    def filled(self, value: Any, places: Mapping[fx.Node, Places] | None = None) -> Any:
        """Return arguments with parts in place of tensors, and numbers in place of what gives numbers."""
        if isinstance(value, fx.Node):
            fact = self.fact(value)
            if not isinstance(fact, (Shape, list)):
                return fact
            return self.of(value, places[value]) if places and value in places else self.whole(value)
        if isinstance(value, dict):
            return {key: self.filled(v, places) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.filled(v, places) for v in value]
        return value


def _args(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call by position."""
    return called_with(node)[0]


def _call(
    parts: Placing,
    node: fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[fx.Node, Places] | None = None,
    first: PlacedValue | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a call of a node's own operator, and its arguments: all places where others are not said."""
    target: Any = node.target
    given = [*([] if first is None else [first]), *(parts.filled(value, places) for value in args)]
    if not kwargs:
        return target, tuple(given)

    def call(named: Mapping[str, Any], *values: Any) -> Any:
        return target(*values, **named)

    return call, (parts.filled(kwargs, places), *given)


#: Placing, node, places → the part, perhaps of more places; None where the rule is not for this call.
_Rule = Callable[[Placing, fx.Node, Places], PlacedValue | None]


def at(value: torch.Tensor, places: Places) -> torch.Tensor:
    """Return a tensor at some places."""
    chosen = ((dim, each) for dim, each in enumerate(places) if each is not None)
    shares = {dim: len(each) / max(1, value.shape[dim]) for dim, each in chosen}
    for dim in sorted(shares, key=shares.__getitem__):  # what leaves the least comes first
        indices = places[dim]
        assert indices is not None
        value = value.index_select(dim, indices)
    return value


def parts_in(value: Any) -> Iterable[PlacedValue]:
    """Yield the parts among arguments."""
    if isinstance(value, PlacedValue):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(parts_in, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(parts_in, value))


def with_values(value: Any, values: Mapping[PlacedValue, Any]) -> Any:
    """Return arguments with values in place of parts."""
    if isinstance(value, PlacedValue):
        return values[value]
    if isinstance(value, dict):
        return {key: with_values(v, values) for key, v in value.items()}
    if isinstance(value, list):
        return [with_values(v, values) for v in value]
    return value


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of what an operator gives is computed of one element of each tensor it reads."""
    return op_name(node) in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _rule_of(node: fx.Node) -> _Rule | None:
    name = op_name(node)
    if name == "prelu":
        return _prelu
    if is_pointwise(node):
        return _pointwise
    if kind_of_node(node) in CONVOLUTIONS or name in CONVOLUTIONS:
        return _convolution
    if name in _SHAPES:
        return None if "dtype" in str(node.target) else _reshaped
    if name in _ALONG:
        return _along
    if name in _REDUCTIONS:
        return _reduced
    if name in _LEADING:
        return _leading
    return _RULES.get(name)


def _local(places: Places, shape: Sequence[int]) -> list[int]:
    """Return the shape of a part."""
    return [size if each is None else len(each) for each, size in zip(places, shape, strict=True)]


def _indices(each: torch.Tensor | None, size: int) -> torch.Tensor:
    return torch.arange(size) if each is None else each


def _broadcast(places: Places, shape: Sequence[int], to: Sequence[int]) -> Places:
    """Return the places of an operand of this shape for places of a result of shape `to`."""
    missing = len(to) - len(shape)
    if missing < 0 or any(size not in (1, to[missing + dim]) for dim, size in enumerate(shape)):
        return (None,) * len(shape)  # of an operand that only gives a dtype
    return tuple(None if size == 1 else places[missing + dim] for dim, size in enumerate(shape))


def _pointwise(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    to = parts.shape(node)
    found = {
        source: _broadcast(places, fact, to)
        for source in node.all_input_nodes
        if isinstance(fact := parts.fact(source), Shape)
    }
    return PlacedValue(node, places, *_call(parts, node, *called_with(node), found))


def _prelu(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    """Take the slopes of the channels, which are the second dimension."""
    x, slopes = _args(node)[:2]
    (count,) = parts.shape(slopes)
    own = (places[1],) if count > 1 and len(places) > 1 else (None,)
    return PlacedValue(node, places, torch.prelu, (parts.of(x, places), parts.of(slopes, own)))


def _linear(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    view = Linear.of(node)
    if len(parts.shape(view.weight)) != 2:
        return None
    *rows, outputs = places
    bias = None if view.bias is None else parts.of(view.bias, (outputs,))
    arguments = parts.of(view.input, (*rows, None)), parts.of(view.weight, (outputs, None)), bias
    return PlacedValue(node, places, torch.nn.functional.linear, arguments)


def _low_bit_linear(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    return _mixing(parts, node, places, {len(places) - 1})


def _matmul(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    left, right = _args(node)[:2]
    shapes, to = (parts.shape(left), parts.shape(right)), parts.shape(node)
    if min(map(len, shapes)) < 2 or len(_args(node)) > 2 or node.kwargs:
        return None
    *batch, rows, columns = places
    before = [_broadcast(tuple(batch), shape[:-2], to[:-2]) for shape in shapes]
    arguments = parts.of(left, (*before[0], rows, None)), parts.of(right, (*before[1], None, columns))
    return PlacedValue(node, places, torch.matmul, arguments)


def _attention(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    """Let a query read all keys and values of its sample and head."""
    a = schema_arguments(node)
    q, k, v, mask = (a[name] for name in ("query", "key", "value", "attn_mask"))
    to, shapes = parts.shape(node), [parts.shape(each) for each in (q, k, v)]
    if {len(shape) for shape in shapes} != {len(to)} or a["dropout_p"]:
        return None
    *batch, rows, _ = places
    before = [
        tuple(
            each if shape[dim] == to[dim] else None for dim, each in enumerate(batch)
        )  # several heads may share keys
        for shape in shapes
    ]
    if any(shape[dim] != to[dim] for shape in shapes for dim in range(1, len(to) - 2)):
        before = [(batch[0] if shape[0] == to[0] else None, *[None] * (len(batch) - 1)) for shape in shapes]
    rows_read = None if a["is_causal"] else rows
    arguments: list[Any] = [
        parts.of(q, (*before[0], rows_read, None)),
        parts.of(k, (*before[1], None, None)),
        parts.of(v, (*before[2], None, None)),
    ]
    read = (*before[0], rows_read, None)
    arguments.append(
        None
        if mask is None
        else parts.of(mask, _broadcast(read, parts.shape(mask), (*to[:-1], shapes[1][-2])))
    )
    named = {"is_causal": a["is_causal"], "scale": a.get("scale"), "enable_gqa": a.get("enable_gqa", False)}
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, **named)
    return PlacedValue(node, read, call, tuple(arguments))


def _norm(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    """Norms of the last dimensions."""
    sizes = _args(node)[1]
    return _mixing(parts, node, places, range(len(places) - len(sizes), len(places)))


def _mixing(parts: Placing, node: fx.Node, places: Places, mixed: Collection[int]) -> PlacedValue:
    """Return a part of an operator that mixes values of some dimensions of its first argument only."""
    (x, *others), kwargs = called_with(node)
    kept = tuple(None if dim in mixed else each for dim, each in enumerate(places))
    return PlacedValue(node, kept, *_call(parts, node, others, kwargs, first=parts.of(x, kept)))


def _along(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    given = schema_arguments(node)[_ALONG[op_name(node)]]
    dims = [given] if isinstance(given, int) else list(given or ())
    if not dims:
        return None
    return _mixing(parts, node, places, {dim % len(places) for dim in dims})


def _leading(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    name, x = op_name(node), _args(node)[0]
    kept = _LEADING[name]
    shape, to = parts.shape(x), parts.shape(node)
    window = int(name[-2]) if "pool" in name else len(shape) - kept
    if len(shape) != len(to) or shape[:kept] != to[:kept] or len(shape) != kept + window:
        return None  # without a batch
    return _mixing(parts, node, places, range(kept, len(to)))


def _padded(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    pads = _args(node)[1]
    return _mixing(parts, node, places, range(len(places) - len(pads) // 2, len(places)))


def _dynamic(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    view = DynamicQDQ.of(node)
    if not view.per_token or view.right is not None:
        return None
    return _mixing(parts, node, places, {view.dim % len(places)})


def _reduced(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    a = schema_arguments(node)
    given, keep, (x, *_) = a.get("dim"), bool(a.get("keepdim")), _args(node)
    shape = parts.shape(x)
    dims = (
        {dim % len(shape) for dim in ([given] if isinstance(given, int) else given or ())} if shape else set()
    )
    if not dims:
        return None
    left = iter(places)
    kept: list[torch.Tensor | None] = []
    for dim in range(len(shape)):
        if dim in dims:
            kept.append(None)
            if keep:
                next(left)
        else:
            kept.append(next(left))
    (_, *others), kwargs = called_with(node)
    return PlacedValue(node, places, *_call(parts, node, others, kwargs, first=parts.of(x, tuple(kept))))


def _reshaped(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    source = _args(node)[0]
    shape, to = parts.shape(source), parts.shape(node)
    groups = _groups(shape, to)
    if groups is None:
        return None
    read: list[torch.Tensor | None] = []
    gathers: list[torch.Tensor | None] = []
    for dims, targets in groups:
        if all(places[dim] is None for dim in targets):
            read += [None] * len(dims)
            gathers.append(None)
            continue
        wanted = _flat([_indices(places[dim], to[dim]) for dim in targets], [to[dim] for dim in targets])
        each = _unraveled(wanted, [shape[dim] for dim in dims])
        read += each
        there = _flat(each, [shape[dim] for dim in dims])
        gathers.append(None if torch.equal(there, wanted) else torch.searchsorted(there, wanted))
    result = _local(places, to)

    def call(x: torch.Tensor) -> torch.Tensor:
        sizes = iter(x.shape)
        x = x.reshape([math.prod(itertools.islice(sizes, len(dims))) for dims, _ in groups])
        return at(x, tuple(gathers)).reshape(result)

    return PlacedValue(node, places, call, (parts.of(source, tuple(read)),), moves=True)


def _groups(shape: Sequence[int], to: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Return groups of dimensions of two shapes with the same product, in order; None where one is 0."""
    if 0 in shape or 0 in to:
        return None
    found, i, j = [], 0, 0
    while i < len(shape) or j < len(to):
        mine, theirs = [], []
        a = b = 1
        if i < len(shape):
            mine, a, i = [i], shape[i], i + 1
        if j < len(to):
            theirs, b, j = [j], to[j], j + 1
        while a != b:
            if a < b:
                mine.append(i)
                a, i = a * shape[i], i + 1
            else:
                theirs.append(j)
                b, j = b * to[j], j + 1
        found.append((mine, theirs))
    return found


def _flat(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the indices in a flat tensor of a product of indices, in order."""
    result = torch.zeros(1, dtype=torch.int64)
    for each, size in zip(indices, sizes, strict=True):
        result = (result[:, None] * size + each).flatten()
    return result


def _unraveled(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return for each dimension the indices that flat ones have there, each once."""
    found = []
    for size in reversed(sizes):
        found.append(torch.unique(flat % size))
        flat = flat // size
    return found[::-1]


def _permuted(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    source, name, rank = _args(node)[0], op_name(node), len(places)
    order = list(range(rank))
    if name == "permute":
        order = [dim % rank for dim in _args(node)[1]]
    elif name in ("transpose", "swapaxes") or rank == 2:
        a, b = (dim % rank for dim in _args(node)[1:]) if name != "t" else (0, 1)
        order[a], order[b] = b, a
    read = [places[order.index(dim)] for dim in range(rank)]
    return PlacedValue(node, places, lambda x: x.permute(order), (parts.of(source, tuple(read)),), moves=True)


def _expanded(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    source = _args(node)[0]
    to, shape = parts.shape(node), parts.shape(source)
    local = _local(places, to)
    read = _broadcast(places, shape, to)
    return PlacedValue(node, places, lambda x: x.expand(local), (parts.of(source, read),), moves=True)


def _sliced(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    a = {key: parts.filled(value) for key, value in schema_arguments(node).items() if key != "self"}
    source = _args(node)[0]
    shape = parts.shape(source)
    dim = a["dim"] % len(shape)
    begin, _, step = slice(a["start"], a["end"], a["step"]).indices(shape[dim])
    return _shifted(parts, node, places, source, dim, lambda each: begin + step * each)


def _shifted(
    parts: Placing,
    node: fx.Node,
    places: Places,
    source: fx.Node,
    dim: int,
    index: Callable[[torch.Tensor], torch.Tensor],
) -> PlacedValue:
    """Return a part of what is another tensor with other indices along one dimension."""
    read = list(places)
    read[dim] = index(_indices(places[dim], parts.shape(node)[dim]))
    return PlacedValue(node, places, lambda x: x, (parts.of(source, tuple(read)),), moves=True)


def _selected(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    source, dim, index = _args(node)[0], _args(node)[1], parts.filled(_args(node)[2])
    shape = parts.shape(source)
    dim %= len(shape)
    read = (*places[:dim], torch.tensor([index % shape[dim]], dtype=torch.int64), *places[dim:])
    return PlacedValue(node, places, lambda x: x.squeeze(dim), (parts.of(source, read),), moves=True)


def _item(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    """Slice what is divided into a list of which this is an entry."""
    source, index = _args(node)[:2]
    if op_name(source) not in _DIVISIONS:
        return None
    dim = schema_arguments(source).get("dim", 0)
    divided, pieces = _args(source)[0], parts.fact(source)
    index %= len(pieces)
    dim %= len(parts.shape(divided))
    if op_name(source) == "unbind":
        read = (*places[:dim], torch.tensor([index], dtype=torch.int64), *places[dim:])
        return PlacedValue(node, places, lambda x: x.squeeze(dim), (parts.of(divided, read),), moves=True)
    begin = sum(piece[dim] for piece in pieces[:index])
    return _shifted(parts, node, places, divided, dim, lambda each: begin + each)


def _joined(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    sources, rank = _args(node)[0], len(places)
    dim = schema_arguments(node).get("dim", 0) % rank
    if not isinstance(sources, (list, tuple)) or any(len(parts.shape(s)) != rank for s in sources):
        return None
    wanted, begin, read = _indices(places[dim], parts.shape(node)[dim]), 0, []
    for source in sources:
        size = parts.shape(source)[dim]
        mine = wanted[(wanted >= begin) & (wanted < begin + size)] - begin
        if len(mine):
            read.append(parts.of(source, (*places[:dim], mine, *places[dim + 1 :])))
        begin += size
    if not read:
        return None
    return PlacedValue(node, places, lambda pieces: torch.cat(pieces, dim), (read,), moves=True)


def _embedding(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    view = Embedding.of(node)
    *rows, _ = places
    arguments = parts.of(view.indices, tuple(rows)), parts.whole(view.weight)
    return PlacedValue(node, (*rows, None), torch.nn.functional.embedding, arguments)


def _dequantized_channels(parts: Placing, node: fx.Node, places: Places) -> PlacedValue:
    a = schema_arguments(node)
    axis = a["axis"] % len(places)
    first = next(iter(a))
    own = {
        key: parts.of(value, places if key == first else (places[axis],))
        if isinstance(value, fx.Node)
        else value
        for key, value in a.items()
    }
    target: Any = node.target
    return PlacedValue(node, places, lambda *values: target(*values), tuple(own.values()))


def _convolution(parts: Placing, node: fx.Node, places: Places) -> PlacedValue | None:
    """Gather the window of each place, one window beside the other."""
    view = Conv.of(node)
    shape, weight = parts.shape(view.input), parts.shape(view.weight)
    dims, to = len(weight) - 2, parts.shape(node)
    if len(shape) != dims + 2 or not isinstance(view.groups, int):
        return None
    window = weight[2:]
    if view.padding == "valid":
        pads = [0] * dims
    elif view.padding == "same":
        _, _, dilation = dataclasses.replace(view, padding=(0,)).sizes(dims)
        pads = [d * (k - 1) // 2 for d, k in zip(dilation, window, strict=True)]
    else:
        _, pads, _ = view.sizes(dims)
    stride, _, dilation = dataclasses.replace(view, padding=(0,)).sizes(dims)
    is_depthwise = view.groups == weight[0] == shape[1]
    channels = places[1]
    read: list[torch.Tensor | None] = [places[0], channels if is_depthwise else None]
    gathers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(dims):
        begin = _indices(places[2 + i], to[2 + i])[:, None] * stride[i] - pads[i]
        each = (begin + dilation[i] * torch.arange(window[i])).flatten()
        outside = (each < 0) | (each >= shape[2 + i])
        inside = torch.unique(each[~outside])
        if not len(inside):
            return None
        read.append(inside)
        gathers.append((torch.searchsorted(inside, each).clamp_(max=len(inside) - 1), outside))
    own = view.groups == 1 or is_depthwise
    rows = channels if own else None
    groups = view.groups if not is_depthwise else (view.groups if channels is None else len(channels))
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[dims - 1]

    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        for dim, (indices, outside) in enumerate(gathers, 2):
            x = x.index_select(dim, indices)
            if bool(outside.any()):
                x = x.index_fill(dim, outside.nonzero().flatten(), 0.0)
        return convolve(x, w, bias, stride=list(window), groups=groups)

    bias = None if view.bias is None else parts.of(view.bias, (rows,))
    arguments = (
        parts.of(view.input, tuple(read)),
        parts.of(view.weight, (rows, *[None] * (dims + 1))),
        bias,
    )
    return PlacedValue(node, (places[0], rows, *places[2:]), call, arguments)


_RULES: Mapping[str, _Rule] = {
    "linear": _linear,
    "quant_linear": _low_bit_linear,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "constant_pad_nd": _padded,
    "quantize_dequantize_dynamic": _dynamic,
    **dict.fromkeys(("permute", "transpose", "swapaxes", "t"), _permuted),
    "expand": _expanded,
    "slice": _sliced,
    "select": _selected,
    "getitem": _item,
    **dict.fromkeys(("cat", "concat"), _joined),
    "embedding": _embedding,
    "dequantize_per_channel": _dequantized_channels,
}
