"""Which kernels ran and for how long, in the same form for every engine."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from nc.profiling import scaling
from nc.profiling.hardware import Limits
from nc.profiling.onednn_verbose import ExecutedPrimitive
from nc.profiling.scaling import Prediction

#: Calls before the first that counts: fusers compile in the first three.
WARM_UP = 3
_MOST, _LEAST, _SECONDS = 20, 3, 5.0
#: The parts of a step's time, in the order that they are shown in.
ROLES = ("int8", "conversion", "fp32", "other")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """One call that the engine makes: an operator, or several in one fused kernel.

    Attributes:
        name: of the call: "onednn::qlinear_pointwise", "aten::layer_norm", "ipex::LlgaFusionGroup".
        operators: names of the operators that it computes, in order; the first stands for all.
        kernels: what oneDNN ran for it; none where torch computes it without oneDNN.
        converts: it only quantizes or dequantizes.
        serves: for a conversion, the operator whose codes it makes or reads; "" where that is not known.
        ms: the fastest of the calls: what other programs of the machine do to one is not the kernel's doing.
    """

    name: str
    operators: tuple[str, ...] = ()
    kernels: tuple[ExecutedPrimitive, ...] = ()
    converts: bool = False
    serves: str = ""
    ms: float = 0.0

    @property
    def role(self) -> str:
        """One of `ROLES`.

        It tells arithmetic on codes, between precisions, an operator in fp32 or bf16, or what belongs to no
        operator.
        """
        if self.name.startswith(("quantized::", "onednn::q")) or any(
            kernel.computes_on_codes for kernel in self.kernels
        ):
            return "int8"
        return "conversion" if self.converts else "fp32" if self.operators else "other"

    @property
    def kernel(self) -> str:
        """What computed it, in words; reorders, which only move values, are counted."""
        counts = collections.Counter(str(k) for k in self.kernels if k.primitive != "reorder")
        names = [f"{n} x {name}" if n > 1 else name for name, n in counts.items()]
        reorders = sum(k.primitive == "reorder" for k in self.kernels)
        if reorders:
            names.append("reorder" if reorders == 1 else f"{reorders} reorders")
        return " + ".join(names) if counts else " + ".join([f"torch {self.name}", *names])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One engine model on one set of inputs.

    Attributes:
        steps: in execution order.
        call_ms: milliseconds of one call without anything that measures inside, the fastest again.
        calls: how many calls were made of either kind, in turns.
        threads: of torch.
        predictions: for other numbers of threads, in their order; () where the engine does not know how its
            steps divide.
        limits: of this CPU with these threads; None where they were not measured, or the multiply-adds of
            the plan are those of other sizes.
    """

    steps: tuple[EngineCall, ...]
    call_ms: float
    calls: int
    threads: int
    predictions: tuple[Prediction, ...] = ()
    limits: Limits | None = None

    def parts(self) -> dict[str, float]:
        """Share of the steps' time by role; they sum to 1."""
        total = self._total()
        return {role: sum(s.ms for s in self.steps if s.role == role) / total for role in ROLES}

    def kernels(self) -> dict[str, tuple[str, float | None]]:
        """For every operator that a step names, its kernel and its share of the steps' time.

        A kernel that computes several operators counts for the first of them; the others say where they are,
        and their share is None.
        """
        total = self._total()
        own: dict[str, list[EngineCall]] = {}
        within: dict[str, str] = {}
        for step in self.steps:
            for operator in step.operators[:1]:
                own.setdefault(operator, []).append(step)
            for operator in step.operators[1:]:
                within.setdefault(operator, step.operators[0])
        found: dict[str, tuple[str, float | None]] = {
            name: (f"in the kernel of {first}", None) for name, first in within.items()
        }
        for name, steps in own.items():
            texts = dict.fromkeys(step.kernel for step in sorted(steps, key=lambda step: -step.ms))
            found[name] = (" + ".join(texts), sum(step.ms for step in steps) / total)
        return found

    def summary(self) -> str:
        """One line."""
        words = {
            "int8": "int8 kernels",
            "conversion": "conversions",
            "fp32": "float operators",
            "other": "other",
        }
        parts = ", ".join(f"{share:.0%} {words[role]}" for role, share in self.parts().items())
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"profile: {self.call_ms:.2f} ms per call, the fastest of {self.calls}, {threads}; {parts}"

    def scaling(self) -> str:
        """Return a table of what other numbers of threads would give, see `nc.profiling.scaling`."""
        return scaling.table(self.predictions)

    def _total(self) -> float:
        return sum(step.ms for step in self.steps) or 1.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Return the inverse of `dataclasses.asdict`, through JSON too."""
        steps = [
            EngineCall(
                **{
                    **step,
                    "operators": tuple(step["operators"]),
                    "kernels": tuple(
                        ExecutedPrimitive(**{**kernel, "reads": tuple(kernel["reads"])})
                        for kernel in step["kernels"]
                    ),
                }
            )
            for step in data["steps"]
        ]
        predictions = tuple(Prediction.from_dict(each) for each in data.get("predictions", ()))
        limits = None if data.get("limits") is None else Limits.from_dict(data["limits"])
        return cls(**{**data, "steps": tuple(steps), "predictions": predictions, "limits": limits})


def repeat(call: Callable[[], object]) -> None:
    """Call 20 times, or as often as 5 seconds allow, but at least 3 times."""
    start = time.perf_counter()
    for i in range(_MOST):
        if i >= _LEAST and time.perf_counter() - start > _SECONDS:
            return
        call()


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
