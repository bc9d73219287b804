"""QDQ graph → frozen TorchScript that IPEX has fused, verified against the graph itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel, EngineReport
from nc.backends.dynamic import packed_bytes
from nc.backends.ipex.compile_gate import Gate
from nc.backends.ipex.executed_graph import build_report, executed_graph
from nc.backends.ipex.isolate import failures_named, first_run_in_child, is_tested
from nc.backends.ipex.low_bit import IPEX_WOQ
from nc.backends.ipex.passes import passes
from nc.backends.ipex.quiet import quiet
from nc.backends.ipex.single_output import one_place
from nc.backends.ipex.timing import profile_script
from nc.backends.low_bit.graph import kernel_choices, replace_low_bit
from nc.backends.new_sizes import NewSizes
from nc.backends.passes import run_passes
from nc.backends.torchscript import Script, script
from nc.backends.verify import check_option, first_disagreement, verify_outputs
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.graph.signature import at_least_two

#: Run 1 profiles, run 2 optimizes and compiles, run 3 is the first that only computes.
_WARM_UP = 3


def lower(
    graph: QDQGraph, *, verify: str = "raise", verify_sizes: bool = True, isolate: str = "auto"
) -> EngineModel:
    """Return an engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        verify_sizes: compare the outputs for new sizes too, in their first call; not with verify="off".
        isolate: "always" makes the first fused run in a child process with a time limit, "auto" does so for
            graphs with patterns that the test suite does not run, "never" trusts the fuser.

    Raises:
        VerificationError: the engine disagrees with the reference; names the first operator that does.
        BackendError: the fuser crashed or hung in the child process, or TorchScript can't express the graph.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    check_option("isolate", isolate, ("auto", "always", "never"))
    module, _ = copy_module(graph.module)
    dims = [leaf.dims for leaf in graph.signature.leaves if leaf.used]
    rewrites = run_passes(module, passes(tuple(at_least_two(graph.example, dims)))).rewrites
    familiar = is_tested(module)
    engine = _with_kernels(module)
    with failures_named():
        scripted, frozen = _freeze(engine)
    inputs = tuple(t.contiguous() for t in graph.example)
    if isolate == "always" or (isolate == "auto" and not familiar):
        first_run_in_child(frozen, inputs)
    with failures_named():
        outputs = _warm_up(frozen, inputs)
    sqnr = verify_outputs(
        graph, outputs, verify, "IPEX", lambda: first_disagreement(module, inputs, _run_part)
    )
    weight_bytes = _constant_bytes(frozen) + packed_bytes(module)
    run = _Runner(frozen)
    new_sizes = (
        NewSizes(run, graph, "IPEX", one_place(graph.module)) if verify_sizes and verify != "off" else None
    )
    low_bit = kernel_choices(engine)

    def report() -> EngineReport:
        executed = executed_graph(run, inputs)
        found = build_report(
            graph, executed, scripted.operators, rewrites, sqnr, "ipex", weight_bytes, low_bit
        )
        return (
            found
            if new_sizes is None
            else dataclasses.replace(found, details={**found.details, **new_sizes.details()})
        )

    # layouts of kernels are for this CPU only, so a program that is written has the operators instead
    program = _freeze(module)[1] if low_bit else frozen
    profile = functools.partial(profile_script, run, scripted.operators)
    return EngineModel(run=new_sizes or run, report=report, script=program, profile=profile)


class _Runner:
    """Calls the frozen module, on inputs of one fixed layout.

    The fuser's kernel cache takes no notice of strides.
    """

    def __init__(self, frozen: torch.jit.ScriptModule) -> None:
        self._frozen = frozen
        self._gate = Gate()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with (
            failures_named(),
            torch.no_grad(),
            self._gate.enter((torch.get_num_threads(), *(t.shape for t in inputs))),
        ):
            outputs: Sequence[Any] = self._frozen(*[t.contiguous() for t in inputs])
            return outputs


def _with_kernels(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose low-bit linears are computed by torch's kernels: IPEX's own are refused."""
    engine, _ = copy_module(module)
    replace_low_bit(engine, "native", (IPEX_WOQ,))
    engine.recompile()
    return engine


def _freeze(module: fx.GraphModule) -> tuple[Script, torch.jit.ScriptModule]:
    with quiet():
        scripted = script(module)
        return scripted, torch.jit.freeze(scripted.module)


def _warm_up(frozen: torch.jit.ScriptModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
    with quiet(), torch.no_grad():
        outputs: Sequence[Any] = ()
        for _ in range(_WARM_UP):
            outputs = frozen(*inputs)
    return outputs


def _run_part(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
    with failures_named():
        return _warm_up(_freeze(_with_kernels(module))[1], inputs)


def _constant_bytes(frozen: torch.jit.ScriptModule) -> int:
    """Bytes of the distinct tensors that the frozen graph holds."""
    seen: dict[int, int] = {}
    for node in frozen.graph.findAllNodes("prim::Constant"):  # type: ignore[attr-defined] # missing in its stub
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            tensor = node.t("value")
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
