"""Which operators cost most of a quantized model's accuracy, measured one by one on one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.accuracy import EXAMPLE, Accuracy
from nc.graph.fx_utils import Hook, run_with
from nc.graph.placement import works_in_place
from nc.graph.plan import Plan
from nc.graph.qdq import Finding
from nc.numerics.metrics import sqnr_db, worst_sqnr_db

#: Below this SQNR of the quantized graph against fp32, in dB, a model is called hopeless: the error is a
#: third of the signal.
HOPELESS_DB = 10.0
#: Below this one the accuracy is called low: the error is more than a tenth of the signal.
LOW_DB = 20.0
#: A model whose scores have another largest entry in fewer places than this share is not hopeless. It takes
#: so many places to tell.
_UNCHANGED, _PLACES = 0.01, 100
#: What the report says first of a model that was below the least accuracy: the name of its `Applied`.
FLOOR = "accuracy floor"
#: Kind of the findings.
COSTLY = "costly"
#: What the measurement may take, and hold.
SECONDS, _BYTES = 3.0, 1 << 30
#: Operators are named from this share of all error on, but for the worst one, which always is.
_SHARE, _NAMED = 0.1, 5


def trouble(accuracy: Accuracy) -> str:
    """Return what a model is called that is far from fp32, "HOPELESS" or "LOW"; "" for one that is not."""
    if accuracy.sqnr_db >= LOW_DB:
        return ""
    changed = accuracy.changed if accuracy.places >= _PLACES else None
    is_hopeless = accuracy.sqnr_db < HOPELESS_DB and (changed is None or changed >= _UNCHANGED)
    return "HOPELESS" if is_hopeless else "LOW"


def costly_operators(
    fp32: fx.GraphModule,
    quantized: fx.GraphModule,
    plan: Plan,
    example: Sequence[torch.Tensor],
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    data: str = EXAMPLE,
) -> tuple[Finding, ...]:
    """Return the operators that lose most, the worst first.

    One run finds the error of each operator on exact inputs. Then operators are tried in the order of these
    errors, for as long as the time allows: the float graph runs with the rounded output of one operator, and
    the error of the model's outputs is measured.

    Args:
        fp32: the float graph from which `quantized` was made, with nodes of the same names.
        quantized: the QDQ graph.
        plan: says which operators are quantized.
        example: flat inputs: those with most of the error.
        seconds: for the second step; one operator is always tried.
        clock: gives the time in seconds.
        data: what the inputs are, in words.

    Returns:
        Findings whose value is the operator's share of the summed error; none for graphs that work in place,
        or whose values take too much memory.
    """
    names = {d.operator for d in plan.quantized}
    places = {n.name: n.meta["operator"] for n in fp32.graph.nodes if n.meta.get("operator") in names}
    if works_in_place(fp32) or not places:
        return ()
    exact: dict[str, Any] = {}
    outputs = run_with(
        fp32,
        example,
        lambda node, value, _: exact.setdefault(node.name, value) if node.name in places else value,
    )
    if sum(map(_bytes, exact.values())) > _BYTES:
        return ()
    local: dict[str, float] = {}
    rounded: dict[str, Any] = {}

    def compare(node: fx.Node, value: Any, _: Mapping[fx.Node, Any]) -> Any:
        if node.name not in exact:
            return value
        local[node.name], rounded[node.name] = sqnr_db(_first(exact[node.name]), _first(value)), value
        return exact[node.name]

    run_with(quantized, example, compare)
    exact.clear()
    noise: dict[str, float] = {}
    decibels: dict[str, float] = {}
    start = clock()
    for name in sorted(local, key=local.__getitem__):
        decibels[name] = worst_sqnr_db(outputs, run_with(fp32, example, _replacing(name, rounded[name])))
        noise[name] = 10 ** (-decibels[name] / 10)
        if clock() - start > seconds:
            break
    total = sum(noise.values())
    worst = sorted((name for name in noise if noise[name]), key=lambda name: -noise[name])
    named = [name for i, name in enumerate(worst) if i == 0 or noise[name] >= _SHARE * total][:_NAMED]
    return tuple(
        Finding(
            COSTLY,
            places[n],
            _share(noise[n], total),
            f"it alone leaves {decibels[n]:.1f} dB on {data}",
        )
        for n in named
    )


def _replacing(name: str, value: Any) -> Hook:
    """Return a hook that gives a node another value."""
    return lambda node, own, _: value if node.name == name else own


def _share(noise: float, total: float) -> float:
    return noise / total if total < float("inf") else float(noise == total)


def _first(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return tensor


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in ([value] if isinstance(value, torch.Tensor) else value))
