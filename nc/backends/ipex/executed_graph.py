"""Which operators run int8: read from the graph that the JIT executes after warm-up, never from the plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from nc.backends.base import EngineReport, OpRun
from nc.backends.low_bit.graph import NAME as LOW_BIT
from nc.backends.passes import Rewrite
from nc.graph.plan import Decision
from nc.graph.qdq import QDQGraph
from nc.nn import KernelChoice

GROUP = "ipex::LlgaFusionGroup"
_LINE = re.compile(r'<string>"?[,:] ?(?:line )?(\d+)')
#: Nodes of the JIT graph that compute one of our operators; a fused kernel has several operators' names in
#: its own.
_COMPUTE = re.compile(
    r"linear|conv|matmul|bmm|add|pool|softmax|layer_?norm|relu|gelu|silu|sigmoid|hardswish|tanh|mean|mul|lstm|gru"
)


def executed_graph(
    run: Callable[[Sequence[torch.Tensor]], object], inputs: Sequence[torch.Tensor]
) -> torch._C.Graph:
    """Return the optimized graph that `run` executes, in this thread."""
    run(inputs)
    graph: torch._C.Graph = torch.jit.last_executed_optimized_graph()  # type: ignore[attr-defined] # not in its __all__
    return graph


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What was found in an executed graph.

    Attributes:
        seen: operators that have their own node.
        int8: those of them that compute on codes.
        by_kernel: those with low-bit weights that a kernel computes.
        groups: fusion groups that read codes.
        quantize_outside: quantize nodes outside of groups.
        dequantize_outside: likewise, without those of constants.
    """

    seen: frozenset[str]
    int8: frozenset[str]
    by_kernel: frozenset[str]
    groups: int
    quantize_outside: int
    dequantize_outside: int


def build_report(
    graph: QDQGraph,
    executed: torch._C.Graph,
    operator_at: Mapping[int, str],
    rewrites: tuple[Rewrite, ...],
    sqnr: float | None,
    backend: str,
    weight_bytes: int,
    low_bit: Mapping[str, KernelChoice],
) -> EngineReport:
    """Match the nodes of the executed graph with operators by source line.

    Args:
        graph: the QDQ graph that was asked for.
        executed: from `executed_graph`.
        operator_at: source line of the script → operator name.
        rewrites: what the passes changed.
        sqnr: engine against reference in dB.
        backend: name for the report.
        weight_bytes: bytes of the engine's constants.
        low_bit: operator name → kernels, of the linears with low-bit weights.
    """
    found = _find(executed, operator_at)
    linted = {rewrite.operator: rewrite.name for rewrite in rewrites}
    return EngineReport(
        backend=backend,
        ops=tuple(_op_run(decision, found, linted, low_bit) for decision in graph.plan.decisions),
        groups=found.groups,
        quantize_outside=found.quantize_outside,
        dequantize_outside=found.dequantize_outside,
        weight_bytes=weight_bytes,
        rewrites=rewrites,
        sqnr_db=sqnr,
    )


def _find(executed: torch._C.Graph, operator_at: Mapping[int, str]) -> _Found:
    """Return what is in an executed graph; for the arguments see `build_report`."""
    nodes = list(_walk(executed, False))
    outside = [node for node, inside in nodes if not inside]
    computing = [(node, inside) for node, inside in nodes if _COMPUTE.search(node.kind().split("::")[-1])]
    owners = [(operator_at.get(line_of(node), ""), node, inside) for node, inside in computing]
    codes_read = [n for n in outside if n.kind() == "aten::dequantize" and not _is_constant(n)]
    return _Found(
        seen=frozenset(name for name, _, _ in owners),
        int8=frozenset(name for name, node, inside in owners if _is_on_codes(node, inside)),
        by_kernel=frozenset(name for name, node, _ in owners if node.kind() == LOW_BIT),
        groups=sum(_is_int8_group(node) for node, _ in nodes),
        quantize_outside=sum(node.kind() == "aten::quantize_per_tensor" for node in outside),
        dequantize_outside=len(codes_read),
    )


def _is_on_codes(node: torch._C.Node, inside: bool) -> bool:
    """Return whether a node computes on codes, `inside` a fusion group or by its own kernel."""
    return (inside and _reads_codes(node)) or _is_quantized_kernel(node)


def _is_int8_group(node: torch._C.Node) -> bool:
    """Return whether a node is a fusion group that reads codes."""
    if node.kind() != GROUP:
        return False
    # its text would do too, but JIT can't print a weight of one element
    return any(inner.kind() == "aten::dequantize" for inner, _ in _walk(node.g("Subgraph"), True))


def _op_run(
    decision: Decision,
    found: _Found,
    linted: Mapping[str, str],
    low_bit: Mapping[str, KernelChoice],
) -> OpRun:
    """How an operator ran.

    Args:
        decision: of the plan.
        found: in the executed graph.
        linted: operator name → the rewrite that changed it.
        low_bit: see `build_report`.
    """
    name = decision.operator
    if name in found.int8:
        return OpRun(operator=name, ran="int8", reason=f"lint {linted[name]}" if name in linted else "")
    if decision.spec.quantized:
        return OpRun(operator=name, ran="fp32", reason=_why_float(name, found.seen, linted))
    choice = low_bit.get(name)
    if choice is not None and name not in found.by_kernel:
        choice = dataclasses.replace(choice, kernels=())
    return OpRun(operator=name, ran="fp32", reason=decision.reason, kernels=choice)


def _why_float(name: str, seen: Collection[str], linted: Mapping[str, str]) -> str:
    if name in linted:
        return f"lint {linted[name]}: see docs/concepts/engines.md"
    if name in seen:
        return "IPEX did not fuse it: it runs between dequantize and quantize"
    return "not in the executed graph: merged into a fp32 kernel, or with an identical call of the same layer"


def _walk(block: torch._C.Graph | torch._C.Block, inside: bool) -> Iterator[tuple[torch._C.Node, bool]]:
    for node in block.nodes():
        yield node, inside
        if node.kind() == GROUP:
            yield from _walk(node.g("Subgraph"), True)
        for inner in node.blocks():
            yield from _walk(inner, inside)


def line_of(node: torch._C.Node) -> int:
    """Return the line of the script that a node comes from; 0 where it has none."""
    match = _LINE.search(str(node.sourceRange()))
    return int(match.group(1)) if match else 0


def _reads_codes(node: torch._C.Node) -> bool:
    """Tell whether an input of a fused node is a dequantize.

    It may be one directly, or through values that are only moved inside the group.
    """
    return any(_from_codes(value.node(), 4) for value in node.inputs())


def _from_codes(node: torch._C.Node, depth: int) -> bool:
    if node.kind() == "aten::dequantize":
        return True
    moves = ("aten::permute", "aten::transpose", "aten::view", "aten::contiguous", "aten::reshape")
    return depth > 0 and node.kind() in moves and _from_codes(next(node.inputs()).node(), depth - 1)


def _is_quantized_kernel(node: torch._C.Node) -> bool:
    """Tell whether an ATen kernel reads quantized tensors itself (`quantized::add`, pooling of codes)."""
    if node.kind().startswith(("quantized::", "aten::quantized_")):
        return True
    first = next(iter(node.inputs()), None)
    return (
        first is not None
        and first.node().kind() in ("aten::quantize_per_tensor", GROUP)
        and _yields_codes(first)
    )


def _yields_codes(value: torch._C.Value) -> bool:
    node = value.node()
    if node.kind() == "aten::quantize_per_tensor":
        return True
    outputs = list(node.outputs())
    inner = list(node.g("Subgraph").outputs())[[o.debugName() for o in outputs].index(value.debugName())]
    return inner.node().kind() == "aten::quantize_per_tensor"


def _is_constant(node: torch._C.Node) -> bool:
    return next(node.inputs()).node().kind() == "prim::Constant"
