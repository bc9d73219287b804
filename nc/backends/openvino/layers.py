"""What OpenVINO executes, read from the runtime model of a compiled model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nc.backends.base import OpRun
from nc.formats.reasons import Cause
from nc.graph.plan import Decision
from nc.nn import KernelChoice

#: How the runtime model calls precisions → what a report says.
_PRECISIONS = {"u8": "int8", "i8": "int8", "bf16": "bf16", "f32": "fp32"}
#: Layers without arithmetic.
_PASSIVE = frozenset(
    {"Const", "Input", "Output", "Reorder", "Reshape", "Transpose", "Broadcast", "Concatenation"}
)
#: Where several layers belong to an operator, the one that multiplies says how it runs.
_PRODUCTS = frozenset(
    {"Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProductAttention"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutedLayer:
    """One layer that OpenVINO executes.

    Attributes:
        kind: e.g. "Convolution".
        precision: "int8", "bf16", "fp32", or another type in OpenVINO's words.
        primitive: the kernel.
        parts: first parts of the names of the layers of the model that it computes.
    """

    kind: str
    precision: str
    primitive: str
    parts: tuple[str, ...]


def layers_of(compiled: Any) -> tuple[ExecutedLayer, ...]:
    """Return the layers of a compiled model, in the order in which they run."""
    return tuple(_layer(node.get_rt_info()) for node in compiled.get_runtime_model().get_ordered_ops())


def _layer(info: Any) -> ExecutedLayer:
    def text(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    precision, kernel = text("runtimePrecision"), text("primitiveType").rpartition("_")[2]
    if precision in ("u8", "i8") and kernel in _PRECISIONS:
        precision = kernel  # compressed weights are int8, but the kernel computes in another type
    names = text("originalLayersNames").split(",")
    parts = tuple(dict.fromkeys(name.partition("/")[0] for name in names if name))
    return ExecutedLayer(
        text("layerType"), _PRECISIONS.get(precision, precision), text("primitiveType"), parts
    )


def op_run(decision: Decision, layers: Sequence[ExecutedLayer], operators: Mapping[str, str]) -> OpRun:
    """How an operator ran.

    Args:
        decision: of the plan.
        layers: that OpenVINO executes.
        operators: first part of a layer's name → operator.
    """
    own = [
        layer
        for layer in layers
        if layer.kind not in _PASSIVE and decision.operator in map(operators.get, layer.parts)
    ]
    layer = next((each for each in own if each.kind in _PRODUCTS), own[0] if own else None)
    kernels = KernelChoice(()) if decision.kind == "quant_linear" else None
    ran = layer.precision if layer is not None and layer.precision in _PRECISIONS.values() else "fp32"
    if ran == "int8" and decision.stays_for(Cause.ASKED):  # it reads and gives fp32, as the user wants it
        ran = "fp32"
    reason = _reason(decision, layer, ran, operators)
    primitive = layer.primitive if layer is not None else ""
    return OpRun(operator=decision.operator, ran=ran, reason=reason, primitive=primitive, kernels=kernels)


def _reason(decision: Decision, layer: ExecutedLayer | None, ran: str, operators: Mapping[str, str]) -> str:
    """Why an operator ran in that precision; "" if it is the one that was asked for."""
    asked = decision.spec.precision
    if ran == "int8" and asked == "fp32" and layer is not None:
        names = [
            operators[part]
            for part in layer.parts
            if part in operators and operators[part] != decision.operator
        ]
        return f"fused into {names[0]}" if names else "computed on codes"
    if ran == asked or asked not in ("int8", "bf16"):
        return decision.reason
    if layer is None:
        return "OpenVINO's runtime model names no separate layer for it"
    return f"OpenVINO computes it by a layer {layer.kind} in {layer.precision} ({layer.primitive})"
