"""SmoothQuant: outliers in few channels of an activation move into the weights that multiply them.

The method is of Xiao et al., arXiv 2211.10438.

For linears that read one tensor, `Y = X W^T = (X / s)(W * s)^T` for any s > 0 per input channel. With the s
of equation 4 both sides become about equally hard to quantize. 1/s is folded into the preceding normalisation
or linear if nothing else reads its result, else it is a separate multiplication. The fp32 function stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from nc.algorithms.smooth_search import Batch, Range, Unit, find_alphas, worse_than_without
from nc.formats import OpSpec
from nc.graph.catalogue import input_node, op_name, schema_arguments
from nc.graph.fx_utils import add_constant, call_function, constant_of, copy_module, replace_constant
from nc.graph.placement import works_in_place
from nc.graph.views import Weighted, set_argument

#: Operators whose result scales with their constants, per channel of the last dimension.
_TAKERS = frozenset({"layer_norm", "rms_norm", "linear"})


@dataclasses.dataclass(frozen=True, slots=True)
class Smoothed:
    """A smoothed graph.

    Attributes:
        module: computes what the graph before it computed.
        ranges: name of each node that smoothed operators read now → the smallest and largest value there,
            fp32 scalars.
        sources: name of each such node → name of the one that they read before.
        alphas: operator → the alpha that was used.
        folded: operators whose 1/s is folded into the operator before them.
        worse: operators whose error on calibration samples is larger than without smoothing.
    """

    module: fx.GraphModule
    ranges: Mapping[str, Range]
    sources: Mapping[str, str]
    alphas: Mapping[str, float]
    folded: frozenset[str]
    worse: tuple[str, ...] = ()


@torch.no_grad()
def smooth(
    module: fx.GraphModule,
    specs: Mapping[str, OpSpec],
    channels: Mapping[str, Range],
    batches: Sequence[Batch],
) -> Smoothed:
    """Smooth the linears of a graph.

    Args:
        module: captured fp32 graph; stays as it is.
        specs: operator → what it is quantized to; those with `smooth` are smoothed.
        channels: name of the node that such an operator reads → extremes of each channel there, fp32, shape
            [channels].
        batches: flat calibration inputs, for the search where alpha is "auto", and to see where smoothing
            harms.
    """
    copy, _ = copy_module(module)
    in_place = works_in_place(copy)  # then a value depends on when it is read
    units = list(_units(copy, specs, channels, in_place))
    ranges: dict[str, Range] = {}
    sources: dict[str, str] = {}
    alphas: dict[str, float] = {}
    folded: set[str] = set()
    chosen = find_alphas(copy, units, batches)
    worse = [
        node.meta["operator"]
        for unit in worse_than_without(copy, units, chosen, batches)
        for node in unit.members
    ]
    for unit, alpha in zip(units, chosen, strict=True):
        scales = unit.scales(alpha)
        _rewrite(copy, unit, scales, in_place)
        low, high = unit.channels
        read = {input_node(node).name for node in unit.members}
        ranges |= dict.fromkeys(read, ((low / scales).amin().float(), (high / scales).amax().float()))
        sources |= dict.fromkeys(read, unit.source.name)
        names = [node.meta["operator"] for node in unit.members]
        alphas |= dict.fromkeys(names, alpha)
        folded |= set(names) if unit.fold else set()
    copy.graph.lint()
    copy.recompile()
    return Smoothed(copy, ranges, sources, alphas, frozenset(folded), tuple(worse))


def _units(
    module: fx.GraphModule, specs: Mapping[str, OpSpec], channels: Mapping[str, Range], in_place: bool
) -> Iterator[Unit]:
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        spec = specs.get(node.meta.get("operator"))
        if spec is not None and spec.smooth is not None:
            readers.setdefault(Weighted.of(node).input, []).append(node)
    for source, nodes in readers.items():
        options = [smooth for n in nodes if (smooth := specs[n.meta["operator"]].smooth) is not None]
        is_own = set(source.users) == set(nodes) and not in_place
        fold = len(set(options)) == 1 and options[0].folding and is_own and _can_take(source)
        groups: dict[object, list[fx.Node]] = {}
        for node, own in zip(nodes, options, strict=True):
            groups.setdefault(own if fold or own.scale_sharing else node, []).append(node)
        low, high = channels[source.name]
        for members in groups.values():
            weights = tuple(constant_of(module, Weighted.of(n).weight).double() for n in members)
            yield Unit(
                source,
                tuple(members),
                tuple(specs[n.meta["operator"]] for n in members),
                weights,
                (low.double(), high.double()),
                fold,
            )


def _can_take(source: fx.Node) -> bool:
    """Return whether 1/s can become part of an operator's constants."""
    if op_name(source) not in _TAKERS:
        return False
    constants = _constants_of(source)
    is_per_channel = "weight" in constants and (
        op_name(source) == "linear" or constants["weight"].meta["val"].dim() == 1
    )
    return is_per_channel and all(node.op == "get_attr" for node in constants.values())


def _constants_of(source: fx.Node) -> dict[str, fx.Node]:
    return {
        name: node
        for name, node in schema_arguments(source).items()
        if name in ("weight", "bias") and isinstance(node, fx.Node)
    }


def _rewrite(module: fx.GraphModule, unit: Unit, scales: torch.Tensor, in_place: bool) -> None:
    for node, weight in zip(unit.members, unit.weights, strict=True):
        replace_constant(module, node, "weight", (weight * scales).float())
    if unit.fold:
        for name, node in _constants_of(unit.source).items():
            value = constant_of(module, node).double()
            replace_constant(
                module, unit.source, name, (value / (scales if value.dim() == 1 else scales[:, None])).float()
            )
        return
    first = unit.members[0]
    factor = add_constant(
        module, first, f"{first.name}_smooth_factor", (1 / scales).float(), f"{first.name}.smooth_factor"
    )
    product = None
    for node in unit.members:
        if product is None or in_place:
            with module.graph.inserting_before(node):
                product = call_function(module.graph, torch.ops.aten.mul.Tensor, (unit.source, factor))
            product.meta["val"] = unit.source.meta.get("val")
        set_argument(node, "input", product)
