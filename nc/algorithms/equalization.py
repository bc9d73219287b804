"""Cross-layer equalization: make the ranges of channels equal without changing the function.

See Nagel et al., arXiv 1906.04721, section 4.1.

If only positively homogeneous operators (`f(s x) = s f(x)` for s > 0) are between two layers, the first layer
can scale a channel up and the second scale it down. Equation 11 gives the scales that make the ranges of both
sides of each channel equal.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import NOTHING, Context, Needs, Stage
from nc.formats.checks import is_number, require
from nc.graph.catalogue import (
    POOLS,
    WEIGHTED,
    computed_options,
    first_input,
    groups_of,
    input_node,
    is_transposed,
    kind_of_node,
    op_name,
    schema_arguments,
)
from nc.graph.fx_utils import constant_of, replace_constant
from nc.graph.plan import Applied, Plan
from nc.graph.views import Weighted

#: Elementwise operators with `f(s x) = s f(x)` for s > 0.
HOMOGENEOUS = frozenset({"relu", "leaky_relu", "prelu", "clone", "contiguous"})
#: Homogeneous operators that work on the last dimensions, as many as their name says ("max_pool2d"), and not
#: across the others.
SPATIAL = POOLS | {"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d"}
#: No channel is scaled by more: dead channels (weights of 1e-20) would get biases that no activation range
#: survives.
LARGEST_SCALE = 1e4


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two layers with only homogeneous operators between them, which nothing else reads.

    Attributes:
        first: the layer whose outputs are the channels.
        second: the layer that reads them; a linear after a flatten reads each channel as a block of inputs.
        between: the operators from the first to the second.
    """

    first: fx.Node
    second: fx.Node
    between: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Equalization:
    """Equalize all pairs of a captured graph.

    Not changed: channels whose weights are all zero (or not finite) on one side, and layers that share a
    weight with another layer.

    Attributes:
        iterations: maximum number of passes over all pairs. A single pair needs one pass; a chain needs
            several.
        tolerance: stop when the scales of a pass differ from 1 by less than this on average.

    Raises:
        ConfigError: iterations is not a whole number from 1, or tolerance is not a number from 0.
    """

    iterations: int = 10
    tolerance: float = 2e-7
    name: ClassVar[str] = "equalization"
    stage: ClassVar[Stage] = Stage.FLOAT

    def __post_init__(self) -> None:
        is_count = (
            isinstance(self.iterations, int)
            and not isinstance(self.iterations, bool)
            and self.iterations >= 1
        )
        require(is_count, "iterations", "a whole number from 1", self.iterations)
        require(
            is_number(self.tolerance) and self.tolerance >= 0, "tolerance", "a number from 0", self.tolerance
        )

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """No data."""
        return NOTHING

    def apply(self, context: Context) -> Applied:
        """`change` the fp32 graph."""
        operators = self.change(context.module)
        why = (
            ""
            if operators
            else ": no two layers with only homogeneous operators between them differ in their ranges"
        )
        return Applied(self.name, operators, f"{len(operators)} operators changed{why}")

    @torch.no_grad()
    def change(self, module: fx.GraphModule) -> tuple[str, ...]:
        """Equalize in place.

        Weights and biases are replaced by new constants, and `output_mean`, `output_std` are scaled with
        them.

        Returns:
            Names of the operators whose weights changed, in execution order.
        """
        reads = constant_reads(module)
        found = [
            p
            for p in pairs(module)
            if all(reads[_weight(module, layer).data_ptr()] == 1 for layer in (p.first, p.second))
        ]
        outputs: dict[fx.Node, torch.Tensor] = {}
        inputs: dict[fx.Node, torch.Tensor] = {}
        for pair, scale in zip(found, self._scales(module, found), strict=True):
            if bool((scale != 1).any()):
                outputs[pair.first], inputs[pair.second] = scale, 1 / scale
        changed = [n for n in module.graph.nodes if n in outputs or n in inputs]
        for node in changed:
            rescale(module, node, outputs.get(node), inputs.get(node))
        module.graph.lint()
        module.recompile()
        return tuple(node.meta["operator"] for node in changed)

    def _scales(self, module: fx.GraphModule, found: list[Pair]) -> list[torch.Tensor]:
        """Return what each pair's channels are multiplied by, float64 [channels].

        Only the largest weight of each connection matters.
        """
        layers = dict.fromkeys(layer for pair in found for layer in (pair.first, pair.second))
        sizes = {layer: grouped(layer, _weight(module, layer)).abs().amax(3).double() for layer in layers}
        totals = [sizes[pair.first].new_ones(sizes[pair.first].shape[:2].numel()) for pair in found]
        for _ in range(self.iterations):
            change = []
            for i, (pair, before) in enumerate(zip(found, totals, strict=True)):
                first, second = sizes[pair.first], sizes[pair.second]
                wanted = before * equalizing_scale(first, second)
                totals[i] = wanted.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
                step = totals[i] / before
                sizes[pair.first] = first * _along_outputs(first, step)
                sizes[pair.second] = second / _along_inputs(second, step)
                change.append((step - 1).abs())
            if not change or torch.cat(change).mean() < self.tolerance:
                break
        return totals


def equalizing_scale(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`sqrt(r2 / r1)` per channel, the inverse of equation 11's s: both ranges become `sqrt(r1 r2)`.

    Args:
        first: largest weights of the first layer, float64 [groups, outputs, inputs], not negative.
        second: those of the second layer, [groups, outputs, inputs]; its inputs are the channels, or equal
            blocks of them.

    Returns:
        float64 [channels]; 1 where a range is 0 or not finite.
    """
    r1 = first.amax(2).flatten()
    r2 = second.amax(1).reshape(r1.numel(), -1).amax(1)
    scale = (r2 / r1).sqrt()
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0)


def pairs(module: fx.GraphModule) -> list[Pair]:
    """All pairs of a captured graph, in execution order.

    A layer can be the second of one and the first of the next.
    """
    found = (_pair_from(node) for node in module.graph.nodes if is_layer(node))
    return [pair for pair in found if pair is not None]


def _pair_from(first: fx.Node) -> Pair | None:
    value = first
    axis: int | None = channel_axis(first)
    between: list[fx.Node] = []
    while axis is not None and len(value.users) == 1:
        (user,) = value.users
        if first_input(user) is not value:
            return None
        if is_layer(user):
            return Pair(first, user, tuple(between)) if axis == channel_axis(user) else None
        value, axis = user, axis_behind(user, axis)
        between.append(user)
    return None


def is_layer(node: fx.Node) -> bool:
    """Return whether a node is a layer in fp32 (or fp64) with constants for weight, bias and groups."""
    if kind_of_node(node) not in WEIGHTED or node.meta["val"].dtype not in (torch.float32, torch.float64):
        return False
    if computed_options(node):
        return False
    layer = Weighted.of(node)
    return layer.weight.op == "get_attr" and (layer.bias is None or layer.bias.op == "get_attr")


def channel_axis(layer: fx.Node) -> int:
    """Return the axis of a layer's channels, from the end: inputs and outputs, batched or not."""
    return 1 - int(Weighted.of(layer).weight.meta["val"].dim())


def axis_behind(node: fx.Node, axis: int) -> int | None:
    """Return the axis of the channels after a homogeneous operator, from the end.

    None if the operator is not homogeneous or mixes channels.
    """
    name = op_name(node)
    if name in HOMOGENEOUS:
        return axis
    if name in SPATIAL:
        dims = re.search(r"(\d)d", name)
        return axis if dims is not None and -axis > int(dims[1]) else None
    if name in ("squeeze", "unsqueeze"):
        return _axis_behind_squeeze(node, axis)
    if name == "mean":
        return _axis_behind_mean(node, axis)
    if name == "reshape":
        return _axis_behind_reshape(node, axis)
    return None


def _axis_behind_reshape(node: fx.Node, axis: int) -> int | None:
    """Return the last axis if it holds the channels and all dimensions that were after them.

    Earlier dimensions may change in any way.
    """
    # torch's symbolic sizes are loaded by whoever captures; `import nc` needn't wait for them
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    block, last = math.prod(input_node(node).meta["val"].shape[axis:]), node.meta["val"].shape[-1:]
    return -1 if last and statically_known_true(last[0] == block) else None


def _axis_behind_squeeze(node: fx.Node, axis: int) -> int | None:
    """Return the axis if the dimension that is added or removed is before the channels.

    A convolution without a batch gets a batch of 1 this way.
    """
    dim = schema_arguments(node).get("dim")
    rank = max(node.meta["val"].dim(), input_node(node).meta["val"].dim())
    return axis if isinstance(dim, int) and dim % rank - rank < axis else None


def _axis_behind_mean(node: fx.Node, axis: int) -> int | None:
    arguments, rank = schema_arguments(node), input_node(node).meta["val"].dim()
    dims = {d % rank - rank for d in arguments.get("dim") or range(rank)}
    if axis in dims:
        return None
    return axis if arguments["keepdim"] else axis + sum(d > axis for d in dims)


def grouped(layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as [groups, outputs of a group, inputs of a group, values of a connection].

    It is a view where the weight is contiguous.
    """
    groups = groups_of(layer)
    view = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return view.transpose(1, 2) if is_transposed(layer) else view


def _along_outputs(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[channels] → [groups, outputs, 1] of a grouped weight."""
    return scale.view(*weight.shape[:2], 1)


def _along_inputs(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[channels] → [groups, 1, inputs] of a grouped weight, whose inputs may be blocks of channels."""
    inputs = weight.shape[0] * weight.shape[2]
    return scale.repeat_interleave(inputs // scale.numel()).view(weight.shape[0], 1, -1)


def constant_reads(module: fx.GraphModule) -> Counter[int]:
    """How often each constant tensor is read, by its address: one tensor can have several names and nodes."""
    constants = [
        n for n in module.graph.nodes if n.op == "get_attr" and constant_of(module, n).layout is torch.strided
    ]
    return Counter(constant_of(module, n).data_ptr() for n in constants for _ in n.users)


def _weight(module: fx.GraphModule, layer: fx.Node) -> torch.Tensor:
    return constant_of(module, Weighted.of(layer).weight)


def rescale(
    module: fx.GraphModule, layer: fx.Node, outputs: torch.Tensor | None, inputs: torch.Tensor | None
) -> None:
    """Multiply a layer's outputs, and the weights of its inputs, by float64 [channels] each; rounded once."""
    weight = _weight(module, layer)
    scaled = weight.contiguous().to(torch.float64, copy=True)
    view = grouped(layer, scaled)
    if outputs is not None:
        view *= _along_outputs(view, outputs).unsqueeze(3)
        bias = Weighted.of(layer).bias
        if bias is not None:
            value = constant_of(module, bias)
            replace_constant(module, layer, "bias", (value.double() * outputs).to(value.dtype))
        for key in ("output_mean", "output_std"):
            if key in layer.meta:
                layer.meta[key] = layer.meta[key] * outputs
    if inputs is not None:
        view *= _along_inputs(view, inputs).unsqueeze(3)
    replace_constant(module, layer, "weight", scaled.to(weight.dtype))
