"""Bias correction: subtract the mean error of quantization in each output channel from the bias.

`b += E[y_fp32] - E[y_int8]` per output channel over calibration samples (Nagel et al., arXiv 1906.04721, section 4.2, the empirical
form), in execution order: each operator is corrected with the corrected operators in front of it, in one pass over the graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import Batch, Bound, Context, Needs, Stage, State, Tap
from nc.algorithms.replay import channel_axis
from nc.graph.catalogue import WEIGHTED, kind_of_node
from nc.graph.fx_utils import add_constant, constant_of, replace_constant
from nc.graph.views import Weighted
from nc.plan import Applied, Plan

#: Multiply-adds of fp32 compute after which no further batch is taken: seconds on two cores, 140 MiniLM samples or 50 of ResNet-50.
MAC_BUDGET = 2e11
#: A node and its values for all batches → what they become.
_Hook = Callable[[fx.Node, list[torch.Tensor]], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class BiasCorrection:
    """Subtract the mean quantization error of each output channel from the bias. It has no options."""

    name: ClassVar[str] = "bias_correction"
    stage: ClassVar[Stage] = Stage.CODES

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Each operator's mean fp32 output per channel."""
        nodes = _targets(module, {d.operator for d in plan.quantized})
        taps = (Tap(n.meta["operator"], "output", functools.partial(_add_up, node=n)) for n in nodes)
        return Needs(samples=Bound(macs=MAC_BUDGET), taps=tuple(taps))

    def apply(self, context: Context) -> Applied:
        """Correct the biases of the QDQ graph in place."""
        if not context.observed:
            why = "no int8 operator has a weight" if context.batches else "no calibration samples were kept, each batch is too large"
            return Applied(self.name, (), f"nothing: {why}")
        assert context.quantized is not None
        means = {operator: state["sum"] / int(state["positions"]) for (operator, _), state in context.observed.items()}
        operators = correct_biases(context.quantized, means, context.batches)
        return Applied(self.name, operators, f"{len(operators)} biases corrected")


def _add_up(state: State, output: torch.Tensor, node: fx.Node) -> State:
    total, positions = _channel_sums(node, output)
    count = torch.tensor(positions, dtype=torch.int64)
    return {"sum": state["sum"] + total, "positions": state["positions"] + count} if state else {"sum": total, "positions": count}


@torch.no_grad()
def correct_biases(quantized: fx.GraphModule, means: Mapping[str, torch.Tensor], batches: Sequence[Batch]) -> tuple[str, ...]:
    """Correct the biases of a QDQ graph in place.

    Args:
        quantized: gets new bias constants.
        means: operator → mean fp32 output per channel over the batches, float64 [channels].
        batches: flat calibration inputs, each with shapes of its own.

    Returns:
        The operators corrected, in execution order.
    """
    corrected: list[str] = []

    def correct(node: fx.Node, values: list[torch.Tensor]) -> list[torch.Tensor]:
        totals = [_channel_sums(node, v) for v in values]
        mean = sum(t for t, _ in totals) / sum(n for _, n in totals)
        delta = (means[node.meta["operator"]] - mean).float()
        if not bool(torch.isfinite(delta).all()):
            return values
        _add_to_bias(quantized, node, delta)
        corrected.append(node.meta["operator"])
        shape = [-1 if d == channel_axis(node, values[0]) else 1 for d in range(values[0].dim())]
        return [v.add_(delta.reshape(shape)) for v in values]

    _run_all(quantized, batches, dict.fromkeys(_targets(quantized, set(means)), correct))
    quantized.graph.lint()
    quantized.recompile()
    return tuple(corrected)


def _targets(module: fx.GraphModule, operators: set[str]) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.meta.get("operator") in operators and kind_of_node(n) in WEIGHTED]


def _run_all(module: fx.GraphModule, batches: Sequence[Batch], hooks: Mapping[fx.Node, _Hook]) -> None:
    """Run a graph node by node over all batches at once; a hook sees a node's values for all batches and may replace them."""
    interpreters = [fx.Interpreter(module, garbage_collect_values=False) for _ in batches]
    for interpreter, batch in zip(interpreters, batches, strict=True):
        interpreter.env = {}
        interpreter.args_iter = iter(batch)
    last_use = _last_use(module)
    constant: set[fx.Node] = set()
    for node in list(module.graph.nodes):
        if node.op == "output":
            break
        if node.op == "get_attr" or (node.all_input_nodes and constant.issuperset(node.all_input_nodes)):
            constant.add(node)  # a weight: the same for every batch
            values = [interpreters[0].run_node(node)] * len(interpreters)
        else:
            values = [interpreter.run_node(node) for interpreter in interpreters]
        if node in hooks:
            values = hooks[node](node, values)
        for interpreter, value in zip(interpreters, values, strict=True):
            interpreter.env[node] = value
            for done in last_use.get(node, ()):
                del interpreter.env[done]


def _last_use(module: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Which values nobody reads after a node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    result: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        result.setdefault(node, []).append(source)
    return result


def _channel_sums(node: fx.Node, value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """float64 sum of an operator's output per channel, shape [channels], and the number of positions."""
    axis = channel_axis(node, value)
    others = [d for d in range(value.dim()) if d != axis]
    sums = value.sum(dim=others, dtype=torch.float64) if others else value.double()
    return sums, value.numel() // value.shape[axis]


def _add_to_bias(module: fx.GraphModule, node: fx.Node, delta: torch.Tensor) -> None:
    bias = Weighted.of(node).bias
    if bias is not None and bias.op != "get_attr":  # computed in the graph (Swin v2 clears part of its bias)
        constant = add_constant(module, node, f"{node.name}_bias_correction", delta, f"{node.name}.bias_correction")
        with module.graph.inserting_before(node):
            node.replace_input_with(bias, module.graph.call_function(torch.ops.aten.add.Tensor, (bias, constant)))
        return
    replace_constant(module, node, "bias", delta if bias is None else constant_of(module, bias) + delta)
