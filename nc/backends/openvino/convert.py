"""Program → OpenVINO model, through `torch.export` and OpenVINO's PyTorch frontend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nc.backends.openvino.extremes import keep_unfused
from nc.backends.openvino.program import program
from nc.backends.program import Exportable, Program, advice, inputs_of, operator_at
from nc.errors import BackendError
from nc.graph.fx_utils import call_function
from nc.graph.output_names import output_names
from nc.graph.qdq import QDQGraph
from nc.kernels import cpu
from nc.process.lock import LOCK


@dataclasses.dataclass(frozen=True, slots=True)
class OpenVinoModel:
    """A model of OpenVINO.

    Attributes:
        model: an `openvino.Model`.
        program: what it was made from.
        layers: the first part of a layer's name → operator.
    """

    model: Any
    program: Program
    layers: dict[str, str]


def of_graph(graph: QDQGraph) -> OpenVinoModel:
    """Return the model of a quantized graph.

    Its free sizes are free, its inputs are named after the arguments, and its outputs after the members of
    what the model returns.

    Raises:
        BackendError: an operator has no translation.
    """
    leaves, example, free = inputs_of(graph)
    converted = convert(program(graph.module, graph.example), example, free)
    for port, leaf in zip(converted.model.inputs, leaves, strict=True):
        port.get_tensor().set_names({leaf.path})
    arguments = {leaf.path for leaf in leaves}
    names = output_names(graph.signature, converted.program.tensors)
    for port, name in zip(converted.model.outputs, names, strict=True):
        given = port.get_names() & arguments  # an output may be an input itself
        port.get_tensor().set_names({*given, name})
    return converted


def convert(
    source: Program, example: tuple[torch.Tensor, ...], free: Sequence[dict[int, Any]] | None = None
) -> OpenVinoModel:
    """Return the model of a program.

    Args:
        source: the program.
        example: flat inputs.
        free: for each input its free dimensions; None: all sizes are those of the example.

    Raises:
        BackendError: an operator has no translation.
    """
    # the frontend is called directly: `openvino.convert_model` would also report usage over the network
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    shapes = None if free is None else (tuple(free),)
    try:
        with LOCK, torch.no_grad():
            exported = torch.export.export(Exportable(source.module).eval(), example, dynamic_shapes=shapes)
            module = exported.run_decompositions(_decompositions()).module()
            _fix_squeezes(module.graph)
            _separate_outputs(module.graph)
            decoder = TorchFXPythonDecoder(module, dynamic_shapes=True)
            frontend = FrontEndManager().load_by_framework("pytorch")
            model = frontend.convert(frontend.load(decoder))
            amx = "amx_int8" in cpu.machine_features()
            keep_unfused(model, narrow=not cpu.accumulates_wide(), amx=amx)
    except Exception as error:  # whatever a compiler may raise
        msg = f"OpenVINO's conversion of the quantized graph failed: {_reason(error)}{advice(error)}"
        raise BackendError(msg) from error
    if len(model.inputs) != len(example):
        msg = (
            f"OpenVINO's conversion of the quantized graph failed: it has {len(model.inputs)} inputs instead "
            f"of {len(example)}."
        )
        raise BackendError(msg)
    layers = {
        node.name: operator
        for node in decoder.pt_module.graph.nodes
        if (operator := _operator_of(node, source.operators))
    }
    return OpenVinoModel(model, source, layers)


def _decompositions() -> Any:
    """torch's, without operators that the frontend knows."""
    from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose

    table = torch.export.default_decompositions()
    known = set(ops_to_not_decompose())
    for operator in [operator for operator in table if operator in known]:
        table.pop(operator)  # type: ignore[no-untyped-call] # torch does not annotate it
    return table


def _fix_squeezes(graph: torch.fx.Graph) -> None:
    """Let each squeeze name sizes that are 1 only.

    OpenVINO also removes a free size, and then its result has too little memory.
    """
    aten = torch.ops.aten
    for node in [
        n for n in graph.nodes if n.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
    ]:
        x, *rest = node.args
        shape = x.meta["val"].shape
        named = rest[0] if rest else range(len(shape))
        dims = [
            dim
            for dim in ([named] if isinstance(named, int) else named)
            if shape and isinstance(shape[dim], int) and shape[dim] == 1
        ]
        node.target, node.args = aten.squeeze.dims, (x, dims)
        if not dims:
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def _separate_outputs(graph: torch.fx.Graph) -> None:
    """Insert an operation before each output that OpenVINO's frontend may take for an earlier output.

    The frontend fails if two outputs are the same value, and copies and views are the same value to it. So
    each output with the dtype and rank of an earlier one is multiplied by 1 (bool: or-ed with itself).
    OpenVINO removes operations that are not needed when it compiles.
    """
    output, found = graph.output_node(), set()
    (results,) = output.args
    assert isinstance(results, Sequence)
    own = []
    for result in results:
        assert isinstance(result, torch.fx.Node)
        value = result.meta["val"]
        with graph.inserting_before(output):
            if (value.dtype, value.dim()) not in found:
                own.append(result)
            elif value.dtype is torch.bool:
                own.append(call_function(graph, torch.ops.aten.logical_or.default, (result, result)))
            else:
                own.append(call_function(graph, torch.ops.aten.mul.Tensor, (result, 1)))
        own[-1].meta.setdefault("val", value)
        found.add((value.dtype, value.dim()))
    output.args = (tuple(own),)


def _operator_of(node: torch.fx.Node, operators: dict[str, str]) -> str:
    """Return the operator that an exported node belongs to; "" where it belongs to none."""
    return operator_at((path for path, _ in (node.meta.get("nn_module_stack") or {}).values()), operators)


def _reason(error: Exception) -> str:
    """Return the line of an error that names what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line
        for line in lines
        if "No conversion rule" in line or "rror message" in line or line.startswith("-- ")
    ]
    return "; ".join(told[:3]) or (lines[0] if lines else type(error).__name__)
