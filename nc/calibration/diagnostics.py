"""Problems that calibration found, from the statistics and the chosen ranges; the report shows them.

Four checks: values outside a range, ranges that still grew at the end of the data, operators that never ran,
and ranges that all rows of a call share. `nc.algorithms.dead_channels` adds channels that are always zero,
and `nc.calibration.costly` the operators that cost most where a model is hopeless. Thresholds decide what is
reported. Nothing here changes what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nc.calibration.costly import COSTLY
from nc.calibration.observe import observer_key
from nc.calibration.statistics import Collected
from nc.formats import PER_TENSOR, OpSpec, QParams, TensorFormat
from nc.formats.reasons import Cause
from nc.graph.catalogue import CONVOLUTIONS
from nc.graph.placement import Edge, edge_key
from nc.graph.plan import Plan
from nc.graph.qdq import Finding
from nc.observers.base import Seen, State
from nc.observers.histogram import HISTOGRAM, occupied

#: Kinds of findings, in the order of the report: an earlier one can be the cause of a later one.
KINDS = (COSTLY, "never_ran", "still_growing", "saturation", "dead_channels", "inaccurate", "shared_range")
#: Reported above this share of values outside of the range. Clipping algorithms leave out 0.01 % of normally
#: distributed data.
SATURATION = 1e-3
#: Reported if the last tenth of the batches widened the range by more than this share of it. Normally
#: distributed data gives 1 or 2 %.
GROWTH = 0.05


_SHARED = (
    "all rows of a call share one range: the result of a row depends on the other rows. "
    'act_granularity="per_token" gives each row its own'
)
_SHARED_IMAGES = (
    "all images of a call share one range: the result of an image depends on the others. Calls of one image "
    "each give it its own"
)


def examine(
    plan: Plan,
    edges: Sequence[Edge],
    qparams: Mapping[tuple[str, TensorFormat], QParams],
    found: Collected,
    others: Sequence[Finding],
) -> tuple[Finding, ...]:
    """All findings: by kind in the order of `KINDS`, the worst of each first.

    Args:
        plan: the decisions after calibration.
        edges: its quantized inputs. Several edges of one tensor give one finding, with the name of the first
            operator.
        qparams: their ranges, by `placement.edge_key`.
        found: the statistics from which the ranges were found.
        others: findings of algorithms, of `nc.calibration.costly`, and on the accuracy of operators.
    """
    missing = [d.operator for d in plan.decisions if d.stays_for(Cause.NEVER_RAN)]
    findings = [
        Finding("never_ran", name, 1.0, f"{Cause.NEVER_RAN.value}: use data that reaches it")
        for name in missing
    ]
    findings += [
        Finding("shared_range", d.operator, 1.0, _SHARED_IMAGES if d.kind in CONVOLUTIONS else _SHARED)
        for d in plan.quantized
        if _shares_range(d.spec)
    ]
    for key, edge in {edge_key(e): e for e in reversed(edges)}.items():
        name = observer_key(edge)
        findings += _of_input(edge, qparams[key], found.states[name], found.seen[name])
    order = {d.operator: i for i, d in enumerate(plan.decisions)}
    findings += others
    return tuple(sorted(findings, key=lambda f: (KINDS.index(f.kind), -f.value, order[f.operator])))


def _shares_range(spec: OpSpec) -> bool:
    """Return whether all rows of a call share the range that is found in it."""
    return spec.mode == "dynamic" and spec.input(0).granularity == PER_TENSOR


def _of_input(edge: Edge, qparams: QParams, state: State, seen: Seen) -> Iterator[Finding]:
    tensor = "its output" if edge.index is None else "its second input" if edge.index else "its input"
    share = late_growth(seen, qparams)
    if share is not None and share > GROWTH:
        text = (
            f"{share:.0%} of the range of {tensor} came in the last {_late(seen)} of {seen.batches} batches: "
            "use more data"
        )
        yield Finding("still_growing", edge.operator, share, text)
    share = saturation(state, seen, qparams)
    if share is not None and share > SATURATION:
        yield Finding(
            "saturation",
            edge.operator,
            share,
            f"{share:.2%} of the values of {tensor} are outside its int8 range",
        )


def saturation(state: State, seen: Seen, qparams: QParams) -> float | None:
    """Return the share of the calibration values that are more than half a step outside of the range.

    None if it is not known: some values were clipped, and no histogram was collected (moving averages).
    """
    low, high = _range(qparams, margin=0.5)
    extremes = seen.extremes(seen.batches)
    if extremes is not None and low <= extremes[0] and extremes[1] <= high:
        return 0.0
    if state.keys() != HISTOGRAM.start.keys():
        return None
    values, counts = occupied(state)
    return float(counts[(values < low) | (values > high)].sum() / counts.sum())


def late_growth(seen: Seen, qparams: QParams) -> float | None:
    """By which share of itself the range grew in the last tenth of the batches.

    Values outside of the quantized range do not count.

    None for fewer than 10 batches, or if the history is not known.
    """
    before, after = (
        seen.extremes(seen.batches - _late(seen)) if _late(seen) else None,
        seen.extremes(seen.batches),
    )
    if before is None or after is None:
        return None
    whole = _width(after, qparams)
    return 1.0 - _width(before, qparams) / whole if whole else 0.0


def _late(seen: Seen) -> int:
    return seen.batches // 10


def _range(qparams: QParams, margin: float = 0.0) -> tuple[float, float]:
    """Return the lowest and highest value that the codes can hold, with `margin` steps more on each side."""
    spec, scale, zero_point = qparams.spec, float(qparams.scale), int(qparams.zero_point)
    return (spec.quant_min - zero_point - margin) * scale, (spec.quant_max - zero_point + margin) * scale


def _width(extremes: tuple[float, float], qparams: QParams) -> float:
    """Width of the range that covers these extremes and 0.

    For symmetric codes it is the width of the larger side.
    """
    low, high = _range(qparams)
    left, right = max(min(extremes[0], 0.0), low), min(max(extremes[1], 0.0), high)
    return max(-left, right) if qparams.spec.symmetric else right - left
