"""What was done to a model with low-bit weights: put together from what its layers carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from nc.nn import QuantEmbedding, QuantLinear
from nc.nn.origin import Origin, QuantizationRun


def note(model: torch.nn.Module, run: QuantizationRun, names: Collection[str] | None = None) -> None:
    """Let low-bit layers of a model carry the run that made them.

    Args:
        model: the quantized model.
        run: what was done to it.
        names: of the layers; None: all.
    """
    for name, module in model.named_modules():
        if isinstance(module, (QuantLinear, QuantEmbedding)) and (names is None or name in names):
            module.origin = Origin(name, run)


def history_of(model: torch.nn.Module) -> QuantizationRun:
    """Return the run that made the layers of a model; for layers of several runs, these put together.

    A model can hold one that was quantized, or be a part of it. Then names are those in this model, and what
    was measured of the other model is left out.
    """
    places: list[tuple[QuantizationRun, str, str]] = []
    for name, module in model.named_modules():
        origin = module.origin if isinstance(module, (QuantLinear, QuantEmbedding)) else None
        if origin is not None and all(origin.run != run for run, _, _ in places):
            places.append((origin.run, *_apart(name, origin.name)))
    if not places:
        return QuantizationRun()
    runs = [run if here == there else _moved(run, here, there) for run, here, there in places]
    return runs[0] if len(runs) == 1 else _together(runs)


def _apart(here: str, there: str) -> tuple[str, str]:
    """Return the prefixes of two names of one layer before their common suffix.

    The result is ("0", "") for "0.fc" and "fc".
    """
    a, b = here.split("."), there.split(".")
    while a and b and a[-1] == b[-1]:
        del a[-1], b[-1]
    return ".".join(a), ".".join(b)


def _moved(run: QuantizationRun, here: str, there: str) -> QuantizationRun:
    """Return a run with the names of layers of `there` in a model that holds them inside of `here`."""

    def moved(name: str) -> str | None:
        if name != there and there and not name.startswith(f"{there}."):
            return None
        return ".".join(filter(None, (here, name[len(there) :].removeprefix("."))))

    decisions = (
        [{**d, "operator": moved(d["operator"])} for d in run.plan["decisions"]]
        if run.plan is not None
        else []
    )
    applied = (
        dataclasses.replace(a, operators=tuple(filter(None, map(moved, a.operators)))) for a in run.applied
    )
    plan = (
        None
        if run.plan is None
        else {**run.plan, "decisions": [d for d in decisions if d["operator"] is not None]}
    )
    return dataclasses.replace(run, plan=plan, applied=tuple(applied), sqnr_db=None, verdict=None)


def _together(runs: list[QuantizationRun]) -> QuantizationRun:
    """Return one run for several; it has a configuration where all have the same."""
    plans = [run.plan for run in runs if run.plan is not None]
    plan: dict[str, Any] | None = None
    if plans:
        algorithms = [step for each in plans for step in each["algorithms"]]
        plan = {
            "algorithms": [step for i, step in enumerate(algorithms) if step not in algorithms[:i]],
            "decisions": [decision for each in plans for decision in each["decisions"]],
        }
    config = runs[0].config if all(run.config == runs[0].config for run in runs) else {}
    return QuantizationRun(plan=plan, applied=tuple(a for run in runs for a in run.applied), config=config)
