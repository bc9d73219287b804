"""What ONNX Runtime computes in int8 of an exported model, from its profile."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from nc.backends.onnx.runtime import ExecutedKernel
from nc.graph.plan import INPUTS, OUTPUTS, Decision, Plan

#: Kernels that multiply or add codes, beside those of names with "QLinear".
_INT8 = frozenset({"MatMulIntegerToFloat", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "QGemm"})
#: Where several kernels belong to an operator, the one that multiplies says how it runs.
_PRODUCTS = (
    "Conv",
    "FusedConv",
    "NhwcFusedConv",
    "ConvTranspose",
    "MatMul",
    "FusedMatMul",
    "Gemm",
    "FusedGemm",
    "MatMulNBits",
)


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxOperator:
    """How ONNX Runtime ran a quantized operator.

    Attributes:
        operator: its name.
        kind: "conv2d", "linear", …
        int8: whether it ran in int8.
        kernel: what computed it, e.g. "QLinearConv"; "" where the profile has no separate kernel for it.
        reason: why it did not run in int8, as far as is known; "" where it did.
    """

    operator: str
    kind: str
    int8: bool
    kernel: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OnnxReport:
    """What `export_onnx` found out.

    Attributes:
        runtime: "ONNX Runtime" and its version; "" where the file was not run.
        operators: how each quantized operator ran, in execution order; empty where the file was not run.
        sqnr_db: the file's outputs against those of the quantized graph, on the example inputs, in dB (the
            worst output), by kernels that can't saturate; None where they were not compared.
        saturating: names of the operators in int8 whose 16-bit sums some input can make saturate on CPUs
            without VNNI; where the file was not run, all quantized operators count as in int8.
        saturated_db: what `sqnr_db` is on this CPU with the kernels that ONNX Runtime takes by itself, which
            may saturate; None where nothing can saturate, or the file was not run.
    """

    runtime: str = ""
    operators: tuple[OnnxOperator, ...] = ()
    sqnr_db: float | None = None
    saturating: tuple[str, ...] = ()
    saturated_db: float | None = None

    @property
    def int8(self) -> int:
        """How many quantized operators ran in int8."""
        return sum(op.int8 for op in self.operators)

    def __str__(self) -> str:
        """Return a sentence, and a line for each reason why operators did not run in int8.

        One more line is for those that can saturate.
        """
        lines = self._ran()
        if self.saturating:
            db = self.saturated_db
            here = (
                "" if db is None else f" ONNX Runtime's own choice of kernels gives {db:.1f} dB on this CPU."
            )
            lines.append(f"Can saturate on CPUs without VNNI: {', '.join(self.saturating)}.{here}")
        return "\n".join(lines)

    def _ran(self) -> list[str]:
        if not self.runtime:
            return ["The file was not run."]
        kernels = Counter(op.kernel for op in self.operators if op.int8)
        listed = ", ".join(f"{count} {name}" for name, count in kernels.most_common())
        head = (
            f"{self.int8} of {len(self.operators)} quantized operators run in int8 on "
            f"{self.runtime}{': ' * bool(listed)}{listed}."
        )
        others: dict[str, list[str]] = {}
        for op in (op for op in self.operators if not op.int8):
            name = f"{op.operator} ({op.kernel or 'no separate kernel'})"
            others.setdefault(op.reason or "for a reason that is not known", []).append(name)
        return [head, *(f"Not in int8, {reason}: {', '.join(names)}." for reason, names in others.items())]


def operators(
    plan: Plan, kernels: Sequence[ExecutedKernel], nodes: Mapping[str, str]
) -> tuple[OnnxOperator, ...]:
    """How each quantized operator ran.

    Args:
        plan: of the graph.
        kernels: that ran.
        nodes: name of a node of the file → operator.
    """
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        operator = _operator_of(kernel.name, nodes)
        if operator:
            found.setdefault(operator, []).append(kernel.kind)
    return tuple(_operator(d, found.get(d.operator, []), plan.placement) for d in plan.quantized)


def _operator_of(name: str, nodes: Mapping[str, str]) -> str:
    """Return the operator of a kernel.

    ONNX Runtime appends `_token_5`, `_2` or `/…` to the name of a node that it rewrote.
    """
    fits = [node for node in nodes if name.startswith(node) and not name[len(node) :][:1].isalnum()]
    return nodes[max(fits, key=len)] if fits else ""


def _operator(decision: Decision, kinds: Sequence[str], placement: str) -> OnnxOperator:
    name, kind = decision.operator, decision.kind
    fast = next((k for k in kinds if k.startswith("QLinear") or k in _INT8), "")
    if fast:
        return OnnxOperator(name, kind, True, fast)
    kernel = next((k for k in kinds if k in _PRODUCTS), kinds[0] if kinds else "")
    return OnnxOperator(name, kind, False, kernel, _why(decision, kernel, placement))


def _why(decision: Decision, kernel: str, placement: str) -> str:
    """Why an operator did not run in int8, as far as is known."""
    activation = decision.spec.activation
    if decision.spec.mode == "dynamic":
        return "as ranges of each call are computed in fp32"
    if decision.kind.startswith("conv_transpose"):
        return "as ONNX Runtime has no int8 kernel for it"
    if placement == INPUTS and (decision.kind.startswith("conv") or decision.kind == "add"):
        return f'as not all inputs and outputs are codes, which prepare(placement="{OUTPUTS}") makes them'
    if activation is not None and activation.dtype.signed:
        return (
            "as ONNX Runtime on x86 fuses int8 activations only where one operator reads them, but "
            'act_dtype="uint8" everywhere'
        )
    if not kernel:
        return "as it became a part of another kernel, or is computed once for several operators"
    return ""
