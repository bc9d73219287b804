"""Digits of 8x8 pixels: a convolutional network trained here on scikit-learn's scans of handwriting."""

from __future__ import annotations

from typing import ClassVar

import torch
from task import Task, train
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + x)


class Digits(Task):
    """Ten classes of 8x8 images."""

    name = "digits"
    held_out = 599
    figures: ClassVar = {"accuracy": ("%", 2), "changed answers": (f"of {held_out}", 0)}
    packages = ("scikit-learn",)

    def architecture(self) -> nn.Module:
        """Return a residual network of 5 convolutions and a classifier."""
        stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        return nn.Sequential(
            stem,
            Block(32),
            nn.MaxPool2d(2),
            Block(32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def make(self) -> None:
        """Train for 12 epochs: seconds."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            msg = (
                "the digits come with scikit-learn: pip install scikit-learn (or pip install "
                "'nc-quant[bench]')"
            )
            raise LookupError(msg) from error
        data = load_digits()
        images, labels = (
            torch.tensor(data.images, dtype=torch.float32)[:, None] / 16,
            torch.tensor(data.target),
        )
        order = torch.randperm(len(images))
        kept, held = order[self.held_out :], order[: self.held_out]
        epochs = [kept[torch.randperm(len(kept))] for _ in range(12)]
        steps = [({"input": images[i]}, labels[i]) for epoch in epochs for i in epoch.split(32)]
        train(self.model, steps, rate=3e-3)
        self.calibration = [{"input": images[i]} for i in kept[:128].split(32)]
        self.evaluation = [{"input": images[i]} for i in held.split(100)]
        self.labels = labels[held]

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return which answers are right."""
        return got.argmax(-1) == self.labels

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Right answers, and answers other than the fp32 model's."""
        return *super().judge(fp32, got), int((got.argmax(-1) != fp32.argmax(-1)).sum())
