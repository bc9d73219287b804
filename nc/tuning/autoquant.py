"""`nc.autoquant`: the fastest precision of each layer by measurement, with what was found in a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nc.api.auto.prepared import PreparedAuto
from nc.api.model_checks import check_progress, check_run_fn, checked_model
from nc.api.preparation.graphs import Request
from nc.api.preparation.routes import automatic
from nc.api.quantized import QuantizedModel, as_call
from nc.api.workflow import convert
from nc.config import AnyConfig, DynamicQuantConfig, StaticQuantConfig
from nc.config.auto import AutoConfig
from nc.errors import ConfigError
from nc.formats.checks import checked_path, is_number
from nc.graph.plan import Applied
from nc.process.torch_settings import check_default_device
from nc.process.warn import warn
from nc.tuning.calibrate import calibrate
from nc.tuning.choices import Choices, Taken
from nc.tuning.described import UntoldError
from nc.tuning.front import Front, FrontPoint
from nc.tuning.identity import Call, KeptCalls, copied, form_of, key_of, metric_of, tensors_of
from nc.tuning.run import CTRL_C, OUT_OF_TIME, TuneProgress
from nc.tuning.tune import tune

_NAME = "autoquant"
#: How many times as fast as the float model the chosen one has to be.
LEAST_GAIN = 1.02
#: Mixtures of candidates that are measured: the fastest by the times of layers, and the most accurate.
_MIXTURES = 2
#: Notes of a front that is not whole: what it gives is used, and not kept.
_ENDED = frozenset({CTRL_C, OUT_OF_TIME})


def autoquant(
    model: torch.nn.Module,
    example_inputs: Any,
    *,
    run_fn: Callable[[Any], Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    min_sqnr_db: float | None = None,
    budget: str | float = "30min",
    backend: str = "auto",
    progress: Callable[[TuneProgress], object] | bool | None = None,
) -> torch.nn.Module:
    """Give each layer the precision that is the fastest on this CPU for these inputs.

    int8 with ranges per row, static int8 where there is calibration data, bf16 where the CPU has it, and fp32
    are timed layer by layer. The fastest mixture is then converted and measured, and so is each precision
    alone. For a limit on a metric of your own use `nc.tune`.

    Args:
        model: a trained fp32 model; it stays as it is.
        example_inputs: as for `prepare`; times are those of a call with these.
        run_fn: calls a prepared model with calibration data. It is called once, and its calls are repeated
            where nothing is known. None: the example inputs are the data, and no layer becomes static.
        cache: a JSON file that keeps what is chosen, for any number of models. The same model, shapes, CPU,
            instruction set, number of threads, engines and versions take what is there, and time nothing.
        min_sqnr_db: least SQNR of the worst output against fp32, in dB, on data that is held out. What is
            below is not taken. None: any.
        budget: as for `nc.tune`.
        backend: as for `prepare`.
        progress: as for `nc.tune`.

    Returns:
        The `QuantizedModel`, whose report says what was measured; `model` itself, with an `NCWarning`, where
        nothing is 1.02 times as fast.

    Raises:
        ConfigError: a value that is out of range.
        ArtefactError: the cache is a directory or a JSON file of something else, or can't be written. A
            damaged one, or one of a newer nc, is an `NCWarning`; it stays as it is, and nothing is kept.
        NCError: as `prepare` and `convert`.
    """
    check_default_device(_NAME)
    model = checked_model(model)
    if min_sqnr_db is not None and not is_number(min_sqnr_db):
        msg = f"min_sqnr_db={min_sqnr_db!r}: expected a number of dB, or None."
        raise ConfigError(msg)
    check_run_fn(run_fn)
    check_progress(progress)
    choices = Choices(None if cache is None else checked_path("cache", cache))
    candidates: dict[str, AnyConfig] = {"int8 per row": DynamicQuantConfig()}
    if run_fn is not None:
        candidates["static int8"] = StaticQuantConfig()
    run = _call_with(example_inputs) if run_fn is None else run_fn
    prepared, calls = _calibrated(model, example_inputs, run, candidates, backend)
    graph = prepared.graph
    # times don't depend on the data, but what is accurate enough does
    try:
        judged_by = "" if min_sqnr_db is None else calls.hash
    except UntoldError as error:
        judged_by, choices = "", Choices(None)
        if cache is not None:
            warn(
                f"cache={str(cache)!r} keeps nothing of this search: it can't be told whether the "
                f"calibration data are the same another time, because of {error}."
            )
    key = {
        **key_of(graph.module, form_of(graph), prepared.first.asked, metric_of(None, None), judged_by, ()),
        "inputs": [[str(t.dtype), *t.shape] for t in tensors_of(example_inputs).values()],
        "candidates": {name: config.to_dict() for name, config in candidates.items()},
        "min_sqnr_db": min_sqnr_db,
    }
    taken = choices.find(key)
    if taken is None:
        front = tune(
            model,
            example_inputs,
            _repeating(calls.all),
            candidates=candidates,
            budget=budget,
            points=_MIXTURES,
            mix=[example_inputs],
            backend=backend,
            automatically=False,
            progress=progress,
        )
        taken = choose(front, min_sqnr_db)
        measured = {point.name for point in front.measured}
        # what failed may work next time
        is_whole = _ENDED.isdisjoint(front.notes) and measured.issuperset(candidates)
        if is_whole:
            choices.keep(key, taken)
    if taken.config is None:
        warn(f"autoquant leaves the model as it is: {taken.why}")
        return model
    return _with_note(
        convert(prepared.prepared(taken.config), measure=False, progress=None if progress is None else False),
        taken.why,
    )


def choose(front: Front, min_sqnr_db: float | None) -> Taken:
    """Return the fastest point that is accurate enough and gains something, or that there is none."""
    said = "; ".join([*map(_measured, front.measured[1:]), *front.notes])
    accurate = [
        point
        for point in front.measured[1:]
        if min_sqnr_db is None or point.result.sqnr_db is None or point.result.sqnr_db >= min_sqnr_db
    ]
    if not accurate:
        limit = "" if min_sqnr_db is None else f" with {min_sqnr_db:g} dB"
        return Taken(None, f"there is nothing else{limit}; {said}")
    certain = [point for point in accurate if not point.is_uncertain]
    best = max(certain or accurate, key=lambda point: point.result.fp32_ratio)
    gain = f"{best.name} is {best.result.fp32_ratio:.2f} times as fast as fp32"
    if best.result.fp32_ratio < LEAST_GAIN:
        return Taken(None, f"{gain}; {said}")
    assert not isinstance(best.config, AutoConfig)
    return Taken(best.config, f"{gain}; {said}")


def _measured(point: FrontPoint) -> str:
    """Return what was measured of a point, in words."""
    result = point.result
    error = "as fp32" if result.sqnr_db is None else f"{result.sqnr_db:.1f} dB"
    doubt = f" ({result.note})" if result.note else ""
    return f"{point.name}: {result.fp32_ratio:.2f} × fp32, {error}{doubt}"


def _call_with(example_inputs: Any) -> Callable[[Any], Any]:
    """Return a function that calls a model with the example inputs."""
    args, kwargs = as_call(example_inputs)
    return lambda prepared: prepared(*args, **kwargs)


def _repeating(calls: Sequence[Call]) -> Callable[[Any], Any]:
    """Return a function that makes calls again: a function of the user's may be able to make them once."""

    def run(prepared: Any) -> None:
        for args, kwargs in map(copied, calls):  # models may write into their inputs
            prepared(*args, **kwargs)

    return run


def _calibrated(
    model: torch.nn.Module,
    example_inputs: Any,
    run: Callable[[Any], Any],
    candidates: Mapping[str, AnyConfig],
    backend: str,
) -> tuple[PreparedAuto, KeptCalls]:
    """Return a preparation that has seen the data, and the calls that it had."""
    asked = Request(backend=backend, example_inputs=example_inputs, strict=False)
    prepared = automatic(model, AutoConfig(), asked, candidates)
    calls = KeptCalls()
    calibrate(prepared, run, calls.note)
    return prepared, calls


def _with_note(q_model: QuantizedModel, why: str) -> QuantizedModel:
    """Return the model with what its report says of the choice."""
    operators = tuple(decision.operator for decision in q_model.graph.plan.quantized)
    graph = dataclasses.replace(
        q_model.graph, applied=(Applied(_NAME, operators, why), *q_model.graph.applied)
    )
    return QuantizedModel(graph, q_model.engine, q_model.backend, q_model.chosen, q_model.verdict)
