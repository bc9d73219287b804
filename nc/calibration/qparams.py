"""Statistics → scale and zero point of every tensor that gets codes."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from torch import fx

from nc.algorithms.range_search import Key, choose_ranges
from nc.calibration.observe import observer_key
from nc.calibration.statistics import Collected
from nc.errors import StateError
from nc.graph.placement import Edge, edge_key
from nc.numerics.affine import choose_qparams
from nc.observers import ALGORITHMS
from nc.observers.auto import AUTO, CANDIDATES
from nc.spec import QParams


def find_qparams(module: fx.GraphModule, edges: Sequence[Edge], found: Collected) -> tuple[dict[Key, QParams], tuple[str, ...]]:
    """Scale and zero point for each edge key, and what there is to say of how they were found.

    Args:
        module: the fp32 graph, which `act_algo="auto"` runs on kept samples.
        edges: what gets codes.
        found: statistics of their tensors.

    Raises:
        StateError: "auto" needs samples, and none were kept.
    """
    distinct = {edge_key(e): e for e in edges}
    searched = {key: edge for key, edge in distinct.items() if edge.spec.algo == AUTO.name}
    qparams = {key: _qparams(edge, edge.spec.algo, found) for key, edge in distinct.items() if key not in searched}
    if not searched:
        return qparams, ()
    if not found.samples:
        msg = (
            'act_algo="auto" compares outputs on calibration samples, and none were kept: each batch is larger than 64 MB. Calibrate with '
            "smaller batches, or name an algorithm."
        )
        raise StateError(msg)
    candidates = {key: {name: _qparams(edge, name, found) for name in CANDIDATES} for key, edge in searched.items()}
    chosen = choose_ranges(module, edges, candidates, found.samples)
    counts = collections.Counter(chosen.values())
    text = ", ".join(f"{name} for {counts[name]}" for name in CANDIDATES if counts[name])
    return qparams | {key: candidates[key][name] for key, name in chosen.items()}, (f'act_algo="auto": {text} tensors',)


def _qparams(edge: Edge, algorithm: str, found: Collected) -> QParams:
    spec = edge.spec
    low, high = ALGORITHMS[algorithm].find_range(found.states[observer_key(edge)], spec)
    scale, zero_point = choose_qparams(low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=spec.symmetric)
    return QParams(scale=scale, zero_point=zero_point, spec=spec)
