"""SmoothQuant: outliers in few channels of an activation move into the weights that multiply them (Xiao et al., arXiv 2211.10438).

For linears that read one tensor, `Y = X W^T = (X / s)(W * s)^T` for any s > 0 per input channel. With the s of equation 4 both sides become
about equally hard to quantize. 1/s goes into the normalisation or linear in front where nothing else reads its result, else into a
multiplication of its own. The fp32 function stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from nc.algorithms.smooth_search import Batch, Range, Unit, find_alphas
from nc.graph.catalogue import op_name
from nc.graph.copying import copy_module
from nc.graph.passes import add_constant
from nc.spec import OpSpec

#: Operators whose result scales with constants of theirs, per channel of the last dimension: positions of those among the arguments.
_TAKERS = {"layer_norm": (2, 3), "rms_norm": (2,), "linear": (1, 2)}


@dataclasses.dataclass(frozen=True, slots=True)
class Smoothed:
    """A smoothed graph.

    Attributes:
        module: computes what the graph before it computed.
        ranges: name of each node that smoothed operators read now → the smallest and largest value there, fp32 scalars.
        alphas: operator → the alpha that was used.
        folded: operators whose 1/s is part of what is in front of them.
    """

    module: fx.GraphModule
    ranges: Mapping[str, Range]
    alphas: Mapping[str, float]
    folded: frozenset[str]


@torch.no_grad()
def smooth(module: fx.GraphModule, specs: Mapping[str, OpSpec], channels: Mapping[str, Range], batches: Sequence[Batch]) -> Smoothed:
    """Smooth the linears of a graph.

    Args:
        module: captured fp32 graph; stays as it is.
        specs: operator → what it is quantized to; those with `smooth` are smoothed.
        channels: name of the node that such an operator reads → extremes of each channel there, fp32, shape [channels].
        batches: flat calibration inputs, for the search where alpha is "auto".
    """
    copy, _ = copy_module(module)
    units = list(_units(copy, specs, channels))
    ranges, alphas, folded = {}, {}, set()
    for unit, alpha in zip(units, find_alphas(copy, units, batches), strict=True):
        scales = unit.scales(alpha)
        _rewrite(copy, unit, scales)
        low, high = unit.channels
        ranges[unit.members[0].args[0].name] = (low / scales).amin().float(), (high / scales).amax().float()
        names = [node.meta["operator"] for node in unit.members]
        alphas |= dict.fromkeys(names, alpha)
        folded |= set(names) if unit.fold else set()
    for node in [n for n in copy.graph.nodes if n.op == "get_attr" and not n.users]:
        copy.graph.erase_node(node)
    copy.graph.lint()
    copy.recompile()
    return Smoothed(copy, ranges, alphas, frozenset(folded))


def _units(module: fx.GraphModule, specs: Mapping[str, OpSpec], channels: Mapping[str, Range]) -> Iterator[Unit]:
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        spec = specs.get(node.meta.get("operator"))
        if spec is not None and spec.smooth is not None:
            readers.setdefault(node.args[0], []).append(node)
    for source, nodes in readers.items():
        options = [specs[n.meta["operator"]].smooth for n in nodes]
        fold = len(set(options)) == 1 and options[0].folding and set(source.users) == set(nodes) and _can_take(source)
        groups: dict[object, list[fx.Node]] = {}
        for node, own in zip(nodes, options, strict=True):
            groups.setdefault(own if fold or own.scale_sharing else node, []).append(node)
        extremes = tuple(t.double() for t in channels[source.name])
        for members in groups.values():
            weights = tuple(getattr(module, n.args[1].target).double() for n in members)
            yield Unit(source, tuple(members), tuple(specs[n.meta["operator"]] for n in members), weights, extremes, fold)


def _can_take(source: fx.Node) -> bool:
    """Whether 1/s can become part of an operator's constants."""
    if op_name(source) not in _TAKERS:
        return False
    constants = _constants_of(source)
    return bool(constants) and constants[0] == _TAKERS[op_name(source)][0] and all(source.args[i].op == "get_attr" for i in constants)


def _constants_of(source: fx.Node) -> list[int]:
    return [i for i in _TAKERS[op_name(source)] if i < len(source.args) and isinstance(source.args[i], fx.Node)]


def _rewrite(module: fx.GraphModule, unit: Unit, scales: torch.Tensor) -> None:
    for node, weight in zip(unit.members, unit.weights, strict=True):
        _replace_constant(module, node, 1, weight * scales)
    if unit.fold:
        for i in _constants_of(unit.source):
            value = getattr(module, unit.source.args[i].target).double()
            _replace_constant(module, unit.source, i, value / (scales if value.dim() == 1 else scales[:, None]))
        return
    first = unit.members[0]
    factor = add_constant(module, first, f"{first.name}_smooth_factor", (1 / scales).float(), f"{first.name}.smooth_factor")
    with module.graph.inserting_before(first):
        product = module.graph.call_function(torch.ops.aten.mul.Tensor, (unit.source, factor))
    product.meta["val"] = unit.source.meta.get("val")
    for node in unit.members:
        node.update_arg(0, product)


def _replace_constant(module: fx.GraphModule, node: fx.Node, index: int, value: torch.Tensor) -> None:
    old = node.args[index]
    constant = add_constant(module, node, f"{node.name}_smooth_{index}", value.float(), old.meta.get("fqn", old.target))
    constant.meta["val"] = old.meta["val"]
    node.update_arg(index, constant)
