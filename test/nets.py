"""One small network per int8 pattern.

What the IPEX tests run and what `tested_patterns.py` collects patterns from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Fn(nn.Module):
    """Layers and a function of them: `forward(x) = function(layers, x)`."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def _attention(m, x):
    q, k, v = (layer(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def _linears(*names):
    return {name: nn.Linear(32, 32) for name in names}


def _chain(activation):
    return nn.Sequential(conv(3, 8), activation, conv(8, 8, 1), activation, nn.Conv2d(8, 8, 3))


IMAGE = (1, 3, 16, 16)
TOKENS = (2, 5, 32)

#: name → (network, input shape, lints that must have been applied)
NETS = {
    "mlp": (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), (4, 32), ()),
    "mlp_gelu": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), TOKENS, ()),
    "mlp_silu": (nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 8)), TOKENS, ()),
    "mlp_tanh": (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8), nn.Sigmoid()), (4, 32), ()),
    "linear_bn": (nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)), (4, 32), ()),
    "linear_norm": (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8)), TOKENS, ()),
    "relu": (_chain(nn.ReLU()), IMAGE, ()),
    "relu6": (_chain(nn.ReLU6()), IMAGE, ()),
    "silu": (_chain(nn.SiLU()), IMAGE, ()),
    "hardswish": (_chain(nn.Hardswish()), IMAGE, ()),
    "leaky_relu": (_chain(nn.LeakyReLU()), IMAGE, ()),
    "gelu": (_chain(nn.GELU()), IMAGE, ()),
    "no_activation": (_chain(nn.Identity()), IMAGE, ()),
    "depthwise": (nn.Sequential(conv(3, 8), nn.ReLU6(), conv(8, 8, groups=8), nn.ReLU6(), conv(8, 4, 1)), IMAGE, ()),
    "conv1d": (nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 8, 3, stride=2)), (1, 8, 40), ()),
    "conv3d": (nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3)), (1, 3, 8, 8, 8), ()),
    "conv_transpose1d": (
        nn.Sequential(nn.ConvTranspose1d(8, 16, 3), nn.ReLU(), nn.ConvTranspose1d(16, 8, 3, stride=2)),
        (1, 8, 16),
        (),
    ),
    "conv_transpose2d": (
        nn.Sequential(nn.ConvTranspose2d(8, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1)),
        (1, 8, 9, 9),
        (),
    ),
    "conv_transpose2d_groups": (
        nn.Sequential(nn.ConvTranspose2d(8, 16, 3, groups=2), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        (1, 8, 9, 9),
        (),
    ),
    "conv_transpose3d": (
        nn.Sequential(nn.ConvTranspose3d(8, 16, 3), nn.ReLU(), nn.ConvTranspose3d(16, 8, 3, stride=2)),
        (1, 8, 5, 5, 5),
        (),
    ),
    "strided_pointwise": (
        nn.Sequential(conv(3, 24), nn.ReLU(), nn.Conv2d(24, 32, 1, stride=2), nn.ReLU(), nn.Conv2d(32, 8, 1)),
        IMAGE,
        ("strided_pointwise",),
    ),
    "max_pool": (nn.Sequential(conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 8)), IMAGE, ()),
    "avg_pool": (nn.Sequential(conv(3, 8), nn.ReLU(), nn.AvgPool2d(2), conv(8, 8)), IMAGE, ()),
    "avg_pool_padded": (nn.Sequential(conv(3, 8), nn.AvgPool2d(3, 1, 1), conv(8, 8)), IMAGE, ()),
    "classifier": (
        nn.Sequential(conv(3, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        IMAGE,
        (),
    ),
    "residual": (
        Fn(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))) + m.s(x))), a=conv(3, 8), b=conv(8, 8), s=conv(3, 8, 1), c=conv(8, 4)),
        IMAGE,
        (),
    ),
    "residual_linear": (Fn(lambda m, x: m.c(m.b(F.gelu(m.a(x))) + x), **_linears("a", "b", "c")), TOKENS, ()),
    "residual_norm": (
        Fn(lambda m, x: m.n(m.b(F.gelu(m.a(x))) + x), n=nn.LayerNorm(32), **_linears("a", "b")),
        TOKENS,
        ("operand_overwritten",),
    ),
    "cat": (
        Fn(lambda m, x: m.c(torch.cat([F.relu(m.a(x)), F.relu(m.b(x))], 1)), a=conv(3, 8), b=conv(3, 8), c=conv(16, 4)),
        IMAGE,
        (),
    ),
    "squeeze_excite": (
        Fn(
            lambda m, x: (lambda y: m.c(y * torch.sigmoid(m.e(F.relu(m.s(F.adaptive_avg_pool2d(y, 1)))))))(m.a(x)),
            a=conv(3, 8), s=conv(8, 4, 1), e=conv(4, 8, 1), c=conv(8, 8),
        ),
        IMAGE,
        (),
    ),
    "bmm": (Fn(lambda m, x: torch.bmm(m.a(x), m.b(x).transpose(1, 2)), **_linears("a", "b")), TOKENS, ()),
    "matmul_2d": (Fn(lambda m, x: m.a(x) @ m.b(x).t(), **_linears("a", "b")), (5, 32), ()),
    "matmul_3d": (Fn(lambda m, x: m.a(x) @ m.b(x).transpose(-1, -2), **_linears("a", "b")), TOKENS, ()),
    "matmul_4d": (Fn(lambda m, x: m.a(x) @ m.b(x).transpose(-1, -2), **_linears("a", "b")), (2, 3, 5, 32), ()),
    "attention": (Fn(_attention, **_linears("q", "k", "v", "o")), TOKENS, ()),
    "encoder_layer": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), TOKENS, ("operand_overwritten",)),
    "encoder_layer_pre_norm": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True), TOKENS, ("operand_overwritten",)),
    "same_twice_matmul": (
        Fn(lambda m, x: m.b((lambda y: y @ y)(m.a(x))), **_linears("a", "b")),
        (1, 2, 32, 32),
        ("same_tensor_twice",),
    ),
    "same_twice_add": (Fn(lambda m, x: m.b((lambda r: r + r)(F.relu(m.a(x)))), a=conv(3, 8), b=conv(8, 8)), IMAGE, ()),
    "operand_is_source": (
        Fn(lambda m, x: m.c(F.relu((lambda y: m.b(y) + y)(F.relu(m.a(x))))), a=conv(3, 8), b=conv(8, 8), c=conv(8, 8)),
        IMAGE,
        ("operand_is_source",),
    ),
    "operand_is_source_1x1": (
        Fn(lambda m, x: m.c((lambda y: m.b(y) + y)(F.relu(m.a(x)))), a=conv(3, 8), b=conv(8, 8, 1), c=conv(8, 8)),
        IMAGE,
        ("operand_is_source",),
    ),
}  # fmt: skip
