"""Options for groups of operators of a captured model, a front of them by estimates, its points measured."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from nc.api.auto.prepared import PreparedAuto
from nc.api.preparation.base import Conversion
from nc.api.preparation.captured import PreparedModel
from nc.api.quantized import QuantizedModel
from nc.config import AnyConfig
from nc.config.auto import AutoConfig
from nc.errors import ArtefactError, BackendError, InputError, NCError
from nc.tuning.front import REFERENCE
from nc.tuning.groups import Group, groups_of
from nc.tuning.identity import Call, Metric
from nc.tuning.measure import of_float, of_quantized
from nc.tuning.mixed import FP32, PlannedCandidate, bf16_config, float_config, mixed
from nc.tuning.run import Run
from nc.tuning.solve import Assignment, front_of, in_largest_gap, spread
from nc.tuning.table import Tried, steps_of, table_of
from nc.tuning.trials import Result

#: Names of points that are always measured.
AUTO, BF16 = "auto", "bf16"


class GraphSearch:
    """One call of `tune` for a captured model.

    Args:
        model: the float model.
        prepared: its candidates, calibrated.
        metric: see `nc.tune`.
        mix: calls that are timed.
        run: where points go.
        points: of the front between the candidates.
        given: whether the candidates are the user's.
        automatically: see `nc.tune`.
    """

    by_size = False

    def __init__(
        self,
        model: torch.nn.Module,
        prepared: PreparedAuto,
        metric: Metric | None,
        mix: Sequence[Call],
        run: Run,
        points: int,
        *,
        given: bool,
        automatically: bool,
    ) -> None:
        self._model, self._prepared, self._metric, self._mix, self._run = model, prepared, metric, mix, run
        self._points, self._given, self._automatically = points, given, automatically
        self._options = dict(prepared.others if given else prepared.models)
        if not prepared.first.capabilities.why_no_bf16:
            self._options[BF16] = prepared.prepared(bf16_config())
        self.total = len(self._options) + points + 2

    def measure(self) -> None:
        """See `PointSearch`."""
        self._reference()
        tried = {name: found for name, each in self._options.items() if (found := self._whole(name, each))}
        if self._automatically:
            self._automatic()
        if tried:
            options = {name: self._options[name] for name in tried}
            self._front_between(self._points, options, tried, given=self._given)

    # ---- points ----

    def _reference(self) -> None:
        """Measure the float model."""
        self._run.say(REFERENCE)
        result = self._run.find(float_config())
        if result is None:
            size = sum(b.numel() * b.element_size() for b in self._prepared.graph.module.buffers())
            result = of_float(self._model, self._metric, self._mix, size)
        self._run.add(REFERENCE, float_config(), result)
        self._fp32_ms = result.ms

    def _whole(self, name: str, option: PreparedModel) -> Tried | None:
        """Measure an option for the whole model; None where it can't be converted, or there is no time."""
        measured = self._measured(name, option.quant_config, lambda: option, judged=True)
        if measured is None:
            return None
        q_model, result = measured
        steps = steps_of(q_model, self._prepared.graph.example)
        sqnr_db = result.sqnr_db
        return Tried(q_model, steps, result.ms, 0.0 if sqnr_db is None else 10 ** (-sqnr_db / 10))

    def _automatic(self) -> None:
        """Measure what `"auto"` chooses."""
        config = AutoConfig()

        def make(asked: Conversion) -> QuantizedModel:
            return self._prepared.convert(dataclasses.replace(asked, measure=True, verify="raise", judged=()))

        self._measured(AUTO, config, None, make)

    def _front_between(
        self,
        points: int,
        options: Mapping[str, PreparedModel],
        tried: Mapping[str, Tried],
        *,
        given: bool,
    ) -> None:
        """Solve for the front of mixed configurations, and measure it; then those in its largest gaps."""
        graph = self._prepared.graph
        operators = {
            decision.operator
            for option in tried.values()
            for decision in option.model.graph.plan.decisions
            if decision.spec.quantized or decision.spec.bf16
        }
        fused = [step.operators for option in tried.values() for step in option.steps]
        groups = groups_of(graph.module, operators, fused)
        table = table_of(graph.module, graph.example, groups, tried, self._fp32_ms)
        front = [each for each in front_of(table) if set(each.options) != {FP32}]
        # "auto" ends with algorithms that cost time now and none in a call; those of the user are as given
        finals = {} if given else self._prepared.finals
        values = {
            name: PlannedCandidate(finals.get(name, option.quant_config), option.plan, option.capabilities)
            for name, option in options.items()
        }
        first = spread(front, max(2, points - points // 3))
        for assignment in first:
            self._mixed(assignment, groups, values)
        tried_ones = list(first)
        for _ in range(points - len(first)):
            between = in_largest_gap(front, tried_ones)
            if between is None:
                return
            tried_ones.append(between)
            self._mixed(between, groups, values)

    def _mixed(
        self, assignment: Assignment, groups: Sequence[Group], values: Mapping[str, PlannedCandidate]
    ) -> None:
        """Measure an assignment."""
        chosen = {
            operator: option
            for group, option in zip(groups, assignment.options, strict=True)
            for operator in group.operators
        }
        counts = collections.Counter(assignment.options)
        name = ", ".join(f"{count} {option}" for option, count in counts.most_common())
        same = sum(known.split(" (#")[0] == name for known in self._run.names())
        name += f" (#{same + 1})" if same else ""  # other groups have these options
        config = mixed(self._prepared.graph, chosen, values)
        estimated = (assignment.error, assignment.price)
        self._measured(name, config, lambda: self._prepared.prepared(config), estimated=estimated)

    def _measured(
        self,
        name: str,
        config: AnyConfig | AutoConfig,
        prepare: Callable[[], PreparedModel] | None,
        make: Callable[[Conversion], QuantizedModel] | None = None,
        *,
        estimated: tuple[float, float] | None = None,
        judged: bool = False,
    ) -> tuple[QuantizedModel, Result] | None:
        """Convert and measure a point; None where that fails or is known, or there is no time.

        Args:
            name: for people.
            config: of the point.
            prepare: makes its preparation.
            make: converts it, instead.
            estimated: see `FrontPoint`.
            judged: the model is wanted with the noise of each operator, even if its result is known.

        Returns:
            The model and its result, whose metric is missing (NaN) where it is computed elsewhere.
        """
        run = self._run
        same = run.same_as(config)
        if same is not None:
            if judged:
                run.note(f"{name} is the same configuration as {same}.")
            return None
        if run.is_over():
            return None
        run.say(name)
        result = run.find(config)
        if result is not None and not judged:
            run.add(name, config, result, estimated=estimated)
            return None
        q_model = self._converted(name, prepare, make, judged=judged)
        if q_model is None:
            return None
        if result is not None:
            run.add(name, config, result, estimated=estimated)
            return q_model, result
        here = run.elsewhere is None
        try:
            result = of_quantized(
                q_model, self._prepared, self._model, self._metric, self._mix, self._fp32_ms, scored=here
            )
        except (BackendError, InputError) as error:  # its outputs, or its metric, are NaN or infinite
            run.note(f"{name} is left out: {error}")
            return None
        try:
            run.add(name, config, result, estimated=estimated, model=None if here else q_model)
        except ArtefactError as error:
            run.note(f"{name} is left out: {error}")
            return None
        return q_model, result

    def _converted(
        self,
        name: str,
        prepare: Callable[[], PreparedModel] | None,
        make: Callable[[Conversion], QuantizedModel] | None,
        *,
        judged: bool,
    ) -> QuantizedModel | None:
        """Return a point's model; None, with a note, where there is none. Arguments as for `_measured`."""
        # what is wrong shows in the metric; the user's own conversion is verified
        rows = self._prepared.few_rows() if judged else ()
        asked = Conversion(measure=False, verify="off", judged=rows, judged_by=())
        try:
            if make is not None:
                return make(asked)
            assert prepare is not None
            prepared = prepare()
            unseen = prepared.unseen()
            if unseen:
                self._run.note(f"{name} is left out: {', '.join(unseen)} were not calibrated for it.")
                return None
            return prepared.lowered(asked)
        except NCError as error:
            self._run.note(f"{name} could not be converted: {error}")
            return None
