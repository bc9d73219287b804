"""Running a QDQ graph with an engine's values put in at every point: what each point should be, given what that engine had above it.

So a difference that comes from above is told from one that an operator makes itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.functional import linear

from nc.graph.functions import quantize_dequantize_dynamic, quantize_per_tensor
from nc.graph.placement import works_in_place
from nc.numerics import affine

#: In quanta: values of a dynamic operator's input that are no further from a tie may become either code.
DYNAMIC_TIE = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """What a point should be.

    Attributes:
        value: of codes the real number that is to be rounded, `x / scale + zero_point`, clamped, as float64; else the tensor itself.
        slack: how far each element may be off because codes inside its operator stand at a tie; None where none is inside.
    """

    value: torch.Tensor
    slack: torch.Tensor | None = None


def recompute(module: fx.GraphModule, inputs: Sequence[torch.Tensor], values: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, Local]:
    """Every point from the engine's values above it.

    Args:
        module: the QDQ graph.
        inputs: flat inputs.
        values: point → the engine's value; codes of quantize nodes, else tensors.
    """
    forced = _Forced(module, values)
    with torch.no_grad():
        forced.run(*inputs)
    return forced.locals


class _Forced(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, values: Mapping[fx.Node, torch.Tensor]) -> None:
        super().__init__(module)
        in_place = works_in_place(module)  # then a tensor is what it should be at the end only
        self.values = {node: v for node, v in values.items() if not in_place or node.target is quantize_per_tensor}
        self.late = set(values) - set(self.values)
        self.locals: dict[fx.Node, Local] = {}
        self.slacks: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        """The engine's value at a point, the graph's own elsewhere."""
        value = super().run_node(node)
        arguments, _ = self.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            self.locals |= {leaf: Local(self.env[leaf]) for leaf in node.args[0] if leaf in self.late}
        elif node.target is quantize_dequantize_dynamic:
            self.slacks[node] = _slack(*arguments)
        if node not in self.values:
            return value
        if node.target is quantize_per_tensor:
            x, scale, zero_point, low, high = arguments
            self.locals[node] = Local((x.double() / scale + zero_point).clamp_(low, high))
        elif node.args and node.args[0] in self.slacks:
            self.locals[node] = Local(value, linear(self.slacks[node.args[0]], arguments[1].abs()))
        else:
            self.locals[node] = Local(value)
        # in the graph's own layout: what follows may be a view
        return torch.empty_like(value).copy_(self.values[node])


def _slack(x: torch.Tensor, per_token: bool, quant_min: int, quant_max: int, symmetric: bool) -> torch.Tensor:  # noqa: FBT001
    """One quantum for each element that stands at a tie, else 0; arguments as in `quantize_dequantize_dynamic`."""
    if not x.numel():
        return torch.zeros_like(x)
    low, high = (x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)) if per_token else torch.aminmax(x)
    scale, _ = affine.choose_qparams(low, high, quant_min=quant_min, quant_max=quant_max, symmetric=symmetric)
    position = x.double() / scale
    return ((position - position.floor() - 0.5).abs() <= DYNAMIC_TIE) * scale
