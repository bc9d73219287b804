"""A lowered graph run by plans: one for each set of input sizes, with memory for each thread that runs it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from nc.backends.native import operators, recurrent
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.any_sizes import AnySizes, SampleInputs
from nc.backends.native.plans.checks import Made, PlanChecks, PlanReference
from nc.backends.native.plans.execution_plan import (
    AtenCall,
    ExecutionPlan,
    shown,
)
from nc.backends.native.plans.operands import PackedWeights
from nc.backends.native.plans.plan_instance import PlanInstance, See
from nc.backends.native.plans.products import PREPACKS
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.sequential import predicted
from nc.backends.native.plans.ways import PlannedOperator
from nc.errors import BackendError, BackendUnavailableError
from nc.graph.catalogue import schema_arguments
from nc.kernels.c_code import openmp
from nc.kernels.onednn.providers import Provider, provider
from nc.kernels.onednn.runner import CompiledRunner, Runner, runner
from nc.process.malloc import give_back_small_pieces
from nc.process.unavailable import Unavailable
from nc.profiling import onednn_verbose
from nc.profiling.nodes import operators_of
from nc.profiling.profile import WARM_UP, EngineCall, Profile, repeat, timed
from nc.profiling.scaling import COUNTS, Prediction


class Otherwise(Protocol):
    """What runs a graph for sizes that can't be planned."""

    @property
    def call(self) -> Callable[..., Sequence[Any]]:
        """Flat tensors → flat outputs."""

    @property
    def steps(self) -> Callable[[Sequence[torch.Tensor]], Sequence[EngineCall]]:
        """See `PlannedModel.steps`."""

    @property
    def profile(self) -> Callable[[Sequence[torch.Tensor]], Profile]:
        """See `PlannedModel.profile`."""


_Key = tuple[Any, ...]
#: Namespaces of operators for which a graph is worth a plan.
_PLANNED = ("onednn", "nc_native", recurrent.NAMESPACE)
#: Plans of a model; the one that was used longest ago goes.
_MOST_PLANS = 64


class _Memory(threading.local):
    """What a thread keeps of a model.

    It keeps memory that all its plans share, and contexts, which hold addresses in it.
    """

    def __init__(self) -> None:
        self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.contexts: weakref.WeakKeyDictionary[ExecutionPlan, PlanInstance] = weakref.WeakKeyDictionary()


class PlannedModel:
    """Runs a lowered graph by plans; safe to call from several threads.

    Attributes:
        checks: comparisons of its plans with the quantized graph.

    Args:
        module: lowered graph, with weights as they are.
        source: of oneDNN.
        run_by: what calls the primitives.
        otherwise: makes what runs the graph for sizes that can't be planned.
        known: what is known of operators, by target; a node of none stays a call of torch's operator. None:
            those of int8 graphs.
        follow: changes of the module's constants are seen, also by what is computed from them alone.
        reference: compares each plan with the quantized graph when it is made: the first one and, where it
            says so, those for new sizes. A plan that computes something else is not used. None: nothing is
            compared.
        samples: of inputs, for a graph over rows of texts, which one plan runs for any number of both; its
            outputs are overwritten by the next call of a thread. None: each set of sizes has a plan.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        source: Provider,
        run_by: Runner,
        otherwise: Callable[[], Otherwise],
        known: Mapping[Any, PlannedOperator] | None = None,
        follow: bool = False,
        reference: PlanReference | None = None,
        samples: SampleInputs | None = None,
    ) -> None:
        table = operators.table() if known is None else known
        any_rows = samples is not None
        self._recorder = functools.partial(Recorder, operators=table, follow=follow, any_rows=any_rows)
        self._module, self._source, self._runner = module, source, run_by
        self._otherwise = functools.cache(otherwise)
        self.checks = PlanChecks(reference, lambda *inputs: self._otherwise().call(*inputs))
        self._weights = PackedWeights()
        self._plans: dict[_Key, ExecutionPlan | Unavailable] = {}
        self._used: dict[_Key, int] = {}
        self._clock = itertools.count()
        #: Held while a plan is recorded: one thread makes it, and others that want one wait.
        self._recording = threading.RLock()
        self._memory = _Memory()
        self._any_sizes = None if samples is None else self._for_any_sizes(samples)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[Any]:
        """Flat outputs."""
        if self._any_sizes is not None:
            return self._any_sizes.run(inputs)
        return self._by_plan(inputs)

    def _by_plan(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Return the outputs of a plan for these sizes."""
        inputs = tuple(map(_regular, inputs))
        plan, outputs = self._found(inputs)
        if isinstance(plan, Unavailable):
            return self._otherwise().call(*inputs)
        return self._context(plan).run(inputs) if outputs is None else outputs

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make the plan for these inputs; raises BackendError where there can be none."""
        with torch.no_grad():
            found, _ = self._found(tuple(map(_regular, inputs)))
        if isinstance(found, Unavailable):
            raise BackendError(found.reason)
        if self._any_sizes is not None:
            self._any_sizes.prepare()

    def steps(self, inputs: Sequence[torch.Tensor]) -> tuple[EngineCall, ...]:
        """Every entry of the plan for these inputs, with the time that it took in one run."""
        inputs = tuple(map(_regular, inputs))
        with torch.no_grad():
            plan, _ = self._found(inputs)
            if isinstance(plan, Unavailable):
                return tuple(self._otherwise().steps(inputs))
            times = self._separate(plan).clocked(inputs)
        return _timed_steps(plan, times)

    def profile(self, inputs: Sequence[torch.Tensor]) -> Profile:
        """Time and kernel of every entry of the plan for these inputs.

        It takes the process's standard output over.
        """
        inputs = tuple(map(_regular, inputs))
        with torch.no_grad():
            plan, _ = self._found(inputs)
            if isinstance(plan, Unavailable):
                return self._otherwise().profile(inputs)
            separate = self._separate(plan)
            for _ in range(WARM_UP):
                self._by_plan(inputs)
            rows: list[tuple[float, list[float]]] = []
            repeat(lambda: rows.append((timed(lambda: self._by_plan(inputs)), separate.clocked(inputs))))
            with onednn_verbose.captured() as lines:
                separate.clocked(inputs, onednn_verbose.mark)
        of_torch = onednn_verbose.by_mark(
            onednn_verbose.parse(lines)
        )  # a primitive's kernel is known without
        times = list(map(min, zip(*(row[1] for row in rows), strict=True)))
        call_ms = min(row[0] for row in rows)
        steps = tuple(
            step if step.kernels else dataclasses.replace(step, kernels=of_torch.get(index, ()))
            for index, step in enumerate(_timed_steps(plan, times))
        )
        return Profile(
            steps=steps,
            call_ms=call_ms,
            calls=len(rows),
            threads=torch.get_num_threads(),
            predictions=self._predicted(inputs, steps),
        )

    def _predicted(
        self, inputs: tuple[torch.Tensor, ...], steps: Sequence[EngineCall]
    ) -> tuple[Prediction, ...]:
        """Return what plans for other numbers of threads would take, from how they divide their work."""
        counts = sorted({*COUNTS, min(torch.get_num_threads(), max(COUNTS))})
        make = functools.partial(self._recorder, self._module, self._source.maker, self._weights)
        with torch.no_grad():
            plans = {count: make(threads=count).record(inputs) for count in counts}
            return predicted(plans, self._separate, inputs, steps)

    def kernels(self) -> dict[str, str]:
        """For each operator its kernels in the plans that there are."""
        found: dict[str, dict[str, None]] = {}
        for plan in list(self._plans.values()):
            for entry in plan.entries if isinstance(plan, ExecutionPlan) else ():
                for operator in entry.step.operators[:1]:
                    found.setdefault(operator, {})[entry.step.kernel] = None
        return {operator: " or ".join(kernels) for operator, kernels in found.items()}

    def multiplied(self) -> frozenset[str]:
        """Return operators that only plans run in int8, and that torch computes in none of them."""
        entries = [
            entry
            for plan in list(self._plans.values())
            if isinstance(plan, ExecutionPlan)
            for entry in plan.entries
        ]
        rows = operators.table()
        own = [n for n in self._module.graph.nodes if n.target in rows and rows[n.target].only_here]
        names = {name for node in own for name in operators_of(node)}
        planned = {name for e in entries for name in e.step.operators}
        by_torch = {name for e in entries if isinstance(e, AtenCall) for name in e.step.operators}
        return frozenset(names & planned - by_torch)

    def weight_bytes(self) -> int:
        """Bytes of the constants that it holds: packed weights, and constants that are not weights."""
        nodes = self._module.graph.nodes
        packed = {source for node in nodes if node.target in PREPACKS for source in node.all_input_nodes}
        rows = operators.table()
        named = [(n, rows[n.target].weight) for n in nodes if n.target in rows]
        packed |= {schema_arguments(node)[weight] for node, weight in named if weight}
        names = {str(node.target) for node in nodes if node.op == "get_attr" and node not in packed}
        values = [value for name in names if isinstance(value := getattr(self._module, name), torch.Tensor)]
        return sum(value.numel() * value.element_size() for value in values) + self._weights.size()

    def forget(self, again: Callable[[], fx.GraphModule]) -> None:
        """Free the weight codes that kernels have packed; no thread may run the model during this call.

        Args:
            again: rebuilds the lowered graph, for inputs that need other layouts of the weights.
        """
        self._weights.again = again
        for name in _packed_only(self._module):
            setattr(self._module, name, getattr(self._module, name).to("meta"))

    def how(self) -> str:
        """Who calls what, in words."""
        return "; ".join(
            filter(None, (f"{self._source}, called by {self._runner.name}", c_functions.remark()))
        )

    def wrong_kernels(self) -> tuple[str, ...]:
        """Return kernels that plans passed over because their sums are wrong.

        Each is listed with the operators that it was meant for.
        """
        found: dict[str, dict[str, None]] = {}
        for plan in list(self._plans.values()):
            for operator, kernels in plan.wrong.items() if isinstance(plan, ExecutionPlan) else ():
                for kernel in kernels:
                    found.setdefault(kernel, {})[operator] = None
        return tuple(f"{kernel} ({', '.join(operators)})" for kernel, operators in found.items())

    def refusals(self) -> tuple[str, ...]:
        """Return operators that torch computes in the plans though this backend has ways for them.

        They are grouped by the reasons that these ways give.
        """
        found: dict[str, dict[str, None]] = {}
        for plan in list(self._plans.values()):
            for refusal in plan.refusals if isinstance(plan, ExecutionPlan) else ():
                if not refusal.kernel:
                    found.setdefault(refusal.why, {})[refusal.operator] = None
        return tuple(f"{', '.join(names)} ({why})" for why, names in found.items())

    def passed_over(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each operator the kernels that others take the place of in the plans, and why."""
        found: dict[str, dict[tuple[str, str], None]] = {}
        for plan in list(self._plans.values()):
            for refusal in plan.refusals if isinstance(plan, ExecutionPlan) else ():
                if refusal.kernel:
                    found.setdefault(refusal.operator, {})[refusal.kernel, refusal.why] = None
        return {operator: tuple(kernels) for operator, kernels in found.items()}

    def unplanned(self) -> tuple[str, ...]:
        """Why sizes that were seen can't be planned, one text for each reason."""
        return tuple(
            dict.fromkeys(plan.reason for plan in list(self._plans.values()) if isinstance(plan, Unavailable))
        )

    def _found(
        self, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[ExecutionPlan | Unavailable, Sequence[Any] | None]:
        """Return the plan for inputs, made if need be, or why there is none.

        Its outputs for them are returned too where it was compared now.
        """
        key = _key(inputs)
        plan, outputs = self._plans.get(key), None
        if plan is None:
            with self._recording:
                plan = self._plans.get(key)  # of a thread that was here first
                if plan is None:
                    plan, outputs = self._record(inputs)
                    self._keep(key, plan)
                    # small pieces that a plan keeps pin the large ones that making it needed for a moment
                    give_back_small_pieces()
        self._used[key] = next(self._clock)  # not before: inputs may be wrong
        return plan, outputs

    def _for_any_sizes(self, samples: SampleInputs) -> AnySizes:
        """Return what runs the graph for any number of rows and texts."""
        if not isinstance(self._runner, CompiledRunner):
            msg = f"calls are not made in C: {self._runner.name}"
            raise BackendError(msg)
        return AnySizes(
            samples,
            lambda inputs: self._recorder(self._module, self._source.maker, self._weights).record(inputs),
            self._by_plan,
            self._source.maker,
            self._runner,
            self._recording,
        )

    def _separate(self, plan: ExecutionPlan) -> PlanInstance:
        """Return a separate context, which runs entries one by one."""
        with torch.inference_mode(False):
            arena = torch.empty(plan.arena + plan.scratchpad, dtype=torch.uint8, device="cpu")
            return PlanInstance(plan, self._source.maker, self._runner, arena, together=False)

    def _record(
        self, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[ExecutionPlan | Unavailable, Sequence[Any] | None]:
        """Return a new plan, or why there is none; and its outputs where it was compared.

        Raises:
            VerificationError: neither the plan nor what takes its place computes what the quantized graph
                computes for these sizes.
        """
        recorder = self._recorder(self._module, self._source.maker, self._weights)
        try:
            plan = recorder.record(inputs)
        except BackendError as error:
            return Unavailable(str(error)), None
        watched = recorder.watched()

        def look(inputs: Sequence[torch.Tensor], names: Collection[str], see: See) -> Sequence[Any]:
            with torch.inference_mode(False):
                instance = PlanInstance(
                    shown(plan), self._source.maker, self._runner, self._arena(plan), together=False
                )
            return instance.watch(inputs, [w for w in watched if not set(names).isdisjoint(w.names)], see)

        why, outputs = self.checks.compare(_key(inputs), inputs, Made(plan, watched, recorder.threads, look))
        return (Unavailable(why), None) if why else (plan, outputs)

    def _keep(self, key: _Key, plan: ExecutionPlan | Unavailable) -> None:
        """Keep a new plan; the caller holds the lock."""
        self._used[key] = next(self._clock)
        self._plans[key] = plan
        while len(self._plans) > _MOST_PLANS:
            del self._plans[min(self._plans, key=lambda k: self._used.get(k, -1))]
        for gone in [
            k for k in list(self._used) if k not in self._plans
        ]:  # also one that another thread has used since it went
            del self._used[gone]

    def _context(self, plan: ExecutionPlan) -> PlanInstance:
        found = self._memory.contexts.get(plan)
        if found is None:
            with torch.inference_mode(False):  # torch's operators write into this memory in any mode
                arena = self._arena(plan)
                found = PlanInstance(plan, self._source.maker, self._runner, arena)
            self._memory.contexts[plan] = found
        return found

    def _arena(self, plan: ExecutionPlan) -> torch.Tensor:
        """Return this thread's memory, enough for a plan."""
        memory, needed = self._memory, plan.arena + plan.scratchpad
        if needed > memory.arena.numel():
            memory.contexts.clear()  # they point into the memory that goes now
            memory.arena = torch.empty(0, dtype=torch.uint8, device="cpu")  # before there is more
            memory.arena = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return memory.arena


def _packed_only(module: fx.GraphModule) -> set[str]:
    """Names of the constants that are weights of primitives, and nothing else."""
    reads = [node for node in module.graph.nodes if node.op == "get_attr"]
    others = {str(node.target) for node in reads if any(user.target not in PREPACKS for user in node.users)}
    return {str(node.target) for node in reads} - others


def _timed_steps(plan: ExecutionPlan, times: Sequence[float]) -> tuple[EngineCall, ...]:
    return tuple(
        dataclasses.replace(entry.step, ms=ms) for entry, ms in zip(plan.entries, times, strict=True)
    )


def _key(inputs: Sequence[torch.Tensor]) -> _Key:
    """Return what a plan is made for.

    The number of threads, too: kernels divide their work when they are made.

    torch gives a new thread its number of threads when it is asked for it first.
    """
    return (openmp.threads(), *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs))


def why_not(module: fx.GraphModule) -> str:
    """Why a graph is not to be planned here, as far as that is known before; "" when it may be."""
    overloads = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    if not any(overload.namespace in _PLANNED for overload in overloads):
        return "this graph has no kernel whose set-up could be kept"
    # oneDNN's sums change memory that the graph has given them
    if any(overload._schema.is_mutable and overload.namespace != "onednn" for overload in overloads):
        return "operators of this graph work in place"
    try:
        provider()
    except BackendUnavailableError as error:
        return str(error)
    return ""


def planned(
    module: fx.GraphModule,
    otherwise: Callable[[], Otherwise],
    reference: PlanReference | None = None,
    samples: SampleInputs | None = None,
) -> PlannedModel:
    """Return what runs a lowered graph by plans; see `PlannedModel`."""
    source = provider()
    run_by = runner(source.maker.library)[0]
    return PlannedModel(module, source, run_by, otherwise, reference=reference, samples=samples)


def _regular(tensor: torch.Tensor) -> torch.Tensor:
    """Return an input without gaps: itself, or a contiguous copy."""
    if tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        return tensor
    return tensor.contiguous()
