"""The dead-channel watch.

It finds output channels whose codes are all 0, or that a ReLU makes 0 at every position of the kept samples.

It changes nothing; what it finds is part of the report (docs/how-to/accuracy-dropped.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import Bound, Context, Needs, Stage, State, Tap, codes_of
from nc.algorithms.bias_correction import MAC_BUDGET
from nc.graph.catalogue import WEIGHTED, kind_of_node, op_name, schema_arguments, weight_axis
from nc.graph.fx_utils import constant_of
from nc.graph.plan import Applied, Plan
from nc.graph.qdq import Finding
from nc.graph.views import Weighted

#: Minimum positions before a channel that was never above 0 is reported.
POSITIONS = 32
#: Arguments of activations that cut off what is below them.
_LOWER_ENDS = {"hardtanh": "min_val", "clamp": "min", "clamp_min": "min"}


@dataclasses.dataclass(frozen=True, slots=True)
class DeadChannels:
    """See the module text; has nothing to set."""

    name: ClassVar[str] = "dead_channels"
    stage: ClassVar[Stage] = Stage.CODES

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return the outputs of int8 operators before a ReLU."""
        names = {d.operator for d in plan.quantized}
        watched = [n for n in module.graph.nodes if n.meta.get("operator") in names and _is_before_relu(n)]
        axes = {
            n.meta["operator"]: -1
            if kind_of_node(n) == "linear"
            else 1 - Weighted.of(n).weight.meta["val"].dim()
            for n in watched
        }
        taps = tuple(
            Tap(name, "output", functools.partial(never_above_0, axis=axis)) for name, axis in axes.items()
        )
        return Needs(samples=Bound(macs=MAC_BUDGET), taps=taps)

    def apply(self, context: Context) -> Applied:
        """Add a finding per operator with dead channels."""
        assert context.quantized is not None
        names = {d.operator for d in context.plan.quantized}
        found = 0
        for node in context.quantized.graph.nodes:
            axis = (
                weight_axis(node)
                if node.meta.get("operator") in names and kind_of_node(node) in WEIGHTED
                else None
            )
            codes = codes_of(Weighted.of(node).weight) if axis is not None else None
            if axis is None or codes is None:
                continue
            finding = _finding(
                node.meta["operator"], constant_of(context.quantized, codes).transpose(0, axis), context
            )
            if finding is not None:
                context.findings.append(finding)
                found += 1
        positions = max((int(state["positions"]) for state in context.observed.values()), default=0)
        watched = f"watched {len(context.observed)} operators before a ReLU, over up to {positions} positions"
        if not context.batches:
            watched = "only weights looked at, since no calibration samples were kept"
        return Applied(self.name, (), f"{watched}; {found} operators have dead channels")


def never_above_0(state: State, output: torch.Tensor, axis: int) -> State:
    """Note which channels of an operator's output were never above 0.

    After the first batches few are left to look at.

    Args:
        state: positions, int64 []: how many were seen per channel; silent, int64: indices of those channels.
        output: of one batch.
        axis: of the channels, counted from the end.
    """
    if not output.numel():
        return state
    channels = output.shape[axis]
    silent = state.get("silent", torch.arange(channels))
    positions = state.get("positions", torch.tensor(0, dtype=torch.int64)) + output.numel() // channels
    rest = output if len(silent) == channels else output.index_select(axis, silent)
    others = [d for d in range(rest.dim()) if d != axis % rest.dim()]
    if rest.numel():
        silent = silent[(rest.amax(others) if others else rest) <= 0]
    return {"positions": positions, "silent": silent}


def _finding(operator: str, codes: torch.Tensor, context: Context) -> Finding | None:
    """Return the finding for one operator, if any; `codes` has the output channels first."""
    zero = codes.flatten(1).eq(0).all(1)
    text, silent = f"{int(zero.sum())} with all weights 0", torch.zeros_like(zero)
    state = context.observed.get((operator, "output"), {})
    if state and state["positions"] >= POSITIONS:
        silent[state["silent"]] = True
        text += (
            f", {int((silent & ~zero).sum())} never above 0 before the ReLU at "
            f"{int(state['positions'])} positions"
        )
    dead = int((zero | silent).sum())
    if not dead:
        return None
    return Finding(
        "dead_channels",
        operator,
        dead / len(zero),
        f"{dead} of {len(zero)} output channels carry nothing: {text}",
    )


def _is_before_relu(node: fx.Node) -> bool:
    return kind_of_node(node) in WEIGHTED and bool(node.users) and all(map(_cuts_negatives, node.users))


def _cuts_negatives(node: fx.Node) -> bool:
    name = op_name(node).rstrip("_")
    return name in ("relu", "relu6") or (
        name in _LOWER_ENDS and schema_arguments(node)[_LOWER_ENDS[name]] == 0
    )
