"""What a model gives: the user's metric, its distance to fp32, its time in turns with the float model."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nc.api.auto.prepared import PreparedAuto
from nc.api.quantized import QuantizedModel
from nc.capture.export_guards import eval_mode
from nc.errors import BackendError, InputError
from nc.profiling.latency import MOST_SPREAD, median, timed_rounds
from nc.profiling.own_model import OwnModel
from nc.text.plain import shown
from nc.tuning.identity import Call, Metric
from nc.tuning.trials import Result

#: Seconds for the time of a model, for each entry of the mix.
SECONDS = 1.0
#: Rounds that are counted at least, and calls that make plans for new sizes.
_ROUNDS, _WARM_UP = 5, 3
_FP32, _QUANTIZED = "fp32", "quantized"


def score(function: Callable[..., Any], model: Any, *args: Any) -> float:
    """Return what the user's metric says of a model.

    Raises:
        InputError: the metric's value is not a finite number.
    """
    with torch.no_grad():
        value = function(model, *args)
    try:
        number = float(value) if hasattr(type(value), "__float__") else math.nan  # a text is not a number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        name = getattr(function, "__name__", type(function).__name__)
        msg = f"The metric {name} gave {shown(value)} for {type(model).__name__}: expected a finite number."
        raise InputError(msg)
    return number


def of_float(model: torch.nn.Module, metric: Metric | None, mix: Sequence[Call], weight_bytes: int) -> Result:
    """Return what the float model gives; its metric is 1 where there is no function.

    Raises:
        InputError: the metric gives no finite number, or the model fails on inputs of the mix.
    """
    with eval_mode(model):
        value = 1.0 if metric is None else score(metric, model)
    times = [timed(model, entry, None) for entry in mix]
    return Result(
        metric=value,
        sqnr_db=None,
        fp32_ratio=1.0,
        ms=sum(each.fp32 for each in times),
        spread=(1.0, 1.0),
        weight_bytes=weight_bytes,
        note=doubts(times),
    )


def of_quantized(
    q_model: QuantizedModel,
    prepared: PreparedAuto,
    model: torch.nn.Module,
    metric: Metric | None,
    mix: Sequence[Call],
    fp32_ms: float,
    *,
    scored: bool = True,
) -> Result:
    """Measure the metric, the SQNR and the time of a quantized model.

    Args:
        q_model: the quantized model.
        prepared: holds the data for the SQNR.
        model: the float model, whose calls are timed in turns with those of `q_model`.
        metric: see `nc.tune`.
        mix: calls that are timed.
        fp32_ms: time of the float model when it was measured first, in ms. Times are scaled to it, because
            the speed of a machine changes.
        scored: False leaves the metric out (NaN).

    Raises:
        InputError: the metric gives no finite number.
        BackendError: the model's outputs are NaN or infinite.
    """
    sqnr_db = prepared.sqnr_db(q_model)
    if math.isnan(sqnr_db) or sqnr_db == -math.inf:
        msg = "its outputs on calibration data hold NaN or infinite values"
        raise BackendError(msg)
    value = math.nan
    if scored:
        value = float(1 - 10 ** (-sqnr_db / 10)) if metric is None else score(metric, q_model)
    times = [timed(model, entry, q_model) for entry in mix]
    fp32, own = sum(each.fp32 for each in times), sum(each.own for each in times)
    return Result(
        metric=value,
        sqnr_db=sqnr_db if math.isfinite(sqnr_db) else None,
        fp32_ratio=fp32 / own,
        ms=own * (fp32_ms / fp32),
        spread=spread_of(times),
        weight_bytes=q_model.engine.report().weight_bytes,
        note=doubts(times),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """Times of a call, taken in turns.

    Attributes:
        fp32: milliseconds of the float model, the median.
        own: of the quantized one: as many times faster as the median of the rounds' ratios says; of the float
            one where there is none.
        quartiles: of the rounds' ratios.
        doubt: why they are uncertain; "" for nothing.
    """

    fp32: float
    own: float
    quartiles: tuple[float, float]
    doubt: str

    @property
    def ratio(self) -> float:
        """How many times as fast as the float model the quantized one is."""
        return self.fp32 / self.own

    @property
    def width(self) -> float:
        """Upper over lower quartile."""
        return self.quartiles[1] / self.quartiles[0]


def timed(model: torch.nn.Module, entry: Call, q_model: torch.nn.Module | None) -> Timed:
    """Return the times of a call of the float model, and of a quantized one in turns with it.

    What was disturbed is measured again, by the CPU time that calls take, and the less uncertain one counts.

    Raises:
        InputError: the float model fails on these inputs.
    """
    own = OwnModel(model, *entry)
    args, kwargs = own.copies()
    with torch.no_grad(), own.called() as (call, why):
        if call is None:
            msg = f"The float model can't be timed: {why}."
            raise InputError(msg)
        calls: dict[str, Callable[[], object]] = {_FP32: call}
        if q_model is not None:
            calls[_QUANTIZED] = lambda: q_model(*args, **kwargs)
            for _ in range(_WARM_UP):
                calls[_QUANTIZED]()
        found = _timed(calls, time.perf_counter)
        if found.doubt:
            again = _timed(calls, time.perf_counter if q_model is None else time.process_time)
            # of CPU times the ratio counts: threads add theirs up
            again = dataclasses.replace(again, fp32=found.fp32, own=found.fp32 / again.ratio)
            found = min((again, found), key=lambda each: (bool(each.doubt), each.width))
    return found


def _timed(calls: Mapping[str, Callable[[], object]], clock: Callable[[], float]) -> Timed:
    rounds, _, load = timed_rounds(calls, SECONDS, clock, least=_ROUNDS)
    # a clock of CPU time has steps
    ratios = sorted(max(each[_FP32], 1e-9) / max(each.get(_QUANTIZED, each[_FP32]), 1e-9) for each in rounds)
    quartiles = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    fp32 = max(median(rounds)[_FP32], 1e-9)
    doubt = load.disturbed()
    if not doubt and quartiles[1] > MOST_SPREAD * quartiles[0]:
        doubt = f"the ratios of single rounds differ by a factor of {quartiles[1] / quartiles[0]:.1f}"
    return Timed(fp32, fp32 / statistics.median(ratios), quartiles, doubt)


def spread_of(times: Sequence[Timed]) -> tuple[float, float]:
    """Return the quartiles of all calls: the least and the largest one."""
    return min(each.quartiles[0] for each in times), max(each.quartiles[1] for each in times)


def doubts(times: Sequence[Timed]) -> str:
    """Return what disturbed the times, each text once."""
    return "; ".join(dict.fromkeys(each.doubt for each in times if each.doubt))
