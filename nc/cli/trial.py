"""A small model that `doctor --run` quantizes, proves and times on this machine."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import nn

import nc

#: Sizes of the encoder: small enough for seconds, and large enough that int8 gains where the CPU has VNNI.
_WIDTH, _LAYERS, _TOKENS, _BATCHES = 256, 2, 128, 4


@dataclasses.dataclass(frozen=True, slots=True)
class SmallModelRun:
    """What came of it.

    Attributes:
        backend: that computed it.
        asked: for how many operators int8 was asked.
        ran: how many of them run in it.
        proof: how far the engine is from the simulation of the same integers, in dB; None: not compared.
        error: how far the quantized model is from fp32, in dB.
        speed: what was measured against fp32, in words.
        seconds: that all of it took.
    """

    backend: str
    asked: int
    ran: int
    proof: float | None
    error: float | None
    speed: str
    seconds: float

    def lines(self) -> list[str]:
        """Return the trial as text."""
        proof = "" if self.proof is None else f", {self.proof:.0f} dB to a simulation of the same integers"
        error = "" if self.error is None else f"; {self.error:.0f} dB to fp32"
        return [
            f"a small encoder: {self.ran} of {self.asked} products run in int8 on {self.backend}{proof}"
            f"{error}",
            self.speed,
            f"that took {self.seconds:.1f} s",
        ]


def tried() -> SmallModelRun:
    """Quantize a small encoder with random weights, and run it.

    Raises:
        NCError: it cannot be quantized, or computes something else than it should.
    """
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
        model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).eval()
    batches = [
        torch.randn(1, _TOKENS, _WIDTH, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_BATCHES)
    ]

    def calibrate(prepared: Any) -> None:
        for batch in batches:
            prepared(batch)

    q_model = nc.quantize(model, nc.StaticQuantConfig(), calibrate, example_inputs=batches[0])
    report = q_model.report()
    return SmallModelRun(
        backend=report.backend,
        asked=report.asked_int8,
        ran=report.ran_int8,
        proof=report.sqnr_db,
        error=report.sqnr_vs_fp32_db,
        speed="its speed was not measured" if report.verdict is None else " ".join(report.verdict.facts()),
        seconds=time.perf_counter() - start,
    )
