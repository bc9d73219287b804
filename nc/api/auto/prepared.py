"""A model under calibration whose configuration is chosen by `convert`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nc.algorithms import POST
from nc.algorithms.base import Bound
from nc.api.auto.candidates import Candidate, candidates
from nc.api.auto.choice import (
    ENOUGH_DB,
    LEAST_MENDED,
    Choice,
    Trial,
    choose,
    costly_few,
    is_slow,
    most_lost,
    next_in_float,
)
from nc.api.auto.record import Record, Steps, text_of
from nc.api.auto.remedies import Way, ways
from nc.api.auto.validation import HeldOut
from nc.api.preparation.base import CapturedPreparation, Conversion
from nc.api.preparation.captured import PreparedModel
from nc.api.preparation.finish import finished
from nc.api.preparation.observed import Observed
from nc.api.quantized import QuantizedModel
from nc.backends.reference import NAME as REFERENCE
from nc.calibration.costly import FLOOR
from nc.calibration.ranks import Ranks
from nc.calibration.statistics import Statistics
from nc.capture.capture import Graph
from nc.config import AnyConfig, StaticQuantConfig
from nc.config.auto import AutoConfig
from nc.errors import BackendError, NCError, StateError
from nc.formats.reasons import Cause, Reason
from nc.graph.fx_utils import call_graph
from nc.graph.known_codes import KnownCodes
from nc.graph.plan import Applied, Plan
from nc.graph.signature import call_error
from nc.numerics.metrics import decibels, powers
from nc.profiling.latency import median, timed_rounds
from nc.profiling.own_model import OwnModel

#: Seconds for the times of each trial.
_SECONDS = 0.7
#: Outputs of the fp32 model that are kept for comparison, in bytes.
_OUTPUT_BYTES = 512 * 2**20
_NAME, _BF16 = "auto", "bf16"
#: Makes a preparation, in which some operators are perhaps mended.
_Mend = Callable[[AnyConfig], PreparedModel]


class PreparedAuto(CapturedPreparation):
    """The captured model. Call it with calibration data; it returns what the fp32 model returns.

    A part of the data is held out: `convert` judges what it tries by it.

    Attributes:
        plan: of what is taken where nothing can be measured.
        quant_config: how the choice is made.
        models: what is tried, by name; they share one calibration.
        finals: configurations of `models` with algorithms that lower the error.
        others: preparations that share it too, and are not tried.
        first: of `models`, what suits the model where nothing can be measured.
        make: makes a preparation of the graph.
        own: the user's module, while it exists, and its example arguments.
    """

    saved_by = "save what it has seen with prepared.statistics.save()"
    plan: Plan
    quant_config: AutoConfig

    def __init__(
        self,
        graph: Graph,
        config: AutoConfig,
        make: Callable[[AnyConfig], PreparedModel],
        kinds: frozenset[str],
        own: OwnModel | None,
        others: Mapping[str, AnyConfig] | None = None,
    ) -> None:
        super().__init__()
        self.graph, self.quant_config, self.own = graph, config, own
        self.models, self._unmade = _distinct(candidates(kinds), make)
        self._configs = {c.name: c.config for c in candidates(kinds)}
        self.finals = {
            c.name: c.config for c in candidates(kinds, post=tuple(cls() for cls in POST.values()))
        }
        self.make = make
        self._late = {c.name for c in candidates(kinds) if c.late}
        self.first = next(iter(self.models.values()))
        self.plan = self.first.plan
        self.others = {name: make(other) for name, other in (others or {}).items()}
        preparations = [*self.models.values(), *self.others.values()]
        watches = [watch for model in preparations for watch in model.watches()]
        self.observed = Observed(graph, watches, Bound())
        self._codes = KnownCodes()
        for model in preparations:
            self._share(model)
        self.held = HeldOut()
        self._judged_by: list[Sequence[torch.Tensor]] = []
        self._expected: list[tuple[Sequence[torch.Tensor], Sequence[Any]]] = []
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fp32 model's outputs, in its own structure.

        Raises:
            InputError: the inputs do not fit what was captured.
            CalibrationError: NaN or Inf reached an operator that is to be quantized.
        """
        signature = self.graph.signature
        inputs = tuple(signature.bind(args, kwargs))
        try:
            split = self.held.split(inputs, self._run)
        except NCError:
            raise
        except Exception as error:
            raise call_error(error, "The captured model", inputs, self.graph.example) from error

        def result(found: Sequence[Any]) -> Any:
            return signature.result(found if split.outputs is None else split.outputs, args, kwargs)

        value = result(()) if split.seen is None else self.observed.see(split.seen, result)
        self.held.keep(split)  # a batch counts whole or not at all
        return value

    def _run(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with torch.no_grad():
            outputs: Sequence[Any] = call_graph(self.graph.module, inputs)
        return outputs

    @property
    def statistics(self) -> Statistics:
        """What was collected so far, to save, load or merge; without what is held out."""
        return self.observed.statistics

    def _users_model(self) -> torch.nn.Module | None:
        own = vars(self).get("own")
        return None if own is None else own.model

    def convert(self, asked: Conversion) -> QuantizedModel:
        """Return the fastest of the models whose error is near the least one; see `AutoConfig`.

        What fails is passed over, whatever the exception, and the report has the traceback. Where all fail it
        is the model in fp32.
        """
        if not Ranks.current().alone:
            msg = (
                '"auto" chooses by measurement, and ranks would choose differently: convert on one rank, '
                "with the statistics of all (prepared.statistics.merge), or give a configuration."
            )
            raise StateError(msg)
        steps, record = Steps(asked.progress), Record(failed=dict(self._unmade))
        trials, models, made, doubt = self._all_trials(asked, steps, record)
        while (choice := self._choose(trials, doubt)) is not None:
            chosen = trials[choice.index]
            steps.begin(f"{chosen.name}, algorithms")
            record.said, record.floor = [], ()
            try:
                found = self._final(asked, chosen, models[chosen.name], made[chosen.name], record)
            except Exception as error:  # as in `_tried`
                trials[choice.index] = dataclasses.replace(
                    chosen, sqnr_db=-math.inf, failed=record.failure(chosen.name, error)
                )
                steps.total += 1
                continue
            said = [f"chosen: {chosen.name}, {choice.why}", *record.said]
            return self._noted(found, trials, said, record)
        return self._noted(self._in_float(asked, trials), trials, ["chosen: fp32"], record)

    def _in_float(self, asked: Conversion, trials: Sequence[Trial]) -> QuantizedModel:
        """Return the model in fp32, where everything else failed.

        Raises:
            BackendError: that fails too.
        """
        why = "; ".join(map(str, trials))
        reason = Cause.FAILED(why=why)
        model = self.first.leaving(dict.fromkeys(_lossy(self.first.plan), reason))
        try:
            return finished(model, model.lowered(asked), asked, self.first.plan)
        except Exception as error:
            msg = f"Nothing that suits this model could be converted: {why}. In fp32: {text_of(error)}"
            raise BackendError(msg) from error

    def _noted(
        self, found: QuantizedModel, trials: Sequence[Trial], said: Sequence[str], record: Record
    ) -> QuantizedModel:
        """Return a model with what its report says of the choice."""
        operators = tuple(d.operator for d in found.graph.plan.quantized)
        text = "; ".join([*map(str, trials), *said])
        rows = (
            ("tried", "error", "time"),
            *(trial.cells for trial in trials),
            (f"{self.where()}; {said[0]}",),
        )
        notes = [*record.floor, Applied(_NAME, operators, f"{self.where()}: {text}", rows)]
        graph = dataclasses.replace(
            found.graph, applied=(*notes, *found.graph.applied), failures=dict(record.failed)
        )
        return QuantizedModel(graph, found.engine, found.backend, found.chosen, found.verdict)

    def _choose(self, trials: Sequence[Trial], doubt: str) -> Choice | None:
        config = self.quant_config
        return choose(
            trials,
            config.error_factor,
            config.least_gain,
            doubt,
            floor=config.min_sqnr_db,
            held_out=bool(self.held.batches),
        )

    def _all_trials(
        self, asked: Conversion, steps: Steps, record: Record
    ) -> tuple[list[Trial], dict[str, PreparedModel], dict[str, QuantizedModel], str]:
        """Return what was tried, the preparations and models by name, and why their times say nothing."""
        # a wrong kernel shows in the error; the chosen model is verified as asked
        quick = dataclasses.replace(asked, measure=False, progress=None, verify="off", judged_by=())
        early = {name: model for name, model in self.models.items() if name not in self._late}
        models = early or dict(self.models)
        if asked.measure and not next(iter(models.values())).capabilities.why_no_bf16:
            bf16 = StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")
            made_bf16 = self._made(_BF16, lambda: self.prepared(bf16), record)
            models |= {} if made_bf16 is None else {_BF16: made_bf16}
        steps.total = len(models) + 1
        trials, made = self._all_tried(models, quick, steps, record)
        doubt = "measure=False"
        if asked.measure:
            trials, doubt = self._timed(trials, made, record)
        choice = self._choose(trials, doubt)
        late = {name: model for name, model in self.models.items() if name not in models}
        if late and choice is not None and not doubt and is_slow(trials, choice):
            steps.total += len(late)
            more, made_late = self._all_tried(late, quick, steps, record)
            models |= late
            made |= made_late
            trials, doubt = self._timed([*trials, *more], made, record)
        return trials, models, made, doubt

    def _all_tried(
        self, models: Mapping[str, PreparedModel], asked: Conversion, steps: Steps, record: Record
    ) -> tuple[list[Trial], dict[str, QuantizedModel]]:
        """Return a trial of each preparation, and those models that there are."""
        trials: list[Trial] = []
        made: dict[str, QuantizedModel] = {}
        for name, model in models.items():
            steps.begin(name)
            trial, q_model = self._tried(name, model, asked, record)
            trials.append(trial)
            if q_model is not None:
                made[name] = q_model
        return trials, made

    def prepared(self, config: AnyConfig) -> PreparedModel:
        """Return a preparation that shares this calibration."""
        model = self.make(config)
        self._share(model)
        return model

    def _share(self, model: PreparedModel) -> None:
        model.observed, model.codes = self.observed, self._codes

    def _made(self, name: str, make: Callable[[], PreparedModel], record: Record) -> PreparedModel | None:
        """Return a further preparation; None if making it fails, which `record` keeps."""
        try:
            return make()
        except Exception as error:  # as in `_tried`
            record.failure(name, error)
            return None

    def _tried(
        self, name: str, model: PreparedModel, asked: Conversion, record: Record
    ) -> tuple[Trial, QuantizedModel | None]:
        """Return what a preparation gives on the data that is held out, and the model; None if it fails."""
        int8 = name != _BF16
        try:
            made = model.lowered(asked)
            sqnr_db = self.sqnr_db(made)
        except StateError:  # nothing was calibrated
            raise
        except Exception as error:  # a defect in one candidate must not end the search
            why = record.failure(name, error)
            return Trial(name=name, sqnr_db=-math.inf, failed=why, int8=int8), None
        fitted = sum(d.spec.mode == "static" for d in made.graph.plan.quantized)
        return Trial(name=name, sqnr_db=sqnr_db, int8=int8, fitted=fitted), made

    def _final(
        self, asked: Conversion, trial: Trial, model: PreparedModel, quick: QuantizedModel, record: Record
    ) -> QuantizedModel:
        """Convert the chosen candidate again, with what lowers its error, and return the finished model.

        An int8 candidate gets algorithms, and costly operators are mended. Operators of any candidate are put
        in float until it reaches `min_sqnr_db`.

        Args:
            asked: the options of `convert`.
            trial: the chosen trial.
            model: its preparation.
            quick: the model that the trial measured.
            record: records the result of each step.
        """
        by = [batch for batch, _ in self._judged()]
        asked = dataclasses.replace(asked, guard="undo", judged=self.few_rows(), judged_by=by)
        if trial.int8:
            model, found, best = self._with_algorithms(asked, trial, self.prepared, record)
            int8 = best
            worst = costly_few(found.graph.noise)
            if worst and best.sqnr_db < ENOUGH_DB:
                mend = self._mend(asked, trial, quick, worst, record)
                if mend is not None:
                    other, mended, again = self._with_algorithms(asked, *mend, record)
                    if again.error < best.error:
                        model, found, best = other, mended, again
        else:
            found = model.lowered(asked)
            int8 = best = dataclasses.replace(trial, sqnr_db=self.sqnr_db(found))
        model, found, best = self._up_to_floor(asked, model, found, best, record)
        floor = self.quant_config.min_sqnr_db
        if floor is not None and int8.sqnr_db < floor:
            record.floor = (self._floor_note(quick, found, int8, best, floor),)
        return finished(model, found, asked, self.first.plan)

    def _with_algorithms(
        self, asked: Conversion, trial: Trial, mend: _Mend, record: Record
    ) -> tuple[PreparedModel, QuantizedModel, Trial]:
        """Return the chosen trial mended, with all algorithms or, where these do not help, without."""
        if self.held.batches:
            model = mend(self.finals[trial.name])
            again, found = self._tried(f"{trial.name}, algorithms", model, asked, record)
            again = dataclasses.replace(again, name=trial.name)
            if found is not None and again.sqnr_db >= trial.sqnr_db:
                record.said.append(f"its algorithms give {again.sqnr_db:.1f} dB")
                return model, found, again
            record.said.append(f"its algorithms give {again.sqnr_db:.1f} dB, and are left out")
        else:
            record.said.append("its algorithms are left out: nothing is held out to judge them by")
        model = mend(self._configs[trial.name])
        return model, model.lowered(asked), trial

    def _mend(
        self,
        asked: Conversion,
        trial: Trial,
        quick: QuantizedModel,
        worst: Mapping[str, float],
        record: Record,
    ) -> tuple[Trial, _Mend] | None:
        """Return the first way to mend the few operators that add most of the error which pays.

        Where its time is not known, accuracy decides.
        """
        names, said = ", ".join(worst), record.said
        limit = most_lost(trial.sqnr_db, self.quant_config.min_sqnr_db)
        for way in ways(quick.graph.plan, worst, bf16=not self.first.capabilities.why_no_bf16):
            mend = self._mend_by(way, worst)
            name = f"{trial.name}, {way.name}"
            model = self._made(name, functools.partial(mend, self._configs[trial.name]), record)
            if model is None or not way.is_in(model.plan):
                continue
            again, mended = self._tried(trial.name, model, asked, record)
            text = f"{', '.join(way.operators)} {way.name}: {again.sqnr_db:.1f} dB without algorithms"
            if mended is None or again.error * LEAST_MENDED > trial.error:
                said.append(f"{text}, too little")
                continue
            lost = self._time_lost(asked, quick, mended, record)
            took = "how much time that costs is not known" if lost is None else f"{lost:.2f} times as long"
            said.append(f"{text}, {took}")
            if lost is None or lost <= limit:
                return again, mend
        said.append(f"{names}: left as {'it is' if len(worst) == 1 else 'they are'}")
        return None

    def _mend_by(self, way: Way, worst: Mapping[str, float]) -> _Mend:
        """Return what makes the preparation of a configuration with operators mended in a way."""
        reasons = {name: Cause.COSTLY(share=f"{worst[name]:.0%}") for name in way.operators}

        def mend(config: AnyConfig) -> PreparedModel:
            model = self.prepared(way.put_into(config))
            return model.leaving(reasons) if way.rule is None else model

        return mend

    def _up_to_floor(
        self, asked: Conversion, model: PreparedModel, found: QuantizedModel, trial: Trial, record: Record
    ) -> tuple[PreparedModel, QuantizedModel, Trial]:
        """Return a model with operators in float until its error is small enough, or all are.

        In each step at least twice as many are.

        Raises:
            BackendError: the model with all operators in float fails.
        """
        floor, reasons = self.quant_config.min_sqnr_db, dict[str, Reason]()
        noise, best = found.graph.noise, trial
        while floor is not None and best.sqnr_db < floor:
            lossy = [name for name in _lossy(model.plan) if name not in reasons]
            if not lossy:
                break
            reason = Cause.BELOW_FLOOR(db=f"{best.sqnr_db:.1f}", floor=f"{floor:g}")
            reasons |= dict.fromkeys(next_in_float(noise, lossy, floor, len(reasons)), reason)
            less = model.leaving(reasons)
            best, other = self._tried(trial.name, less, asked, record)
            if other is not None:
                found, noise = other, other.graph.noise
            elif reasons.keys() >= set(lossy):
                msg = f"{trial.name} in fp32: {best.failed}"
                raise BackendError(msg)
        return model.leaving(reasons), found, best

    def _floor_note(
        self, quick: QuantizedModel, found: QuantizedModel, before: Trial, after: Trial, floor: float
    ) -> Applied:
        """Return what the report says first of a model that was below the least accuracy."""
        lossy, still = _lossy(quick.graph.plan), set(_lossy(found.graph.plan))
        left = tuple(name for name in lossy if name not in still)
        what = "all are" if len(left) == len(lossy) else f"{len(left)} of {len(lossy)} are"
        text = (
            f"{before.name} alone has {before.sqnr_db:.1f} dB on {self._data()}, less than {floor:g} "
            f"(AutoConfig.min_sqnr_db): of the operators {what} in float; it has {after.sqnr_db:.1f} dB now"
        )
        return Applied(FLOOR, left, text)

    def _time_lost(
        self, asked: Conversion, before: QuantizedModel, after: QuantizedModel, record: Record
    ) -> float | None:
        """How many times as long a call takes; None where that can't be measured."""
        if not asked.measure or REFERENCE in (before.backend, after.backend):
            return None
        times, doubt = self._times({"before": before, "after": after}, record)
        return None if doubt else times["after"] / times["before"]

    def few_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return some of what is held out, to find the noise of each operator: what has the largest outputs.

        Others may be silence.
        """

        def power(judged: tuple[Sequence[torch.Tensor], Sequence[Any]]) -> float:
            return math.fsum(powers(value, value)[0] for value in judged[1] if _is_float(value))

        return [tuple(max(self._judged(), key=power)[0])]

    def _judged(self) -> list[tuple[Sequence[torch.Tensor], Sequence[Any]]]:
        """Return flat inputs to judge by, and what the fp32 model gives for them, as far as memory allows."""
        batches = self.held.batches or self.observed.spread.batches or [self.graph.example]
        if [id(batch) for batch in self._judged_by] != [id(batch) for batch in batches]:
            self._judged_by, self._expected, size = list(batches), [], 0
            for batch in batches:
                outputs = self._run(batch)
                self._expected.append((batch, outputs))
                size += sum(t.numel() * t.element_size() for t in outputs if isinstance(t, torch.Tensor))
                if size > _OUTPUT_BYTES:
                    break
        return self._expected

    def where(self) -> str:
        """Say what the dB are measured on."""
        if self.held.batches:
            return f"judged by {self._data()}"
        return (
            f"judged by {self._data()}, none was held out, since it is one batch that has no rows to spare: "
            "what depends least on it is chosen, and errors on other data may be larger"
        )

    def _data(self) -> str:
        return f"{self.held.rows} rows held out" if self.held.batches else "calibration data"

    def sqnr_db(self, model: QuantizedModel) -> float:
        """Return the SQNR of the worst output over all that is judged by."""
        signal: dict[int, float] = {}
        noise: dict[int, float] = {}
        for batch, outputs in self._judged():
            known = model.engine.comparable(batch, outputs)
            for index, (expected, got) in enumerate(zip(known, model.engine.run(batch), strict=True)):
                if _is_float(expected):
                    more = powers(expected, got)
                    signal[index] = signal.get(index, 0.0) + more[0]
                    noise[index] = noise.get(index, 0.0) + more[1]
        return min((decibels(signal[index], noise[index]) for index in signal), default=math.inf)

    def _timed(
        self, trials: Sequence[Trial], made: Mapping[str, QuantizedModel], record: Record
    ) -> tuple[list[Trial], str]:
        """Return the trials with their times on the example inputs, and why they say nothing."""
        if not made:
            return list(trials), "nothing could be converted"
        if any(model.backend == REFERENCE for model in made.values()):
            return list(trials), "the reference is never timed"
        times, doubt = self._times(made, record)
        return [dataclasses.replace(t, ms=times.get(t.name)) for t in trials], doubt

    def _times(self, models: Mapping[str, QuantizedModel], record: Record) -> tuple[dict[str, float], str]:
        """Return milliseconds of a call of each model, and why they say nothing."""
        seconds = _SECONDS * len(models)
        try:
            calls = {name: self.call(model) for name, model in models.items()}
            with torch.no_grad():
                rounds, _, load = timed_rounds(calls, seconds)
        except Exception as error:  # times can be done without
            return {}, f"times could not be measured: {record.failure('times', error)}"
        return dict(median(rounds)), load.disturbed()

    def call(self, model: QuantizedModel) -> Callable[[], object]:
        """Return the call of a model as the user makes it."""
        # a model that fills lists or caches is another one in each call of the same arguments
        if self.own is None or self.graph.signature.effects.after is not None:
            return lambda: model.engine.run(self.graph.example)
        args, kwargs = self.own.copies()
        return lambda: model(*args, **kwargs)


def _distinct(
    tried: Sequence[Candidate], make: Callable[[AnyConfig], PreparedModel]
) -> tuple[dict[str, PreparedModel], dict[str, str]]:
    """Return the preparations that differ and quantize something, and tracebacks of those that failed.

    Where none quantizes anything the first one is returned.

    Raises:
        NCError: all fail.
    """
    models: dict[str, PreparedModel] = {}
    record, errors = Record(), list[Exception]()
    for candidate in tried:
        try:
            model = make(candidate.config)
        except Exception as error:  # a defect in one candidate is not a reason to prepare none
            errors.append(error)
            record.failure(candidate.name, error)
            continue
        if not any(_same(model.plan, other.plan) for other in models.values()):
            models[candidate.name] = model
    if not models:
        first = errors[0]
        if isinstance(first, NCError):
            raise first
        msg = f"Nothing that suits this model could be prepared: {'; '.join(map(text_of, errors))}"
        raise BackendError(msg) from first
    quantizing = {name: m for name, m in models.items() if m.plan.quantized}
    return quantizing or dict([next(iter(models.items()))]), record.failed


def _same(one: Plan, other: Plan) -> bool:
    """Return whether two plans quantize the same operators in the same way."""
    return one.algorithms == other.algorithms and {d.operator: d.spec for d in one.decisions} == {
        d.operator: d.spec for d in other.decisions
    }


def _lossy(plan: Plan) -> list[str]:
    """Return the operators that are not in fp32."""
    return [d.operator for d in plan.decisions if d.spec.quantized or d.spec.bf16]


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
