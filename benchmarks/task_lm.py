"""The next byte of Python's documentation: a transformer trained here, in about two minutes."""

from __future__ import annotations

import math
import re
from pydoc_data.topics import topics
from typing import ClassVar

import torch
from task import Batch, Task, train
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape: [batch, positions, width]."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder over bytes; the head shares the embedding's weight."""

    def __init__(self, width: int, heads: int, layers: int, positions: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, [batch, positions, 256]."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


class LanguageModel(Task):
    """The next byte of Python's documentation."""

    name = "lm"
    figures: ClassVar = {"perplexity": ("perplexity", 4), "more than fp32": ("%", 2)}
    positions, train_steps = 128, 1000

    def architecture(self) -> nn.Module:
        """0.8 million weights."""
        return Transformer(width=128, heads=4, layers=4, positions=self.positions)

    def make(self) -> None:
        """Train."""
        # paragraphs, each once and in random order: topics repeat each other, and what is held out must be
        # new
        found = sorted(
            {p.strip("\n") for topic in topics.values() for p in re.split(r"\n\s*\n", topic) if p.strip()}
        )
        text = "\n\n".join(found[i] for i in torch.randperm(len(found)))
        data = torch.tensor(list(text.encode()))
        cut = len(data) * 9 // 10
        starts = torch.randint(cut - self.positions - 1, (self.train_steps, 16, 1))
        pieces = (data[s + torch.arange(self.positions + 1)] for s in starts)
        train(self.model, [({"tokens": p[:, :-1]}, p[:, 1:]) for p in pieces], rate=4e-3)
        self.calibration = [
            {"tokens": t} for t in data[: 64 * self.positions].view(-1, self.positions).split(16)
        ]
        held = data[cut:]
        held = held[: len(held) // self.positions * self.positions].view(-1, self.positions)
        self.evaluation = [{"tokens": t} for t in held[:256].split(32)]

    def read(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Log-probabilities: what a shift of all logits leaves as it is."""
        return output.log_softmax(-1)

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return the surprise of each sequence, the mean of its bytes."""
        tokens = torch.cat([batch["tokens"] for batch in self.evaluation])[:, 1:, None]
        return -got[:, :-1].gather(-1, tokens).double().mean((1, 2))

    def score(self, samples: torch.Tensor) -> float:
        """Return the perplexity per byte."""
        return math.exp(samples.mean().item())

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Perplexity per byte, and how much more that is than fp32's."""
        before, after = (self.score(self.samples(fp32, outputs)) for outputs in (fp32, got))
        return after, 100 * (after / before - 1)
