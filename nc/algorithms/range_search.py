"""`act_algo="auto"`: choose the algorithm whose range gives the least output error.

It is the error of the operators that read a tensor.

Each operator computes with the fp32 weight and one input rounded to the codes of each candidate, over kept
calibration samples; the sixth powers of its errors, relative to those of its output, are summed over all that
read the tensor with that range. Models suffer from few large errors more than from many small ones: squares
choose ranges that clip, and lose 1.9 dB to min-max on MiniLM (docs/results/accuracy.md).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from nc.algorithms.base import Batch, Bound, Context, Needs, Stage
from nc.calibration.qparams import Key, qparams_of
from nc.errors import StateError
from nc.formats import QParams
from nc.graph.fx_utils import run_with
from nc.graph.placement import Edge, edge_key
from nc.graph.plan import Applied, Plan
from nc.numerics.affine import dequantize, quantize
from nc.observers.auto import AUTO, CANDIDATES

#: Samples after which no further batch is run: ranges are told apart by far fewer than they are found from.
_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class RangeSearch:
    """See the module text; has nothing to set."""

    name: ClassVar[str] = "range_search"
    stage: ClassVar[Stage] = Stage.QPARAMS

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return samples; the candidates read the histogram that "auto" collects."""
        return Needs(samples=Bound())

    def apply(self, context: Context) -> Applied:
        """Replace the ranges of tensors with `act_algo="auto"`.

        Raises:
            StateError: no samples were kept.
        """
        searched = {edge_key(e): e for e in context.edges if e.spec.algo == AUTO.name}
        if not searched:
            return Applied(self.name, (), 'no tensor with act_algo="auto" got a range')
        if not context.batches:
            msg = (
                'act_algo="auto" compares outputs on calibration samples, and none were kept: each batch is '
                "larger than 64 MB. Calibrate "
                "with smaller batches, or name an algorithm."
            )
            raise StateError(msg)
        assert context.found is not None
        candidates = {
            key: {name: qparams_of(edge, name, context.found) for name in CANDIDATES}
            for key, edge in searched.items()
        }
        chosen = choose_ranges(context.module, context.edges, candidates, context.batches)
        context.qparams |= {key: candidates[key][name] for key, name in chosen.items()}
        counts = Counter(chosen.values())
        text = ", ".join(f"{name} for {counts[name]}" for name in CANDIDATES if counts[name])
        operators = dict.fromkeys(e.operator for e in context.edges if edge_key(e) in searched)
        return Applied(self.name, tuple(operators), f"{text} tensors")


@torch.no_grad()
def choose_ranges(
    module: fx.GraphModule,
    edges: Sequence[Edge],
    candidates: Mapping[Key, Mapping[str, QParams]],
    batches: Sequence[Batch],
) -> dict[Key, str]:
    """Return the best candidate of each tensor.

    Args:
        module: captured fp32 graph.
        edges: all edges, of which those whose key is in `candidates` are looked at.
        candidates: edge key → algorithm → the scale and zero point that it finds.
        batches: flat calibration inputs, at least one.

    Returns:
        Edge key → name of the algorithm.
    """
    trial = _Trial([e for e in edges if edge_key(e) in candidates], candidates)
    rows = 0
    for batch in batches:
        run_with(module, batch, trial.see)
        rows += batch[0].shape[0] if batch[0].dim() else 1
        if rows >= _ROWS:
            break
    return {key: min(found, key=found.__getitem__) for key, found in trial.totals().items()}


class _Trial:
    """Tries, at each reader, what every candidate would do to its result."""

    def __init__(self, edges: Sequence[Edge], candidates: Mapping[Key, Mapping[str, QParams]]) -> None:
        self._candidates = candidates
        self._edges: dict[fx.Node, list[Edge]] = {}
        for edge in edges:
            self._edges.setdefault(edge.reader, []).append(edge)
        self._errors: defaultdict[tuple[Edge, str], float] = defaultdict(float)
        self._sizes: defaultdict[Edge, float] = defaultdict(float)

    def see(self, node: fx.Node, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        """Try the candidates at a node; its value stays."""
        for edge in self._edges.get(node, ()):
            if edge.index is None:
                self._try_output(edge, value)
                continue
            assert not isinstance(node.target, str)
            given: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            args, kwargs = given
            self._sizes[edge] += _sixth_powers(_first(value))
            for name, qp in self._candidates[edge_key(edge)].items():
                tried = list(args)
                limits = qp.spec.quant_min, qp.spec.quant_max
                codes = quantize(
                    args[edge.index], qp.scale, qp.zero_point, *limits, dtype=qp.spec.dtype.storage
                )
                tried[edge.index] = dequantize(codes, qp.scale, qp.zero_point)
                self._errors[edge, name] += _sixth_powers(
                    _first(node.target(*tried, **kwargs)) - _first(value)
                )
        return value

    def _try_output(self, edge: Edge, value: torch.Tensor) -> None:
        """Try the candidates on an operator's own result."""
        self._sizes[edge] += _sixth_powers(value)
        for name, qp in self._candidates[edge_key(edge)].items():
            codes = quantize(
                value,
                qp.scale,
                qp.zero_point,
                qp.spec.quant_min,
                qp.spec.quant_max,
                dtype=qp.spec.dtype.storage,
            )
            self._errors[edge, name] += _sixth_powers(dequantize(codes, qp.scale, qp.zero_point) - value)

    def totals(self) -> dict[Key, dict[str, float]]:
        """Edge key → algorithm → sum of the readers' errors, each relative to its output."""
        totals = {key: dict.fromkeys(names, 0.0) for key, names in self._candidates.items()}
        for (edge, name), error in self._errors.items():
            totals[edge_key(edge)][name] += error / max(self._sizes[edge], 1e-300)
        return totals


def _sixth_powers(values: torch.Tensor) -> float:
    squares = values.double().square()
    return float((squares * squares * squares).sum())


def _first(result: Any) -> torch.Tensor:
    """Return what an operator computes.

    Pools that say where they found a maximum have that as a second result.
    """
    first: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return first
