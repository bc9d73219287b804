"""SmoothQuant: outliers in few channels of an activation move into the weights that multiply them (Xiao et al., arXiv 2211.10438).

For linears that read one tensor, `Y = X W^T = (X / s)(W * s)^T` for any s > 0 per input channel. With `s = max|X|^a / max|W|^(1-a)`
(equation 4) both sides become about equally hard to quantize. 1/s goes into the normalisation or linear in front where nothing else reads
its result, else into a multiplication of its own. The fp32 function stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx

from nc.algorithms.replay import inputs_of
from nc.graph.catalogue import op_name
from nc.graph.copying import copy_module
from nc.graph.passes import add_constant
from nc.numerics.affine import choose_qparams, dequantize, quantize
from nc.spec import OpSpec, SmoothSpec, TensorSpec

Range = tuple[torch.Tensor, torch.Tensor]
#: Below these, channels are as good as dead; the same floors as in the authors' code.
_LEAST_WEIGHT = 1e-5
_LEAST_SCALE = 1e-5
#: Rows of a linear's input that the search for alpha looks at.
_ROWS = 256
_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "mean": lambda stacked: stacked.mean(0),
}


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """Linears that share one s.

    Attributes:
        source: what they read.
        members: their nodes.
        specs: how each is quantized.
        fold: whether 1/s goes into `source`.
    """

    source: fx.Node
    members: tuple[fx.Node, ...]
    specs: tuple[OpSpec, ...]
    fold: bool

    @property
    def smooth(self) -> SmoothSpec:
        """The options, alike for all members."""
        return self.specs[0].smooth


@torch.no_grad()
def smooth(
    module: fx.GraphModule, specs: Mapping[str, OpSpec], channels: Mapping[str, Range], batches: Sequence[Sequence[torch.Tensor]]
) -> Smoothed:
    """Smooth the linears of a graph.

    Args:
        module: captured fp32 graph; stays as it is.
        specs: operator → what it is quantized to; those with `smooth` are smoothed.
        channels: name of the node that such an operator reads → extremes of each channel there, fp32, shape [channels].
        batches: flat calibration inputs, for the search where alpha is "auto".
    """
    copy, _ = copy_module(module)
    graph = copy.graph
    units = list(_units(copy, specs))
    searched = [unit.source.name for unit in units if unit.smooth.alpha is None]
    rows = inputs_of(module, searched, batches, _ROWS) if searched else {}
    ranges, alphas, folded = {}, {}, set()
    for unit in units:
        low, high = (t.double() for t in channels[unit.source.name])
        weights = [getattr(copy, node.args[1].target).double() for node in unit.members]
        alpha = unit.smooth.alpha
        if alpha is None:
            alpha = _best_alpha(unit, weights, (low, high), rows[unit.source.name].double())
        scales = scales_for(alpha, low, high, weights, unit.smooth.shared_criterion)
        _rewrite(copy, unit, weights, scales)
        ranges[unit.members[0].args[0].name] = (low / scales).amin().float(), (high / scales).amax().float()
        names = [node.meta["operator"] for node in unit.members]
        alphas |= dict.fromkeys(names, alpha)
        folded |= set(names) if unit.fold else set()
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    graph.lint()
    copy.recompile()
    return Smoothed(copy, ranges, alphas, frozenset(folded))


def scales_for(alpha: float, low: torch.Tensor, high: torch.Tensor, weights: Sequence[torch.Tensor], criterion: str) -> torch.Tensor:
    """S of equation 4.

    Args:
        alpha: 0 to 1.
        low: smallest value of each input channel, float64, shape [channels].
        high: largest.
        weights: float64, each [outputs, channels].
        criterion: how the weights' magnitudes are combined: "max", "min" or "mean".

    Returns:
        float64, shape [channels]; 1 for channels that are always 0.
    """
    x = torch.maximum(-low, high).clamp(min=0.0)
    w = _COMBINE[criterion](torch.stack([weight.abs().amax(0) for weight in weights])).clamp(min=_LEAST_WEIGHT)
    scales = (x**alpha / w ** (1 - alpha)).clamp(min=_LEAST_SCALE)
    return torch.where(x == 0.0, torch.ones_like(scales), scales)


def _units(module: fx.GraphModule, specs: Mapping[str, OpSpec]) -> Iterator[_Unit]:
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        spec = specs.get(node.meta.get("operator"))
        if spec is not None and spec.smooth is not None:
            readers.setdefault(node.args[0], []).append(node)
    for source, nodes in readers.items():
        groups: dict[object, list[fx.Node]] = {}
        alike = len({specs[n.meta["operator"]].smooth for n in nodes}) == 1
        fold = alike and specs[nodes[0].meta["operator"]].smooth.folding and set(source.users) == set(nodes) and _can_take(source)
        for node in nodes:
            options = specs[node.meta["operator"]].smooth
            groups.setdefault(options if fold or options.scale_sharing else node, []).append(node)
        for members in groups.values():
            yield _Unit(source, tuple(members), tuple(specs[n.meta["operator"]] for n in members), fold)


def _can_take(source: fx.Node) -> bool:
    """Whether 1/s can become part of an operator's constants."""
    return op_name(source) in _TAKERS and all(source.args[i].op == "get_attr" for i in _constants_of(source))


#: Operators whose result scales with constants of theirs, per channel of the last dimension: positions of those among the arguments.
_TAKERS = {"layer_norm": (2, 3), "rms_norm": (2,), "linear": (1, 2)}


def _constants_of(source: fx.Node) -> list[int]:
    positions = _TAKERS[op_name(source)]
    if op_name(source) != "linear" and (len(source.args) <= positions[0] or source.args[positions[0]] is None):
        return [0]  # a normalisation without weights has nothing to take it
    return [i for i in positions if i < len(source.args) and isinstance(source.args[i], fx.Node)]


def _rewrite(module: fx.GraphModule, unit: _Unit, weights: Sequence[torch.Tensor], scales: torch.Tensor) -> None:
    for node, weight in zip(unit.members, weights, strict=True):
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


def _best_alpha(unit: _Unit, weights: Sequence[torch.Tensor], extremes: Range, rows: torch.Tensor) -> float:
    """The alpha on the grid with the least output error over `rows`, [n, channels]; `init_alpha` where none is better."""
    options = unit.smooth
    steps = int((options.alpha_max - options.alpha_min) / options.alpha_step + 1e-9)
    grid = [options.init_alpha, *(round(options.alpha_min + i * options.alpha_step, 6) for i in range(steps + 1))]
    outputs = [rows @ weight.T for weight in weights]
    best, least = grid[0], float("inf")
    for alpha in grid:
        scales = scales_for(alpha, *extremes, weights, options.shared_criterion)
        low, high = (extremes[0] / scales).amin(), (extremes[1] / scales).amax()
        errors = []
        for weight, spec, output in zip(weights, unit.specs, outputs, strict=True):
            x = fake_quantize(rows / scales, low, high, spec.activation)
            w = fake_quantize_rows(weight * scales, spec.weight)
            errors.append((x @ w.T - output).square().mean() / output.square().mean().clamp(min=1e-30))
        error = float(_COMBINE[options.shared_criterion](torch.stack(errors)))
        if error < least:
            best, least = alpha, error
    return best


def fake_quantize(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Values of the codes of `x` for one range; float64 in, float64 out."""
    scale, zero_point = choose_qparams(low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=spec.symmetric)
    codes = quantize(x, float(scale), int(zero_point), spec.quant_min, spec.quant_max)
    return dequantize(codes, float(scale), int(zero_point)).double()


def fake_quantize_rows(weight: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Values of the codes of a weight, [outputs, channels], with min-max ranges."""
    per_channel = spec.granularity == "per_channel"
    low, high = torch.aminmax(weight, dim=1) if per_channel else torch.aminmax(weight)
    scale, _ = choose_qparams(low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=True)
    axis = 0 if per_channel else None
    return dequantize(quantize(weight, scale, 0, spec.quant_min, spec.quant_max, axis), scale, 0, axis).double()
