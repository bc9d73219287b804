"""Sizes of the values of a graph, for given sizes of its inputs, without values.

Torch's tensors without memory know sizes too, but need a second of imports for most operators. They are asked
where nothing here knows an operator.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import CONVOLUTIONS, JOINS, op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS, Size, dim_of
from nc.graph.views import Conv, called_with

#: Operators whose result has the sizes of their first argument.
_SAME = frozenset(
    {
        *("softmax", "_softmax", "log_softmax", "cumsum", "flip", "roll", "clone", "contiguous", "to"),
        *("_to_copy", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "dropout"),
        *("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel"),
        *("quantize_dequantize_dynamic", "to_bf16", "from_bf16"),
    }
)


class UnknownSizes(Exception):
    """The sizes of a node's result are not known without its values."""


class Shape(tuple[int, ...]):
    """The sizes of a tensor."""

    __slots__ = ()


class KnownSizes:
    """Knows what the nodes of a graph give for inputs of some sizes: a `Shape`, a list of those, or a number.

    Args:
        module: the graph.
        inputs: sizes of the placeholders' tensors, in order.
        known: sizes of other nodes' tensors.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Sequence[int]],
        known: Mapping[fx.Node, Sequence[int]],
    ) -> None:
        self._module = module
        self._facts: dict[fx.Node, Any] = {node: Shape(sizes) for node, sizes in known.items()}
        self._names: dict[str, int] = {}
        #: Whether inputs have the sizes that their names say: a graph may take others than the traced ones.
        self._as_traced = True
        placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
        for node, sizes in zip(placeholders, inputs, strict=True):
            self._facts[node] = Shape(sizes)
            for name, size in zip(_template(node) or (), sizes, strict=False):
                expected = self._names.setdefault(name, size) if isinstance(name, str) else name
                self._as_traced &= expected == size

    def of(self, node: fx.Node) -> Any:
        """Return what is known of a node's result.

        Raises:
            UnknownSizes: they depend on values.
        """
        waiting = [node]
        while waiting:  # no recursion: chains of nodes may be long
            last = waiting[-1]
            if last not in self._facts:
                by_name = self._by_name(last)
                missing = [source for source in last.all_input_nodes if source not in self._facts]
                if by_name is None and missing:
                    waiting += missing
                    continue
                self._facts[last] = self._computed(last) if by_name is None else by_name
            waiting.pop()
        return self._facts[node]

    def check(self, node: fx.Node) -> None:
        """Raise UnknownSizes where the given sizes of a node are known to be others."""
        own = self._by_name(node)
        if own not in (None, self._facts[node]):
            msg = f"{node.name} has the sizes {self._facts[node]}, expected {own}"
            raise UnknownSizes(msg)

    def _by_name(self, node: fx.Node) -> Shape | None:
        """Return the sizes where each is a number or the name of a size of an input."""
        template = _template(node)
        if template is None or not self._as_traced:
            return None
        sizes = [self._names.get(size) if isinstance(size, str) else size for size in template]
        return None if None in sizes else Shape(size for size in sizes if size is not None)

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), self._module)
            return Shape(value.shape) if isinstance(value, torch.Tensor) else value
        name, facts = op_name(node), [self._facts[source] for source in node.all_input_nodes]
        arguments = called_with(node)
        if name == "sym_size":
            return facts[0][arguments[0][1]]
        if not any(isinstance(fact, (Shape, list)) for fact in facts) and not _gives_tensors(node):
            args, kwargs = fx.map_arg(arguments, self._facts.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator] # a call
        if name == "getitem" and isinstance(facts[0], list):
            return facts[0][arguments[0][1]]
        own = self._of_operator(node, name)
        return self._of_torch(node) if own is None else Shape(own)

    def _of_operator(self, node: fx.Node, name: str) -> Sequence[int] | None:
        """Return the sizes of a result by the operator's name; None where it is not known here."""

        def shape(value: Any) -> Shape:
            found: Shape = self._facts[value]
            return found

        args, _ = called_with(node)
        if name in _SAME:
            return shape(args[0])
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) and _gives_tensors(node):
            facts = (self._facts[source] for source in node.all_input_nodes)
            return _broadcast(*(fact for fact in facts if isinstance(fact, Shape)))
        if name in ("linear", "matmul", "bmm", "mm"):
            return _multiplied(name, shape(args[0]), shape(args[1]))
        if name == "embedding":
            return *shape(args[1]), shape(args[0])[1]
        if name == "scaled_dot_product_attention":
            q, k, v = (shape(each) for each in args[:3])
            return None if q[:-2] != k[:-2] else (*q[:-1], v[-1])
        if name in CONVOLUTIONS:
            return _convolved(Conv.of(node), shape)
        if name in JOINS and name != "stack" and isinstance(args[0], (list, tuple)):
            parts = [shape(part) for part in args[0]]
            dim = schema_arguments(node).get("dim", 0) % len(parts[0])
            return *parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1 :]
        return None

    def _of_torch(self, node: fx.Node) -> Any:
        """Return what torch gives for tensors without memory."""

        def value(source: fx.Node) -> Any:
            return _on_meta(self._facts[source], _dtype(source))

        args, kwargs = _on_meta(fx.map_arg(called_with(node), value))
        try:
            return _facts_of(node.target(*args, **kwargs))  # type: ignore[operator] # a call
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            msg = f"{node.name}: {error}"
            raise UnknownSizes(msg) from error


def _broadcast(*shapes: Sequence[int]) -> Sequence[int]:
    found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call] # torch does not annotate it
    return found


def _multiplied(name: str, a: Shape, b: Shape) -> Sequence[int] | None:
    if min(len(a), len(b)) < 2:
        return None
    return (*a[:-1], b[0]) if name == "linear" else (*_broadcast(a[:-2], b[:-2]), a[-2], b[-1])


def _convolved(view: Conv, shape: Any) -> Sequence[int] | None:
    x, weight = shape(view.input), shape(view.weight)
    dims = len(weight) - 2
    if isinstance(view.padding, str) or len(x) != dims + 2:
        return None
    sizes = zip(x[2:], weight[2:], *view.sizes(dims), strict=True)
    return (
        x[0],
        weight[0],
        *((size + 2 * pad - step * (k - 1) - 1) // stride + 1 for size, k, stride, pad, step in sizes),
    )


def _template(node: fx.Node) -> tuple[int | str, ...] | None:
    """Return the sizes of a node's tensor as they were traced, names of free ones; None for no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, TENSORS):
        return None
    return tuple(str(size) if isinstance(size, Size) else dim_of(size) for size in value.shape)


def _gives_tensors(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (*TENSORS, list, tuple))


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, TENSORS) else torch.float32


def _on_meta(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return tensors without memory in place of sizes, and the meta device in place of another one."""
    if isinstance(value, Shape):
        return torch.empty(value, dtype=dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {key: _on_meta(v) for key, v in value.items()}
    return type(value)(_on_meta(v, dtype) for v in value) if type(value) in (list, tuple) else value


def _facts_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Shape(value.shape)
    return [_facts_of(v) for v in value] if isinstance(value, (list, tuple)) else value
