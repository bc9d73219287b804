"""The search for SmoothQuant's alpha.

It is the value on a grid with the least output error, for linears with one scale or for whole blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.algorithms.replay import inputs_of
from nc.formats import PER_CHANNEL, OpSpec, SmoothSpec, TensorFormat
from nc.graph.catalogue import input_node
from nc.graph.views import Weighted
from nc.numerics.affine import dequantize
from nc.numerics.smoothing import COMBINE, fake_quantize, scales_for
from nc.numerics.weights import quantize_weight

Range = tuple[torch.Tensor, torch.Tensor]
Batch = Sequence[torch.Tensor]
#: Rows of a linear's input that the search looks at.
_ROWS = 256
#: Factor by which an error may grow without being a loss: 0.5 dB.
_WORSE = 10**0.05
#: Calibration batches that the search over blocks runs.
_BATCHES = 4
#: A block is an operator's path up to its first number: "encoder.layer.0".
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Linears that share one s.

    Attributes:
        source: what they read.
        members: their nodes.
        specs: how each is quantized.
        weights: float64, each [outputs, channels].
        channels: extremes of each channel of `source`, float64, shape [channels].
        fold: whether 1/s goes into `source`.
    """

    source: fx.Node
    members: tuple[fx.Node, ...]
    specs: tuple[OpSpec, ...]
    weights: tuple[torch.Tensor, ...]
    channels: Range
    fold: bool

    @property
    def smooth(self) -> SmoothSpec:
        """The options, alike for all members."""
        smooth = self.specs[0].smooth
        assert smooth is not None
        return smooth

    def scales(self, alpha: float) -> torch.Tensor:
        """Return what the channels are divided by for one alpha, float64, shape [channels]."""
        return scales_for(alpha, *self.channels, self.weights, self.smooth.shared_criterion)


def find_alphas(module: fx.GraphModule, units: Sequence[Unit], batches: Sequence[Batch]) -> list[float]:
    """Return the alpha of each unit.

    Args:
        module: the fp32 graph that the units' nodes are of.
        units: in execution order.
        batches: flat calibration inputs.
    """
    alphas = {i: unit.smooth.alpha for i, unit in enumerate(units) if unit.smooth.alpha is not None}
    single = [i for i, unit in enumerate(units) if i not in alphas and not unit.smooth.do_blockwise]
    rows = inputs_of(module, {units[i].source.name for i in single}, batches, _ROWS) if single else {}
    for i in single:
        alphas[i] = _best(
            units[i].smooth,
            functools.partial(_unit_error, units[i], rows=rows[units[i].source.name].double()),
        )
    blocks = [i for i, _ in enumerate(units) if i not in alphas]
    for _, block in itertools.groupby(blocks, key=lambda i: _block_of(units[i])):
        indices = list(block)
        members = [units[i] for i in indices]
        outputs = list(_block_outputs(module, members, batches[:_BATCHES]))
        alphas |= dict.fromkeys(
            indices, _best(members[0].smooth, functools.partial(_block_error, members, parts=outputs))
        )
    return [alphas[i] for i in range(len(units))]


def worse_than_without(
    module: fx.GraphModule, units: Sequence[Unit], alphas: Sequence[float], batches: Sequence[Batch]
) -> list[Unit]:
    """Return the units whose products have a larger error with their scales than without any.

    Args:
        module: the fp32 graph that the units' nodes are of.
        units: in execution order.
        alphas: of each unit.
        batches: flat calibration inputs; without any nothing can be told.
    """
    rows = inputs_of(module, {unit.source.name for unit in units}, batches, _ROWS) if batches else {}
    found = []
    for unit, alpha in zip(units, alphas, strict=True):
        x = rows[unit.source.name].double() if unit.source.name in rows else None
        if x is not None and _unit_error(unit, alpha, x) > _WORSE * _unit_error(unit, None, x):
            found.append(unit)
    return found


def _best(options: SmoothSpec, error: Callable[[float], float]) -> float:
    """Return the alpha with the least error.

    It is `init_alpha`, if that is within the limits, where none is better.
    """
    first = [options.init_alpha] if options.alpha_min <= options.init_alpha <= options.alpha_max else []
    steps = int((options.alpha_max - options.alpha_min) / options.alpha_step + 1e-9)
    grid = (round(options.alpha_min + i * options.alpha_step, 6) for i in range(steps + 1))
    return min((*first, *grid), key=error)  # of equals the first


def _unit_error(unit: Unit, alpha: float | None, rows: torch.Tensor) -> float:
    """Return the error of the members' products over some rows of their input, relative to their size.

    Errors are combined as the unit says.
    """
    errors = []
    for run, weight in zip(_quantized(unit, alpha), unit.weights, strict=True):
        expected = rows @ weight.T
        lost, power = ((run(rows) - expected).double().square().mean(), expected.double().square().mean())
        errors.append(lost / power.clamp(min=1e-300))
    return float(COMBINE[unit.smooth.shared_criterion](torch.stack(errors)))


def _quantized(unit: Unit, alpha: float | None) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """For each member, its product with smoothed and quantized sides; `alpha` None: not smoothed."""
    scales = torch.ones_like(unit.channels[0]) if alpha is None else unit.scales(alpha)
    low, high = (unit.channels[0] / scales).amin(), (unit.channels[1] / scales).amax()
    for weight, spec in zip(unit.weights, unit.specs, strict=True):
        assert spec.weight is not None
        codes, w_scale = quantize_weight((weight * scales).float(), spec.weight, 0)
        w = dequantize(
            codes, w_scale, 0, PER_CHANNEL.block_size(codes.shape, 0) if w_scale.dim() else None
        ).double()
        yield functools.partial(_product, w=w, scales=scales, low=low, high=high, spec=spec.input(0))


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    spec: TensorFormat,
) -> torch.Tensor:
    return fake_quantize(x.double() / scales, low, high, spec) @ w.T


def _block_of(unit: Unit) -> str:
    name = unit.members[0].meta["operator"]
    match = _BLOCK.match(name)
    return match[0] if match else name


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """The nodes of a block, and all that they read, for one batch.

    Attributes:
        interpreter: of the whole graph.
        inputs: values of the nodes before the block.
        nodes: those of the block, in execution order.
        results: fp32 values of its nodes that are read after the block.
    """

    interpreter: fx.Interpreter
    inputs: Mapping[fx.Node, Any]
    nodes: Sequence[fx.Node]
    results: Mapping[fx.Node, torch.Tensor]

    def run(
        self, products: Mapping[fx.Node, Callable[[torch.Tensor], torch.Tensor]]
    ) -> Mapping[fx.Node, Any]:
        """All values, with some linears replaced."""
        env = self.interpreter.env = dict(self.inputs)
        for node in self.nodes:
            if node in products:
                y = products[node](env[input_node(node)]).float()
                bias = Weighted.of(node).bias
                env[node] = y if bias is None else y + env[bias]
            else:
                env[node] = self.interpreter.run_node(node)
        return env


def _run_whole(module: fx.GraphModule, batch: Batch) -> fx.Interpreter:
    """Return an interpreter that has computed a batch, with the values of all nodes but the output."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.args_iter = iter(batch)
    interpreter.env = {}
    for node in list(module.graph.nodes)[:-1]:
        interpreter.env[node] = interpreter.run_node(node)
    return interpreter


def _end_of_block(nodes: Sequence[fx.Node], order: Mapping[fx.Node, int], last: int) -> int:
    """Return the place of the activation or addition that ends a block, or the last place itself."""
    while (
        len(nodes[last].users) == 1
        and order[next(iter(nodes[last].users))] == last + 1
        and nodes[last + 1].op != "output"
    ):
        last += 1
    return last


def _block_outputs(
    module: fx.GraphModule, units: Sequence[Unit], batches: Sequence[Batch]
) -> Iterator[_Part]:
    nodes = list(module.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    members = [node for unit in units for node in unit.members]
    places = [order[n] for n in members]
    first, last = min(places), _end_of_block(nodes, order, max(places))
    inside = [n for n in nodes[first : last + 1] if n.op == "call_function"]
    read = [n for n in inside if any(order[user] > last for user in n.users)]
    block = set(inside)
    for batch in batches:
        interpreter = _run_whole(module, batch)
        values = interpreter.env
        inputs = {n: values[n] for node in inside for n in node.all_input_nodes if n not in block}
        results = {
            n: values[n]
            for n in read
            if isinstance(values[n], torch.Tensor) and values[n].is_floating_point()
        }
        yield _Part(interpreter, inputs, inside, results)


def _block_error(units: Sequence[Unit], alpha: float, parts: Sequence[_Part]) -> float:
    products = {
        node: run for unit in units for node, run in zip(unit.members, _quantized(unit, alpha), strict=True)
    }
    error = 0.0
    for part in parts:
        values = part.run(products)
        for node, expected in part.results.items():
            error += float(
                (values[node] - expected).double().square().mean()
                / expected.double().square().mean().clamp(min=1e-300)
            )
    return error
