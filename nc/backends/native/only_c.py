"""Models whose plans call functions in C only: neither torch nor oneDNN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport
from nc.backends.native import operators
from nc.backends.native.lower import lowered
from nc.backends.native.over_rows import check, example_of, over_rows, samples_of
from nc.backends.native.plans.affine import Sizes, Unfit, fitted
from nc.backends.native.plans.any_sizes import RECORDED, SampleInputs
from nc.backends.native.plans.execution_plan import ExecutionPlan, FunctionCall
from nc.backends.native.plans.family import FamilyInstance, FamilyKernels, PlanFamily, family_of
from nc.backends.native.plans.operands import PackedWeights
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.prelude import Prelude, with_prelude
from nc.backends.rewrites.ragged.rewrite import Ragged, ragged
from nc.backends.verify import verify_outputs
from nc.errors import BackendError, InputError, UnsupportedError
from nc.graph.qdq import QDQGraph
from nc.kernels.onednn.api import Unimplemented
from nc.kernels.onednn.primitives import Maker
from nc.kernels.onednn.providers import provider
from nc.kernels.onednn.runner import CompiledRunner, runner

#: Functions that nc-run has: those whose use of memory runner/nc_run/uses.py knows.
FUNCTIONS = frozenset(
    {
        *(
            "attention",
            "bf16_rows",
            "code_product",
            "codes",
            "dynamic_attention",
            "flash",
            "float_attention",
            "int8_attention",
            "map",
            "mean",
            "norm",
        ),
        *("norm_rows", "place", "recurrent", "rotary", "round_rows", "row_chain", "row_product", "text_sums"),
    }
)
#: Rows and texts of a plan for one set of sizes.
_ONE: Sizes = (1, 1)
#: Flat inputs → flat outputs.
Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


class NoPrimitives(Maker):
    """Makes no primitive: each way by oneDNN refuses."""

    def __init__(self) -> None:
        self.kept, self.verdicts = None, {}

    def keeping(self) -> Maker:
        """Return itself: it keeps nothing."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        msg = "a plan for nc-run has no primitives of oneDNN"
        raise Unimplemented(msg)

    layout = _attributes = _primitive = _refuse


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlanOfC:
    """A plan of functions in C.

    Attributes:
        threads: those that functions divide their work among.
        family: the calls, for any number of rows and texts, or the same for all.
        inputs: layouts of the inputs; sizes may be `Affine`.
    """

    threads: int
    family: PlanFamily
    inputs: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ModelOfC:
    """A model of such plans.

    Attributes:
        plans: one for each number of threads.
        runs: what runs each of them here.
        form: of padded texts; None: inputs have the sizes of the example.
        prelude: what is computed of padded texts before.
    """

    plans: Sequence[PlanOfC]
    runs: Sequence[Run]
    form: Ragged | None
    prelude: Prelude


def model_of_c(graph: QDQGraph, counts: Sequence[int], verify: str) -> ModelOfC:
    """Return a model with a plan for each of some numbers of threads, compared with the graph.

    Args:
        graph: the quantized model.
        counts: of threads.
        verify: see `nc.backends.verify`.

    Raises:
        UnsupportedError: an operator has no function in C that takes it; says which, and why.
        VerificationError: the outputs for the example are not those of the graph.
        BackendError: nothing runs such plans here.
    """
    form = ragged(graph.module, graph.signature)
    if isinstance(form, Ragged):
        form, prelude = with_prelude(form)
        example = example_of(form, graph.example)
        if verify != "off":
            check(graph, form, example)
        module, samples = form.module, samples_of(form, example)
    else:
        form, prelude, module, samples = None, Prelude((), ()), graph.module, None
        example = tuple(tensor.contiguous() for tensor in graph.example)
    weights, of_c = PackedWeights(), lowered(module, example, True)[0]
    plans = [only_c(of_c, weights, example, count, samples) for count in counts]
    runs = [_runs(plan, samples) for plan in plans]
    if form is not None:  # which compares, too
        engines = [EngineModel(run=run, report=_report) for run in runs]
        runs = [over_rows(graph, form, engine, _no_padding, verify).run for engine in engines]
    elif verify != "off":
        with torch.no_grad():
            for run in runs:
                verify_outputs(graph, run(graph.example), verify, "nc-run")
    return ModelOfC(plans, runs, form, prelude)


def _runs(plan: PlanOfC, samples: SampleInputs | None) -> Run:
    """Return what runs a plan here."""
    source = provider()
    run_by = runner(source.maker.library)[0]
    if not isinstance(run_by, CompiledRunner):
        msg = f"calls are not made in C: {run_by.name}"
        raise BackendError(msg)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        sizes = _ONE if samples is None else samples.sizes(inputs)
        instance = FamilyInstance(plan.family, FamilyKernels(source.maker), run_by, *sizes)
        return instance.run([tensor.contiguous() for tensor in inputs], *sizes)

    return run


def _report() -> EngineReport:
    return EngineReport(backend="nc-run", ops=())


def _no_padding() -> EngineModel:
    msg = "nc-run does not take these texts: one has no real token, or its real tokens have gaps"
    raise InputError(msg)


def only_c(
    module: fx.GraphModule,
    weights: PackedWeights,
    inputs: Sequence[torch.Tensor],
    threads: int,
    samples: SampleInputs | None,
) -> PlanOfC:
    """Return the plan of a lowered graph for some threads.

    Args:
        module: the graph.
        weights: packed already; those that are packed now are added.
        inputs: of the plan, if there is one for their sizes only.
        threads: those that functions divide their work among.
        samples: of a graph over rows of texts, for any number of both; None: for the sizes of `inputs`.

    Raises:
        UnsupportedError: an operator has no function in C that takes it; says which, and why.
    """
    table = operators.of_c()

    def recorded(given: Sequence[torch.Tensor]) -> ExecutionPlan:
        recorder = Recorder(
            module, NoPrimitives(), weights, table, threads=threads, any_rows=samples is not None, only_c=True
        )
        return recorder.record(given)

    try:
        with torch.no_grad():
            if samples is None:
                plans = [recorded(inputs)] * len(RECORDED)  # the same for all sizes: nothing depends on them
            else:
                plans = [recorded(samples.make(*sizes)) for sizes in RECORDED]
        _check(plans[0])
        inputs = fitted([[slot.desc for slot in plan.inputs] for plan in plans], RECORDED, "an input")
        return PlanOfC(threads, family_of(plans, RECORDED), inputs)
    except (BackendError, Unfit) as error:
        msg = f"nc-run can't take this model: {error}."
        raise UnsupportedError(msg) from None


def _check(plan: ExecutionPlan) -> None:
    """Raise UnsupportedError where something else than functions of nc-run computes; says what, and why."""
    why = {refusal.operator: refusal.why for refusal in plan.refusals if not refusal.kernel}
    found: dict[str, str] = {}
    for entry in plan.entries:
        name = next(iter(entry.step.operators), entry.step.name)
        if not isinstance(entry, FunctionCall):
            found[name] = why.get(name, "no function in C computes it")
        elif entry.function.row.takes.name not in FUNCTIONS:
            found[name] = f"nc-run does not have the function {entry.function.row.takes.name!r}"
    if found:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in found.items())
        msg = f"nc-run can't take this model: it does not compute {reasons}."
        raise UnsupportedError(msg)
