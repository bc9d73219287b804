"""Compare two engines tensor by tensor: whether an operator is wrong or only rounding differs.

See docs/how-to/compare-engines.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.api.quantized import QuantizedModel, ReferenceModule, as_call, checked
from nc.backends import engine_options, get_backend
from nc.errors import ConfigError, StateError
from nc.graph.qdq import QDQGraph
from nc.graph.views import Quantize
from nc.numerics.metrics import sqnr_db
from nc.parity.engine_values import Run, read
from nc.parity.graph_diff import difference
from nc.proof.intermediates import Point, name_of, places_of, points_at
from nc.proof.teacher_forcing import Local, recompute
from nc.text.html_page import preformatted
from nc.text.table import format_table

REFERENCE = "reference"
#: From the best to the worst.
VERDICTS = ("equal", "within one quantum", "propagated", "disagreement")
#: A fp32 tensor has no codes; its quantum is what it would have as 8 bits over its own range: the largest
#: magnitude over this.
_STEPS = 255
#: Where roundings that can't be read feed operators that nothing bounds, a tensor is judged as a whole:
#: after an LSTM or GRU, which round the result of the last step in every step, or after a norm that the
#: engine fused with them.
WHOLE_DB = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One engine's value of one tensor, compared with the correct value.

    The correct value is that for the engine's own earlier tensors.

    Attributes:
        error: the largest error in quanta, beyond what rounding explains: half a quantum for a code, and ties
            in earlier tensors. Where single elements have no bound, the SQNR in dB.
        unit: "quanta" or "dB".
        wrong: number of elements whose error is above the backend's tolerance; all elements if the SQNR is
            below `WHOLE_DB`.
    """

    error: float
    unit: str
    wrong: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorComparison:
    """One tensor in both engines.

    Attributes:
        tensor: name of its node in the quantized graph.
        operator: the operator that made it.
        operators: all operators between it and the earlier tensors that were compared. A fault is in one of
            them.
        how: what was compared: "codes", "fp32", "dynamic", "recurrent" or "exact";
            docs/how-to/compare-engines.md says how each is judged.
        verdict: one of `VERDICTS`.
        distance: the largest difference between the engines, in quanta.
        different: number of elements that differ.
        elements: number of all elements.
        since: the earlier tensors in which the differences begin.
        sides: both engines, in the order of the comparison.
    """

    tensor: str
    operator: str
    operators: tuple[str, ...]
    how: str
    verdict: str
    distance: float
    different: int
    elements: int
    since: tuple[str, ...]
    sides: tuple[Side, Side]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `compare` found; `print` shows a table of what differs.

    Attributes:
        engines: names of the two backends.
        tolerances: the tolerance of each backend at ties, in quanta.
        tensors: all that were compared, in execution order.
        unread: tensors that were not compared, because reading them changes an engine's results. They are
            judged together with the next tensor that can be read.
    """

    engines: tuple[str, str]
    tolerances: tuple[float, float]
    tensors: tuple[TensorComparison, ...]
    unread: tuple[str, ...] = ()

    @property
    def disagreements(self) -> tuple[TensorComparison, ...]:
        """Tensors that an engine computed wrongly from its own earlier tensors."""
        return tuple(t for t in self.tensors if t.verdict == "disagreement")

    @property
    def first(self) -> TensorComparison | None:
        """The first of `disagreements` in execution order; None when there are none."""
        return next(iter(self.disagreements), None)

    def counts(self) -> dict[str, int]:
        """Return the number of tensors with each verdict."""
        found = Counter(t.verdict for t in self.tensors)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "counts": self.counts()}

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return preformatted(str(self))

    def __str__(self) -> str:
        """Return the tensors that differ, then a summary."""
        rows: list[tuple[str, ...]] = [("tensor", "made by", "verdict", "different", "quanta", "since")]
        rows += [_row(t) for t in self.tensors if t.verdict != "equal"]
        lines = [format_table(rows), ""] if len(rows) > 1 else []
        lines.append(f"{self.engines[0]} against {self.engines[1]}, {len(self.tensors)} tensors: ")
        lines[-1] += ", ".join(f"{n} {verdict}" for verdict, n in self.counts().items() if n)
        lines += [_accusation(t, self.engines, self.tolerances) for t in self.disagreements]
        if self.unread:
            lines.append(
                f"not read, because reading them changes the results of an engine: {', '.join(self.unread)}"
            )
        return "\n".join(lines)


@torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator] # torch does not annotate it; as when the models are called
def compare(
    q_a: QuantizedModel,
    q_b: QuantizedModel | ReferenceModule | str = REFERENCE,
    inputs: Any = None,
    *,
    isolate: str = "auto",
) -> Comparison:
    """Run two engines on the same inputs and compare every tensor.

    Both engines lower the quantized graph again, with the tensors as additional outputs. This takes longer
    than `convert`.

    Args:
        q_a: the result of `convert` or `load`.
        q_b: the same quantized model on another engine, or "reference".
        inputs: one batch: a tensor, a tuple or list (positional), or a dict (keywords); None: the example
            inputs of `prepare`.
        isolate: as in `convert`.

    Raises:
        StateError: not quantized models.
        ConfigError: they are not the same quantized model; says what differs.
        InputError: the inputs do not fit the captured model.
        BackendUnavailableError: an engine cannot run here.
    """
    graph, sides = _checked(q_a, q_b)
    bound = _bind(graph, inputs)
    places = places_of(graph.module, frozenset(d.operator for d in graph.plan.quantized))
    readings = [
        read(graph, get_backend(side.backend), side.run, bound, places, isolate=isolate) for side in sides
    ]
    tolerances = (sides[0].tolerance, sides[1].tolerance)
    common = [n for n in places if all(n in reading for reading in readings)]
    tensors = _judge_all(graph, bound, common, readings, tolerances)
    accused = _disagreeing(tensors)
    for node in [n for n in common if name_of(n) in accused]:
        # if excluding this tensor removes the disagreements after it, the engine's value of the tensor was
        # misread
        fewer = [n for n in common if n is not node]
        others = _judge_all(graph, bound, fewer, readings, tolerances)
        if len(_disagreeing(others)) < len(_disagreeing(tensors)) - 1:
            common, tensors = fewer, others
    return Comparison(
        engines=(sides[0].backend, sides[1].backend),
        tolerances=tolerances,
        tensors=tensors,
        unread=tuple(name_of(n) for n in places if n not in common),
    )


def _disagreeing(tensors: Sequence[TensorComparison]) -> list[str]:
    """Return the names of the tensors on which the engines disagree."""
    return [t.tensor for t in tensors if t.verdict == "disagreement"]


def _judge_all(
    graph: QDQGraph,
    inputs: Sequence[torch.Tensor],
    places: Sequence[fx.Node],
    readings: Sequence[Mapping[fx.Node, torch.Tensor]],
    tolerances: tuple[float, float],
) -> tuple[TensorComparison, ...]:
    """All verdicts, with `places` and the outputs as points."""
    points = points_at(graph.module, places, frozenset(d.operator for d in graph.plan.quantized))
    locals_ = [
        recompute(graph.module, inputs, {p.node: reading[p.node] for p in points}) for reading in readings
    ]
    tensors: list[TensorComparison] = []
    for point in points:
        values = readings[0][point.node], readings[1][point.node]
        local = locals_[0][point.node], locals_[1][point.node]
        tensors.append(_judged(point, values, local, tolerances, tensors))
    return tuple(tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class _Engine:
    backend: str
    run: Run

    @property
    def tolerance(self) -> float:
        return get_backend(self.backend).capabilities().tolerance


def _engine_of(model: QuantizedModel) -> _Engine:
    """Return the engine of a model; one that leaves padding out computes it here, as the reference does."""
    if model.engine.texts is None:
        return _Engine(model.backend, model.engine.run)
    backend = get_backend(model.backend)
    options = engine_options(backend, padding="computed")
    return _Engine(model.backend, backend.lower(model.graph, verify="off", **options).run)


def _checked(q_a: Any, q_b: Any) -> tuple[QDQGraph, tuple[_Engine, _Engine]]:
    """Return the graph and both engines."""
    graph = checked(q_a, "compare").graph
    a = _engine_of(q_a)
    if isinstance(q_b, str) and q_b != REFERENCE:
        msg = (
            f'compare() takes a model or "reference" to compare with, but got {q_b!r}; load the model with '
            f"backend={q_b!r} for that."
        )
        raise ConfigError(msg)
    if not isinstance(q_b, (QuantizedModel, ReferenceModule, str)):
        msg = (
            'compare() expects the result of convert() or load(), or "reference", as the second model, but '
            f"got {type(q_b).__name__}."
        )
        raise StateError(msg)
    found = "" if isinstance(q_b, str) or q_b.graph is graph else difference(graph.module, q_b.graph.module)
    if found:
        msg = f"The two are not the same quantized model: {found}. Save one and load it on both engines."
        raise ConfigError(msg)
    if isinstance(q_b, QuantizedModel):
        return graph, (a, _engine_of(q_b))
    return graph, (a, _Engine(REFERENCE, get_backend(REFERENCE).lower(graph).run))


def _bind(graph: QDQGraph, inputs: Any) -> Sequence[torch.Tensor]:
    """Return the flat inputs."""
    return graph.example if inputs is None else graph.signature.bind(*as_call(inputs, "inputs"))


def _judged(
    point: Point,
    values: tuple[torch.Tensor, torch.Tensor],
    local: tuple[Local, Local],
    tolerances: Sequence[float],
    done: Sequence[TensorComparison],
) -> TensorComparison:
    """Return the verdict on one tensor, given those above."""
    distance, different = _distances(*values)
    quanta = _largest(distance) / (1.0 if point.how in ("codes", "exact") else _quantum(values[1]))
    first, second = (
        _side(point, v, should, tolerance)
        for v, should, tolerance in zip(values, local, tolerances, strict=True)
    )
    if first.wrong or second.wrong:
        verdict = "disagreement"
    elif not different:
        verdict = "equal"
    else:
        verdict = "within one quantum" if quanta <= 1 else "propagated"
    above = [done[i] for i in point.above if done[i].different]
    since = dict.fromkeys(name for t in above for name in (t.since or (t.tensor,)))
    return TensorComparison(
        tensor=name_of(point.node),
        operator=point.operator,
        operators=point.operators,
        how=point.how,
        verdict=verdict,
        distance=quanta,
        different=different,
        elements=values[0].numel(),
        since=tuple(since),
        sides=(first, second),
    )


def _side(point: Point, value: torch.Tensor, local: Local, tolerance: float) -> Side:
    slack = torch.zeros((), dtype=torch.float32) if local.slack is None else local.slack
    bounded = point.how != "recurrent" and not bool(slack.isinf().any())
    errors, different = _distances(value, local.value)
    if point.how == "exact":
        return Side(error=_largest(errors), unit="quanta", wrong=different if bounded else 0)
    if not bounded:
        zero_point = Quantize.of(point.node).numbers[1] if point.how == "codes" else 0
        db = sqnr_db(local.value - zero_point, value.double() - zero_point)
        return Side(error=db, unit="dB", wrong=value.numel() if db < WHOLE_DB else 0)
    free, quantum = (0.5, 1.0) if point.how == "codes" else (0.0, _quantum(local.value))
    errors = (errors - slack - free).clamp_min(0) / quantum
    return Side(error=_largest(errors), unit="quanta", wrong=int((errors > tolerance).sum()))


def _largest(distances: torch.Tensor) -> float:
    return distances.max().item() if distances.numel() else 0.0


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return |a - b| and how many elements differ.

    The distance is float64: 0 where both are the same infinity or NaN, infinity where only one is.
    """
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    distance = (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)
    return distance, int((~same).sum())


def _quantum(value: torch.Tensor) -> float:
    """Return the quantum of an fp32 tensor: a fixed part of its largest finite magnitude."""
    finite = value[torch.isfinite(value)].double().abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return largest / _STEPS or 1.0


def _row(t: TensorComparison) -> tuple[str, ...]:
    since = ", ".join(t.since) or ("unread tensors" if t.verdict == "propagated" else "here")
    return (t.tensor, t.operator, t.verdict, f"{t.different} of {t.elements}", f"{t.distance:.3g}", since)


def _accusation(t: TensorComparison, engines: tuple[str, str], tolerances: tuple[float, float]) -> str:
    """Which side is wrong at one tensor, by how much, and which operators it may be."""
    found = []
    for side, engine, tolerance in zip(t.sides, engines, tolerances, strict=True):
        unit = (
            f"{side.error:.1f} dB, less than {WHOLE_DB:.0f}"
            if side.unit == "dB"
            else f"up to {side.error:.3g} quanta"
        )
        if side.wrong:
            found.append(
                f"{engine} is wrong in {side.wrong} of {t.elements} elements, {unit} (tolerance "
                f"{tolerance:g})"
            )
    return (
        f"{t.operator!r} (between the tensors above and {t.tensor}: {', '.join(t.operators) or 'nothing'}): "
        f"{'; '.join(found)}"
    )
