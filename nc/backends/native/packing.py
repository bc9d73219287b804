"""Lowered graphs as torch's own operators run them.

Weights are packed constants, and what torch computes wrong is avoided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.fuse import constant
from nc.backends.native.noise_trials import guard, is_guarded, is_wrong, wrong_sizes
from nc.backends.native.plans.products import PREPACKS
from nc.backends.torchscript import annotated
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import constant_value, copy_module, drop_unused, retarget, run_with
from nc.graph.views import set_argument
from nc.profiling.nodes import operators_of

_LINEAR = torch.ops.onednn.qlinear_pointwise
#: Where `packed` notes the shape that a convolution reads in the example.
_READS = "reads_in_example"


def qlinear(*arguments: Any) -> torch.Tensor:
    """`onednn::qlinear_pointwise`, with the dimensions of its input also where that is empty.

    Torch's gives two.
    """
    return _with_rows_of(arguments[0], _LINEAR.default(*arguments))


def qlinear_sum(*arguments: Any) -> torch.Tensor:
    """`onednn::qlinear_pointwise.binary`, likewise."""
    return _with_rows_of(arguments[0], _LINEAR.binary(*arguments))


def _with_rows_of(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result if result.dim() == x.dim() else result.view(*x.shape[:-1], result.shape[-1])


def _spelled(kernel: torch._ops.OpOverload) -> str:
    places = annotated(kernel, [f"{{{i}}}" for i in range(len(kernel._schema.arguments))])
    return f"self._with_rows_of({{0}}, torch.ops.onednn.qlinear_pointwise({', '.join(places)}))"


#: How TorchScript writes the functions above, and the method that it needs for them.
SPELLING: Mapping[Callable[..., object], str] = {
    qlinear: _spelled(_LINEAR.default),
    qlinear_sum: _spelled(_LINEAR.binary),
}
_LINEARS = {_LINEAR.default: qlinear, _LINEAR.binary: qlinear_sum}
HELPERS = """
def _with_rows_of(self, x: Tensor, result: Tensor) -> Tensor:
    if result.dim() == x.dim():
        return result
    return result.view(x.size()[:-1] + [result.size(-1)])
"""


def packed(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return a copy of a lowered graph whose weights are packed constants, for torch's operators.

    A convolution takes weights that were packed for another shape too, but lays them out anew at every call
    where it wants another block size, which can take a hundred times as long as it computes (AMX). So they
    are packed for the shapes that it reads in the example.
    """
    module, _ = copy_module(module)
    guard(module)
    for node in module.graph.nodes:
        if node.target in _LINEARS:
            retarget(node, _LINEARS[node.target])
    shapes: dict[fx.Node, list[int]] = {}

    def note(node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        if _packs_convolution(node):
            arguments = schema_arguments(node)
            shapes[arguments["qw"]] = node.meta[_READS] = list(env[arguments["qx"]].shape)
        return value

    if any(map(_packs_convolution, module.graph.nodes)):
        run_with(module, example, note)
    for node in [n for n in module.graph.nodes if n.target in PREPACKS]:
        if node in shapes:
            set_argument(node, "x_shape", shapes[node])
        value = constant_value(module, node)
        assert value is not None, f"{node.name} does not pack a constant"
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(constant(module, f"{node.name}_packed", value))
        module.graph.erase_node(node)
    drop_unused(module)
    module.recompile()
    return module


def refused(module: fx.GraphModule) -> dict[str, str]:
    """Names of the operators of a packed graph that are computed in fp32 for the example, and why."""
    wrong = [
        node for node in module.graph.nodes if is_guarded(node) and is_wrong(module, node, node.meta[_READS])
    ]
    why = (
        f"torch {torch.__version__} has an int8 kernel for it whose sums are wrong on this CPU, as a trial "
        "on noise shows"
    )
    return {name: why for node in wrong for name in operators_of(node)}


def refused_sizes(module: fx.GraphModule) -> dict[str, str]:
    """Return what a report says about sizes for which a packed graph computes convolutions in fp32.

    {} if there are none.
    """
    found = {node: wrong_sizes(module, node) for node in module.graph.nodes if is_guarded(node)}
    texts = [
        f"{operators_of(node)[0]} ({'; '.join(map(_shape, sizes))})" for node, sizes in found.items() if sizes
    ]
    return {"wrong sums, so in fp32": ", ".join(texts)} if texts else {}


def _packs_convolution(node: fx.Node) -> bool:
    """Return whether a node is a convolution of torch's, which reads a packed weight."""
    return is_guarded(node) or (
        isinstance(node.target, torch._ops.OpOverload) and str(node.target).startswith("onednn.qconv")
    )


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
