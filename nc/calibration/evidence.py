"""What reports draw of a conversion: errors along the depth, ranges as histograms, channels with smoothing.

It is computed once, on the example inputs, by two runs of the graphs node by node. An artefact has no fp32
weights, so nobody could compute it later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.calibration.statistics import Collected
from nc.formats import QParams, TensorFormat
from nc.graph.evidence import ChannelView, DepthPoint, Evidence, RangeView
from nc.graph.fx_utils import constant_of, run_with
from nc.graph.placement import Edge, edge_key, works_in_place
from nc.graph.plan import Plan
from nc.graph.views import Weighted
from nc.numerics.metrics import sqnr_db
from nc.observers import ALGORITHMS
from nc.observers.auto import CANDIDATES
from nc.observers.base import State
from nc.observers.histogram import HISTOGRAM, occupied

#: Multiply-adds of the example inputs, up to which it is computed: about a second for each run.
MOST_MULTIPLY_ADDS = 3e10
#: How much is kept.
RANGES, BINS, LAYERS, CHANNELS = 12, 48, 4, 64
#: Values of a result that stand for all in the cumulative error.
_VALUES = 1 << 14
#: Of "percentile", where the configuration has none: the default of configurations.
_PERCENTILE = 99.999
#: Algorithms that take milliseconds for a range; "kl" takes a fifth of a second, and is shown where it was
#: asked for.
_QUICK = ("minmax", "percentile", "mse")
#: The largest SQNR, in dB: results that are equal have an infinite one.
_MOST_DB = 200.0


@torch.no_grad()
def evidence_of(
    original: fx.GraphModule,
    module: fx.GraphModule,
    quantized: fx.GraphModule,
    plan: Plan,
    edges: Sequence[Edge],
    qparams: Mapping[tuple[str, TensorFormat], QParams],
    found: Collected,
    example: Sequence[torch.Tensor],
    config: Mapping[str, Any] | None,
) -> Evidence:
    """Return the evidence of a conversion.

    Args:
        original: the captured fp32 graph.
        module: the fp32 graph from which `quantized` was made: `original` after algorithms such as smoothing.
        quantized: the QDQ graph.
        plan: says which operators are quantized.
        edges: what has static ranges in `module`.
        qparams: these ranges, by `placement.edge_key`.
        found: statistics of calibration.
        example: flat inputs.
        config: the configuration as plain values.
    """
    work = sum(d.multiply_adds or 0 for d in plan.decisions)
    if works_in_place(module):
        return Evidence(config=config, missing="the model writes into its tensors")
    if work > MOST_MULTIPLY_ADDS:
        text = f"the example inputs take {work:.1e} multiply-adds, more than {MOST_MULTIPLY_ADDS:.0e}"
        return Evidence(config=config, missing=text)
    watched = {e.origin.name for e in edges if (e.origin.name, HISTOGRAM.name) not in found.states}
    walk = _Walk(quantized, plan, watched)
    run_with(module, example, walk.fp32)
    run_with(quantized, example, walk.quantized)
    return Evidence(
        config=config,
        depth=tuple(
            DepthPoint(operator=name, local_db=_bounded(walk.local[name]), cumulative_db=_bounded(db))
            for name, db in walk.cumulative.items()
        ),
        ranges=_ranges(edges, qparams, found, walk.states),
        channels=_channels(original, module, plan, example),
    )


class _Walk:
    """Hooks that look at the values of both graphs.

    Attributes:
        local: operator → SQNR of its result for exact inputs, in dB.
        cumulative: operator → SQNR of its result in the quantized graph, in dB.
        states: name of a watched node → histogram of its values.
    """

    def __init__(self, quantized: fx.GraphModule, plan: Plan, watched: set[str]) -> None:
        names = {d.operator for d in plan.quantized}
        self._module = quantized
        self._nodes = {n.name: n for n in quantized.graph.nodes if n.meta.get("operator") in names}
        self._watched = watched
        self._exact: dict[str, torch.Tensor] = {}
        self.local: dict[str, float] = {}
        self.cumulative: dict[str, float] = {}
        self.states: dict[str, State] = {}

    def fp32(self, node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        """Look at a node of the fp32 graph."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return value
        if node.name in self._watched:
            low, high = torch.aminmax(value)
            if bool(low.isfinite() & high.isfinite()):
                start = {name: each.clone() for name, each in HISTOGRAM.start.items()}
                self.states[node.name] = HISTOGRAM.update(start, value, low, high)
        if node.name in self._nodes and bool(value.isfinite().all()) and bool(value.any()):
            values = {n.name: each for n, each in env.items() if n.op != "get_attr"}
            got = self._computed(self._nodes[node.name], values)
            if isinstance(got, torch.Tensor) and got.shape == value.shape:
                self.local[str(node.meta["operator"])] = sqnr_db(value, got)
                self._exact[node.name] = _sampled(value)
        return value

    def quantized(self, node: fx.Node, value: Any, _: Mapping[fx.Node, Any]) -> Any:
        """Look at a node of the quantized graph."""
        if node.name in self._exact:
            self.cumulative[str(node.meta["operator"])] = sqnr_db(self._exact[node.name], _sampled(value))
        return value

    def _computed(self, node: fx.Node, exact: Mapping[str, Any]) -> Any:
        """Return what a node of the quantized graph gives for the values that the fp32 graph has."""

        def value_of(source: fx.Node) -> Any:
            if source.op == "get_attr":
                return constant_of(self._module, source)
            return exact[source.name] if source.name in exact else self._computed(source, exact)

        assert callable(node.target), f"{node.name} computes nothing"
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        return node.target(*args, **kwargs)


def _sampled(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().flatten()
    return flat[:: max(1, math.ceil(flat.numel() / _VALUES))].float().clone()


def _bounded(db: float) -> float:
    return round(min(max(db, -_MOST_DB), _MOST_DB), 1) if not math.isnan(db) else -_MOST_DB


def _ranges(
    edges: Sequence[Edge],
    qparams: Mapping[tuple[str, TensorFormat], QParams],
    found: Collected,
    states: Mapping[str, State],
) -> tuple[RangeView, ...]:
    """Return the tensors whose rounding loses most, with what each algorithm would choose."""
    views = []
    for key, edge in {edge_key(e): e for e in reversed(edges)}.items():
        name = edge.origin.name
        state = found.states.get((name, HISTOGRAM.name), states.get(name))
        if state is not None and bool((state["counts"] > 0).any()):
            chosen = _covered(qparams[key])
            views.append((_estimated_db(state, qparams[key], chosen), edge, state, chosen))
    views.sort(key=lambda view: view[0])
    return tuple(
        RangeView(
            operator=edge.operator,
            data="calibration" if (edge.origin.name, HISTOGRAM.name) in found.states else "example inputs",
            low=_rounded(float(state["low"])),
            high=_rounded(float(state["high"])),
            counts=_binned(state),
            chosen=chosen,
            others={name: _found(name, state, edge.spec) for name in dict.fromkeys((*_QUICK, *_own(edge)))},
            db=db,
        )
        for db, edge, state, chosen in views[:RANGES]
    )


def _own(edge: Edge) -> tuple[str, ...]:
    """Return the algorithm of an edge, where it looks at a histogram and is one of several."""
    algo = edge.spec.algo
    return (algo,) if algo in CANDIDATES else ()


def _covered(qp: QParams) -> tuple[float, float]:
    scale, zero = float(qp.scale), int(qp.zero_point)
    return _rounded((qp.spec.quant_min - zero) * scale), _rounded((qp.spec.quant_max - zero) * scale)


def _found(name: str, state: State, spec: TensorFormat) -> tuple[float, float]:
    given = spec if spec.percentile is not None else dataclasses.replace(spec, percentile=_PERCENTILE)
    low, high = ALGORITHMS[name].find_range(state, given)
    return _rounded(float(low)), _rounded(float(high))


def _estimated_db(state: State, qp: QParams, covered: tuple[float, float]) -> float:
    """Return the SQNR of values after rounding: a uniform error within the range, and what is cut off."""
    values, counts = occupied(state)
    cut = (values - values.clamp(*covered)).square()
    noise = float(((cut + float(qp.scale) ** 2 / 12) * counts).sum())
    signal = float((values.square() * counts).sum())
    return _bounded(10 * math.log10(signal / noise)) if signal and noise else _MOST_DB


def _binned(state: State) -> tuple[int, ...]:
    values, counts = occupied(state)
    low, high = float(state["low"]), float(state["high"])
    places = ((values - low) / max(high - low, 1e-30) * BINS).long().clamp(0, BINS - 1)
    return tuple(torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, counts).long().tolist())


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _channels(
    original: fx.GraphModule, module: fx.GraphModule, plan: Plan, example: Sequence[torch.Tensor]
) -> tuple[ChannelView, ...]:
    """Return the smoothed operators whose largest channel most exceeds the median without smoothing."""
    names = {d.operator for d in plan.quantized if d.spec.smooth is not None}
    if not names:
        return ()
    before, after = (_magnitudes(graph, names, example) for graph in (original, module))
    pairs = [
        (name, before[name], after[name])
        for name in before
        if name in after and bool((before[name] + after[name]).isfinite().all())
    ]
    pairs.sort(key=lambda pair: -float(pair[1].amax() / pair[1].median().clamp(min=1e-12)))
    views = []
    for name, one, other in pairs[:LAYERS]:
        order = one.argsort(descending=True)
        groups = order.tensor_split(min(CHANNELS, len(order)))
        views.append(
            ChannelView(
                operator=name,
                channels=len(order),
                before=tuple(_rounded(float(one[g].amax())) for g in groups),
                after=tuple(_rounded(float(other[g].amax())) for g in groups),
            )
        )
    return tuple(views)


def _magnitudes(
    module: fx.GraphModule, names: set[str], example: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return by operator the largest magnitude of each channel that it reads."""
    sources: dict[str, list[str]] = {}
    for node in module.graph.nodes:
        if node.meta.get("operator") in names:
            sources.setdefault(Weighted.of(node).input.name, []).append(node.meta["operator"])
    found: dict[str, torch.Tensor] = {}

    def look(node: fx.Node, value: Any, _: Mapping[fx.Node, Any]) -> Any:
        for operator in sources.get(node.name, ()):
            found[operator] = value.detach().abs().reshape(-1, value.shape[-1]).amax(0)
        return value

    run_with(module, example, look)
    return found
