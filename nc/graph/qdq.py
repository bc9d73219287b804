"""Graph + qparams → QDQ graph: integer weights and quantize/dequantize nodes among plain float operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.formats import PER_COLUMN, PER_TENSOR, PER_TOKEN, OpSpec, QParams, TensorFormat
from nc.graph.accuracy import Accuracy
from nc.graph.catalogue import is_float_tensor, kind_of_node
from nc.graph.evidence import Evidence
from nc.graph.fx_utils import (
    add_constant,
    call_operator,
    constant_of,
    copy_module,
    drop_unused,
)
from nc.graph.known_codes import KnownCodes
from nc.graph.placement import Edge, edge_key, works_in_place
from nc.graph.plan import Applied, Plan
from nc.graph.qdq_weights import quantize_weights
from nc.graph.recurrent import is_recurrent
from nc.graph.signature import Signature
from nc.graph.views import Binary, Weighted, set_argument
from nc.ops import (
    dequantize_per_tensor,
    from_bf16,
    quantize_dequantize_dynamic,
    quantize_per_tensor,
    to_bf16,
)

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something about an operator's calibration that is worth a look; `nc.calibration.diagnostics` finds it.

    Attributes:
        kind: one of `nc.calibration.diagnostics.KINDS`.
        operator: its name.
        value: how much, as a share from 0 to 1: of the values, of the range or of the channels.
        text: the same in words.
    """

    kind: str
    operator: str
    value: float
    text: str


def _nothing() -> None:
    """In memory of this process constants are always what they were."""


@dataclasses.dataclass(frozen=True, slots=True)
class QDQGraph:
    """A quantized model, independent of engines: what backends lower, artefacts store and the reference runs.

    Attributes:
        module: flat fx module of ATen operators and those of `nc.ops`.
        signature: the user's call contract.
        plan: what was decided for each operator.
        example: flat example inputs, for warm-up and verification.
        notes: operator name → why calibration changed its decision.
        float_bytes: bytes of the captured fp32 constants.
        sqnr_vs_fp32_db: this graph against the fp32 model on the example inputs, in dB (the worst output):
            what quantization itself costs.
        health: problems that calibration found, the worst of each kind first.
        applied: what each algorithm did, in the order of the plan.
        noise: operator → power of the error that it adds to the outputs, as a fraction of their power, the
            largest first; empty if it was not estimated. Artefacts do not have it.
        accuracy: this graph against the fp32 model on calibration data; None where it was not measured.
        failures: what "auto" passed over → its traceback. Artefacts do not have it.
        changes: what `saturation.py` did to this graph, one line each.
        evidence: what conversion saw, for reports; None in artefacts that do not have it.
        expected: what `module` gives for the example, where that is known already; see `expected_outputs`.
        intact: raises NCError if the constants have changed: codes may be in a mapped file. Call it before
            the constants are read again after the graph was lowered.
    """

    module: fx.GraphModule
    signature: Signature
    plan: Plan
    example: tuple[torch.Tensor, ...]
    notes: Mapping[str, str]
    float_bytes: int
    sqnr_vs_fp32_db: float
    health: tuple[Finding, ...] = ()
    applied: tuple[Applied, ...] = ()
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    accuracy: Accuracy | None = None
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()
    evidence: Evidence | None = None
    expected: tuple[Any, ...] | None = None
    intact: Callable[[], None] = dataclasses.field(default=_nothing, compare=False)

    @property
    def judged(self) -> Accuracy:
        """How far it is from fp32, on what is known: calibration data, or else the example inputs."""
        return self.accuracy or Accuracy(sqnr_db=self.sqnr_vs_fp32_db)


def expected_outputs(outputs: Sequence[Any], constants: int) -> tuple[Any, ...] | None:
    """Return copies of the outputs for the example, so that the graph need not run again to verify an engine.

    None if they take too much memory: more than a quarter of the bytes of the `constants`, and more than a
    megabyte.
    """
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > max(constants // 4, 1 << 20):
        return None
    return tuple(value.detach().clone() if isinstance(value, torch.Tensor) else value for value in outputs)


def in_memory(graph: QDQGraph) -> QDQGraph:
    """Return the same graph with copies of all codes in memory, which changes of files do not reach."""
    module, _ = copy_module(graph.module, lazy=True)
    for name, value in list(module.named_buffers()):
        if value.dtype in (torch.int8, torch.uint8):
            module.register_buffer(name, value.clone())
    return dataclasses.replace(graph, module=module, intact=_nothing)


def insert_qdq(
    module: fx.GraphModule,
    edges: list[Edge],
    qparams: Mapping[tuple[str, TensorFormat], QParams],
    plan: Plan,
    known: KnownCodes | None = None,
) -> fx.GraphModule:
    """Return a copy of `module` with pairs on all edges, weights as codes, and bf16 roundings where asked.

    It shares other constants.

    Args:
        module: captured graph.
        edges: from `placement.place`.
        qparams: by (origin node name, spec), see `placement.edge_key`.
        plan: gives each weighted operator's weight spec.
        known: codes that are shared with other calls; None: no codes are shared.
    """
    copy, mapping = copy_module(module)
    graph = copy.graph
    in_place = works_in_place(module)
    _insert_pairs(graph, edges, qparams, mapping, in_place)
    _insert_dynamic(graph, plan, in_place)
    _insert_bf16(copy, plan, in_place)
    quantize_weights(copy, plan, known or KnownCodes())
    drop_unused(copy)
    graph.lint()
    copy.recompile()
    return copy


def _insert_pairs(
    graph: fx.Graph,
    edges: Iterable[Edge],
    qparams: Mapping[tuple[str, TensorFormat], QParams],
    mapping: Mapping[fx.Node, fx.Node],
    in_place: bool,
) -> None:
    """Insert the pairs of edges; those of one tensor share its codes, unless it may change in between.

    Args:
        graph: a copy.
        edges: in the original graph; outputs come last, so that all other readers have their pairs.
        qparams: by `placement.edge_key`.
        mapping: nodes of the original graph → those of the copy.
        in_place: some operator changes a tensor.
    """
    codes: dict[tuple[fx.Node, tuple[str, TensorFormat]], fx.Node] = {}
    for edge in edges:
        reader, source = mapping[edge.reader], mapping[edge.source]
        others = [n for n in source.users if n.target is not quantize_per_tensor]
        readers = [reader] if edge.index is not None else others
        qp = qparams[edge_key(edge)]
        scale, zero_point, storage = float(qp.scale), int(qp.zero_point), _storage(qp.spec)
        key = (source, edge_key(edge))
        if readers and (key not in codes or in_place):
            where = graph.inserting_before(reader) if in_place else graph.inserting_after(_last_input(source))
            with where:
                numbers = scale, zero_point, qp.spec.quant_min, qp.spec.quant_max
                codes[key] = call_operator(graph, quantize_per_tensor, source, *numbers, storage)
                codes[key].meta["val"] = source.meta.get("val")
        # each reader has its own dequantize, so that an engine can fuse every one of them
        for user in readers:
            with graph.inserting_before(user):
                values = call_operator(graph, dequantize_per_tensor, codes[key], scale, zero_point, storage)
            values.meta["val"] = source.meta.get("val")
            if edge.index is not None:
                user.update_arg(edge.index, values)
            else:
                user.replace_input_with(source, values)


def _insert_dynamic(graph: fx.Graph, plan: Plan, in_place: bool) -> None:
    """Let dynamic operators read their inputs through codes.

    Those that read one tensor alike share them, unless it may change between.
    """
    specs = {d.operator: d.spec for d in plan.quantized if d.spec.mode == "dynamic"}
    shared: dict[tuple[fx.Node, TensorFormat, fx.Node | None], fx.Node] = {}
    for node in [n for n in graph.nodes if n.meta.get("operator") in specs]:
        if is_recurrent(node):
            continue  # its operator finds the ranges
        for name, source, spec, right in _dynamic_inputs(node, specs[node.meta["operator"]]):
            key = source, spec, right
            if key not in shared or in_place:
                with graph.inserting_before(node):
                    shared[key] = _with_ranges_of_each_call(graph, source, spec, right)
            set_argument(node, name, shared[key])


def _dynamic_inputs(node: fx.Node, spec: OpSpec) -> list[tuple[str, fx.Node, TensorFormat, fx.Node | None]]:
    """Return what a dynamic operator reads through codes.

    The names of its arguments, the tensors, how, and the right side whose ranges weigh a left one.
    """
    if kind_of_node(node) != "matmul":
        return [("input", Weighted.of(node).input, spec.input(0), None)]
    left, right = Binary.of(node).sides
    beside = right if spec.input(1).granularity == PER_TOKEN else None
    return [("left", left, spec.input(0), beside), ("right", right, spec.input(1), None)]


def _with_ranges_of_each_call(
    graph: fx.Graph, source: fx.Node, spec: TensorFormat, right: fx.Node | None
) -> fx.Node:
    columns = spec.granularity == PER_COLUMN and source.meta["val"].dim() > 1
    how: tuple[fx.node.Argument, ...] = (
        spec.granularity != PER_TENSOR,
        spec.quant_min,
        spec.quant_max,
        spec.symmetric,
        _storage(spec),
    )
    if columns or right is not None:
        how = (*how, -2 if columns else -1)
    codes = call_operator(
        graph, quantize_dequantize_dynamic, source, *how, *([right] if right is not None else [])
    )
    codes.meta["val"] = source.meta.get("val")
    return codes


def _insert_bf16(module: fx.GraphModule, plan: Plan, in_place: bool) -> None:
    """Let operators read and give values rounded to bf16.

    Constants are rounded here, activations once where several read them.
    """
    names = {d.operator for d in plan.decisions if d.spec.bf16}
    graph, rounded = module.graph, {}
    for node in [n for n in graph.nodes if n.meta.get("operator") in names]:
        for source in filter(is_float_tensor, node.all_input_nodes):
            if source not in rounded or in_place:
                if source.op == "get_attr":
                    value = constant_of(module, source).to(torch.bfloat16)
                    low = add_constant(
                        module,
                        next(iter(graph.nodes)),
                        f"{source.target}_bf16",
                        value,
                        source.meta.get("fqn", source.target),
                    )
                else:
                    with graph.inserting_before(node):
                        low = _call(graph, to_bf16, source)
                with graph.inserting_before(node):
                    rounded[source] = _call(graph, from_bf16, low)
            node.replace_input_with(source, rounded[source])
        readers = list(node.users)
        with graph.inserting_after(node):
            low = _call(graph, to_bf16, node)
        with graph.inserting_after(low):
            result = _call(graph, from_bf16, low)
        for reader in readers:
            reader.replace_input_with(node, result)


def _call(graph: fx.Graph, operator: torch._ops.OpOverload, source: fx.Node) -> fx.Node:
    node = call_operator(graph, operator, source)
    node.meta["val"] = operator(source.meta["val"])
    return node


def _storage(spec: TensorFormat) -> torch.dtype:
    """Return the dtype that codes have in memory."""
    return spec.dtype.storage


def _last_input(source: fx.Node) -> fx.Node:
    """Return the node after which to insert a quantize of `source`: `source`, or the last placeholder."""
    node = source
    while node.next.op == "placeholder":
        node = node.next
    return node
