"""What determines the result of a trial: the model, the data, the metric, the machine and versions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc._version import __version__
from nc.backends import available_backends, cpu
from nc.calibration.tensor_file import checksum

Metric = Callable[[Any], float]
#: Arguments of a call, by position and by keyword.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Sizes of calibration batches that are timed, the most frequent first.
_MOST_SIZES = 4
#: Of so many calls one is held out, to judge by.
_SHARE = 4


class SeenCalls:
    """What a model was called with: a hash of all inputs, and how often each set of sizes came.

    Attributes:
        sizes: as text → how often they came, and the first inputs.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, Call]] = {}
        self._hash = hashlib.sha256()

    @property
    def hash(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    def note(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call down; a forward pre-hook."""
        tensors = tensors_of((args, kwargs))
        self._hash.update(checksum("", tensors).encode())
        text = str([tuple(t.shape) for t in tensors.values()])
        count, first = self.sizes.get(text, (0, (args, kwargs)))
        self.sizes[text] = count + 1, first

    def frequent(self) -> list[Call]:
        """Return the inputs of the most frequent sizes."""
        found = sorted(self.sizes.values(), key=lambda each: -each[0])
        return [call for _, call in found[:_MOST_SIZES]]


class KeptCalls(SeenCalls):
    """What a model was called with, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Call] = []

    def note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call down; a forward pre-hook."""
        super().note(module, args, kwargs)
        self.all.append(pytree.tree_map(_copied, (args, kwargs)))

    def split(self) -> tuple[list[Call], list[Call]]:
        """Return the calls to calibrate with, and those to judge by; of few calls, all are both."""
        if len(self.all) < _SHARE:
            return self.all, self.all
        judged = self.all[1::_SHARE]
        return [call for i, call in enumerate(self.all) if i % _SHARE != 1], judged


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def tensors_of(values: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a structure, by position."""
    leaves = pytree.tree_leaves(values)
    return {f"{i:06}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def key_of(
    module: torch.nn.Module,
    described: str,
    backend: str,
    metric: Metric | None,
    calibration: str,
    mix: Sequence[Call],
) -> dict[str, Any]:
    """Return what determines a result, beside the configuration.

    Args:
        module: the model.
        described: what beside its tensors makes it this model.
        backend: that was asked for.
        metric: see `tune`.
        calibration: hash of the calibration data.
        mix: the calls that are timed.
    """
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    return {
        "model": checksum(described, tensors),
        "calibration": calibration,
        "metric": _described(metric),
        "mix": checksum("", tensors_of(list(mix))),
        "backend": backend,
        "engines": [name for name, why_not in available_backends().items() if not why_not],
        "isa": list(cpu.detected()),
        "cpu": hashlib.sha256(" ".join([cpu.model_name(), *sorted(cpu.flags())]).encode()).hexdigest(),
        "threads": torch.get_num_threads(),
        "versions": {"nc": __version__, "torch": torch.__version__},
    }


def _described(metric: Metric | None) -> str:
    """Return the name of a metric and a hash of its source, as far as there is one."""
    if metric is None:
        return "distance to fp32"
    name = f"{getattr(metric, '__module__', '')}.{getattr(metric, '__qualname__', type(metric).__qualname__)}"
    try:
        source = inspect.getsource(metric)
    except (OSError, TypeError):
        source = ""
    return f"{name} {hashlib.sha256(source.encode()).hexdigest()}"
