"""Statistics → scale and zero point of every quantized activation."""

from __future__ import annotations

from collections.abc import Sequence

from nc.calibration.observe import observer_key
from nc.calibration.statistics import Collected
from nc.formats import QParams, TensorFormat
from nc.graph.placement import Edge, edge_key
from nc.numerics.affine import choose_qparams
from nc.observers import ALGORITHMS

Key = tuple[str, TensorFormat]


def find_qparams(edges: Sequence[Edge], found: Collected) -> dict[Key, QParams]:
    """Scale and zero point of each edge key, by the algorithm of its spec.

    Args:
        edges: inputs to be quantized.
        found: statistics of their tensors.
    """
    return {
        key: qparams_of(edge, edge.spec.algo, found) for key, edge in {edge_key(e): e for e in edges}.items()
    }


def qparams_of(edge: Edge, algorithm: str, found: Collected) -> QParams:
    """Scale and zero point that one range algorithm finds."""
    spec = edge.spec
    low, high = ALGORITHMS[algorithm].find_range(found.states[observer_key(edge)], spec)
    scale, zero_point = choose_qparams(
        low, high, quant_min=spec.quant_min, quant_max=spec.quant_max, symmetric=spec.symmetric
    )
    return QParams(scale=scale, zero_point=zero_point, spec=spec)
