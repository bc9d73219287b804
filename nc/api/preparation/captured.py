"""A captured model under calibration.

It has the user's signature, fp32 results, and observers on tensors that will be quantized.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.algorithms.base import Algorithm, Bound, Context, Stage
from nc.algorithms.pipeline import all_needs, run
from nc.api.preparation.base import CapturedPreparation, Conversion
from nc.api.preparation.finish import finished
from nc.api.preparation.observed import Observed
from nc.api.quantized import QuantizedModel
from nc.backends import choose_backend, engine_options, first_that_can, why_chosen
from nc.backends.auto_order import kind_of_graph
from nc.backends.base import Backend, EngineModel, lower
from nc.calibration.accuracy import KEPT, accuracy_of, in_words, some_of
from nc.calibration.costly import costly_operators, trouble
from nc.calibration.diagnostics import examine
from nc.calibration.distributed import gather
from nc.calibration.evidence import evidence_of
from nc.calibration.fake_ranges import find_fake_ranges, key_of, watches_for_sites
from nc.calibration.local_error import LEAST_DB, local_errors
from nc.calibration.observe import Watch, observer_key, watches_for
from nc.calibration.qparams import find_qparams
from nc.calibration.ranks import Ranks
from nc.calibration.sensitivity import noise_of_operators, ranking
from nc.calibration.statistics import Collected, Statistics
from nc.calibration.tensor_file import checksum
from nc.capture.capture import Graph
from nc.config import AnyConfig
from nc.config.document import plain_values
from nc.errors import InputError, NotCalibratedError
from nc.formats import BF16, FLOAT, Capabilities
from nc.formats.reasons import Cause, Reason
from nc.graph.accuracy import Accuracy
from nc.graph.catalogue import PRODUCTS
from nc.graph.dataflow import pools_on_codes
from nc.graph.evidence import Evidence
from nc.graph.fake_quant import insert_fake_quant, static_sites
from nc.graph.known_codes import KnownCodes
from nc.graph.placement import Edge, place
from nc.graph.plan import Plan
from nc.graph.qdq import Finding, QDQGraph, expected_outputs, insert_qdq
from nc.numerics.metrics import worst_sqnr_db
from nc.observers import Observer
from nc.observers.base import Key
from nc.planning.rules import fit
from nc.planning.simulated import WHY_REFERENCE, that_simulates
from nc.profiling.own_model import OwnModel


class PreparedModel(CapturedPreparation):
    """The captured model.

    Call it with calibration data of any batch size; it returns what the fp32 model returns.

    Attributes:
        graph: the captured model.
        plan: the decisions; `print(prepared.plan)` shows them.
        backend: name of the backend that `convert` will use by default.
        asked: the `backend` argument of `prepare`, perhaps "auto".
        failed: engines that "auto" passed over, because they lack what the configuration asks for, and why.
        quant_config: the configuration.
        own: the user's module, while it exists, and its example arguments, for the verdict on speed.
        observed: runs the model and collects.
        codes: of weights, that conversions share; None: each makes its own.
    """

    saved_by = "save what it has seen with prepared.statistics.save()"
    plan: Plan
    quant_config: AnyConfig

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        capabilities: Capabilities,
        backend: str,
        quant_config: AnyConfig,
        algorithms: Sequence[Algorithm] = (),
        *,
        asked: str = "",
        failed: Mapping[str, str] | None = None,
        own: OwnModel | None = None,
        observed: Observed | None = None,
    ) -> None:
        super().__init__()
        self._algorithms = tuple(algorithms)
        self._applied = run(self._algorithms, Stage.FLOAT, Context(graph.module, plan), graph.example)
        _check_weights(graph, plan)
        self.graph = graph
        self.plan = plan
        self.capabilities = capabilities
        self.backend = backend
        self.asked = asked or backend
        self.failed = dict(failed or {})
        self.own = own
        self.quant_config = quant_config
        self.codes: KnownCodes | None = None
        self._pools = {node.name for node in pools_on_codes(graph.module, plan.static)}
        self.observed = Observed(graph, self.watches(), self.room()) if observed is None else observed
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the fp32 model's outputs, in its own structure.

        Raises:
            InputError: the inputs do not fit what was captured.
            CalibrationError: NaN or Inf reached an operator that is to be quantized.
        """
        return self.observed(*args, **kwargs)

    def watches(self) -> list[Watch]:
        """Return what is to be collected of which tensors."""
        return [
            *watches_for(self._edges(self.graph.module, self.plan)),
            *watches_for_sites(static_sites(self.graph.module, self.plan)),
            *all_needs(self._algorithms, self.graph.module, self.plan).statistics,
        ]

    def unseen(self) -> tuple[str, ...]:
        """Return operators of which something is needed that is not collected: calibration was another's."""
        return tuple(
            dict.fromkeys(
                watch.operator
                for watch in self.watches()
                if (watch.node.name, watch.statistic.name) not in self.observers
            )
        )

    def room(self) -> Bound | None:
        """Return how many samples are to be kept; None: none."""
        return all_needs(self._algorithms, self.graph.module, self.plan).samples

    @property
    def observers(self) -> Mapping[Key, Observer]:
        """By node and statistic."""
        return self.observed.observers

    @property
    def statistics(self) -> Statistics:
        """What was collected so far, to save, load or merge."""
        return self.observed.statistics

    def _users_model(self) -> torch.nn.Module | None:
        own = vars(self).get("own")
        return None if own is None else own.model

    def convert(self, asked: Conversion) -> QuantizedModel:
        """Return the model on an engine, compared with the reference; warns where it is hardly worth it."""
        return finished(self, self.lowered(asked), asked)

    def lowered(self, asked: Conversion) -> QuantizedModel:
        """Return the model on an engine, compared with the reference."""
        graph, lowered, name, chosen = self._lowered(asked)
        return QuantizedModel(graph, lowered, name, chosen)

    def leaving(self, reasons: Mapping[str, Reason]) -> PreparedModel:
        """Return the same preparation with some operators in fp32, or in bf16 where their rule says so."""
        decisions = tuple(
            d
            if d.operator not in reasons
            else dataclasses.replace(
                d,
                spec=BF16 if d.fallback == "bf16" and d.kind in PRODUCTS else FLOAT,
                why=reasons[d.operator],
            )
            for d in self.plan.decisions
        )
        other = copy.copy(self)
        other.plan = dataclasses.replace(self.plan, decisions=decisions)
        return other

    def _lowered(self, asked: Conversion) -> tuple[QDQGraph, EngineModel, str, str]:
        """Return the QDQ graph, the engine's model of it, the name of the engine, and why "auto" chose it."""
        kind = kind_of_graph(self.graph.module)
        name, first, before = self.asked, self.backend, self.failed
        if asked.backend is not None:
            name, before = asked.backend, {}
            first = choose_backend(that_simulates(name, self.quant_config), kind).name

        def attempt(engine: Backend) -> tuple[QDQGraph, EngineModel]:
            engine.start()
            graph = self.quantized_graph(
                engine.capabilities(), asked.judged, asked.judged_by, looks=asked.measure
            )
            given = {name: getattr(asked, name) for name in ("verify_sizes", "isolate", "compile", "padding")}
            return graph, lower(engine, graph, verify=asked.verify, **engine_options(engine, **given))

        engine_name = that_simulates(name, self.quant_config)
        (graph, lowered), found, failed = first_that_can(engine_name, first, attempt, before, kind)
        return (
            graph,
            lowered,
            found,
            why_chosen(name, found, failed, kind) if engine_name == name else WHY_REFERENCE,
        )

    def quantized_graph(
        self,
        capabilities: Capabilities | None = None,
        judged: Sequence[Sequence[torch.Tensor]] = (),
        judged_by: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        looks: bool = False,
    ) -> QDQGraph:
        """Return the QDQ graph for the ranges seen so far, by all ranks of a process group.

        Calibration can go on afterwards.

        Args:
            capabilities: of the backend that it is for; None: the one that was planned for.
            judged: flat inputs on which the noise of each operator is estimated.
            judged_by: as in `Conversion`.
            looks: compute what reports draw of a conversion, by two more runs on the example inputs.

        Raises:
            StateError: nothing was calibrated yet, or another rank has another model.
            UnsupportedError: that backend has no kernel for a dtype that was asked for.
        """
        capabilities = capabilities or self.capabilities
        found = gather(self.statistics, lambda: self._identity(capabilities))
        if self.observers and not any(seen.batches for seen in found.seen.values()):
            msg = (
                "Nothing was calibrated: call the prepared model with calibration batches (e.g. 100 "
                "samples) before convert()."
            )
            raise NotCalibratedError(msg)
        known = self.codes or KnownCodes()
        plan, inaccurate = self._accurate(self._executed(fit(self.plan, capabilities), found), known)
        example, applied = self.graph.example, list(self._applied)
        context = Context(self.graph.module, plan, found)
        applied += run(self._algorithms, Stage.STATISTICS, context, example)
        assert context.found is not None
        context.edges = self._edges(context.module, context.plan)
        context.qparams = find_qparams(context.edges, context.found)
        applied += run(self._algorithms, Stage.QPARAMS, context, example)
        context.quantized = insert_qdq(
            context.module, list(context.edges), context.qparams, context.plan, known
        )
        insert_fake_quant(
            context.quantized,
            context.plan,
            find_fake_ranges(static_sites(context.module, context.plan), context.found),
        )
        applied += run(self._algorithms, Stage.CODES, context, example)
        with torch.no_grad():
            outputs = context.quantized(*example)
            sqnr_vs_fp32_db = worst_sqnr_db(self.graph.module(*example), outputs)
        accuracy, costly = self._accuracy(context, sqnr_vs_fp32_db, judged_by)
        noise = noise_of_operators(context.module, context.quantized, context.plan, judged) if judged else {}
        if noise:
            applied.append(ranking(noise))
        return QDQGraph(
            module=context.quantized,
            signature=self.graph.signature,
            plan=context.plan,
            example=example,
            notes={
                d.operator: d.reason
                for d in context.plan.decisions
                if d.stays_for(Cause.NEVER_RAN) or d.stays_for(Cause.INACCURATE)
            },
            float_bytes=sum(b.numel() * b.element_size() for b in self.graph.module.buffers()),
            sqnr_vs_fp32_db=sqnr_vs_fp32_db,
            accuracy=accuracy,
            health=examine(
                context.plan,
                context.edges,
                context.qparams,
                context.found,
                (*costly, *context.findings, *inaccurate),
            ),
            applied=tuple(applied),
            noise=noise,
            evidence=self._evidence(context, looks=looks),
            expected=expected_outputs(
                outputs, sum(b.numel() * b.element_size() for b in context.quantized.buffers())
            ),
        )

    def _accuracy(
        self, context: Context, example_db: float, judged_by: Sequence[Sequence[torch.Tensor]] | None
    ) -> tuple[Accuracy | None, tuple[Finding, ...]]:
        """Measure the accuracy of the QDQ graph against fp32; if it is low, find the costliest operators.

        Args:
            context: holds the QDQ graph.
            example_db: SQNR of the QDQ graph on the example inputs, in dB; used if no data was kept.
            judged_by: as in `Conversion`.

        Returns:
            The accuracy, None if `judged_by` is empty; and the operators that cost most, () if it is fine.
        """
        assert context.found is not None
        assert context.quantized is not None
        if judged_by is not None and not judged_by:
            return None, ()
        # a file of statistics has samples, and ranks share them: the same statistics give the same artefact
        samples = context.found.samples
        spread = self.observed.spread.batches if len(samples) < 2 and Ranks.current().alone else ()
        batches = judged_by or spread or samples[:: math.ceil(len(samples) / KEPT) or 1]
        example, accuracy = self.graph.example, Accuracy(sqnr_db=example_db)
        worst: Sequence[torch.Tensor] = example
        if batches:
            work = sum(d.multiply_adds or 0 for d in context.plan.decisions)
            some = some_of(batches, example, work, self.graph.signature)
            what = "calibration data that was held out" if judged_by else "calibration data"
            accuracy, worst = accuracy_of(self.graph.module, context.quantized, some, in_words(some, what))
        if not trouble(accuracy):
            return accuracy, ()
        data = "the worst of them" if batches else accuracy.data
        costly = costly_operators(context.module, context.quantized, context.plan, worst, data=data)
        return accuracy, costly

    def _evidence(self, context: Context, *, looks: bool) -> Evidence:
        """Return what reports draw of a conversion; only the configuration if not `looks`."""
        config = plain_values(self.quant_config)
        if not looks:
            return Evidence(config=config, missing="measure=False")
        assert context.found is not None
        assert context.quantized is not None
        try:
            return evidence_of(
                self.graph.module,
                context.module,
                context.quantized,
                context.plan,
                context.edges,
                context.qparams,
                context.found,
                self.graph.example,
                config,
            )
        except Exception as error:  # any model; a report without pictures is better than no conversion
            return Evidence(config=config, missing=f"{type(error).__name__}: {error}")

    def _edges(self, module: fx.GraphModule, plan: Plan) -> list[Edge]:
        """Return what gets codes in the captured graph, or in a smoothed one."""
        return place(
            module, plan, self.capabilities, {node for node in module.graph.nodes if node.name in self._pools}
        )

    def _identity(self, capabilities: Capabilities) -> dict[str, bytes]:
        """Return what ranks must share beside the model to get the same bytes from the same statistics."""
        configuration = [
            self.plan.to_dict(),
            dataclasses.asdict(capabilities),
            [str(a) for a in self._applied],
        ]
        examples = {str(i): tensor for i, tensor in enumerate(self.graph.example)}
        return {
            "configuration, backend or CPU": json.dumps(
                configuration, default=sorted, sort_keys=True
            ).encode(),
            "example_inputs": checksum("", examples).encode(),
        }

    def _executed(self, plan: Plan, found: Collected) -> Plan:
        """Return the plan without operators that never ran.

        Taking one out can move edges, so it goes on until nothing changes.
        """
        while True:
            keys = [(e.operator, observer_key(e)) for e in self._edges(self.graph.module, plan)]
            keys += [(s.operator, key_of(s)) for s in static_sites(self.graph.module, plan)]
            missing = {
                operator for operator, key in keys if key not in found.seen or not found.seen[key].batches
            }
            if not missing:
                return plan
            decisions = tuple(
                dataclasses.replace(d, spec=FLOAT, why=Cause.NEVER_RAN()) if d.operator in missing else d
                for d in plan.decisions
            )
            plan = dataclasses.replace(plan, decisions=decisions)

    def _accurate(self, plan: Plan, known: KnownCodes) -> tuple[Plan, list[Finding]]:
        """Return the plan without dynamic operators whose own result is hardly more than noise.

        Findings on those that stay int8 are returned too.
        """
        dynamic = {d.operator for d in plan.quantized if d.spec.mode == "dynamic"}
        if not dynamic:
            return plan, []
        alone = tuple(
            d if d.operator in dynamic else dataclasses.replace(d, spec=FLOAT) for d in plan.decisions
        )
        quantized = insert_qdq(self.graph.module, [], {}, dataclasses.replace(plan, decisions=alone), known)
        errors = local_errors(self.graph.module, quantized, dynamic, self.graph.example)
        decisions, findings = [], []
        for d in plan.decisions:
            db = errors.get(d.operator, LEAST_DB)
            if db >= LEAST_DB:
                decisions.append(d)
            elif d.keep_inaccurate:
                decisions.append(d)
                text = (
                    f"its int8 result has {db:.1f} dB against fp32 on the example inputs: "
                    "keep_inaccurate=False leaves it in fp32"
                )
                findings.append(Finding("inaccurate", d.operator, min(10 ** (-db / 10), 1.0), text))
            else:
                spec = BF16 if d.fallback == "bf16" and d.kind in PRODUCTS else FLOAT
                decisions.append(dataclasses.replace(d, spec=spec, why=Cause.INACCURATE(db=f"{db:.1f}")))
        return dataclasses.replace(plan, decisions=tuple(decisions)), findings


def _check_weights(graph: Graph, plan: Plan) -> None:
    """Raise InputError for weights and biases of int8 operators that are not finite."""
    names = {d.operator for d in plan.quantized}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes if node.meta.get("operator") in names else ():
            value = getattr(graph.module, source.target) if source.op == "get_attr" else None
            if value is not None and value.is_floating_point() and not bool(value.isfinite().all()):
                msg = (
                    f"{source.meta.get('fqn', source.target)!r} of operator {node.meta['operator']!r} holds "
                    "NaN or infinite values, which have no codes. Repair it, or leave the operator in fp32: "
                    "config.exclude(...)."
                )
                raise InputError(msg)
