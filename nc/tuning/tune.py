"""`nc.tune`: how much accuracy each speed, or each size, costs."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch

from nc.api.model_checks import METRIC, check_progress, check_run_fn, checked_model
from nc.api.preparation.graphs import Request
from nc.api.preparation.routes import automatic, prepared_by
from nc.api.quantized import as_call
from nc.config import AnyConfig, has_weight_only
from nc.config.auto import AutoConfig
from nc.config.neural_compressor import config_from
from nc.errors import ConfigError, InputError, StateError
from nc.formats.checks import check_callable, checked_path, is_number
from nc.planning.layer_plan import WeightPlan
from nc.process.modes import evaluating
from nc.process.torch_settings import check_default_device
from nc.process.warn import warn
from nc.text.plain import shown
from nc.tuning.calibrate import calibrate
from nc.tuning.described import UntoldError, described
from nc.tuning.executor_metrics import Elsewhere
from nc.tuning.front import REFERENCE, Front
from nc.tuning.identity import (
    Call,
    KeptCalls,
    Metric,
    SeenCalls,
    form_of,
    key_of,
    metric_of,
    plain_or_described,
)
from nc.tuning.low_bit import LowBitSearch, default_candidates, plans_of
from nc.tuning.run import Run, TuneProgress, front_by, telling
from nc.tuning.search import AUTO, BF16, GraphSearch
from nc.tuning.trials import Trials

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _calibrate(prepared: torch.nn.Module, run_fn: Callable[[Any], Any], note: Callable[..., None]) -> None:
    """Call `calibrate`; raises StateError where nothing came of it."""
    if not calibrate(prepared, run_fn, note):
        msg = "Nothing was calibrated: run_fn did not call the prepared model that it was given."
        raise StateError(msg)


def tune(
    model: torch.nn.Module,
    example_inputs: Any,
    run_fn: Callable[[Any], Any],
    metric: Metric | None = None,
    candidates: Mapping[str, AnyConfig] | Sequence[AnyConfig] | None = None,
    *,
    budget: str | float = "30min",
    trials: str | os.PathLike[str] | None = None,
    points: int = 8,
    mix: Sequence[Any] | None = None,
    backend: str = "auto",
    automatically: bool = True,
    progress: Callable[[TuneProgress], object] | bool | None = None,
    executor: Executor | None = None,
    target_bits: float | None = None,
    fused: bool = False,
    metric_id: str | None = None,
) -> Front:
    """Find how much accuracy each speed costs: a front of models that were converted and measured.

    Operators that the engine couples are one decision. Each candidate is calibrated at the same time, and
    converted once; the noise that each group adds to the outputs (no labels are needed) and the time that it
    takes are estimated. Assignments of candidates to groups that are optimal for these estimates are then
    measured one by one: with the metric, and in turns with the float model. fp32, bf16 where the CPU has it,
    each candidate alone and `"auto"` are always among the points.

    With `target_bits` the candidates quantize weights alone, and what they cost is bytes. Each is converted
    and measured for the whole model, and what it costs each layer is estimated. The first mixed point has the
    least estimated error of all assignments with so many bits on average; others around it follow. The model
    is not captured.

    Args:
        model: a trained fp32 model.
        example_inputs: as for `prepare`.
        run_fn: calls the prepared model with calibration data.
        metric: called with a quantized model and with the float one; larger is better. None: the part of the
            power of the outputs that is right, on calibration data that is held out; 1 for fp32. With
            `target_bits`, for models that return logits, the negative KL divergence in nats per token.
        candidates: configurations by name, or in a list; None: those that `"auto"` tries for such a model;
            with `target_bits` GPTQ with 2 to 8 bits.
        budget: for all, in seconds or as "90s", "30min", "2h". The float model is measured in any case.
        trials: folder for one file per measured point. A search with the same model, data, metric, machine
            and versions takes what it finds there.
        points: of the front between the candidates, beside those that are always measured.
        mix: inputs, as in calls, whose times are added up; None: the most frequent sizes of `run_fn`.
        backend: as for `prepare`.
        automatically: whether `"auto"` is among the points.
        progress: called with a `TuneProgress`; `print` shows it. None and False: as for `convert`.
        executor: computes the metrics of quantized models, which are sent as artefacts, after all times were
            measured here. Any `concurrent.futures.Executor`; the metric must be one that it can send. None:
            here.
        target_bits: of the weights that candidates quantize, on average, with scales and zero points.
        fused: with `target_bits`, give layers that read one tensor one format: engines such as vLLM compute
            them as one layer.
        metric_id: a text that you change with the metric and its data, for `trials`. None: they are told
            apart by the metric's code, what it holds and the globals that it reads, arrays by their bytes.
            Where that can't be done (open files, generators, code that reads files), nothing is kept, with an
            `NCWarning`.

    Returns:
        The front. Ctrl-C ends the search, and the front so far is returned.

    Raises:
        ConfigError: a value that is out of range, or a candidate for weights alone without `target_bits`,
            or another one with it.
        InputError: the metric gives no finite number, or as `prepare`.
        NCError: as `prepare`.
    """
    start = time.monotonic()
    check_default_device("tune")
    model = checked_model(model)
    check_run_fn(run_fn)
    if run_fn is None:
        msg = "run_fn=None: a search needs calibration data; give a function that calls the prepared model."
        raise InputError(msg)
    check_callable("metric", metric, METRIC)
    check_progress(progress)
    _check_mix(mix)
    if metric_id is not None and (metric is None or not isinstance(metric_id, str) or not metric_id):
        msg = f"metric_id={metric_id!r}: expected a text that tells metric= apart, and a metric."
        raise ConfigError(msg)
    kept = Trials(None if trials is None else checked_path("trials", trials))
    seconds = _seconds(budget)
    elsewhere = None if executor is None else Elsewhere(executor, metric, model, backend)
    if type(points) is not int or points < 1:
        msg = f"points={points!r}: expected a whole number from 1."
        raise ConfigError(msg)
    if type(fused) is not bool or (fused and target_bits is None):
        msg = f"fused={fused!r}: expected True or False, and True only with target_bits=."
        raise ConfigError(msg)
    named = _named(candidates, weights=target_bits is not None)
    asked = Request(backend=backend, example_inputs=example_inputs, strict=False)
    try:
        with telling(progress) as told:
            if target_bits is not None:
                bits = _bits(target_bits)
                options = named or default_candidates(model)
                first = prepared_by(model, next(iter(options.values())), asked)
                plans = plans_of(model, options)
                calls = KeptCalls()
                _calibrate(first, run_fn, calls.note)
                timed = _mix(mix, calls, example_inputs)

                def low_bit_key() -> dict[str, Any]:
                    with evaluating(model):
                        form = f"{model} {described(model)} {_layers(plans.values())}"
                    return key_of(model, form, backend, metric_of(metric, metric_id), calls.hash, timed)

                run = _run(kept, low_bit_key, options, start + seconds, told, elsewhere)
                of_bits = LowBitSearch(
                    model, options, plans, metric, calls, timed, backend, run, bits, points, fused=fused
                )
                return front_by(of_bits, run)
            prepared = automatic(model, AutoConfig(), asked, named)
            seen = SeenCalls()
            _calibrate(prepared, run_fn, seen.note)
            timed = _mix(mix, seen, example_inputs)

            def key() -> dict[str, Any]:
                judged_by, graph = metric_of(metric, metric_id), prepared.graph
                return key_of(graph.module, form_of(graph), prepared.first.asked, judged_by, seen.hash, timed)

            run = _run(kept, key, named, start + seconds, told, elsewhere)
            given = candidates is not None
            whole = GraphSearch(
                model, prepared, metric, timed, run, points, given=given, automatically=automatically
            )
            return front_by(whole, run)
    finally:
        if elsewhere is not None:
            elsewhere.close()


def _run(
    trials: Trials,
    key: Callable[[], dict[str, Any]],
    candidates: Mapping[str, AnyConfig],
    end: float,
    progress: Callable[[TuneProgress], object],
    elsewhere: Elsewhere | None,
) -> Run:
    """Return the state of a search; trials are kept if all that determines them can be told apart."""
    if trials.folder is None:
        return Run({}, trials, end, progress, elsewhere)
    try:
        determines = key()
        for config in candidates.values():
            plain_or_described(config)
    except UntoldError as error:
        said = (
            f"trials={str(trials.folder)!r} keeps nothing of this search, and all is measured again each "
            f"time: it can't be told whether the metric and the data are the same another time, because of "
            f"{error}. If that is the metric's, give metric_id=, a text that you change with the metric."
        )
        warn(said)
        run = Run({}, Trials(None), end, progress, elsewhere)
        run.note(said)
        return run
    return Run(determines, trials, end, progress, elsewhere)


def _check_mix(mix: object) -> None:
    """Raise InputError for a mix that is not a list of inputs: a tensor's rows would be timed as calls."""
    if mix is not None and (not isinstance(mix, (list, tuple)) or not mix):
        msg = (
            f"Expected mix to be a list of inputs, one for each call, as [x, y], but got {shown(mix)}. For "
            "one call write mix=[x]."
        )
        raise InputError(msg)


def _mix(mix: Sequence[Any] | None, seen: SeenCalls, example_inputs: Any) -> list[Call]:
    """Return the calls that are timed."""
    calls = [as_call(each, "each entry of mix") for each in mix] if mix is not None else seen.frequent()
    return calls or [as_call(example_inputs)]


def _layers(plans: Iterable[WeightPlan]) -> list[str]:
    """Return the layers that some plan quantizes: a result's average of bits is over these."""
    return sorted({decision.operator for plan in plans for decision in plan.quantized})


def _bits(target: object) -> float:
    """Return a target.

    Raises:
        ConfigError: it is not a number above 0.
    """
    if not is_number(target) or not target > 0:  # type: ignore[operator]
        msg = f"target_bits={shown(target)}: expected a number above 0, as 4.25."
        raise ConfigError(msg)
    return float(target)  # type: ignore[arg-type]


def _seconds(budget: str | float) -> float:
    """Return a budget in seconds.

    Raises:
        ConfigError: it is not a positive time.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*(s|min|h)\s*", budget) if isinstance(budget, str) else None
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else float(budget)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(budget, bool) or not value > 0:
        msg = f'budget={shown(budget)}: expected seconds, or a time as "90s", "30min" or "2h".'
        raise ConfigError(msg)
    return value


def _named(
    candidates: Mapping[str, AnyConfig] | Sequence[AnyConfig] | None, *, weights: bool
) -> dict[str, AnyConfig]:
    """Return candidates by name, all or none of which are for weights alone."""
    if candidates is None:
        return {}
    if not isinstance(candidates, (Mapping, list, tuple)):
        msg = f"candidates={shown(candidates)}: expected configurations in a list, or by name in a dict."
        raise ConfigError(msg)
    items = candidates.items() if isinstance(candidates, Mapping) else enumerate(candidates, 1)
    found = {str(name): config_from(config) for name, config in items}
    others = [name for name, config in found.items() if has_weight_only(config) != weights]
    if others:
        said = (
            "is not for weights alone, as target_bits= asks for"
            if weights
            else "quantizes weights alone, which needs target_bits="
        )
        msg = f"candidates: {', '.join(others)} {said}."
        raise ConfigError(msg)
    taken = sorted({REFERENCE, AUTO, BF16} & set(found))
    if not found or taken:
        msg = (
            f"candidates: {', '.join(taken)} is always measured." if taken else "candidates: none was given."
        )
        raise ConfigError(msg)
    return found
