"""Helpers for fx graphs: copies, constants with their values, and runs node by node."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from nc.graph.catalogue import (
    OF_OPERATOR,
    first_input,
    may_be_view,
    name_operator,
    schema_arguments,
    works_in_place,
)
from nc.graph.tensor_meta import TENSORS, names_of
from nc.graph.views import called_with, set_argument
from nc.ops import REFERENCE

Hook = Callable[[fx.Node, Any, Mapping[fx.Node, Any]], Any]


def copy_module(
    module: fx.GraphModule, *, lazy: bool = False
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy whose nodes can be changed, and the copy of each node; constants are shared.

    `lazy`: see `lazy_module`.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, mapping))
    return lazy_module(module, graph) if lazy else fx.GraphModule(module, graph), mapping


def lazy_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module whose Python code is written at its first call.

    That takes 30 ms for BERT-base, and not every module is called.
    """
    return _LazyGraphModule(root, graph)


def call_function(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[fx.node.Argument, ...] = (),
    kwargs: dict[str, fx.node.Argument] | None = None,
) -> fx.Node:
    """Return a call of a function, inserted where the graph inserts."""
    return name_operator(graph.call_function(target, args, kwargs))


def retarget(node: fx.Node, target: Callable[..., Any]) -> None:
    """Let a node call another function."""
    node.target = target
    name_operator(node)


def call_operator(graph: fx.Graph, operator: torch._ops.OpOverload, *arguments: fx.node.Argument) -> fx.Node:
    """Return a call of an operator, inserted where the graph inserts.

    The node is named after the operator alone.
    """
    node = graph.create_node(
        "call_function", operator, arguments, {}, operator._schema.name.partition("::")[2]
    )
    return name_operator(node)


def gives_tensor(node: object) -> bool:
    """Return whether a value is a node that gives one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), TENSORS)


def sizes_of(node: object) -> list[str]:
    """Return the sizes of the tensor that a node gives as words, free ones by their names; [] for others."""
    return names_of(node.meta.get("val")) if isinstance(node, fx.Node) else []


def take_over(new: fx.Node, old: fx.Node) -> None:
    """Note on a node what is known of the one that it replaces.

    Not the operator and its kind: the new node calls another one.
    """
    new.meta.update({key: value for key, value in old.meta.items() if key not in OF_OPERATOR})


def note_value_of(new: fx.Node, old: fx.Node) -> None:
    """Note on a node that its value has the shape and dtype of another one's, where these are known."""
    if "val" in old.meta:
        new.meta["val"] = old.meta["val"]


#: Names of the nodes of a QDQ graph whose values a node of the lowered graph gives; where several say so of
#: one name, the last one does.
GIVES = "gives"


def note_values(module: fx.GraphModule) -> None:
    """Let every node of a graph that is about to be lowered say that it gives its own value."""
    for node in module.graph.nodes:
        node.meta[GIVES] = (node.name,)


def give_values_of(new: fx.Node, *old: fx.Node) -> None:
    """Let a node say that it gives the values of others, in their place.

    With none it says that it gives no value of the QDQ graph.
    """
    new.meta[GIVES] = tuple(name for node in old for name in node.meta.get(GIVES, ()))


def inline(module: fx.GraphModule, keep: Collection[object] = ()) -> None:
    """Let nodes of `nc` operators, but for those to `keep`, call the functions that compute them.

    Compilers do not look into operators.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in REFERENCE and node.target not in keep:
            node.args, node.kwargs = called_with(node)  # the functions take some arguments by position only
            retarget(node, REFERENCE[node.target])


class _Hooked(fx.Interpreter):
    def __init__(
        self,
        module: fx.GraphModule,
        hook: Hook,
        before: Callable[[fx.Node, Mapping[fx.Node, Any]], None] | None,
    ) -> None:
        super().__init__(module)
        self._hook, self._before = hook, before

    def run_node(self, n: fx.Node) -> Any:
        if self._before is not None:
            self._before(n, self.env)
        return self._hook(n, super().run_node(n), self.env)


def call_graph(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    """Return the outputs of a graph.

    `module(*inputs)` prints a stack to standard error if it fails, also where that is handled.
    """
    return torch.nn.Module.__call__(module, *inputs)


def run_with(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    hook: Hook,
    before: Callable[[fx.Node, Mapping[fx.Node, Any]], None] | None = None,
    *,
    gradients: bool = False,
) -> Any:
    """Run a graph node by node.

    Args:
        module: flat graph.
        inputs: flat inputs.
        hook: called after each node with the node, its value, and the values of its inputs; returns the value
            to continue with.
        before: called before each node with the node and the values of its inputs, which the node may then
            change in place.
        gradients: record for a backward pass.

    Returns:
        The graph's outputs.
    """
    with torch.set_grad_enabled(gradients):
        return _Hooked(module, hook, before).run(*inputs)


def constant_of(module: torch.nn.Module, node: fx.Node) -> torch.Tensor:
    """Return the constant that a "get_attr" node reads."""
    value: torch.Tensor = getattr(module, str(node.target))
    return value


def constant_value(module: fx.GraphModule, node: object) -> torch.Tensor | None:
    """Return the value of a node that depends on constants only.

    None is returned when it depends on inputs, or is changed in place.
    """
    value = _evaluate(module, node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def constant_number(module: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the same of a node whose value is a number."""
    value = _evaluate(module, node)
    return value if isinstance(value, int | float) else None


def _is_changed(node: fx.Node) -> bool:
    """Return whether an operator changes a node's value in place, perhaps through a view."""
    seen = [node]
    for each in seen:  # which grows
        for user in each.users:
            if first_input(user) is each:
                if works_in_place(user):
                    return True
                if may_be_view(user):
                    seen.append(user)
    return False


def _function(target: object) -> Callable[..., object] | None:
    """Return what a node calls, where that changes no argument: it can be computed beforehand."""
    if target is operator.getitem:
        return operator.getitem
    return target if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable else None


def _evaluate(module: fx.GraphModule, node: fx.Node) -> object:
    """Return the value of a constant node, None for others."""
    values: dict[fx.Node, Any] = {}
    for each in _constants_in_order(node) or ():
        if each.op == "get_attr":
            values[each] = constant_of(module, each)
            continue
        function = _function(each.target)
        assert function is not None, "asked for constants"
        args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
        with torch.no_grad():
            values[each] = function(*args, **kwargs)
    return values.get(node)


def _constants_in_order(node: fx.Node) -> list[fx.Node] | None:
    """Return what the value of a node depends on, and the node; None where not all of that is constant.

    A walk without recursion: models have thousands of operators one after another.
    """
    order: dict[fx.Node, None] = {}
    opened: set[fx.Node] = set()
    stack = [node]
    while stack:
        last = stack[-1]
        if last in opened:
            order[stack.pop()] = None
            continue
        opened.add(last)
        is_computed = bool(last.all_input_nodes) and _function(last.target) is not None
        if _is_changed(last) or not (last.op == "get_attr" or is_computed):
            return None
        # the last inputs are looked at first: activations come before weights, and one that is not constant
        # ends the search
        stack += [source for source in last.all_input_nodes if source not in order]
    return list(order)


def free_name(module: torch.nn.Module, name: str) -> str:
    """Return a name that artefacts take and that is not an attribute of `module`.

    Characters other than ASCII letters, digits and underscores become underscores. More underscores are
    appended until the name is free.
    """
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    while hasattr(module, name):
        name += "_"
    return name


def add_constant(
    module: fx.GraphModule, before: fx.Node, name: str, value: torch.Tensor, fqn: str
) -> fx.Node:
    """Insert a new constant into the graph before the node `before`, and return it."""
    name = free_name(module, name)
    module.register_buffer(name, value.detach().contiguous())
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta = {"val": value, "fqn": fqn}
    return node


def replace_constant(module: fx.GraphModule, node: fx.Node, argument: str, value: torch.Tensor) -> None:
    """Give an operator a new constant as "weight" or "bias"; remove the old one if nothing else reads it."""
    arguments = schema_arguments(node)
    old = arguments[argument]
    name = fqn_of(old) if old is not None else f"{fqn_of(arguments['weight']).removesuffix('weight')}bias"
    constant = add_constant(module, node, f"{node.name}_{argument}", value, name)
    set_argument(node, argument, constant)
    if old is not None and not old.users:
        module.graph.erase_node(old)
        if not any(n.op == "get_attr" and n.target == old.target for n in module.graph.nodes):
            del module._buffers[old.target]


def fqn_of(node: fx.Node) -> str:
    """Name of the first constant that a node is, or is computed from."""
    while node.op != "get_attr":
        node = node.all_input_nodes[0]
    return str(node.meta.get("fqn", ""))


def drop_unused(module: fx.GraphModule) -> None:
    """Remove constants that nothing reads any more."""
    for node in [n for n in module.graph.nodes if n.op == "get_attr" and not n.users]:
        module.graph.erase_node(node)
    used = {n.target for n in module.graph.nodes if n.op == "get_attr"}
    for name in [name for name in module._buffers if name not in used]:
        del module._buffers[name]
