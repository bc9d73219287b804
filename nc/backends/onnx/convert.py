"""Program → ONNX model, through `torch.export` and `torch.onnx`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc._version import __version__
from nc.backends.onnx.integers import explicit_zero_points, pack_4_bits
from nc.backends.onnx.program import program
from nc.backends.program import Exportable, Program, advice, inputs_of, operator_at
from nc.errors import BackendError
from nc.graph.output_names import output_names
from nc.graph.qdq import QDQGraph
from nc.ops import dequantize_per_channel, dequantize_per_group, dequantize_per_tensor, quantize_per_tensor
from nc.process.error_texts import lines_of_onnx_export
from nc.process.lock import LOCK

#: The first with blocks and 4 bits in DequantizeLinear.
OPSET = 21
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model of ONNX.

    Attributes:
        model: a `torch.onnx.ONNXProgram`.
        program: what it was made from.
        nodes: name of a node → operator.
    """

    model: Any
    program: Program
    nodes: dict[str, str]

    def save(self, path: str) -> None:
        """Write the file.

        Constants of more than 2 GB together go into a second file, of that name and `.data`.
        """
        self.model.save(path)


def of_graph(graph: QDQGraph) -> OnnxModel:
    """Return the model of a quantized graph.

    Its free sizes are free, its inputs are named after the arguments, and its outputs after the members of
    what the model returns.

    Raises:
        BackendError: an operator has no translation.
    """
    leaves, example, free = inputs_of(graph)
    source = program(graph.module, graph.example)
    names = [leaf.path for leaf in leaves]
    return convert(source, example, free, names, output_names(graph.signature, source.tensors))


def convert(
    source: Program,
    example: tuple[torch.Tensor, ...],
    free: Sequence[dict[int, Any]] | None = None,
    names: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> OnnxModel:
    """Return the model of a program.

    Args:
        source: the program.
        example: flat inputs.
        free: for each input its free dimensions; None: all sizes are those of the example.
        names: of the inputs; None: as torch calls them.
        outputs: names of the outputs; None: as torch calls them.

    Raises:
        BackendError: an operator has no translation.
    """
    shapes = None if free is None else (tuple(free),)
    try:
        with LOCK, torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):  # torch prints what it is at
            exported = torch.export.export(Exportable(source.module).eval(), example, dynamic_shapes=shapes)
            _name_axes(exported)
            model = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                output_names=outputs,
                custom_translation_table=_translations(),
                verbose=False,
            )
    except Exception as error:  # whatever a compiler may raise
        msg = f"The conversion of the quantized graph to ONNX failed: {_reason(error)}{advice(error)}"
        raise BackendError(msg) from error
    assert model is not None
    _check_sizes(model.model, free or ())
    nodes = _name_nodes(model.model, source.operators)
    pack_4_bits(model.model)
    explicit_zero_points(model.model)
    _forget_origin(model.model)
    return OnnxModel(model, source, nodes)


def _name_axes(exported: torch.export.ExportedProgram) -> None:
    """Give the smallest and largest value of a whole tensor all axes by number.

    `torch.onnx` does not know them without.
    """
    operators = (torch.ops.aten.amin.default, torch.ops.aten.amax.default)
    for node in [
        n for n in exported.graph.nodes if n.target is torch.ops.aten.aminmax.default and not n.kwargs
    ]:
        (x,) = node.args
        for user in list(node.users):
            _, index = user.args
            user.target, user.args = operators[index], (x, list(range(x.meta["val"].dim())))
    exported.graph_module.recompile()


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Each operator of nc that stays → a function that builds the operator of ONNX for it."""
    import numpy as np
    import onnx_ir
    from onnxscript import opset21 as op

    storage: dict[object, Any] = {torch.uint8: np.uint8, torch.int8: np.int8}
    storage |= {
        onnx_ir.DataType.UINT8: np.uint8,
        onnx_ir.DataType.INT8: np.int8,
    }  # as which torch hands dtypes over

    def constant(value: Any) -> Any:
        return op.Constant(value=onnx_ir.tensor(value))

    def quantize(x: Any, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: Any) -> Any:
        kind = storage[dtype]
        limits = np.iinfo(kind)
        if (quant_min, quant_max) != (limits.min, limits.max):  # codes of fewer bits than their type
            low, high = (np.float32(scale) * np.float32(end - zero_point) for end in (quant_min, quant_max))
            x = op.Clip(x, constant(low), constant(high))
        return op.QuantizeLinear(x, constant(np.float32(scale)), constant(kind(zero_point)))

    def dequantize(codes: Any, scale: float, zero_point: int, dtype: Any) -> Any:
        return op.DequantizeLinear(codes, constant(np.float32(scale)), constant(storage[dtype](zero_point)))

    def dequantize_channels(
        codes: Any, scale: Any, zero_point: Any, axis: int, dtype: Any
    ) -> Any:  # of the codes
        return op.DequantizeLinear(codes, scale, zero_point, axis=axis)

    def dequantize_groups(
        codes: Any, scale: Any, zero_point: Any, axis: int, size: int, dtype: Any
    ) -> Any:  # of the codes
        return op.DequantizeLinear(codes, scale, zero_point, axis=axis, block_size=size)

    return {
        quantize_per_tensor: quantize,
        dequantize_per_tensor: dequantize,
        dequantize_per_channel: dequantize_channels,
        dequantize_per_group: dequantize_groups,
    }


def _check_sizes(model: Any, free: Sequence[dict[int, Any]]) -> None:
    """Raise BackendError where a size that is free in the graph was fixed on the way."""
    for value, dims in zip(model.graph.inputs, free, strict=False):
        fixed = [i for i in dims if isinstance(value.shape[i], int)]
        if fixed:
            msg = (
                f"The conversion of the quantized graph to ONNX fixed the size of dimension {fixed[0]} of "
                f"input {value.name!r}."
            )
            raise BackendError(msg)


def _name_nodes(model: Any, operators: dict[str, str]) -> dict[str, str]:
    """Name the nodes of operators "operator:Type"; returns the operators by these names."""
    found: dict[str, str] = {}
    for node in model.graph:
        scopes = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))
        operator = operator_at(scopes, operators)
        if operator:
            base = name = f"{operator}:{node.op_type}"
            count = 1
            while name in found:
                name = f"{base}:{(count := count + 1)}"
            node.name, found[name] = name, operator
    return found


def _forget_origin(model: Any) -> None:
    """Remove what torch notes of the source, which has paths of this machine in it."""
    model.producer_name, model.producer_version, model.doc_string = "nc", __version__, None
    graph = model.graph
    values = [
        *graph.inputs,
        *graph.initializers.values(),
        *(value for node in graph for value in node.outputs),
    ]
    for each in (model, graph, *graph, *values):
        each.metadata_props.clear()
        each.doc_string = None


def _reason(error: BaseException) -> str:
    """Return the line of an error that names what failed, from the innermost cause that has one."""
    told = []
    cause: BaseException | None = error
    while cause is not None:
        told += lines_of_onnx_export(cause)
        last, cause = cause, cause.__cause__
    lines = [line.strip() for line in str(last).splitlines() if line.strip()]
    return next(iter(reversed(told)), "") or (lines[0] if lines else type(error).__name__)
