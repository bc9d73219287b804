"""What a report says of one operator."""

from __future__ import annotations

import dataclasses

from nc.formats import Mode
from nc.graph.shares import Part


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpReport:
    """One operator.

    Attributes:
        operator: its name.
        kind: its kind.
        asked: what the configuration asks for: "int8", "bf16", "fp32", for example "int4 per_group 32, weight
            only", or of a simulated operator the formats of all roles.
        ran: what the engine executes: "int8", "bf16" or "fp32"; "int8" also for what an int8 kernel computes
            along, see `reason`.
        rule: the rule that decided.
        reason: why it is not int8, what was rewritten, or "fused into X" where nobody asked for int8 and the
            int8 kernel of X computes it; else "".
        kernel: of a linear with low-bit weights, its kernels with the numbers of rows M that each is for; of
            others the kernel that computed it in the profile, or that the engine's plans have for it; "" if
            the engine knows none.
        share: its part of the profiled time, from 0 to 1; None without a profile, or if it has no kernel of
            its own.
        mode: "static", "dynamic", "weight_only", "fake_quant" or "float": how it is quantized in the graph.
        refused: (kernel, why it does not compute this operator) of the kernels that would be preferred.
        weights: names and numbers of values of the weights that it reads.
        float_weights: names of those that stay fp32 though it runs in int8.
        multiply_adds: how many it does on the example inputs; None if that is not known.
    """

    operator: str
    kind: str
    asked: str
    ran: str
    rule: str
    reason: str
    kernel: str = ""
    share: float | None = None
    mode: Mode = "float"
    refused: tuple[tuple[str, str], ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    float_weights: tuple[str, ...] = ()
    multiply_adds: int | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it contributes to the shares of the model."""
        whole = Part(
            operator=self.operator, form=self.ran, weights=self.weights, multiply_adds=self.multiply_adds
        )
        return whole.without(self.float_weights)
