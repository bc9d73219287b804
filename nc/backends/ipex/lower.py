"""QDQ graph → frozen TorchScript that IPEX has fused, verified against the graph itself."""

from __future__ import annotations

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
from nc.backends.ipex.layout import make_row_major
from nc.backends.ipex.quiet import quiet
from nc.backends.ipex.timing import profile_script
from nc.backends.ipex.workarounds import apply_lints
from nc.backends.torchscript import Script, script
from nc.backends.verify import TOLERANCE_DB, check_option, verify_outputs
from nc.graph.catalogue import ACTIVATIONS, MOVES, op_name
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.graph.signature import at_least_two
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import dequantize_per_tensor, quantize_per_tensor

#: Run 1 profiles, run 2 optimizes and compiles, run 3 is the first that only computes.
_WARM_UP = 3


def lower(graph: QDQGraph, *, verify: str = "raise", isolate: str = "auto") -> EngineModel:
    """An engine model of `graph`.

    Args:
        graph: the quantized model.
        verify: see `nc.backends.verify`.
        isolate: "always" makes the first fused run in a child process with a time limit, "auto" does so for graphs with patterns that
            the test suite does not run, "never" trusts the fuser.

    Raises:
        VerificationError: the engine disagrees with the reference; names the first operator that does.
        BackendError: the fuser crashed or hung in the child process, or TorchScript can't express the graph.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    check_option("isolate", isolate, ("auto", "always", "never"))
    module, _ = copy_module(graph.module)
    dims = [leaf.dims for leaf in graph.signature.leaves if leaf.used]
    permuted = make_row_major(module, tuple(at_least_two(graph.example, dims)))
    rewrites = (*(f"memory_layout: {name}" for name in permuted), *apply_lints(module))
    familiar = is_tested(module)
    with failures_named():
        scripted, frozen = _freeze(module)
    inputs = tuple(t.contiguous() for t in graph.example)
    if isolate == "always" or (isolate == "auto" and not familiar):
        first_run_in_child(frozen, inputs)
    with failures_named():
        outputs = _warm_up(frozen, inputs)
    sqnr = verify_outputs(graph, outputs, verify, "IPEX", lambda: first_disagreement(module, inputs))
    weight_bytes = _constant_bytes(frozen) + packed_bytes(module)
    run = _Runner(frozen)

    def report() -> EngineReport:
        executed = executed_graph(run, inputs)
        return build_report(graph, executed, scripted.operators, rewrites, sqnr, "ipex", weight_bytes)

    return EngineModel(run=run, report=report, script=frozen, profile=functools.partial(profile_script, run, scripted.operators))


class _Runner:
    """Calls the frozen module, on inputs of one fixed layout: the fuser's kernel cache takes no notice of strides."""

    def __init__(self, frozen: torch.jit.ScriptModule) -> None:
        self._frozen = frozen
        self._gate = Gate()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with failures_named(), torch.no_grad(), self._gate.enter((torch.get_num_threads(), *(t.shape for t in inputs))):
            return self._frozen(*[t.contiguous() for t in inputs])


def _freeze(module: fx.GraphModule) -> tuple[Script, torch.jit.ScriptModule]:
    with quiet():
        scripted = script(module)
        return scripted, torch.jit.freeze(scripted.module)


def _warm_up(frozen: torch.jit.ScriptModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
    with quiet(), torch.no_grad():
        for _ in range(_WARM_UP):
            outputs = frozen(*inputs)
    return outputs


def first_disagreement(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> str:
    """Name of the first operator whose prefix graph the engine computes wrongly, by bisection; "" when every prefix is right."""
    nodes = [n for n in module.graph.nodes if "operator" in n.meta]
    low, high = 0, len(nodes)
    while low < high:
        middle = (low + high) // 2
        if _prefix_sqnr(module, nodes[middle], inputs) < TOLERANCE_DB:
            high = middle
        else:
            low = middle + 1
    return nodes[low].meta["operator"] if low < len(nodes) else ""


def _prefix_sqnr(module: fx.GraphModule, last: fx.Node, inputs: tuple[torch.Tensor, ...]) -> float:
    """Engine against the graph itself, for what leads to one operator's result: to its codes, where it is quantized."""
    probes = _codes_of(last) or [last]
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        if all(probe in mapping for probe in probes):
            break
    graph.output(tuple(mapping[probe] for probe in probes))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    prefix = fx.GraphModule(module, graph)
    with torch.no_grad():
        expected = prefix(*inputs)
    with failures_named():
        return worst_sqnr_db(expected, _warm_up(_freeze(prefix)[1], inputs))


def _codes_of(node: fx.Node) -> list[fx.Node]:
    """The dequantize nodes behind an operator, through what is fused behind it: a fault of fusion may show in a quantized result only."""
    found = []
    for user in node.users:
        if user.target is dequantize_per_tensor:
            found.append(user)
        elif user.target is quantize_per_tensor or op_name(user) in ACTIVATIONS or op_name(user) in MOVES:
            found += _codes_of(user)
    return found


def _constant_bytes(frozen: torch.jit.ScriptModule) -> int:
    """Bytes of the distinct tensors that the frozen graph holds."""
    seen: dict[int, int] = {}
    for node in frozen.graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            tensor = node.t("value")
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
