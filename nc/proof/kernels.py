"""Compare every kernel of an engine with the quantized graph.

Each kernel is given the engine's own input values. The outputs of a deep model say little about one kernel:
rounding errors grow, so that a wrong operator and a correct one look alike. Between two tensors that were
read, only their own kernel computes, and its possible error is known: the rounding of a code, or of fp32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.views import Quantize, returned
from nc.numerics.metrics import sqnr_db
from nc.ops import quantize_per_tensor
from nc.proof.intermediates import Point, name_of, outputs_of, places_of, points_at
from nc.proof.teacher_forcing import Local, recompute

#: A code may be this many quanta further from the real number than the nearest code is, on any element, and
#: on the mean. The mean is that of noise of 0.22 quanta: 60 dB below the range of 8 bits.
MOST_QUANTA = 1.0
MOST_QUANTA_ON_THE_MEAN = 0.05
#: Of fp32 results.
LEAST_DB = 60.0
#: Where roundings that were not read feed operators that nothing bounds, a tensor is judged as a whole: an
#: LSTM rounds in every step what the last step made.
LEAST_DB_UNBOUNDED = 30.0
#: (dtype of an engine's codes, dtype of the graph's) → what to add to the engine's: kernels take one
#: signedness only.
_SHIFTS = {(torch.int8, torch.uint8): 128, (torch.uint8, torch.int8): -128}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A tensor that an engine computed wrongly from the tensors above it.

    Attributes:
        tensor: its name in the quantized graph.
        operator: the operator that made it.
        operators: all operators between it and the tensors above that were read. The fault is in one of them.
        text: how far it is off, and what is allowed.
    """

    tensor: str
    operator: str
    operators: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        """For messages."""
        among = f" (one of {', '.join(self.operators)})" if len(self.operators) > 1 else ""
        return f"{self.operator!r}{among}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCheck:
    """What a comparison of kernels found.

    Attributes:
        tensors: number of tensors that were compared.
        quanta: the largest error of a code beyond its rounding, in quanta.
        db: the smallest SQNR of a fp32 result; infinity where there is none.
        unread: names of tensors that the engine does not keep; they were judged together with the next ones.
        faults: what is wrong, in execution order.
        few_places: only a few places of each tensor were compared, see `nc.proof.few_places`.
    """

    tensors: int = 0
    quanta: float = 0.0
    db: float = math.inf
    unread: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    few_places: bool = False

    def __str__(self) -> str:
        """Return a line of a report."""
        if self.faults:
            return f"{len(self.faults)} of {self.tensors} tensors are wrong, the first of {self.faults[0]}"
        fp32 = "" if math.isinf(self.db) else f", fp32 results to {self.db:.0f} dB"
        together = (
            f"; {len(self.unread)} that are in no memory were judged with the next" if self.unread else ""
        )
        where = " at a few places each" if self.few_places else ""
        return (
            f"{self.tensors} tensors{where}, codes within {max(self.quanta, 0.01):.2f} quanta of their "
            f"rounding{fp32}{together}"
        )


def compared_names(module: fx.GraphModule, quantized: frozenset[str]) -> frozenset[str]:
    """Return the names of the nodes of a QDQ graph whose values `check_kernels` can use, without outputs."""
    return frozenset(node.name for node in places_of(module, quantized))


def check_kernels(
    module: fx.GraphModule,
    quantized: frozenset[str],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[Any],
    values: Mapping[str, torch.Tensor],
) -> KernelCheck:
    """Compare all values that an engine shows of one call.

    Args:
        module: the QDQ graph.
        quantized: names of the operators that are to run in int8.
        inputs: flat inputs of the call, as they were before it.
        outputs: flat outputs of the call.
        values: name of a node of the QDQ graph → the engine's value. Codes may have the other signedness.
    """
    given = {
        leaf: value
        for leaf, value in zip(returned(module), outputs, strict=True)
        if isinstance(leaf, fx.Node)
    }
    read = {node: given[node] for node in outputs_of(module)}
    places = places_of(module, quantized)
    inner = {node: as_in_graph(node, values[node.name]) for node in places if node.name in values}
    read |= {node: value for node, value in inner.items() if value is not None}
    points = points_at(module, [node for node in read if node in inner], quantized)
    unread = tuple(name_of(node) for node in places if node not in read)
    return checked(points, read, recompute(module, inputs, read), unread)


def checked(
    points: Sequence[Point],
    read: Mapping[fx.Node, torch.Tensor],
    locals_: Mapping[fx.Node, Local],
    unread: tuple[str, ...],
) -> KernelCheck:
    """Compare values with what they should be.

    Args:
        points: those that are compared.
        read: point's node → the engine's value, or some places of it.
        locals_: point's node → what it should be there.
        unread: see `KernelCheck`.
    """
    errors = [_error(point, read[point.node], locals_[point.node]) for point in points]
    return KernelCheck(
        tensors=len(points),
        quanta=max((error.quanta for error in errors), default=0.0),
        db=min((error.db for error in errors), default=math.inf),
        unread=unread,
        faults=tuple(
            Fault(name_of(point.node), point.operator, point.operators, error.wrong)
            for point, error in zip(points, errors, strict=True)
            if error.wrong
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Error:
    """How far a tensor is off: codes in quanta, fp32 results in dB.

    `wrong` says what is too much, and is "" where nothing is.
    """

    quanta: float = 0.0
    db: float = math.inf
    wrong: str = ""


def as_in_graph(node: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    """Return an engine's value in the form that the graph has it in.

    None is returned where it is rounded otherwise, see `is_comparable`.
    """
    if not is_comparable(node, value.dtype):
        return None
    if node.target is not quantize_per_tensor or value.dtype is Quantize.of(node).dtype:
        return value
    dtype = Quantize.of(node).dtype
    return (value.to(torch.int16) + _SHIFTS[value.dtype, dtype]).to(dtype)


def is_comparable(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether an engine's value of this dtype can be compared: not one that is rounded, as to bf16."""
    if node.target is not quantize_per_tensor:
        return dtype is torch.float32
    of_graph = Quantize.of(node).dtype
    return dtype is of_graph or (dtype, of_graph) in _SHIFTS


def _error(point: Point, value: torch.Tensor, local: Local) -> _Error:
    if value.shape != local.value.shape:
        return _Error(wrong=f"its shape is {tuple(value.shape)}, expected {tuple(local.value.shape)}")
    slack = torch.zeros((), dtype=torch.float32) if local.slack is None else local.slack
    if point.how == "recurrent" or bool(slack.isinf().any()):
        return _whole(point, value, local.value)
    if point.how == "codes":
        return _of_codes(value, local.value, slack)
    if point.how == "exact":
        different = int((_difference(value, local.value) > 0).sum())
        return _Error(wrong=f"{different} of {value.numel()} elements differ" if different else "")
    return _of_values(value, local.value, slack)


def _of_codes(codes: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> _Error:
    """Return the distance of codes from real numbers, beyond that of the nearest code.

    A code of NaN is not an error: no code is right.
    """
    beyond = (
        ((codes.double() - exact).abs() - (exact.round() - exact).abs() - slack)
        .clamp_min(0)
        .nan_to_num(nan=0.0)
    )
    if not beyond.numel():
        return _Error()
    largest, mean = beyond.max().item(), beyond.mean().item()
    wrong = largest > MOST_QUANTA or mean > MOST_QUANTA_ON_THE_MEAN
    text = (
        f"codes are up to {largest:.3g} quanta beyond their rounding and {mean:.2g} on the mean, expected at "
        f"most {MOST_QUANTA:g} and {MOST_QUANTA_ON_THE_MEAN:g}"
    )
    return _Error(quanta=largest, wrong=text if wrong else "")


def _of_values(value: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> _Error:
    """Return the SQNR of fp32 values, without what ties above may have done to them."""
    error = (_difference(value, exact) - slack).clamp_min(0)
    db = _db(exact, error)
    return _Error(
        db=db,
        wrong="" if db >= LEAST_DB else f"fp32 values have {db:.1f} dB, expected at least {LEAST_DB:.0f}",
    )


def _whole(point: Point, value: torch.Tensor, exact: torch.Tensor) -> _Error:
    zero_point = Quantize.of(point.node).numbers[1] if point.how == "codes" else 0
    db = sqnr_db(exact - zero_point, value.double() - zero_point)
    return _Error(
        wrong=""
        if db >= LEAST_DB_UNBOUNDED
        else f"values have {db:.1f} dB, expected at least {LEAST_DB_UNBOUNDED:.0f}"
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |a - b| as float64: 0 where both are NaN or the same infinity, infinity where one is."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)


def _db(exact: torch.Tensor, error: torch.Tensor) -> float:
    """SQNR of values with these absolute errors."""
    noise = error.square().sum().item()
    if noise == 0.0:
        return math.inf
    signal = exact.double()[exact.isfinite()].square().sum().item()
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf
