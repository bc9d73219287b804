"""A QDQ graph as a program for `torch.export`, for engines and formats that are reached through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.fx_utils import add_constant, constant_value, copy_module
from nc.graph.qdq import QDQGraph
from nc.graph.signature import Leaf, at_least_two
from nc.process.error_texts import is_of_grouped_experts


def advice(error: Exception) -> str:
    """Return what to do about an error of a conversion, to append to its message; "" if nothing is known."""
    if not is_of_grouped_experts(error):
        return ""
    return (
        ". transformers multiplies stacked experts by its own operator, which has no translation: call "
        "model.set_experts_implementation('batched_mm') before prepare."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is exported.

    Attributes:
        module: flat inputs → its outputs that are tensors. Each operator is a call of a submodule, which
            export notes at every node.
        operators: name of the submodule → operator.
        tensors: for each output of the graph whether it is a tensor.
        others: flat inputs → the outputs that are not tensors, such as numbers computed from sizes.
    """

    module: fx.GraphModule
    operators: dict[str, str]
    tensors: tuple[bool, ...]
    others: Callable[..., Sequence[Any]]

    def together(self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Return the outputs of the graph: tensors that were computed elsewhere, and the others."""
        if all(self.tensors):
            return list(tensors)
        with torch.no_grad():
            others = iter(self.others(*inputs))
        left = iter(tensors)
        return [next(left if is_tensor else others) for is_tensor in self.tensors]


def program(
    part: fx.GraphModule, example: Sequence[torch.Tensor], rewrite: Callable[[fx.GraphModule], object]
) -> Program:
    """Return the program for a QDQ graph.

    Args:
        part: the graph, which stays as it is.
        example: flat inputs of it.
        rewrite: changes a copy of the graph, so that it has only operators that the importer of
            the export knows.
    """
    with torch.no_grad():
        tensors = tuple(isinstance(value, torch.Tensor) for value in part(*example))
    module, others = _only(part, tensors), _only(part, [not tensor for tensor in tensors])
    others.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    others.recompile()
    rewrite(module)
    operators = _as_submodules(module)
    module.graph.lint()
    module.recompile()
    return Program(module.eval(), operators, tensors, others)


class Exportable(torch.nn.Module):
    """A program as a part of a module.

    Export takes no fx module by itself for one whose parts it should note.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        """As the program."""
        return self.module(*inputs)


def operator_at(paths: Iterable[str], operators: Mapping[str, str]) -> str:
    """Return the operator of a program that something exported belongs to; "" where it belongs to none.

    Args:
        paths: names of the modules around it, the outermost first.
        operators: of the program.
    """
    names = [path.rpartition(".")[2] for path in paths]
    return next((operators[name] for name in reversed(names) if name in operators), "")


def fold(module: fx.GraphModule, keep: Collection[object] = ()) -> None:
    """Make what nc's own operators compute of constants a constant.

    Args:
        module: changed in place.
        keep: operators that stay.
    """
    for node in [n for n in module.graph.nodes if _is_own(n) and n.target not in keep]:
        value = constant_value(module, node)
        if value is not None:
            node.replace_all_uses_with(
                add_constant(module, node, node.name, value, node.meta.get("fqn", node.name))
            )
            module.graph.erase_node(node)


def _is_own(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "nc"


class _Call(torch.nn.Module):
    """A call of one operator."""

    def __init__(self, target: Callable[..., Any]) -> None:
        super().__init__()
        self._target = target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operator gives."""
        return self._target(*args, **kwargs)


def _as_submodules(module: fx.GraphModule) -> dict[str, str]:
    """Let every operator be the call of a submodule; returns the operators by the names of these."""
    found = {}
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and "operator" in n.meta]
    for index, node in enumerate(nodes):
        name = f"operator_{index}"
        module.add_submodule(name, _Call(node.target))
        found[name] = node.meta["operator"]
        node.op, node.target = "call_module", name
    return found


def _only(part: fx.GraphModule, chosen: Sequence[bool]) -> fx.GraphModule:
    """Return a copy of a graph that returns some of its outputs."""
    module, _ = copy_module(part)
    output = module.graph.output_node()
    (results,) = output.args
    assert isinstance(results, Sequence)
    output.args = (tuple(r for r, take in zip(results, chosen, strict=True) if take),)
    return module


def inputs_of(graph: QDQGraph) -> tuple[list[Leaf], tuple[torch.Tensor, ...], list[dict[int, Any]]]:
    """Return what `torch.export` is to know of the inputs that a graph reads.

    Returns:
        Their leaves; example inputs, with 2 for each free size of 1, which tracing would take as fixed; for
        each input its free dimensions.
    """
    leaves = [leaf for leaf in graph.signature.leaves if leaf.used]
    dims = [leaf.dims for leaf in leaves]
    free = [
        {i: torch.export.Dim.AUTO for i, dim in enumerate(sizes) if isinstance(dim, str)} for sizes in dims
    ]
    return leaves, tuple(at_least_two(graph.example, dims)), free
