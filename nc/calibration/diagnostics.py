"""Is this calibration good enough? What the statistics and the chosen ranges say, as findings that the report shows.

Four questions: do values fall outside of a range, did a range still grow when the data ended, are there channels that carry nothing, and
did every operator run at all. A threshold says what is worth a line; none of it changes what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from nc.calibration.observe import observer_key
from nc.calibration.statistics import Collected
from nc.graph.catalogue import WEIGHTED, first_input, op_name, schema_arguments, weight_axis
from nc.graph.fx_utils import copy_module
from nc.graph.placement import Edge, edge_key
from nc.graph.qdq import Finding
from nc.observers.base import Seen, State
from nc.observers.histogram import HISTOGRAM, occupied
from nc.plan import Plan
from nc.spec import QParams, TensorSpec

NEVER_RAN = "never executed during calibration"
#: In the order in which they are shown: a later one can be the consequence of an earlier one.
KINDS = ("never_ran", "still_growing", "saturation", "dead_channels")
#: Share of a tensor's values outside of its range. Clipping algorithms leave out 0.01 % of well-behaved data.
SATURATION = 1e-3
#: Share of a range that came in the last tenth of the batches. Of normally distributed data it is 1 or 2 %.
GROWTH = 0.05
#: A channel that was not above 0 at fewer positions than these may have had no luck.
POSITIONS = 32
#: Arguments of activations that cut off what is below them.
_LOWER_ENDS = {"hardtanh": "min_val", "clamp": "min", "clamp_min": "min"}


def examine(
    module: fx.GraphModule,
    plan: Plan,
    edges: Sequence[Edge],
    qparams: Mapping[tuple[str, TensorSpec], QParams],
    found: Collected,
    watches: Watches,
) -> tuple[Finding, ...]:
    """All findings: by kind in the order of `KINDS`, the worst of each first.

    Args:
        module: the QDQ graph.
        plan: what was decided after calibration.
        edges: its quantized inputs; those of one tensor give one finding, under the first operator.
        qparams: their ranges, by `placement.edge_key`.
        found: the statistics that these come from.
        watches: from `watched`, after samples ran through it; empty when none did.
    """
    missing = [d.operator for d in plan.decisions if d.reason == NEVER_RAN]
    findings = [Finding("never_ran", name, 1.0, f"{NEVER_RAN}: use data that reaches it") for name in missing]
    for key, edge in {edge_key(e): e for e in reversed(edges)}.items():
        name = observer_key(edge)
        findings += _of_input(edge, qparams[key], found.states[name], found.seen[name])
    order = {d.operator: i for i, d in enumerate(plan.decisions)}
    findings += _of_weights(module, plan, watches)
    return tuple(sorted(findings, key=lambda f: (KINDS.index(f.kind), -f.value, order[f.operator])))


def _of_input(edge: Edge, qparams: QParams, state: State, seen: Seen) -> Iterator[Finding]:
    tensor = "its second input" if edge.index else "its input"
    share = late_growth(seen, qparams)
    if share is not None and share > GROWTH:
        text = f"{share:.0%} of the range of {tensor} came in the last {_late(seen)} of {seen.batches} batches: use more data"
        yield Finding("still_growing", edge.operator, share, text)
    share = saturation(state, seen, qparams)
    if share is not None and share > SATURATION:
        yield Finding("saturation", edge.operator, share, f"{share:.2%} of the values of {tensor} lie outside of its int8 range")


def saturation(state: State, seen: Seen, qparams: QParams) -> float | None:
    """Share of the calibration values that no code is near to: more than half a step outside of the range.

    None when that is not known: values were clipped, and no histogram was collected (moving averages).
    """
    low, high = _range(qparams, margin=0.5)
    extremes = seen.extremes(seen.batches)
    if extremes is not None and low <= extremes[0] and extremes[1] <= high:
        return 0.0
    if state.keys() != HISTOGRAM.start.keys():
        return None
    values, counts = occupied(state)
    return float(counts[(values < low) | (values > high)].sum() / counts.sum())


def late_growth(seen: Seen, qparams: QParams) -> float | None:
    """Share of the range in use that the last tenth of the batches brought; what the codes leave out does not count.

    None for fewer than 10 batches, which have no last tenth, and when the history is not known.
    """
    before, after = seen.extremes(seen.batches - _late(seen)) if _late(seen) else None, seen.extremes(seen.batches)
    if before is None or after is None:
        return None
    whole = _width(after, qparams)
    return 1.0 - _width(before, qparams) / whole if whole else 0.0


def _late(seen: Seen) -> int:
    return seen.batches // 10


def _range(qparams: QParams, margin: float = 0.0) -> tuple[float, float]:
    """What the codes can hold, and `margin` steps more on each side."""
    spec, scale, zero_point = qparams.spec, float(qparams.scale), int(qparams.zero_point)
    return (spec.quant_min - zero_point - margin) * scale, (spec.quant_max - zero_point + margin) * scale


def _width(extremes: tuple[float, float], qparams: QParams) -> float:
    """How much of the range values between these extremes need: it always holds 0, and symmetric codes have one width for both sides."""
    low, high = _range(qparams)
    left, right = max(min(extremes[0], 0.0), low), min(max(extremes[1], 0.0), high)
    return max(-left, right) if qparams.spec.symmetric else right - left


def _of_weights(module: fx.GraphModule, plan: Plan, watches: Watches) -> Iterator[Finding]:
    """Output channels whose codes are all 0, or that a ReLU makes 0 at every position that was watched."""
    names = {d.operator for d in plan.quantized}
    for node in module.graph.nodes:
        axis = weight_axis(node) if node.meta.get("operator") in names and op_name(node) in WEIGHTED else None
        codes = first_input(node.args[1]) if axis is not None else None
        if codes is None or codes.op != "get_attr":
            continue
        name = node.meta["operator"]
        zero = getattr(module, codes.target).transpose(0, axis).flatten(1).eq(0).all(1)
        text, silent = f"{int(zero.sum())} with all weights 0", torch.zeros_like(zero)
        watch = watches.get(name)
        if watch is not None and watch.positions >= POSITIONS:
            silent[watch.silent] = True
            text += f", {int((silent & ~zero).sum())} never above 0 in front of the ReLU at {watch.positions} positions"
        dead = int((zero | silent).sum())
        if dead:
            yield Finding("dead_channels", name, dead / len(zero), f"{dead} of {len(zero)} output channels carry nothing: {text}")


class ChannelWatch(torch.nn.Module):
    """Notes which channels of an operator's output were never above 0.

    After the first batches few channels are left to look at, so it costs next to nothing.

    Attributes:
        axis: of the channels, counted from the end.
        positions: per channel, so far.
        silent: indices of those channels, int64; None before the first batch.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.positions = 0
        self.silent: torch.Tensor | None = None

    def forward(self, output: torch.Tensor) -> None:
        """Look at one batch."""
        if not output.numel():
            return
        channels = output.shape[self.axis]
        self.positions += output.numel() // channels
        if self.silent is None:
            self.silent = torch.arange(channels)
        rest = output if len(self.silent) == channels else output.index_select(self.axis, self.silent)
        others = [d for d in range(rest.dim()) if d != self.axis % rest.dim()]
        if rest.numel():
            self.silent = self.silent[(rest.amax(others) if others else rest) <= 0]


#: By operator name.
Watches = Mapping[str, ChannelWatch]


def watched(module: fx.GraphModule, plan: Plan) -> tuple[fx.GraphModule, Watches]:
    """A copy of a captured graph, sharing its constants, that watches the int8 operators in front of a ReLU.

    Whoever runs it over samples anyway, as bias correction does, feeds the watches.

    Returns:
        The copy, and the watches by operator name.
    """
    copy, mapping = copy_module(module)
    graph = copy.graph
    watches: dict[str, ChannelWatch] = {}
    names = {d.operator for d in plan.quantized}
    for node in module.graph.nodes:
        if node.meta.get("operator") in names and op_name(node) in WEIGHTED and node.users and all(map(_cuts_negatives, node.users)):
            name = node.meta["operator"]
            watches[name] = ChannelWatch(-1 if op_name(node) == "linear" else 1 - node.args[1].meta["val"].dim())
            copy.add_submodule(f"watch_{len(watches)}", watches[name])
            with graph.inserting_after(mapping[node]):
                graph.call_module(f"watch_{len(watches)}", (mapping[node],))
    copy.recompile()
    return copy, watches


def _cuts_negatives(node: fx.Node) -> bool:
    name = op_name(node).rstrip("_")
    return name in ("relu", "relu6") or (name in _LOWER_ENDS and schema_arguments(node)[_LOWER_ENDS[name]] == 0)
