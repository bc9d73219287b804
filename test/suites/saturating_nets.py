"""Networks whose int8 products a 16-bit pair sum saturates."""

from torch import nn

NETS = {
    "linear": (lambda: nn.Linear(30, 17), (5, 30)),
    "long linear": (lambda: nn.Linear(768, 96), (33, 768)),
    "conv1d": (lambda: nn.Conv1d(10, 12, 3), (2, 10, 20)),
    "conv2d": (lambda: nn.Conv2d(3, 16, 3, padding=1), (2, 3, 9, 9)),
    "wide conv2d": (lambda: nn.Conv2d(64, 32, 3, stride=2), (2, 64, 9, 9)),
    "pointwise": (lambda: nn.Conv2d(40, 24, 1), (2, 40, 7, 7)),
    "grouped": (lambda: nn.Conv2d(24, 24, 3, groups=4), (2, 24, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), (2, 16, 7, 7)),
    "one channel": (lambda: nn.Conv2d(1, 8, 5), (2, 1, 9, 9)),
    "one channel for two": (lambda: nn.Conv1d(8, 16, 3, groups=8), (2, 8, 15)),
    "depthwise 3d": (lambda: nn.Conv3d(8, 8, 3, groups=8), (2, 8, 6, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(6, 8, 3), (1, 6, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(12, 16, 3), (2, 12, 6, 6)),
    "transposed in groups": (lambda: nn.ConvTranspose2d(12, 8, 3, groups=2), (2, 12, 6, 6)),
}
