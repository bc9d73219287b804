"""QDQ graph → graph of oneDNN calls, run by PyTorch; verified against the QDQ graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport, OpRun
from nc.backends.dynamic import DYNAMIC_KERNEL, packed_bytes
from nc.backends.low_bit.graph import kernel_choices
from nc.backends.native import operators
from nc.backends.native.compiled import compiled
from nc.backends.native.executors import PYTHON, Lowered, Running, called, executable, executable_for_rows
from nc.backends.native.fuse import is_kernel
from nc.backends.native.over_rows import DETAIL, check, example_of, over_rows, samples_of
from nc.backends.native.packing import packed
from nc.backends.native.passes import finish, kernels
from nc.backends.native.plans.any_sizes import SampleInputs
from nc.backends.native.plans.products import PREPACKS
from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.backends.native.references import Reference
from nc.backends.passes import PassesResult, run_passes
from nc.backends.rewrites.ragged.rewrite import Ragged, ragged
from nc.backends.verify import check_option, first_disagreement, verify_outputs
from nc.backends.verify import verify_kernels as judge_kernels
from nc.errors import BackendError, VerificationError
from nc.formats.reasons import Cause
from nc.graph.fx_utils import copy_module, note_values
from nc.graph.plan import Decision
from nc.graph.qdq import QDQGraph
from nc.graph.signature import are_fake
from nc.ops import quantize_per_tensor, segment_attention
from nc.process.malloc import give_back_small_pieces
from nc.process.unavailable import Unavailable
from nc.profiling.nodes import operators_of

#: When the kernels for the example are compared.
ALWAYS, IN_DOUBT = "always", "in doubt"
#: What becomes of the padding of texts.
SKIPPED, COMPUTED = "skipped", "computed"


def lower(
    graph: QDQGraph,
    *,
    verify: str = "raise",
    verify_sizes: bool = True,
    verify_kernels: str = ALWAYS,
    compile: bool = False,
    padding: str = SKIPPED,
) -> EngineModel:
    """Return an engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        verify_sizes: compare plans for new sizes too, when they are made; not with verify="off".
        verify_kernels: compare the kernels for the example "always", or "in doubt" only: where its outputs
            alone do not tell.
        compile: let `torch.compile` fuse what is fp32 between the kernels.
        padding: of texts is "skipped" where the graph allows that, so that its outputs are zeros; or
            "computed".

    Raises:
        VerificationError: the kernels compute something else than the graph; names the first operator that
            differs.
        BackendError, BackendUnavailableError: the graph can't be compiled here.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    options: dict[str, Any] = {
        "verify": verify,
        "verify_sizes": verify_sizes,
        "verify_kernels": verify_kernels,
    }
    whole = functools.partial(_lower, graph, **options, compile=compile)
    form = None if compile or padding == COMPUTED else ragged(graph.module, graph.signature)
    if form is None:
        return whole()
    if isinstance(form, Ragged):
        try:
            example = example_of(form, graph.example)
            if verify != "off":
                check(graph, form, example)
            inner_graph = dataclasses.replace(graph, module=form.module, example=example, expected=None)
            inner = _lower(inner_graph, **options, compile=False, samples=samples_of(form, example))
            return over_rows(graph, form, inner, whole, verify)
        except (BackendError, VerificationError) as error:
            form = Unavailable(str(error).splitlines()[0])
    found = whole()

    def report() -> EngineReport:
        engine = found.report()
        return dataclasses.replace(engine, details={**engine.details, DETAIL: f"computed: {form.reason}"})

    return dataclasses.replace(found, report=report)


def _lower(
    graph: QDQGraph,
    *,
    verify: str,
    verify_sizes: bool,
    verify_kernels: str,
    compile: bool,
    samples: SampleInputs | None = None,
) -> EngineModel:
    """Return an engine model of one graph as it is; see `lower`.

    `samples`: of its inputs, for a graph over rows of texts, see `PlannedModel`.
    """

    def again(products: bool) -> tuple[fx.GraphModule, PassesResult]:
        graph.intact()
        return lowered(graph.module, graph.example, products)

    made = functools.cache(again)
    reference = (
        None if verify == "off" else Reference(graph, new_sizes=verify_sizes, always=verify_kernels == ALWAYS)
    )

    def module_of(products: bool) -> fx.GraphModule:
        return made(products)[0]

    running, outputs, run_by = _running(module_of, graph.example, compile, reference, samples)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        if torch._C._is_tracing():  # whose graph would not see the kernels
            msg = "what kernels write would be constants of the trace"
            raise RuntimeError(msg)
        if are_fake(inputs):  # whose address is 0
            msg = "kernels read memory, which fake tensors have not"
            raise RuntimeError(msg)
        if not torch.is_grad_enabled():  # small models notice the context
            return running.call(*inputs)
        with torch.no_grad():
            return running.call(*inputs)

    def run_part(part: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        return _running(lambda products: lowered(part, inputs, products)[0], inputs, compile)[1]

    first = functools.partial(first_disagreement, graph.module, graph.example, run_part)
    sqnr = verify_outputs(
        graph, outputs, verify, "The native backend", first, None if reference is None else reference.expected
    )
    judge_kernels(running.checked, verify, "The native backend")
    kernels_compared = {} if running.checked is None else {"kernels compared": str(running.checked)}
    nodes = made(running.products)[0].graph.nodes
    in_plans = {str(node.all_input_nodes[0].target) for node in nodes if node.target in PREPACKS}
    dynamic = packed_bytes(graph.module, in_plans)

    running.forget(lambda: again(running.products)[0])
    give_back_small_pieces()  # half of what a transformer needs is between its packed weights

    def report() -> EngineReport:
        module, outcome = made(running.products)
        wrong = running.refused()
        found = {name: how for name, how in executed(module).items() if name not in wrong} | dict.fromkeys(
            running.multiplied(), "int8"
        )
        outcome = dataclasses.replace(
            outcome, refused={(name, "int8"): why for name, why in wrong.items()} | dict(outcome.refused)
        )
        low_bit = kernel_choices(module)
        passed_over = outcome.passed_over(), running.passed_over()
        targets = [node.target for node in module.graph.nodes]
        joined = beside(module, {d.operator for d in graph.plan.quantized}, found)
        for decision in graph.plan.decisions:
            if decision.operator in wrong or decision.stays_for(
                Cause.ASKED
            ):  # as the user wants it, it reads and gives fp32
                joined.pop(decision.operator, None)
        ran = functools.partial(
            _op_run,
            found=found,
            outcome=outcome,
            primitives=running.kernels(),
            joined=joined,
            in_float=_in_float(module),
        )
        return EngineReport(
            backend="native",
            ops=tuple(
                dataclasses.replace(
                    ran(decision),
                    kernels=low_bit.get(decision.operator),
                    refused=_joined(decision.operator, passed_over),
                )
                for decision in graph.plan.decisions
            ),
            quantize_outside=targets.count(quantize) + targets.count(quantize_per_tensor),
            dequantize_outside=targets.count(dequantize),
            weight_bytes=dynamic + running.weight_bytes(),
            sqnr_db=sqnr,
            details=({"run by": run_by} if run_by else {})
            | dict(running.details())
            | _single(passed_over[0], graph.plan.decisions)
            | kernels_compared,
        )

    # of compiled code nothing says which part of it computes which operator
    profile, steps = (None, None) if compile else (running.profile, running.steps)
    return EngineModel(run=run, report=report, profile=profile, steps=steps, verified=verify != "off")


def lowered(
    part: fx.GraphModule, example: Sequence[torch.Tensor], products: bool
) -> tuple[fx.GraphModule, PassesResult]:
    """Return the graph of oneDNN calls for a QDQ graph, which stays as it is; see `kernels`."""
    module, _ = copy_module(part, lazy=True)
    note_values(module)
    return module, run_passes(module, (*kernels(example, products=products), *finish()))


def _running(
    lowered: Lowered,
    example: Sequence[torch.Tensor],
    compile: bool,
    reference: Reference | None = None,
    samples: SampleInputs | None = None,
) -> tuple[Running, Sequence[Any], str]:
    """Return what runs a lowered graph and its outputs for the example.

    What the report says of who runs it is returned too.
    """
    if samples is not None:
        return *executable_for_rows(lowered, example, reference, samples), ""
    if not compile:
        return executable(lowered, example, reference)
    running = PYTHON.build(lowered, example)
    call = compiled(copy_module(packed(lowered(PYTHON.products), example))[0])
    of_python = running.details
    running = dataclasses.replace(
        running,
        call=call,
        details=lambda: {"between the kernels": "compiled by torch.compile", **of_python()},
    )
    return running, called(running, example), ""


def _op_run(
    decision: Decision,
    found: Mapping[str, str],
    outcome: PassesResult,
    primitives: Mapping[str, str],
    joined: Mapping[str, str],
    in_float: Mapping[str, str],
) -> OpRun:
    asked = decision.spec.precision
    if asked == "fp32" and decision.operator in joined:
        return OpRun(
            operator=decision.operator,
            ran="int8",
            reason=joined[decision.operator],
            primitive=primitives.get(decision.operator, ""),
        )
    if asked in ("fp32", found.get(decision.operator)):
        return OpRun(
            operator=decision.operator,
            ran=asked,
            reason=decision.reason,
            primitive=primitives.get(decision.operator, ""),
        )
    if decision.operator in in_float:
        return OpRun(operator=decision.operator, ran="fp32", reason=in_float[decision.operator])
    why = outcome.refused.get((decision.operator, asked), "it became part of a fp32 call")
    how = "rounded to bf16 before and after" if asked == "bf16" else "between dequantize and quantize"
    return OpRun(operator=decision.operator, ran="fp32", reason=f"{why}; it runs in fp32, {how}")


def _in_float(module: fx.GraphModule) -> dict[str, str]:
    """Return operators that functions compute in fp32 whatever they were asked for, and why."""
    why = "scores by distance are added: one function computes this attention in fp32"
    nodes = [node for node in module.graph.nodes if node.target is segment_attention]
    return {name: why for node in nodes for name in operators_of(node)}


def _joined(
    operator: str, found: Iterable[Mapping[str, tuple[tuple[str, str], ...]]]
) -> tuple[tuple[str, str], ...]:
    """Return what several mappings have for an operator."""
    return tuple(each for kernels in found for each in kernels.get(operator, ()))


def _single(
    passed_over: Mapping[str, tuple[tuple[str, str], ...]], decisions: Iterable[Decision]
) -> dict[str, str]:
    """Return what a report says of nodes that are not operators, but together have a kernel."""
    operators = {decision.operator for decision in decisions}
    texts = [
        f"{node} ({kernel}: {why})"
        for node, kernels in passed_over.items()
        if node not in operators
        for kernel, why in kernels
    ]
    return {"not in one call": "; ".join(texts)} if texts else {}


def executed(module: fx.GraphModule) -> dict[str, str]:
    """Names of the operators that the graph computes in int8 or bf16, and in which."""
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        if is_kernel(node):
            found |= dict.fromkeys(node.meta["operators"], "int8")
        elif node.meta.get(DYNAMIC_KERNEL):
            found |= dict.fromkeys(operators_of(node), "int8")
        elif node.meta.get("bf16_operators"):
            found |= dict.fromkeys(node.meta["bf16_operators"], "bf16")
        elif node.meta.get("bf16"):
            found |= dict.fromkeys(operators_of(node), "bf16")
    return found


def beside(module: fx.GraphModule, asked: Container[str], ran: Container[str]) -> dict[str, str]:
    """Return the operators that int8 kernels compute although they were not asked to be int8, and how.

    Args:
        module: the graph of oneDNN calls.
        asked: names of the operators that were asked to be int8.
        ran: names of the operators that an int8 kernel computed.
    """
    rows, found = operators.table(), dict[str, str]()
    for node in module.graph.nodes:
        row = rows.get(node.target)
        weighted = is_kernel(node) or (row is not None and row.weight)
        names = node.meta.get("operators", ()) if weighted else ()
        kernel = next((name for name in names if name in asked and name in ran), None)
        if kernel is not None:
            found |= {name: f"fused into {kernel}" for name in names if name not in asked}
        elif getattr(node.target, "namespace", "") == "quantized" and node.meta.get("operator", "") not in (
            "",
            *found,
        ):
            found[node.meta["operator"]] = "computed on codes"
    return {name: how for name, how in found.items() if name not in asked}
