"""Plans in which nothing is quantized: why, and what to write."""

from __future__ import annotations

import dataclasses

from nc.config import AnyConfig, parts_of
from nc.errors import InputError, UnsupportedError
from nc.formats.reasons import Cause
from nc.graph.plan import Decision, Plan

#: Reasons of a strategy that has nothing for an operator, or not unasked.
_NOT_FOR_IT = (Cause.NO_KERNEL, Cause.OTHER_RANGES, Cause.ONLY_NAMED)
_OTHER_DTYPE = (Cause.NOT_FP32, Cause.WEIGHTS_NOT_FP32)
#: Reasons that a configuration gives on purpose.
_WISHES = (
    Cause.ASKED,
    Cause.NOT_LISTED,
    Cause.NO_BF16_FORM,
    Cause.OTHER_STRATEGY,
    Cause.NO_LAYER,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing:
    """A plan in which nothing is quantized.

    Attributes:
        text: why, and what to write.
        error: what `prepare` raises with `strict`; None where the configuration itself leaves everything in
            fp32, and where no engine has int8 for the operators.
    """

    text: str
    error: type[InputError | UnsupportedError] | None


def nothing_quantized(plan: Plan, config: AnyConfig) -> Nothing | None:
    """Return what to say of a plan.

    None is returned if an operator is quantized, computes in bf16 or has a low-bit weight.
    """
    if any(d.spec.quantized or d.spec.bf16 or d.stays_for(Cause.LOW_BIT) for d in plan.decisions):
        return None
    products = [d for d in plan.decisions if d.multiply_adds != 0]
    if not products:
        return Nothing("Nothing is quantized: the model has no operator with products of tensors.", None)
    text = f"Nothing is quantized: {_reasons(products)}. {_advice(products, config)}".rstrip()
    if any(map(_is_wish, products)):
        return Nothing(text, None)
    if any(map(_has_other_dtype, products)):
        return Nothing(text, InputError)
    return Nothing(
        text,
        UnsupportedError if _is_dynamic(config) and any(map(_has_no_kernel, products)) else None,
    )


def _is_wish(decision: Decision) -> bool:
    return any(map(decision.stays_for, _WISHES))


def _has_no_kernel(decision: Decision) -> bool:
    return any(map(decision.stays_for, _NOT_FOR_IT))


def _is_dynamic(config: AnyConfig) -> bool:
    return all(part.family == "dynamic" for part in parts_of(config))


def _has_other_dtype(decision: Decision) -> bool:
    return any(map(decision.stays_for, _OTHER_DTYPE))


def _reasons(decisions: list[Decision]) -> str:
    """Return the most frequent reasons with the operators that they are for."""
    names: dict[str, list[str]] = {}
    for decision in decisions:
        names.setdefault(decision.reason, []).append(decision.operator)
    most = sorted(names.items(), key=lambda item: -len(item[1]))[:3]
    return "; ".join(f"{_some(operators)}: {reason}" for reason, operators in most)


def _some(operators: list[str]) -> str:
    return ", ".join(operators[:2]) + (f" and {len(operators) - 2} more" if len(operators) > 2 else "")


def _advice(decisions: list[Decision], config: AnyConfig) -> str:
    if any(map(_has_other_dtype, decisions)):
        return "Write model.float(), and give example_inputs and calibration data in fp32."
    if any(map(_has_no_kernel, decisions)):
        if _is_dynamic(config):
            return (
                "Ranges found at each call are for linears, LSTM, GRU, RNN, and for convolutions and matmuls "
                "that a rule names; nc.StaticQuantConfig() quantizes convolutions and matmuls."
            )
        return "nc.DynamicQuantConfig() quantizes LSTM, GRU and RNN, and nc.StaticQuantConfig() the rest."
    if any(map(_is_wish, decisions)):
        return "The configuration and its rules leave them in fp32."
    return (
        "nc.describe(model, config, example_inputs) lists all; nc.WeightOnlyConfig() quantizes weights of "
        "linears and stacked experts."
    )
