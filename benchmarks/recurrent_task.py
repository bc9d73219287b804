"""What a task of recurrent.py is: a model with labels, and the modules that engines quantize."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import packages
import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., Tensors]
#: Name of a module → what calls it.
Calls = Mapping[str, Call]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A module that an engine quantizes and calls.

    Attributes:
        module: in fp32.
        examples: of its inputs. The first one is the example of all engines, and NNCF calibrates with all.
        axes: for each input the sizes that are free, by dimension.
    """

    module: nn.Module
    examples: Sequence[Tensors]
    axes: Sequence[Mapping[int, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A model with labels.

    Attributes:
        metric: what its rate of errors is called.
        of: the model.
        packages: distributions that weights and labels are of.
        parts: name → module.
        evaluate: runs all data; returns the outputs, and what is counted of each unit.
        rate: gives the percentage of errors of chosen units.
        timed: name → what is timed.
        block: units in a row that are alike; the bootstrap draws so many together.
    """

    metric: str
    of: str
    packages: Sequence[str]
    parts: Mapping[str, Part]
    evaluate: Callable[[Calls], tuple[torch.Tensor, np.ndarray]]
    rate: Callable[[np.ndarray, np.ndarray], float]
    timed: Mapping[str, Callable[[Calls], object]]
    block: int = 1


def ratio(counts: np.ndarray, chosen: np.ndarray) -> float:
    """Return the percentage of errors of units for which [errors, of how many] were counted."""
    errors, total = counts[chosen].sum(0)
    return float(100 * errors / total)


def folder(package: str) -> Path:
    """Return where the files of a package lie, which is not imported."""
    found = packages.installed(package)
    if found is None:
        msg = f"{package} is not installed; see the first lines of benchmarks/recurrent.py"
        raise SystemExit(msg)
    return found
