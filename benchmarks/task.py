"""What a task of accuracy.py is: a fp32 model, data to calibrate on, other data, and what counts as good."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from bootstrap import deviation
from results_rows import Figure, Value
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
Run = Callable[..., Any]


class Task(abc.ABC):
    """A fp32 model and its data.

    Attributes:
        name: how the command line knows it.
        figures: name of what `judge` returns → its unit and the digits that a table shows.
        free: which dimensions of the inputs may have any size.
        known: attributes that are one tensor each, and are kept with the data.
        packages: distributions that weights and data are of.
        model: in eval mode.
        calibration: keyword inputs, batch by batch.
        evaluation: others.
        labels: what is right for the evaluation data, where the inputs do not tell.
    """

    name: ClassVar[str]
    figures: ClassVar[dict[str, tuple[str, int]]]
    free: ClassVar[tuple[int, ...]] = (0,)
    known: ClassVar[tuple[str, ...]] = ("labels",)
    packages: ClassVar[tuple[str, ...]] = ()
    labels: torch.Tensor
    calibration: list[Batch]
    evaluation: list[Batch]

    def __init__(self, folder: Path | None = None) -> None:
        torch.manual_seed(0)
        files = [folder / f"{self.name}-{part}.safetensors" for part in ("weights", "data")] if folder else []
        self.model = self.architecture()
        for known in self.known:
            setattr(self, known, torch.empty(0))
        if files and all(file.exists() for file in files):
            self._read(*files)
        else:
            self.make()
            if files:
                folder.mkdir(parents=True, exist_ok=True)
                self._write(*files)
        self.model.eval()

    @abc.abstractmethod
    def architecture(self) -> nn.Module:
        """Return the model, trained or not."""

    @abc.abstractmethod
    def make(self) -> None:
        """Train the model where it has to be, and set the data."""

    def read(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return what is judged of a model's output for one batch, first dimension samples: all of it."""
        return output

    @abc.abstractmethod
    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return what `score` has to know of each sample, of which a bootstrap draws some; [samples, ...]."""

    def score(self, samples: torch.Tensor) -> float:
        """Return the first of `figures` for some samples: the percentage of true ones, if nothing else."""
        return 100 * samples.double().mean().item()

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """One number for each of `figures`, for all of `evaluation`."""
        return (self.score(self.samples(fp32, got)),)

    @torch.no_grad()
    def outputs(self, run: Run) -> torch.Tensor:
        """Return what is judged, of all the evaluation data."""
        return torch.cat([self.read(run(**batch), batch) for batch in self.evaluation])

    def row(self, fp32: torch.Tensor, got: torch.Tensor) -> dict[str, Figure]:
        """`judge`, the standard errors of its first number and of what it is more than fp32's, and the noise.

        Both errors are of the same drawn samples: the difference is paired.
        """
        noise = (fp32 - got).double().square().sum().item()
        sqnr: Value = (
            round(10 * math.log10(fp32.double().square().sum().item() / noise), 1) if noise else "inf"
        )
        judged = zip(self.figures.items(), self.judge(fp32, got), strict=True)
        found = {name: Figure(round(number, digits), unit) for (name, (unit, digits)), number in judged}
        unit, digits = next(iter(self.figures.values()))
        before, after = self.samples(fp32, fp32), self.samples(fp32, got)
        units = len(after)
        error = deviation(lambda chosen: self.score(after[chosen]), units)
        more = self.score(after) - self.score(before)
        paired = deviation(lambda chosen: self.score(after[chosen]) - self.score(before[chosen]), units)
        return {
            **found,
            "standard error": Figure(round(error, digits), unit),
            "difference to fp32": Figure(f"{more:+.{digits}f} ± {paired:.{digits}f}", unit),
            "SQNR": Figure(sqnr, "dB"),
        }

    def _read(self, weights: Path, data: Path) -> None:
        self.model.load_state_dict(load_file(weights))
        found = load_file(data)
        for known in self.known:
            setattr(self, known, found.pop(known))
        self.calibration, self.evaluation = (_batches(found, part) for part in ("calibration", "evaluation"))

    def _write(self, weights: Path, data: Path) -> None:
        save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, weights)
        named = {
            f"{part}.{i}.{k}": v
            for part in ("calibration", "evaluation")
            for i, b in enumerate(getattr(self, part))
            for k, v in b.items()
        }
        save_file({**named, **{known: getattr(self, known) for known in self.known}}, data)


def _batches(data: dict[str, torch.Tensor], part: str) -> list[Batch]:
    found: dict[int, Batch] = {}
    for name, tensor in data.items():
        owner, number, key = name.split(".", 2)
        if owner == part:
            found.setdefault(int(number), {})[key] = tensor
    return [found[i] for i in sorted(found)]


@torch.enable_grad()
def train(model: nn.Module, steps: Sequence[tuple[Batch, torch.Tensor]], rate: float) -> None:
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
