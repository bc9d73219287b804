"""Applying algorithms.

Kept samples run through the fp32 graph once per stage, then each algorithm is applied in its order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from nc.algorithms.base import Algorithm, Batch, Bound, Context, Needs, Stage
from nc.algorithms.replay import collect
from nc.calibration.statistics import Samples
from nc.graph.plan import Applied, Plan
from nc.numerics.metrics import worst_sqnr_db
from nc.process.warn import warn

#: Agreement below which an algorithm before quantization gives a warning; int8 alone changes outputs less.
LEAST_AGREEMENT_DB = 30.0


def all_needs(algorithms: Sequence[Algorithm], module: fx.GraphModule, plan: Plan) -> Needs:
    """Return the needs of all, as one.

    It has every statistic, and room for the samples of the one that wants most.
    """
    each = [a.needs(module, plan) for a in algorithms]
    bounds = [needs.samples for needs in each if needs.samples is not None]
    room = Bound(max(b.rows for b in bounds), max(b.size for b in bounds)) if bounds else None
    return Needs(tuple(w for needs in each for w in needs.statistics), room)


@torch.no_grad()
def run(
    algorithms: Sequence[Algorithm], stage: Stage, context: Context, example: Batch
) -> tuple[Applied, ...]:
    """Apply the algorithms of one stage.

    Args:
        algorithms: of all stages, in their order.
        stage: which of them are applied.
        context: is changed.
        example: flat example inputs; what changes the fp32 graph has to leave the outputs on them nearly as
            they are. It warns of more.

    Returns:
        What each did.
    """
    chosen = [a for a in algorithms if a.stage is stage]
    needs = [a.needs(context.module, context.plan) for a in chosen]
    kept = context.found.samples if context.found is not None else ()
    batches = [within(kept, n.samples) for n in needs]
    collected = collect(
        context.module, context.plan, [(n.taps, b, n.samples) for n, b in zip(needs, batches, strict=True)]
    )
    changes_float = stage in (Stage.FLOAT, Stage.STATISTICS)
    results = []
    for algorithm, (context.observed, context.batches) in zip(chosen, collected, strict=True):
        before = _outputs(context.module, example) if changes_float else []
        applied = algorithm.apply(context)
        if changes_float and applied.operators:
            distance = worst_sqnr_db(before, _outputs(context.module, example))
            text = f"{applied.text}; fp32 outputs before and after agree to {distance:.0f} dB"
            applied = dataclasses.replace(applied, text=text)
            if distance < LEAST_AGREEMENT_DB:
                msg = (
                    f"{applied.algorithm} changes what the fp32 model computes: its outputs on the example "
                    f"inputs before and after agree to {distance:.0f} dB only, which quantization can't win "
                    "back. Leave it out of `pre`, or out of these layers."
                )
                warn(msg)
        results.append(applied)
    return tuple(results)


def within(batches: Sequence[Batch], bound: Bound | None) -> list[Batch]:
    """Return as many of the kept batches as one algorithm asked for."""
    room = Samples(bound.rows, bound.size) if bound is not None else Samples(0, 0)
    for batch in batches:
        if room.has_room(batch):
            room.batches.append(tuple(batch))
    return list(room.batches)


def _outputs(module: fx.GraphModule, example: Batch) -> list[torch.Tensor]:
    """Return copies: the graph may work in place on what it returned before."""
    return [t.clone() if isinstance(t, torch.Tensor) else t for t in module(*example)]
