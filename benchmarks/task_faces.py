"""Faces or not: MTCNN's second network on small pictures in noise.

The weights are in the package `facenet-pytorch` (2 MB), 100 faces and 100 other cuttings of 25x25 pixels in
`scikit-image` (14 MB). A fifth of either calibrates. Without noise the network confuses none of them, and no
quantization would show.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import packages
import torch
from ranks import area
from task import Task
from torch import nn
from torch.nn import functional as F


class RNet(nn.Module):
    """The second network of MTCNN (arXiv 1604.02878) without its boxes, with the names of facenet-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 28, 3), nn.PReLU(28)
        self.conv2, self.prelu2 = nn.Conv2d(28, 48, 3), nn.PReLU(48)
        self.conv3, self.prelu3 = nn.Conv2d(48, 64, 2), nn.PReLU(64)
        self.dense4, self.prelu4 = nn.Linear(576, 128), nn.PReLU(128)
        self.dense5_1 = nn.Linear(128, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [images, 2] of what is no face and what is one."""
        x = F.max_pool2d(self.prelu1(self.conv1(images)), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = self.prelu3(self.conv3(x)).permute(0, 3, 2, 1).flatten(1)
        return self.dense5_1(self.prelu4(self.dense4(x)))


class Faces(Task):
    """Faces among other cuttings of photographs."""

    name = "faces"
    #: Deviation of the noise, where white is 1.
    noise = 0.08
    figures: ClassVar = {"area under the curve": ("%", 2)}
    packages = ("facenet-pytorch", "scikit-image")

    def architecture(self) -> nn.Module:
        """Return the network with its weights."""
        file = packages.folder("facenet_pytorch", "facenet-pytorch==2.6.0") / "data" / "rnet.pt"
        weights = torch.load(file, weights_only=True)
        network = RNet()
        network.load_state_dict({name: weights[name] for name in network.state_dict()})
        return network

    def make(self) -> None:
        """Read the pictures."""
        folder = packages.folder("skimage", "scikit-image==0.26.0") / "data"
        grey = torch.from_numpy(np.load(folder / "lfw_subset.npy")).float()
        small = F.interpolate(grey[:, None], size=(24, 24), mode="area")
        noisy = (small + self.noise * torch.randn_like(small)).clamp(0, 1)
        pixels = (255 * noisy.expand(-1, 3, -1, -1) - 127.5) / 128
        calibrates = torch.arange(len(grey)) % 5 == 0
        self.calibration, self.evaluation = (
            [{"images": x} for x in part.contiguous().split(20)]
            for part in (pixels[calibrates], pixels[~calibrates])
        )
        self.labels = (torch.arange(len(grey)) < 100)[~calibrates]

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return for each picture how much it is a face, and whether it is."""
        return torch.stack((got[:, 1] - got[:, 0], self.labels.to(got.dtype)), 1)

    def score(self, samples: torch.Tensor) -> float:
        """Return the area under the curve of hits over false alarms."""
        return 100 * area(samples[:, 0], samples[:, 1] > 0)
