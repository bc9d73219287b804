"""Four tasks to judge accuracy on.

A fp32 model, data to calibrate on, other data to evaluate on, and what counts as good.

* `minilm`: the sentence encoder and the protocol of examples/minilm.py.
* `digits`: a convolutional network trained here on scikit-learn's digits, scans of handwriting; a third is
  held out.
* `pictures`: MobileNetV2 with ImageNet weights; see pictures.py.
* `lm`: a byte-level transformer trained here on Python's own documentation, in about two minutes; a tenth is
  held out.

Needs torch, safetensors and transformers only, so that the environment of peers.py can import it too. With a
folder, what was trained and the data are kept there as safetensors, and read from there the next time: all
environments then judge the same weights.
"""

from __future__ import annotations

import abc
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar

import pictures
import torch
from results_rows import Figure, Value, append
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import minilm

Batch = dict[str, torch.Tensor]
Run = Callable[..., Any]


class Task(abc.ABC):
    """A fp32 model and its data.

    Attributes:
        name: how the command line knows it.
        figures: name of what `judge` returns → its unit and the digits that a table shows.
        free: which dimensions of the inputs may have any size.
        model: in eval mode.
        calibration: keyword inputs, batch by batch.
        evaluation: others.
        labels: what is right for the evaluation data, where the inputs do not tell.
    """

    name: ClassVar[str]
    figures: ClassVar[dict[str, tuple[str, int]]]
    free: ClassVar[tuple[int, ...]] = (0,)

    def __init__(self, folder: Path | None = None) -> None:
        torch.manual_seed(0)
        files = [folder / f"{self.name}-{part}.safetensors" for part in ("weights", "data")] if folder else []
        self.model = self.architecture()
        self.labels = torch.empty(0)
        if files and all(file.exists() for file in files):
            self.model.load_state_dict(load_file(files[0]))
            data = load_file(files[1])
            self.labels, self.calibration, self.evaluation = (
                data.pop("labels"),
                _batches(data, "calibration"),
                _batches(data, "evaluation"),
            )
        else:
            self.make()
            if files:
                folder.mkdir(parents=True, exist_ok=True)
                save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, files[0])
                named = {
                    f"{part}.{i}.{k}": v
                    for part in ("calibration", "evaluation")
                    for i, b in enumerate(getattr(self, part))
                    for k, v in b.items()
                }
                save_file({**named, "labels": self.labels}, files[1])
        self.model.eval()

    @abc.abstractmethod
    def architecture(self) -> nn.Module:
        """Return the model, trained or not."""

    @abc.abstractmethod
    def make(self) -> None:
        """Train the model where it has to be, and set the data."""

    @abc.abstractmethod
    def read(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return what is judged of a model's output for one batch, first dimension samples."""

    @abc.abstractmethod
    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """One number for each of `figures`, for all of `evaluation`."""

    @torch.no_grad()
    def outputs(self, run: Run) -> torch.Tensor:
        """Return what is judged, of all the evaluation data."""
        return torch.cat([self.read(run(**batch), batch) for batch in self.evaluation])

    def row(self, fp32: torch.Tensor, got: torch.Tensor) -> dict[str, Figure]:
        """`judge`, and the noise in dB."""
        noise = (fp32 - got).double().square().sum().item()
        sqnr: Value = (
            round(10 * math.log10(fp32.double().square().sum().item() / noise), 1) if noise else "inf"
        )
        judged = zip(self.figures.items(), self.judge(fp32, got), strict=True)
        found = {name: Figure(round(number, digits), unit) for (name, (unit, digits)), number in judged}
        return {**found, "SQNR": Figure(sqnr, "dB")}


class MiniLM(Task):
    """Sentence embeddings against the fp32 model's own."""

    name = "minilm"
    figures: ClassVar = {
        "mean cosine": ("cosine", 5),
        "worst cosine": ("cosine", 4),
        "same neighbour": ("%", 1),
    }
    free = (0, 1)

    def architecture(self) -> nn.Module:
        """Return the encoder with its weights, which come in a package."""
        return minilm.load_model()

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

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """How near the embeddings are, and how many texts keep their nearest other text."""
        found = minilm.agreement(fp32, got)
        return found["mean_cosine"], found["worst_cosine"], 100 * found["same_neighbour"]


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
        _train(self.model, steps, rate=3e-3)
        self.calibration = [{"input": images[i]} for i in kept[:128].split(32)]
        self.evaluation = [{"input": images[i]} for i in held.split(100)]
        self.labels = labels[held]

    def read(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Logits."""
        return output

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Right answers, and answers other than the fp32 model's."""
        right = (got.argmax(-1) == self.labels).float().mean()
        return 100 * right.item(), int((got.argmax(-1) != fp32.argmax(-1)).sum())


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


class Pictures(Task):
    """MobileNetV2 with ImageNet weights, against its own answers; see pictures.py."""

    name = "pictures"
    figures: ClassVar = {"same answer": ("%", 1)}

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

    def read(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Logits."""
        return output

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """How many pictures keep the answer of fp32."""
        return (100 * (fp32.argmax(1) == got.argmax(1)).double().mean().item(),)


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
        _train(self.model, [({"tokens": p[:, :-1]}, p[:, 1:]) for p in pieces], rate=4e-3)
        self.calibration = [
            {"tokens": t} for t in data[: 64 * self.positions].view(-1, self.positions).split(16)
        ]
        held = data[cut:]
        held = held[: len(held) // self.positions * self.positions].view(-1, self.positions)
        self.evaluation = [{"tokens": t} for t in held[:256].split(32)]

    def read(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Log-probabilities: what a shift of all logits leaves as it is."""
        return output.log_softmax(-1)

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Perplexity per byte."""
        tokens = torch.cat([batch["tokens"] for batch in self.evaluation])[:, 1:, None]
        before, after = (-x[:, :-1].gather(-1, tokens).double().mean().item() for x in (fp32, got))
        return math.exp(after), 100 * math.expm1(after - before)


TASKS = {task.name: task for task in (MiniLM, Digits, Pictures, LanguageModel)}
#: Something to run, the size of its constants in MB, and how many of its products run in int8.
Result = tuple[Run, str, str]
Candidate = Callable[[Task], Result]


def _batches(data: dict[str, torch.Tensor], part: str) -> list[Batch]:
    found: dict[int, Batch] = {}
    for name, tensor in data.items():
        owner, number, key = name.split(".", 2)
        if owner == part:
            found.setdefault(int(number), {})[key] = tensor
    return [found[i] for i in sorted(found)]


@torch.enable_grad()
def _train(model: nn.Module, steps: Sequence[tuple[Batch, torch.Tensor]], rate: float) -> None:
    """AdamW with a linear warm-up and a cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(steps), pct_start=0.1)
    model.train()
    for inputs, targets in steps:
        loss = F.cross_entropy(model(**inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def fp32(task: Task) -> Result:
    """Return the model itself."""
    size = sum(t.numel() * t.element_size() for t in task.model.state_dict().values())
    return task.model, f"{size / 1e6:.1f}", "-"


def compare(
    task: Task, candidates: Mapping[str, Candidate], results: Path | None, packages: Sequence[str]
) -> None:
    """Print a Markdown table, row by row as candidates finish, and append rows.

    Args:
        task: what is judged.
        candidates: by the name of their flow.
        results: file of the rows; None: no rows.
        packages: whose versions a row names.
    """
    head = [
        "",
        *(f"{name}, {unit}" for name, (unit, _) in task.figures.items()),
        "SQNR, dB",
        "MB",
        "int8 products",
    ]
    print(f"\n### {task.name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    expected = task.outputs(task.model)
    for name, candidate in candidates.items():
        try:
            run, size, int8 = candidate(task)
            for _ in range(2):  # engines compile during the first calls
                run(**task.calibration[0])
            figures = task.row(expected, task.outputs(run))
        except Exception as error:  # the others still count
            print(f"| {name} | {type(error).__name__}: {str(error).strip().splitlines()[0]} |", flush=True)
            continue
        print(
            f"| {' | '.join([name, *(str(figure.value) for figure in figures.values()), size, int8])} |",
            flush=True,
        )
        what = {"measured": "accuracy", "task": task.name, "flow": name}
        append(results, what if int8 == "-" else {**what, "int8 products": int8}, figures, packages)
