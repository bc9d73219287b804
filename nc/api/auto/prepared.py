"""A model under calibration whose configuration is chosen by `convert`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nc.algorithms import POST
from nc.algorithms.base import Bound
from nc.api.auto.candidates import Candidate, candidates
from nc.api.auto.choice import ENOUGH_DB, LEAST_MENDED, MOST_LOST, Choice, Trial, choose, costly_few, is_slow
from nc.api.auto.held_out import HeldOut
from nc.api.auto.mending import Way, ways
from nc.api.preparation.base import CapturedPreparation, Conversion
from nc.api.preparation.captured import PreparedModel
from nc.api.preparation.finish import finished
from nc.api.preparation.observed import Observed
from nc.api.quantized import QuantizedModel
from nc.backends.profiling.latency import median, timed_rounds
from nc.backends.profiling.own_model import OwnModel
from nc.backends.reference import NAME as REFERENCE
from nc.calibration.ranks import Ranks
from nc.calibration.statistics import Statistics
from nc.capture.capture import Graph
from nc.config import AnyConfig, StaticQuantConfig
from nc.config.auto import AutoConfig
from nc.errors import BackendError, NCError, StateError
from nc.formats.reasons import Cause
from nc.graph.fx_utils import call_graph
from nc.graph.known_codes import KnownCodes
from nc.graph.plan import Applied, Plan
from nc.graph.signature import call_error
from nc.numerics.metrics import decibels, powers
from nc.weights.driver import Progress

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
        self.models = _distinct(candidates(kinds), make)
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
        """Return the fastest of the models whose error is near the least one; see `AutoConfig`."""
        if not Ranks.current().alone:
            msg = (
                '"auto" chooses by measurement, and ranks would choose differently: convert on one rank, '
                "with the statistics of all (prepared.statistics.merge), or give a configuration."
            )
            raise StateError(msg)
        steps = _Steps(asked.progress)
        trials, models, made, choice = self._choice(asked, steps)
        if choice is None:
            msg = f"Nothing that suits this model could be converted: {'; '.join(map(str, trials))}."
            raise BackendError(msg)
        chosen = trials[choice.index]
        steps.begin(f"{chosen.name}, algorithms")
        found, texts = self._final(asked, chosen, models[chosen.name], made[chosen.name])
        said = "; ".join([*map(str, trials), f"chosen: {chosen.name}, {choice.why}", *texts])
        operators = tuple(d.operator for d in found.graph.plan.quantized)
        note = Applied(_NAME, operators, f"{self.where()}: {said}")
        graph = dataclasses.replace(found.graph, applied=(note, *found.graph.applied))
        return QuantizedModel(graph, found.engine, found.backend, found.chosen, found.verdict)

    def _choice(
        self, asked: Conversion, steps: _Steps
    ) -> tuple[list[Trial], dict[str, PreparedModel], dict[str, QuantizedModel], Choice | None]:
        """Return what was tried, the preparations and the models by name, and which one is taken."""
        # a wrong kernel shows in the error; the chosen model is verified as asked
        quick = dataclasses.replace(asked, measure=False, progress=None, verify="off")
        early = {name: model for name, model in self.models.items() if name not in self._late}
        models = early or dict(self.models)
        if asked.measure and not next(iter(models.values())).capabilities.why_no_bf16:
            models[_BF16] = self.prepared(StaticQuantConfig(w_dtype="bf16", act_dtype="bf16"))
        steps.total = len(models) + 1
        trials, made = self._all_tried(models, quick, steps)
        config, doubt = self.quant_config, "measure=False"
        if asked.measure:
            trials, doubt = self._timed(trials, made)
        choice = choose(trials, config.error_factor, config.least_gain, doubt)
        late = {name: model for name, model in self.models.items() if name not in models}
        if late and choice is not None and not doubt and is_slow(trials, choice):
            steps.total += len(late)
            more, made_late = self._all_tried(late, quick, steps)
            models |= late
            made |= made_late
            trials, doubt = self._timed([*trials, *more], made)
            choice = choose(trials, config.error_factor, config.least_gain, doubt)
        return trials, models, made, choice

    def _all_tried(
        self, models: Mapping[str, PreparedModel], asked: Conversion, steps: _Steps
    ) -> tuple[list[Trial], dict[str, QuantizedModel]]:
        """Return a trial of each preparation, and those models that there are."""
        trials: list[Trial] = []
        made: dict[str, QuantizedModel] = {}
        for name, model in models.items():
            steps.begin(name)
            trial, q_model = self._tried(name, model, asked)
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

    def _tried(
        self, name: str, model: PreparedModel, asked: Conversion
    ) -> tuple[Trial, QuantizedModel | None]:
        """Return what a preparation gives on the data that is held out, and the model; None if it fails."""
        int8 = name != _BF16
        try:
            made = model.lowered(asked)
        except StateError:  # nothing was calibrated
            raise
        except NCError as error:
            return Trial(name=name, sqnr_db=-math.inf, failed=str(error), int8=int8), None
        return Trial(name=name, sqnr_db=self.sqnr_db(made) if int8 else math.inf, int8=int8), made

    def _final(
        self, asked: Conversion, trial: Trial, model: PreparedModel, quick: QuantizedModel
    ) -> tuple[QuantizedModel, list[str]]:
        """Return the chosen model with what lowers its error, and what each of these gave.

        Args:
            asked: of `convert`.
            trial: the chosen one.
            model: its preparation.
            quick: the model that was tried.
        """
        asked = dataclasses.replace(asked, guard="undo", judged=self.few_rows())
        if not trial.int8:
            return finished(model, model.lowered(asked), asked), []
        said: list[str] = []
        model, found, best = self._with_algorithms(asked, trial, self.prepared, said)
        worst = costly_few(found.graph.noise)
        if worst and best.sqnr_db < ENOUGH_DB:
            found_mend = self._mend(asked, trial, quick, worst, said)
            if found_mend is not None:
                other, mended, again = self._with_algorithms(asked, *found_mend, said)
                if again.error < best.error:
                    model, found = other, mended
        return finished(model, found, asked), said

    def _with_algorithms(
        self, asked: Conversion, trial: Trial, mend: _Mend, said: list[str]
    ) -> tuple[PreparedModel, QuantizedModel, Trial]:
        """Return the chosen trial mended, with all algorithms or, where these do not help, without."""
        model = mend(self.finals[trial.name])
        again, found = self._tried(trial.name, model, asked)
        if found is not None and again.sqnr_db >= trial.sqnr_db:
            said.append(f"its algorithms give {again.sqnr_db:.1f} dB")
            return model, found, again
        said.append(f"its algorithms give {again.sqnr_db:.1f} dB, and are left out")
        model = mend(self._configs[trial.name])
        return model, model.lowered(asked), trial

    def _mend(
        self,
        asked: Conversion,
        trial: Trial,
        quick: QuantizedModel,
        worst: Mapping[str, float],
        said: list[str],
    ) -> tuple[Trial, _Mend] | None:
        """Return the first way to mend the few operators that add most of the error which pays."""
        names = ", ".join(worst)
        for way in ways(quick.graph.plan, worst, bf16=not self.first.capabilities.why_no_bf16):
            mend = self._mend_by(way, worst)
            model = mend(self._configs[trial.name])
            if not way.is_in(model.plan):
                continue
            again, mended = self._tried(trial.name, model, asked)
            text = f"{', '.join(way.operators)} {way.name}: {again.sqnr_db:.1f} dB without algorithms"
            if mended is None or again.error * LEAST_MENDED > trial.error:
                said.append(f"{text}, too little")
                continue
            lost = self._time_lost(asked, quick, mended)
            took = "how much time that costs is not known" if lost is None else f"{lost:.2f} times as long"
            said.append(f"{text}, {took}")
            if lost is not None and lost <= MOST_LOST:
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

    def _time_lost(self, asked: Conversion, before: QuantizedModel, after: QuantizedModel) -> float | None:
        """How many times as long a call takes; None where that can't be measured."""
        if not asked.measure or REFERENCE in (before.backend, after.backend):
            return None
        calls = [self.call(model) for model in (before, after)]
        with torch.no_grad():
            rounds, _, load = timed_rounds({"before": calls[0], "after": calls[1]}, 2 * _SECONDS)
        return None if load.disturbed() else median(rounds)["after"] / median(rounds)["before"]

    def few_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return some of what is held out, to find the noise of each operator."""
        return [tuple(self._judged()[0][0])]

    def _judged(self) -> list[tuple[Sequence[torch.Tensor], Sequence[Any]]]:
        """Return flat inputs to judge by, and what the fp32 model gives for them, as far as memory allows."""
        batches = self.held.samples.batches or self.observed.samples.batches[-1:] or [self.graph.example]
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
        if not self.held.samples.batches:
            return "judged by calibration data, none was held out"
        rows = sum(len(batch[0]) if batch[0].dim() else 1 for batch in self.held.samples.batches)
        return f"judged by {rows} rows held out"

    def sqnr_db(self, model: QuantizedModel) -> float:
        """Return the SQNR of the worst output over all that is judged by."""
        signal: dict[int, float] = {}
        noise: dict[int, float] = {}
        for batch, outputs in self._judged():
            for index, (expected, got) in enumerate(zip(outputs, model.engine.run(batch), strict=True)):
                if isinstance(expected, torch.Tensor) and expected.is_floating_point():
                    more = powers(expected, got)
                    signal[index] = signal.get(index, 0.0) + more[0]
                    noise[index] = noise.get(index, 0.0) + more[1]
        return min((decibels(signal[index], noise[index]) for index in signal), default=math.inf)

    def _timed(self, trials: Sequence[Trial], made: Mapping[str, QuantizedModel]) -> tuple[list[Trial], str]:
        """Return the trials with their times on the example inputs, and why they say nothing."""
        if any(model.backend == REFERENCE for model in made.values()):
            return list(trials), "the reference is never timed"
        calls = {name: self.call(model) for name, model in made.items()}
        with torch.no_grad():
            rounds, _, load = timed_rounds(calls, _SECONDS * len(calls))
        times = median(rounds)
        return [dataclasses.replace(t, ms=times.get(t.name)) for t in trials], load.disturbed()

    def call(self, model: QuantizedModel) -> Callable[[], object]:
        """Return the call of a model as the user makes it."""
        # a model that fills lists or caches is another one in each call of the same arguments
        if self.own is None or self.graph.signature.effects.after is not None:
            return lambda: model.engine.run(self.graph.example)
        args, kwargs = self.own.copies()
        return lambda: model(*args, **kwargs)


def _distinct(
    tried: Sequence[Candidate], make: Callable[[AnyConfig], PreparedModel]
) -> dict[str, PreparedModel]:
    """Return the preparations that differ and quantize something; the first where none does."""
    models: dict[str, PreparedModel] = {}
    for candidate in tried:
        model = make(candidate.config)
        if not any(_same(model.plan, other.plan) for other in models.values()):
            models[candidate.name] = model
    return {name: m for name, m in models.items() if m.plan.quantized} or dict([next(iter(models.items()))])


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans quantize the same operators in the same way."""
    return one.algorithms == other.algorithms and {d.operator: d.spec for d in one.decisions} == {
        d.operator: d.spec for d in other.decisions
    }


@dataclasses.dataclass(slots=True)
class _Steps:
    """Tells a caller of `convert` what is begun."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def begin(self, name: str) -> None:
        """Say that a step begins."""
        if self.progress is not None:
            self.progress(self.done, self.total, name)
        self.done += 1
