"""Calibration statistics: save, load and merge them without running the data again.

One file holds the statistics of every observed tensor and the kept samples (`nc.calibration.tensor_file`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.calibration import tensor_file
from nc.calibration.tensor_file import checksum
from nc.errors import InputError, StateError
from nc.observers import Observer
from nc.observers.base import Key, Seen, State

SCHEMA = 1
_KIND = ("nc-statistics", SCHEMA)
#: Statistic → other statistics whose state contains its state.
_CONTAINED_IN = {"extremes": ("histogram",)}

Batch = tuple[torch.Tensor, ...]


class Samples:
    """The first calibration inputs, kept for algorithms that run the model again.

    They have at most `rows` rows and `size` bytes.

    Attributes:
        batches: flat inputs, each with its own shapes.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.rows = rows
        self.size = size
        self.batches: list[Batch] = []

    def keep(self, inputs: Sequence[torch.Tensor]) -> None:
        """Keep a copy of one batch, if there is room for the whole of it."""
        if self.has_room(inputs):
            # row-major, as in a file: kernels round differently on another layout
            self.batches.append(
                tuple(t.detach().clone(memory_format=torch.contiguous_format) for t in inputs)
            )

    def has_room(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether one more batch is kept."""
        rows = sum(batch[0].shape[0] if batch[0].dim() else 1 for batch in self.batches)
        used = sum(t.numel() * t.element_size() for batch in self.batches for t in batch)
        size = sum(t.numel() * t.element_size() for t in inputs)
        return (
            bool(inputs) and rows < self.rows and used + size <= self.size and all(t.numel() for t in inputs)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """Statistics as plain values: of this run, or from a file.

    Attributes:
        states: (node name, statistic) → its state.
        seen: (node name, statistic) → which batches went into it.
        samples: kept inputs.
        weights: mean magnitude of each of the model's constants.
    """

    states: Mapping[Key, State]
    seen: Mapping[Key, Seen]
    samples: tuple[Batch, ...]
    weights: Mapping[str, float]


class Statistics:
    """The statistics of one prepared model. `convert` uses them, also after `load` and `merge`.

    Example:
        >>> import nc, torch
        >>> model, x = torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)
        >>> today = nc.prepare(model, nc.StaticQuantConfig(act_algo="mse"), example_inputs=x,
        backend="reference")
        >>> _ = today(x)
        >>> today.statistics.save("/tmp/statistics.safetensors")
        >>> tomorrow = nc.prepare(model, nc.StaticQuantConfig(act_algo="kl"), example_inputs=x,
        backend="reference")
        >>> tomorrow.statistics.load("/tmp/statistics.safetensors")
        >>> q_model = nc.convert(tomorrow)
    """

    def __init__(self, module: fx.GraphModule, observers: Mapping[Key, Observer], samples: Samples) -> None:
        self._module = module
        self._observers = observers
        self._samples = samples

    def collected(self) -> Collected:
        """Return a snapshot."""
        states = {key: {name: t.clone() for name, t in o.state.items()} for key, o in self._observers.items()}
        seen = {key: o.seen for key, o in self._observers.items()}
        return Collected(states, seen, tuple(self._samples.batches), magnitudes(self._module.named_buffers()))

    def identity(self) -> dict[str, bytes]:
        """Return what the statistics belong to: the captured graph and a checksum of its constants."""
        return {
            "model": self._module.code.encode(),
            "weights": checksum("", dict(self._module.named_buffers())).encode(),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file. If that fails, an earlier file stays as it was."""
        tensor_file.write(path, _KIND, *_unparsed(self.collected()))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the statistics of this model by those of a file.

        Raises:
            ArtefactMissingError, ArtefactCorruptError, ArtefactSchemaError: the file is missing, damaged, or
            of a newer version.
            StateError: the file belongs to another model, or lacks a tensor or a statistic that this
                configuration needs.
        """
        self._become(self.combined([(str(path), read(path))]))

    def merge(self, other: Statistics | str | os.PathLike[str]) -> None:
        """Add the statistics of another run. The result is that of one run over both, bit for bit.

        Moving averages are an exception: they are averaged, weighted by their numbers of batches.

        Args:
            other: statistics of another prepared model, or a file.

        Raises:
            As `load`.
        """
        if not isinstance(other, (Statistics, str, os.PathLike)):
            msg = (
                "merge() takes the statistics of another prepared model, or a file, but got "
                f"{type(other).__name__}."
            )
            raise InputError(msg)
        found = (
            ("the other model", other.collected())
            if isinstance(other, Statistics)
            else (str(other), read(other))
        )
        self._become(self.combined([("here", self.collected()), found]))

    def combined(self, parts: Iterable[tuple[str, Collected]]) -> Collected:
        """Return the statistics of one run over all parts, in their order.

        Those of this object do not change.

        Args:
            parts: at least one. Each is a name for messages, and statistics. They are read one at a time.

        Raises:
            StateError: a part belongs to another model, or lacks a tensor or a statistic that this
                configuration needs.
        """
        whole: Collected | None = None
        samples = Samples(self._samples.rows, self._samples.size)
        mine = magnitudes(self._module.named_buffers())
        for where, part in parts:
            found = self._fitting(part, where, mine)
            if whole is None:
                whole, samples.batches = found, list(found.samples)
                continue
            states = {
                key: o.statistic.merge(whole.states[key], found.states[key])
                for key, o in self._observers.items()
            }
            seen = {key: whole.seen[key].then(found.seen[key]) for key in self._observers}
            for batch in found.samples:
                samples.keep(batch)
            whole = Collected(states, seen, tuple(samples.batches), whole.weights)
        assert whole is not None
        return whole

    def _become(self, found: Collected) -> None:
        for key, observer in self._observers.items():
            observer.state, observer.seen = found.states[key], found.seen[key]
        self._samples.batches = list(found.samples)

    def _fitting(self, found: Collected, where: str, mine: Mapping[str, float]) -> Collected:
        """Return the part of `found` that the observers of this model need.

        `mine` are the weights of this model.
        """
        refuse_other_weights(found.weights, mine, where)
        states, seen = {}, {}
        for (tensor, statistic), observer in self._observers.items():
            kept = ((tensor, name) for name in (statistic, *_CONTAINED_IN.get(statistic, ())))
            key = next((k for k in kept if k in found.states), None)
            if key is None:
                has = ", ".join(sorted(s for t, s in found.states if t == tensor)) or "nothing"
                msg = (
                    f"{where} holds {has} of the input of operator {observer.operator!r}, and this "
                    f"configuration needs {statistic!r}. Calibrate with it."
                )
                raise StateError(msg)
            states[tensor, statistic] = {name: found.states[key][name] for name in observer.state}
            seen[tensor, statistic] = found.seen[key]
        return Collected(states, seen, found.samples, found.weights)


def read(path: str | os.PathLike[str]) -> Collected:
    """Read a file of `Statistics.save`.

    Raises:
        ArtefactMissingError, ArtefactCorruptError, ArtefactSchemaError.
    """
    return decode(tensor_file.read(path), str(path))


def encode(found: Collected) -> bytes:
    """Return the content of a file."""
    return tensor_file.encode(_KIND, *_unparsed(found))


def decode(data: bytes, where: str) -> Collected:
    """Return the inverse of `encode`.

    Args:
        data: content of a file.
        where: name of the file, for messages.

    Raises:
        ArtefactCorruptError, ArtefactSchemaError.
    """
    return tensor_file.decode(_KIND, data, where, _parsed)


def _unparsed(found: Collected) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    keys = list(found.states)
    tensors = {f"{i}.{name}": t for i, key in enumerate(keys) for name, t in found.states[key].items()}
    tensors |= {f"sample.{i}.{j}": t for i, batch in enumerate(found.samples) for j, t in enumerate(batch)}
    observers = [
        {"tensor": k[0], "statistic": k[1], "batches": found.seen[k].batches, "growth": found.seen[k].growth}
        for k in keys
    ]
    return {"observers": observers, "weights": found.weights}, tensors


def _parsed(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Collected:
    states: dict[Key, State] = {}
    seen: dict[Key, Seen] = {}
    for i, entry in enumerate(document["observers"]):
        key = entry["tensor"], entry["statistic"]
        states[key] = {
            name.partition(".")[2]: t for name, t in tensors.items() if name.partition(".")[0] == str(i)
        }
        seen[key] = Seen(entry["batches"], tuple((batch, low, high) for batch, low, high in entry["growth"]))
    samples: dict[int, list[torch.Tensor]] = {}
    for name in sorted(
        (n for n in tensors if n.startswith("sample.")), key=lambda n: [int(p) for p in n.split(".")[1:]]
    ):
        samples.setdefault(int(name.split(".")[1]), []).append(tensors[name])
    return Collected(states, seen, tuple(tuple(batch) for batch in samples.values()), document["weights"])


def magnitudes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Mean magnitude of the finite values of each constant.

    It tells models apart, but not the last bits of folded batch norms.
    """
    return {name: _magnitude(t) for name, t in tensors if t.is_floating_point() and bool(t.isfinite().any())}


def _magnitude(value: torch.Tensor) -> float:
    """Return the mean magnitude of the finite values of a tensor that has some."""
    total = float(torch.linalg.vector_norm(value, 1, dtype=torch.float64))
    if math.isfinite(total):
        return total / value.numel()  # nothing is copied
    return float(value[value.isfinite()].double().abs().mean())


def refuse_other_weights(found: Mapping[str, float], mine: Mapping[str, float], where: str) -> None:
    """Raise StateError if the `magnitudes` of what was saved are those of another model."""
    for name in sorted(set(mine) | set(found)):
        if not math.isclose(mine.get(name, math.nan), found.get(name, math.nan), rel_tol=1e-3, abs_tol=1e-12):
            msg = (
                f"The statistics in {where} are of another model, or of other weights: {name!r} differs. "
                "Calibrate this one."
            )
            raise StateError(msg)
