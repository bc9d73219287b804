"""Run a QDQ graph with an engine's values at every compared tensor.

It gives the expected value of each tensor for the inputs that the engine had.

This separates the error of an operator from errors of earlier operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.fx_utils import run_with
from nc.graph.placement import works_in_place
from nc.graph.views import Quantize
from nc.ops import quantize_per_tensor
from nc.proof.rounding_bounds import position, slack_of


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """What a point should be.

    Attributes:
        value: of codes the real number that is to be rounded, `x / scale + zero_point`, clamped, as float64;
            else the tensor itself.
        slack: how far each element may be off, in the units of `value`, because of ties between this point
            and those above; see `nc.proof.rounding_bounds`. None where there are none.
    """

    value: torch.Tensor
    slack: torch.Tensor | None = None


def recompute(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], values: Mapping[fx.Node, torch.Tensor]
) -> dict[fx.Node, Local]:
    """Every point from the engine's values above it.

    Args:
        module: the QDQ graph.
        inputs: flat inputs.
        values: point → the engine's value; codes of quantize nodes, else tensors.
    """
    forced = _Forced(module, values)
    run_with(module, inputs, forced.see)
    return forced.locals


class _Forced:
    def __init__(self, module: fx.GraphModule, values: Mapping[fx.Node, torch.Tensor]) -> None:
        in_place = works_in_place(module)  # then a tensor is what it should be at the end only
        self.values = {
            node: v for node, v in values.items() if not in_place or node.target is quantize_per_tensor
        }
        self.late = set(values) - set(self.values)
        self.locals: dict[fx.Node, Local] = {}
        self.slacks: dict[fx.Node, Any] = {}

    def see(self, node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        """Return the engine's value at a point, the graph's own elsewhere."""
        if node.op == "output":
            self.locals |= {
                leaf: Local(env[leaf], self.slacks.get(leaf))
                for leaf in node.all_input_nodes
                if leaf in self.late
            }
        if node not in self.values:
            slack = slack_of(node, value, env, self.slacks) if node.op == "call_function" else None
            if slack is not None:
                self.slacks[node] = slack
            return value
        if node.target is quantize_per_tensor:
            codes = Quantize.of(node)
            slack = self.slacks[codes.input] / codes.scale if codes.input in self.slacks else None
            self.locals[node] = Local(position(env[codes.input], codes), slack)
        else:
            self.locals[node] = Local(value, slack_of(node, value, env, self.slacks))
        # in the graph's own layout: what follows may be a view
        return torch.empty_like(value).copy_(self.values[node])
