"""An exported program → one flat fx module whose parameters are constants.

The rewrites in `rewrites.py` begin with it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.node import Argument

from nc.errors import CaptureError
from nc.graph.catalogue import name_operators
from nc.graph.fx_utils import free_name


def flatten_program(
    program: torch.export.ExportedProgram,
) -> tuple[fx.GraphModule, list[fx.Node | Unused | None]]:
    """Return a flat module from an exported program.

    Parameters and buffers become `get_attr` of flat buffers.

    Returns:
        The module, and for each user input leaf its placeholder, or None when the leaf is not a tensor.
    """
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        names = ", ".join([*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()])
        msg = (
            f"The model changes its buffers or inputs while it runs ({names}); a quantized graph has no "
            "state. Move that out of forward."
        )
        raise CaptureError(msg)
    constants = {**program.state_dict, **program.constants}
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    root = torch.nn.Module()
    graph = fx.Graph()
    mapping: dict[fx.Node, Argument] = {}
    placeholders: list[fx.Node | None] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets:
            fqn = targets[node.name]
            mapping[node] = _constant_node(root, graph, fqn, constants[fqn], node.meta.get("val"))
        elif node.op == "placeholder":
            placeholder = None
            if isinstance(node.meta.get("val"), torch.Tensor):
                mapping[node] = placeholder = graph.placeholder(node.name)
                placeholder.meta = dict(node.meta)
            placeholders.append(placeholder)
        else:
            _copy(program.graph_module, node, graph, mapping)
    name_operators(graph)
    module = fx.GraphModule(root, graph)
    used = {n for n in placeholders if n is not None and n.users}
    for node in [n for n in placeholders if n is not None and n not in used]:
        graph.erase_node(node)
    return module, [n if n is None or n in used else Unused(n) for n in placeholders]


def own_constants(module: fx.GraphModule, program: torch.export.ExportedProgram) -> None:
    """Copy the constants that are still the model's own tensors.

    Those that a rewrite made are new already.
    """
    theirs = {
        t.untyped_storage().data_ptr()
        for t in (*program.state_dict.values(), *program.constants.values())
        if _has_storage(t)
    }
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    for name, value in list(module.named_buffers(remove_duplicate=False)):
        if _has_storage(value) and value.untyped_storage().data_ptr() in theirs:
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            copies.setdefault(key, value.clone())
            setattr(module, name, copies[key])


def _has_storage(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class Unused:
    """In the place of the placeholder of a tensor that the model never reads: it has a shape and no users."""

    def __init__(self, node: fx.Node) -> None:
        self.meta = node.meta
        self.users: dict[fx.Node, None] = {}


def _constant_node(
    root: torch.nn.Module, graph: fx.Graph, fqn: str, value: torch.Tensor, val: object
) -> fx.Node:
    name = free_name(root, fqn)
    value = value.detach()
    root.register_buffer(name, value)
    node = graph.get_attr(name)
    node.meta = {"val": val, "fqn": fqn}
    return node


def _copy(owner: fx.GraphModule, node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, Argument]) -> None:
    """Copy one node.

    Of a region with its own grad mode, or with autocast switched off, copy the nodes inside.
    """
    name = getattr(node.target, "__name__", "")
    if node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), fx.GraphModule):
        return
    if node.op == "call_function" and name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        _copy_region(owner, node, graph, mapping)
        return
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        found = mapping.get(source) if isinstance(source, fx.Node) else None
        if isinstance(found, (tuple, list)) and isinstance(index, int):
            mapping[node] = found[index]
            return
    if (
        node.op == "call_function"
        and not isinstance(node.target, torch._ops.OpOverload)
        and _is_higher_order(node)
    ):
        msg = (
            f"The model uses the control-flow operator {name!r}, which no int8 engine runs; quantize the "
            "submodules around it instead."
        )
        raise CaptureError(msg)
    mapping[node] = graph.node_copy(node, lambda n: mapping[n])


def _copy_region(
    owner: fx.GraphModule, node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, Argument]
) -> None:
    """Copy the nodes inside of a region; what it returns takes the place of the node.

    Raises:
        CaptureError: it switches autocast on.
    """
    args = list(node.args)  # options, the region, and what the region reads
    at = next(i for i, a in enumerate(args) if isinstance(a, fx.Node) and a.op == "get_attr")
    options, region, values = args[:at], args[at], args[at + 1 :]
    assert isinstance(region, fx.Node)
    inner = getattr(owner, str(region.target))
    is_autocast = getattr(node.target, "__name__", "") == "wrap_with_autocast"
    if is_autocast and options[2] and options[0] == "cpu":  # device, dtype, enabled, cache
        msg = (
            "The model switches autocast on inside forward; quantize it in fp32: remove the autocast region."
        )
        raise CaptureError(msg)
    inputs = iter([mapping[a] if isinstance(a, fx.Node) else a for a in values])
    for inside in inner.graph.nodes:
        if inside.op == "placeholder":
            mapping[inside] = next(inputs)
        elif inside.op == "output":
            (results,) = inside.args
            mapping[node] = fx.map_arg(results, lambda n: mapping[n])
        else:
            _copy(inner, inside, graph, mapping)


def _is_higher_order(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)
