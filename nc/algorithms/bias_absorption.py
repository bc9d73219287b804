"""Bias absorption: move the constant part of a channel from one layer's bias to the next.

See Nagel et al., arXiv 1906.04721, section 4.1.3.

Equalization can leave channels with a large bias, which stretch the one range that all channels of an
activation share. Where a value x is above c nearly always, `relu(x) = relu(x - c) + c`: the first layer
subtracts c, the second adds `W c` (equations 15 and 16).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import NOTHING, Context, Needs, Stage
from nc.algorithms.equalization import Pair, grouped, pairs
from nc.formats.checks import is_number, require
from nc.graph.catalogue import is_transposed, op_name, schema_arguments
from nc.graph.fx_utils import constant_of, replace_constant
from nc.graph.plan import Applied, Plan
from nc.graph.views import Weighted


@dataclasses.dataclass(frozen=True, slots=True)
class BiasAbsorption:
    """Absorb high biases of all layers that are followed by a relu and one other layer.

    It needs no data: `c = max(0, mean - n_sigma * std)` of each channel, with the mean and deviation of the
    folded batch norm. The function changes only for values below c: 0.135 % of a normal distribution for
    n_sigma = 3. The second layer must not be a transposed convolution and must have no padding, because
    padded zeros contain no c.

    Attributes:
        n_sigma: standard deviations between mean and c.

    Raises:
        ConfigError: n_sigma is not a number from 0.
    """

    n_sigma: float = 3.0
    name: ClassVar[str] = "bias_absorption"
    stage: ClassVar[Stage] = Stage.FLOAT

    def __post_init__(self) -> None:
        require(is_number(self.n_sigma) and self.n_sigma >= 0, "n_sigma", "a number from 0", self.n_sigma)

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """No data: the means are those of batch norms."""
        return NOTHING

    def apply(self, context: Context) -> Applied:
        """`change` the fp32 graph."""
        operators = self.change(context.module)
        why = (
            ""
            if operators
            else ": no layer after a batch norm and before a relu has channels that always exceed 0"
        )
        return Applied(self.name, operators, f"{len(operators)} operators changed{why}")

    @torch.no_grad()
    def change(self, module: fx.GraphModule) -> tuple[str, ...]:
        """Absorb in place; biases are replaced by new constants. A second time finds nothing left to absorb.

        Returns:
            Names of the operators whose biases changed, in execution order.
        """
        changed = set()
        for pair in pairs(module):
            if "output_mean" not in pair.first.meta or not _is_exact(pair):
                continue
            mean = pair.first.meta["output_mean"]
            below = torch.minimum(mean, self.n_sigma * pair.first.meta["output_std"])
            if bool((mean > below).any()):
                _absorb(module, pair, mean - below)
                pair.first.meta["output_mean"] = below
                changed |= {pair.first, pair.second}
        module.graph.lint()
        module.recompile()
        return tuple(n.meta["operator"] for n in module.graph.nodes if n in changed)


def _is_exact(pair: Pair) -> bool:
    """Tell whether every output of the second layer reads c from every input, and only a relu is between."""
    is_padded = any(schema_arguments(pair.second).get("padding", ()))
    return [op_name(n) for n in pair.between] == ["relu"] and not is_transposed(pair.second) and not is_padded


def _absorb(module: fx.GraphModule, pair: Pair, c: torch.Tensor) -> None:
    """Subtract c, float64 [channels], from the first layer's bias and add `W c` to the second layer's."""
    weight = constant_of(module, Weighted.of(pair.second).weight)
    matrix = grouped(pair.second, weight.double()).sum(3)
    added = torch.einsum("goi,gi->go", matrix, c.view(matrix.shape[0], -1)).flatten()
    for layer, shift in ((pair.first, -c), (pair.second, added)):
        bias = Weighted.of(layer).bias
        value = shift if bias is None else constant_of(module, bias).double() + shift
        replace_constant(module, layer, "bias", value.to(weight.dtype))
