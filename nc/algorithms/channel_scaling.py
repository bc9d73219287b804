"""Channel scaling: channels of an activation become equally large, and the layers around it take the scale.

A tensor has one range, and a channel that covers a hundredth of it uses two of its codes. If only additions
and operators with `f(s x) = s f(x)` are between the layers that produce a tensor and those that read it, each
channel can be scaled up by a factor that the weights after it divide out. The factor is the s of SmoothQuant
(arXiv 2211.10438, equation 4) in the direction of cross-layer equalization (arXiv 1906.04721, section 4.1).
It costs nothing at run time.

Channels that never reach a clip (ReLU6) in calibration are scaled too, at most up to the clip.

How far channels become alike minimises the expected error of the tensor's codes and of the weights that read
it. For depthwise convolutions, whose weights have a scale for each channel, that is all the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import Bound, Context, Needs, Stage
from nc.algorithms.equalization import (
    HOMOGENEOUS,
    LARGEST_SCALE,
    SPATIAL,
    channel_axis,
    constant_reads,
    grouped,
    is_layer,
    rescale,
)
from nc.calibration.observe import Watch, observed_module
from nc.graph.catalogue import (
    computed_options,
    first_input,
    is_transposed,
    kind_of_node,
    op_name,
    schema_arguments,
)
from nc.graph.fx_utils import constant_of, copy_module
from nc.graph.placement import works_in_place
from nc.graph.plan import Applied, Plan
from nc.graph.tensor_meta import same_shape
from nc.graph.views import Binary, Weighted
from nc.observers import ALGORITHMS
from nc.observers.base import State
from nc.observers.channels import extremes_along
from nc.observers.minmax import EXTREMES

#: Exponents that are tried; 0 leaves channels as they are.
_POWERS = tuple(step / 8 for step in range(9))
#: Largest code of a weight, and steps of an activation's range.
_WEIGHT_STEPS, _STEPS = 127.0, 255.0
#: Channels grow up to this part of the range: other data may have larger values than calibration has.
_ROOM = 1.25
_CLIPS = frozenset({"relu6", "hardtanh", "clamp"})


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelRegion:
    """Tensors whose channels share their scale.

    Attributes:
        producers: layers whose outputs they are.
        tensors: outputs of producers and of the operators after them; all have the channels along `axis`.
        consumers: layers that read them.
        clips: those of the tensors that a clip gives, and its limits.
        axis: of the channels, counted from the end.
    """

    producers: tuple[fx.Node, ...]
    tensors: tuple[fx.Node, ...]
    consumers: tuple[fx.Node, ...]
    clips: Mapping[fx.Node, tuple[float, float]]
    axis: int

    @property
    def coded(self) -> list[fx.Node]:
        """The tensors that are quantized: the ones that layers and additions read."""
        readers = {*self.consumers, *(node for node in self.tensors if kind_of_node(node) == "add")}
        return [node for node in self.tensors if not readers.isdisjoint(node.users)]


def regions(module: fx.GraphModule) -> Iterator[ChannelRegion]:
    """Yield the regions of a graph; a layer is a producer in at most one, and a consumer in at most one."""
    reads = constant_reads(module)
    done: set[fx.Node] = set()
    for node in module.graph.nodes:
        if not is_layer(node) or node in done:
            continue
        region = _region_of(node)
        if region is None:
            continue
        done.update(region.producers)
        layers = (*region.producers, *region.consumers)
        alone = all(reads[constant_of(module, Weighted.of(n).weight).data_ptr()] == 1 for n in layers)
        if alone and region.consumers and not any(map(is_transposed, region.consumers)):
            yield region


def _region_of(first: fx.Node) -> ChannelRegion | None:
    """Return the region of a layer's output; None where something in it does not scale, or reads it too."""
    axis = channel_axis(first)
    tensors: dict[fx.Node, None] = {}
    consumers: dict[fx.Node, None] = {}
    clips: dict[fx.Node, tuple[float, float]] = {}
    open_ = [first]
    while open_:
        node = open_.pop()
        if node in tensors:
            continue
        tensors[node] = None
        if is_layer(node):
            if channel_axis(node) != axis:
                return None
        else:
            sources = _scaled_sources(node, axis)
            if sources is None:
                return None
            open_ += sources
            if op_name(node) in _CLIPS:
                clips[node] = _limits(node)
        for user in node.users:
            if is_layer(user):
                if first_input(user) is not node or channel_axis(user) != axis:
                    return None
                consumers[user] = None
            else:
                open_.append(user)
    producers = tuple(node for node in tensors if is_layer(node))
    return ChannelRegion(producers, tuple(tensors), tuple(consumers), clips, axis)


def _scaled_sources(node: fx.Node, axis: int) -> list[fx.Node] | None:
    """Return what a node reads, if it gives s times as much for s times as much; else None."""
    name = op_name(node)
    if kind_of_node(node) == "add":
        sum_ = Binary.of(node)
        sides = [side for side in sum_.sides if isinstance(side, fx.Node)]
        alike = len(sides) == 2 and same_shape(*(side.meta["val"].shape for side in sides))
        return sides if alike else None
    source = first_input(node)
    if source is None:
        return None
    if computed_options(node):
        return None
    if name in _CLIPS:
        low, high = _limits(node)
        return [source] if low in (0.0, -math.inf) or low < 0 < high else None
    if name in HOMOGENEOUS:
        return [source]
    dims = name[-2:-1]
    return [source] if name in SPATIAL and dims.isdigit() and -axis > int(dims) else None


def _limits(node: fx.Node) -> tuple[float, float]:
    """Return the lower and the upper limit of a clip."""
    if op_name(node) == "relu6":
        return 0.0, 6.0
    a, ending = schema_arguments(node), "_val" if op_name(node) == "hardtanh" else ""
    low, high = a.get(f"min{ending}"), a.get(f"max{ending}")
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelScaling:
    """Scale channels between layers with static int8, see the module text. It has no options."""

    name: ClassVar[str] = "channel_scaling"
    stage: ClassVar[Stage] = Stage.STATISTICS

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return the extremes of each channel."""
        if works_in_place(module):
            return Needs()
        return Needs(
            tuple(
                Watch(node, next(iter(node.users)), extremes_along(region.axis), _operator(region))
                for region in regions(module)
                if _is_static(region, plan)
                for node in region.tensors
            ),
            Bound(),
        )

    def apply(self, context: Context) -> Applied:
        """Scale channels of a copy of the fp32 graph, and what is known of its tensors."""
        assert context.found is not None
        if works_in_place(context.module):
            return Applied(self.name, (), "nothing: the model changes tensors in place")
        states = dict(context.found.states)
        module, _ = copy_module(context.module)
        changed: list[str] = []
        scaled: set[str] = set()
        with torch.no_grad():
            for region in list(regions(module)):
                key = extremes_along(region.axis).name
                known = [states.get((node.name, key)) for node in region.tensors]
                if not _is_static(region, context.plan) or any(state is None for state in known):
                    continue
                ranges = {
                    node: (state["low"].double(), state["high"].double())
                    for node, state in zip(region.tensors, known, strict=True)
                    if state is not None
                }
                scale = best_scale(module, region, ranges)
                if bool((scale == 1).all()):
                    continue
                _rescaled(module, region, scale)
                states |= _scaled_states(states, region, ranges, scale, key)
                scaled |= {node.name for node in region.tensors}
                changed += [str(node.meta["operator"]) for node in (*region.producers, *region.consumers)]
        module.graph.lint()
        module.recompile()
        context.module = module
        states |= _observed_again(context, states, scaled)
        context.found = dataclasses.replace(context.found, states=states)
        names = tuple(dict.fromkeys(changed))
        why = "" if names else ": there are no channels between layers that could be made alike"
        return Applied(self.name, names, f"{len(names)} operators scaled{why}")


def _operator(region: ChannelRegion) -> str:
    return str(region.producers[0].meta["operator"])


def _is_static(region: ChannelRegion, plan: Plan) -> bool:
    """Whether a layer in static int8 reads the region, and each layer has a scale for each output channel."""
    specs = {d.operator: d.spec for d in plan.decisions}
    layers = [specs[node.meta["operator"]] for node in (*region.producers, *region.consumers)]
    reads = any(specs[node.meta["operator"]].mode == "static" for node in region.consumers)
    return reads and all(s.weight is None or s.weight.granularity.name == "per_channel" for s in layers)


def _observed_again(
    context: Context, states: Mapping[tuple[str, str], State], names: set[str]
) -> dict[tuple[str, str], State]:
    """Return the statistics of scaled tensors that do not follow from their extremes, of the kept samples."""
    nodes = {node.name: node for node in context.module.graph.nodes}
    watches = [
        Watch(nodes[name], next(iter(nodes[name].users)), statistic, name)
        for statistic in {a.statistic.name: a.statistic for a in ALGORITHMS.values()}.values()
        for name in sorted(names)
        if statistic is not EXTREMES and (name, statistic.name) in states
    ]
    if not watches:
        return {}
    copy, observers = observed_module(context.module, watches)
    with torch.no_grad():
        for batch in context.batches:
            copy(*batch)
    return {key: observer.state for key, observer in observers.items()}


def best_scale(
    module: fx.GraphModule,
    region: ChannelRegion,
    ranges: Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return what channels are multiplied by, float64, shape [channels]: the power with the least error.

    Args:
        module: has the weights.
        region: of channels.
        ranges: extremes of each channel of each tensor, float64, shape [channels].
    """
    sizes = torch.stack(
        [torch.maximum(-low, high) for low, high in map(ranges.__getitem__, region.coded)]
    ).amax(0)
    sizes = torch.minimum(_ROOM * sizes, sizes.max()).clamp(min=float(sizes.max()) / LARGEST_SCALE)
    if not bool((sizes > 0).all()) or not bool(sizes.isfinite().all()):
        return torch.ones_like(sizes)
    limits = torch.full_like(sizes, math.inf)
    for node, (least, most) in region.clips.items():
        low, high = ranges[node]
        if least < 0:
            limits = torch.minimum(limits, least / (_ROOM * low).clamp(max=-1e-30))
        limits = torch.minimum(limits, most / (_ROOM * high).clamp(min=1e-30))

    def scale(power: float) -> torch.Tensor:
        # what reaches a clip stays as it is
        return torch.minimum((sizes.max() / sizes) ** power, limits.clamp(min=1))

    return min((scale(power) for power in _POWERS), key=lambda s: _expected_error(module, region, ranges, s))


def _expected_error(
    module: fx.GraphModule,
    region: ChannelRegion,
    ranges: Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]],
    scale: torch.Tensor,
) -> float:
    """Return the power of the expected rounding errors of what reads a region, relative to its results.

    Codes are taken for uniform noise, and values for uniform in the range of their channel.
    """
    total = 0.0
    for layer in region.consumers:
        source = first_input(layer)
        assert source is not None
        low, high = (each * scale for each in ranges[source])
        step = float(high.max().clamp(min=0) - low.min().clamp(max=0)) / _STEPS
        power = torch.maximum(-low, high).square() / 3
        weight = grouped(layer, constant_of(module, Weighted.of(layer).weight)).double()
        groups, _, inputs, taps = weight.shape
        per_input = scale.view(groups, 1, inputs, 1)
        power = power.view(groups, 1, inputs)
        scaled = weight / per_input
        squares = scaled.square().sum(3)
        of_codes = step**2 / 12 * squares.sum()
        steps = scaled.abs().amax((2, 3)) / _WEIGHT_STEPS
        of_weights = (steps.square() / 12 * taps * power.sum(2)).sum()
        total += float((of_codes + of_weights) / (squares * power).sum().clamp(min=1e-300))
    for node in region.tensors:
        if kind_of_node(node) == "add":
            low, high = (each * scale for each in ranges[node])
            step = float(high.max().clamp(min=0) - low.min().clamp(max=0)) / _STEPS
            power = (torch.maximum(-low, high) / scale).square() / 3
            total += float((step**2 / 12 / scale.square()).sum() / power.sum().clamp(min=1e-300))
    return total


def _rescaled(module: fx.GraphModule, region: ChannelRegion, scale: torch.Tensor) -> None:
    """Multiply the outputs of producers and divide the inputs of consumers; a layer can be both."""
    for layer in region.producers:
        rescale(module, layer, scale, None)
    for layer in region.consumers:
        rescale(module, layer, None, 1 / scale)


def _scaled_states(
    states: Mapping[tuple[str, str], State],
    region: ChannelRegion,
    ranges: Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]],
    scale: torch.Tensor,
    key: str,
) -> dict[tuple[str, str], State]:
    """Return what is known of the scaled tensors."""
    found: dict[tuple[str, str], State] = {}
    for node in region.tensors:
        low, high = (each * scale for each in ranges[node])
        found[node.name, key] = {"low": low.float(), "high": high.float()}
        if (node.name, EXTREMES.name) in states:
            found[node.name, EXTREMES.name] = {"low": low.amin().float(), "high": high.amax().float()}
    return found
